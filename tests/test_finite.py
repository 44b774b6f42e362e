"""The guard over attention's outputs: what it finds, when it says so, that no row escapes it."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_families import TINY, latents
from torch import Tensor

from vidsparse import finite, sparsify
from vidsparse.finite import FiniteGuard
from vidsparse.pipelines.again import Forward
from vidsparse.site import CallSite

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_guard_tells_the_first_output_that_was_not_finite(
    number: float, dtype: torch.dtype
) -> None:
    guard: FiniteGuard[str] = FiniteGuard()
    # as large as numbers get: their sum or their squares would overflow.
    fine = torch.full((1, 2, 9, 4), torch.finfo(dtype).max, dtype=dtype)
    for layer in range(3):
        guard.watch(fine, f"step 0, layer {layer}")
    assert guard.look(last=False) is None
    bad = fine.clone()
    bad[0, 1, 8, 3] = number
    for layer in range(4):
        guard.watch(bad if layer >= 2 else fine, f"step 1, layer {layer}")
    assert guard.look(last=False) == "step 1, layer 2"


@pytest.mark.parametrize("first", range(5))
def test_outputs_of_several_shapes_and_sizes_are_told_in_their_order(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the larger ones are reduced at once.
    monkeypatch.setattr(finite, "_SMALL", 100)
    guard: FiniteGuard[int] = FiniteGuard()
    shapes = [(2, 3), (64, 7), (3, 2), (2, 3), (0,), (64, 7), ()]
    for place, shape in enumerate(shapes):
        guard.watch(torch.full(shape, torch.inf if place >= first else 1.0), place)
    # nothing is in an output without elements.
    assert guard.look(last=True) == (5 if first == 4 else first)


def test_an_output_that_is_held_counts_as_it_is_at_the_look() -> None:
    guard: FiniteGuard[str] = FiniteGuard()
    out = torch.full((3 << 20,), torch.nan)
    guard.watch(out, "filled later", hold=True)
    out.fill_(1)
    assert guard.look(last=True) is None


@pytest.mark.parametrize("everywhere", [True, False])
def test_what_only_another_process_has_found_is_told_as_the_first_of_the_look(
    everywhere: bool,
) -> None:
    asked: list[bool] = []

    def agree(flag: Tensor) -> Tensor:
        asked.append(bool(flag))
        return torch.tensor(everywhere)

    guard: FiniteGuard[str] = FiniteGuard(agree=agree)
    for name in ("first", "second"):
        guard.watch(torch.ones(3), name)
    assert guard.look(last=False) == (None if everywhere else "first")
    guard.watch(torch.ones(3), "third")
    guard.watch(torch.full((3,), torch.nan), "fourth")
    assert guard.look(last=False) is not None
    assert asked == [True, False]


@pytest.mark.gpu
def test_on_a_gpu_a_step_is_told_after_the_next_or_at_the_end() -> None:
    bad = torch.full((1, 2, 9, 4), torch.nan, device="cuda")
    guard: FiniteGuard[int] = FiniteGuard()
    guard.watch(bad, 0)
    assert guard.look(last=False) is None
    guard.watch(torch.zeros_like(bad), 1)
    assert guard.look(last=False) == 0
    guard = FiniteGuard()
    guard.watch(bad, 0)
    assert guard.look(last=True) == 0


@pytest.mark.gpu
def test_on_a_gpu_steps_within_a_pause_wait_for_the_next_look() -> None:
    guard: FiniteGuard[int] = FiniteGuard(pause=1e6)
    guard.watch(torch.zeros(3, device="cuda"), 0)
    guard.look(last=False)
    for step in (1, 2, 3):
        guard.watch(torch.full((3,), torch.nan if step >= 2 else 0.0, device="cuda"), step)
        assert guard.look(last=False) is None
    assert guard.look(last=True) == 2


# ---- every family ----


class _Seen(Exception):
    """A watcher was told of what is not finite."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_row_that_is_not_finite_in_any_layer_is_seen(name: str) -> None:
    # one row of one sample, at either end: of the video, of its text or of frames of the past.
    pipe = TINY[name].build()
    unseen = []
    at: tuple[int, int] = 0, 0

    def spoil(q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
        if site.layer == at[0]:
            q[-1, :, at[1], 0] = torch.nan

    def told(forward: Forward, out: Tensor, given_back: bool) -> None:
        if not out.isfinite().all():
            raise _Seen

    with sparsify(pipe, "fg-attn", dense_steps=100) as handle:
        handle.watch(told)
        for part, engine in enumerate(handle.engines):
            engine.observer = spoil
            for at in itertools.product(range(engine.layers), (0, -1)):
                try:
                    latents(name, pipe)
                except _Seen:
                    continue
                unseen.append((part, at))
            engine.observer = None
    assert not unseen


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_linear_layer_in_8_bits_does_not_hide_it(number: float, dtype: torch.dtype) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    layers = torch.nn.Sequential(torch.nn.Linear(256, 256)).to(dtype)
    quantization.quantize_(layers, quantization.Int8DynamicActivationInt8WeightConfig())
    x = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1, 5, 3] = number
    with torch.no_grad():
        rows = layers(x).isfinite().all(-1).logical_not().nonzero()
    assert rows.tolist() == [[1, 5]]
