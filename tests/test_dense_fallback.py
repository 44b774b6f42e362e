"""Calls that are dense where the sparse output was not finite, if that is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_calls import engine_of, qkv, site
from tiny_pipelines import latents_of, tiny_wan
from torch import Tensor

import vidsparse.engine as engines
from vidsparse import sparsify

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
