"""Statistics of single attention calls: hand values, and an engine left as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vidsparse.attention import attend
from vidsparse.calls import (
    RecordedCall,
    mean_densities,
    measure_call,
    measure_calls,
    record_calls,
    relative_l1,
    run_call,
)
from vidsparse.engine import AttentionEngine
from vidsparse.grid import TokenGrid
from vidsparse.methods import FgAttn, SpargeAttn, make_method
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

GRID = TokenGrid(3, 8, 7)


def _smooth(seed: int) -> torch.Tensor:
    """A field ``[1, 2, S, 8]`` whose neighbours in the grid are alike."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 1, GRID.frames, GRID.height, GRID.width, generator=generator)
    for _ in range(4):
        x = F.avg_pool3d(F.pad(x, (1,) * 6, mode="replicate"), 3, 1)
    return (2 * x / x.std()).view(1, 2, 8, GRID.video).transpose(2, 3).contiguous()


def _call(seed: int = 0) -> RecordedCall:
    q, k, v = (_smooth(3 * seed + part) for part in range(3))
    return RecordedCall(q=q, k=0.5 * q + k, v=v, site=CallSite(0, 0, 0.0, GRID))


def test_l1_is_the_papers_relative_distance() -> None:
    call, method = _call(), FgAttn(top_p=0.4)
    dense = F.scaled_dot_product_attention(call.q, call.k, call.v)
    sparse = attend(call.q, call.k, call.v, GRID, method)
    expected = (sparse - dense).abs().sum() / dense.abs().sum()
    measured = measure_call(call, method, "hilbert")
    assert measured.l1 == pytest.approx(expected.item(), rel=1e-4)
    assert 0.01 < measured.l1 < 1
    assert 0 < measured.selected <= measured.computed < 1


def test_l1_by_head_keeps_heads_and_batch_apart() -> None:
    dense = torch.ones(2, 3, 4, 5)
    sparse = dense.clone()
    sparse[1, 2] += 0.5
    sparse[0, 1, 0] -= 1
    expected = torch.zeros(2, 3)
    expected[1, 2], expected[0, 1] = 0.5, 0.25
    torch.testing.assert_close(relative_l1(sparse, dense), expected)


def test_a_call_runs_at_its_own_step_and_layer() -> None:
    one = _call()
    call = RecordedCall(q=one.q, k=one.k, v=one.v, site=CallSite(3, 5, 0.0, GRID))
    sparse, dense, cell = run_call(call, FgAttn(top_p=0.4), "hilbert")
    assert (cell.layer, cell.step) == (3, 5)
    assert cell.selected is not None
    assert cell.selected.shape == (1, 2)
    assert torch.equal(dense, F.scaled_dot_product_attention(call.q, call.k, call.v))
    assert not torch.equal(sparse, dense)


def test_a_full_mask_has_no_error_and_density_one() -> None:
    measured = measure_call(_call(), FgAttn(top_p=1.0), "random")
    assert measured.l1 < 1e-5
    assert measured.selected == measured.computed == 1


def test_neighbourhoods_order_as_in_the_paper() -> None:
    method = SpargeAttn(tile=(32, 16), theta=-1)
    similar = {
        order: measure_calls([_call(0), _call(1)], method, order)
        for order in ("hilbert", "rowmajor", "random")
    }
    assert similar["hilbert"].sim_q > similar["rowmajor"].sim_q > similar["random"].sim_q
    assert similar["hilbert"].sim_k > similar["rowmajor"].sim_k > similar["random"].sim_k


def test_measure_calls_is_the_mean_over_calls() -> None:
    calls, method = [_call(0), _call(1)], FgAttn(top_p=0.4)
    each = [measure_call(call, method, "hilbert") for call in calls]
    both = measure_calls(calls, method, "hilbert")
    assert both.l1 == pytest.approx((each[0].l1 + each[1].l1) / 2)
    densities = mean_densities(calls, method, "hilbert")
    assert densities["selected"] == pytest.approx(both.selected)
    assert densities["computed"] == pytest.approx(both.computed)


def test_recording_keeps_the_chosen_calls_and_leaves_the_engine_alone() -> None:
    engine = AttentionEngine(make_method("dense"), schedule=Schedule(), layers=2)
    engine.begin_run(3)
    call = _call()
    q, k, v = (x.expand(3, -1, -1, -1) for x in (call.q, call.k, call.v))
    before = engine.observer
    with record_calls(engine, steps={1}, layers={0, 1}, rows=2) as calls:
        for branch in ("conditional", "unconditional"):
            for step in range(3):
                for layer in range(2):
                    out = engine.attend(q, k, v, CallSite(layer, step, 0.0, GRID, branch))
    assert engine.observer is before
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v))
    assert [(one.site.step, one.site.layer, one.site.branch) for one in calls] == [
        (1, 0, "conditional"),
        (1, 1, "conditional"),
    ]
    assert calls[0].q.shape[0] == 2
    assert torch.equal(calls[0].v, v[:2])


def test_an_error_while_recording_leaves_the_engine_alone() -> None:
    engine = AttentionEngine(make_method("dense"), schedule=Schedule(), layers=1)
    before = engine.observer
    with pytest.raises(RuntimeError), record_calls(engine, steps=(), layers=(), rows=1):
        raise RuntimeError
    assert engine.observer is before
