"""The guard over attention's outputs: what it finds, when it says so, and the dense fallback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_attention import engine_of, qkv, site
from tiny_pipelines import latents_of, tiny_wan
from torch import Tensor

import vidsparse.engine as engines
from vidsparse import sparsify
from vidsparse.errors import NonFiniteError
from vidsparse.finite import FiniteGuard
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest

pytestmark = pytest.mark.usefixtures("one_thread")


def broken_kernel(layer_calls: set[int]) -> Any:
    """The true kernel, with a NaN in the output of the calls of these numbers."""
    calls = 0
    true = engines.sparse_attention

    def kernel(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        out, lse = true(*args, **options)
        if calls in layer_calls:
            out[0, 0, 7, 3] = torch.nan
        calls += 1
        return out, lse

    return kernel


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_guard_names_the_first_call_that_was_not_finite(
    number: float, dtype: torch.dtype
) -> None:
    guard = FiniteGuard()
    # as large as numbers get: their sum or their squares would overflow.
    fine = torch.full((1, 2, 9, 4), torch.finfo(dtype).max, dtype=dtype)
    for layer in range(3):
        guard.watch(fine, site(0, layer), "replan, torch")
    assert guard.look(last=False) is None
    bad = fine.clone()
    bad[0, 1, 8, 3] = number
    for layer in range(4):
        guard.watch(bad if layer >= 2 else fine, site(1, layer), "reuse, torch")
    found = guard.look(last=False)
    assert found is not None
    assert (found.site.step, found.site.layer, found.how) == (1, 2, "reuse, torch")


@pytest.mark.gpu
def test_on_a_gpu_a_step_is_told_after_the_next_or_at_the_end() -> None:
    bad = torch.full((1, 2, 9, 4), torch.nan, device="cuda")
    guard = FiniteGuard()
    guard.watch(bad, site(0, 0), "replan, triton")
    assert guard.look(last=False) is None
    guard.watch(torch.zeros_like(bad), site(1, 0), "replan, triton")
    found = guard.look(last=False)
    assert found is not None
    assert found.site.step == 0
    guard = FiniteGuard()
    guard.watch(bad, site(0, 0), "replan, triton")
    assert guard.look(last=True) is not None


@pytest.mark.parametrize("call", [0, 3, 5])
def test_generate_ends_and_names_layer_and_step(
    call: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny_model, device="cpu")
    # two layers; without guidance a step calls each once.
    request = GenerateRequest(
        prompt="a red circle", frames=9, width=64, height=64, steps=3, dense_steps=0,
        guidance=1.0, device="cpu", method="fg-attn",
    )  # fmt: skip
    kernel = broken_kernel({call})
    init = engines.AttentionEngine.__init__

    def with_kernel(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.kernel = kernel

    monkeypatch.setattr(engines.AttentionEngine, "__init__", with_kernel)
    words = f"attention came to NaN or infinity in layer {call % 2 + 1}, step {call // 2 + 1} of 3"
    with pytest.raises(NonFiniteError, match=words):
        generate(loaded, request)
    # the kernel is right again by now.
    assert generate(loaded, request).frames.any()


def test_a_call_that_falls_back_is_dense_and_counted() -> None:
    q, k, v = qkv()
    engine = engine_of(top_p=0.3, dense_fallback=True)
    engine.begin_run(3)
    engine.kernel = broken_kernel({1})
    for step in range(3):
        out = engine.attend(q, k, v, site(step))
        assert bool(out.isfinite().all())
        if step == 1:
            torch.testing.assert_close(
                out, torch.nn.functional.scaled_dot_product_attention(q, k, v)
            )
    told = engine.trace.summary()
    assert told.notes == (engines.FELL_BACK,)
    assert told.dense_call_share == pytest.approx(1 / 3)
    assert told.work is not None
    assert told.work.dense_fallback == pytest.approx(1 / 3)
    assert [cell.computed_share == 1 for cell in engine.trace.cells] == [False, True, False]


def test_a_plan_whose_call_fell_back_is_not_used_again() -> None:
    q, k, v = qkv()
    engine = engine_of(top_p=0.3, dense_fallback=True, reuse=4)
    engine.begin_run(4)
    engine.kernel = broken_kernel({1})
    for step in range(3):
        engine.attend(q, k, v, site(step))
    assert [cell.action for cell in engine.trace.cells] == ["replan", engines.FELL_BACK, "replan"]


def test_a_pipeline_falls_back_where_it_is_asked_to() -> None:
    pipe = tiny_wan()
    for fallback in (False, True):
        with sparsify(pipe, dense_steps=0, dense_fallback=fallback) as handle:
            for engine in handle.engines:
                engine.kernel = broken_kernel({0})
            latents = latents_of(pipe)
            assert bool(latents.isfinite().all()) == fallback
            assert (engines.FELL_BACK in handle.summary().notes) == fallback
