"""The probe's maps are those of the method, tile by tile and token by token, whatever the order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_pipelines import tiny_wan

from vidsparse.engine import AttentionEngine, CallSite
from vidsparse.errors import OptionError
from vidsparse.grid import TokenGrid
from vidsparse.masks import pooled_scores
from vidsparse.methods import FgAttn
from vidsparse.order import token_order
from vidsparse.pipelines import sparsify
from vidsparse.probe import CellProbe
from vidsparse.schedule import Schedule
from vidsparse.trace import Cell, Trace

GRID = TokenGrid(3, 8, 8, text=5)
METHOD = FgAttn(top_p=0.5, tile=(16, 8))


def _record(probe: CellProbe, order: str = "hilbert", dense_steps: int = 0) -> tuple[Any, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, GRID.tokens, 32) * 3 for _ in range(3))
    engine = AttentionEngine(
        METHOD, schedule=Schedule(dense_steps=dense_steps), order=order, layers=2
    )
    engine.probe = probe
    engine.begin_run(2)
    outputs = [engine.attend(q, k, v, CallSite(layer, 0, 1.0, GRID)) for layer in (0, 1)]
    return q, k, outputs, engine.trace


def test_along_the_run_s_own_order_the_map_is_the_method_s_mask() -> None:
    probe = CellProbe(0, 1)
    q, k, _, trace = _record(probe)
    record = probe.record
    assert record is not None
    assert (record.step, record.layer, record.order, record.heads) == (0, 1, "hilbert", 3)
    order = token_order("hilbert", GRID)
    q, k = order.apply(q[:1]), order.apply(k[:1])
    mask = METHOD.select(q, k, CallSite(1, 0, 1.0, GRID))[0]
    mask[:, GRID.video // 16 :] = True
    mask[:, :, GRID.video // 8 :] = True
    assert torch.equal(torch.from_numpy(record.maps["hilbert"].kept), mask)
    weights = pooled_scores(q, k, METHOD.tile)[0].softmax(-1)
    weights = weights / weights.amax(-1, keepdim=True)
    found = torch.from_numpy(record.maps["hilbert"].weights).float()
    torch.testing.assert_close(found, weights, atol=1e-3, rtol=0)
    assert list(record.computed) == trace.cells[1].computed[0].tolist()


def test_what_is_no_probe_is_refused_before_a_run() -> None:
    with (
        sparsify(tiny_wan(), "fg-attn") as handle,
        pytest.raises(OptionError, match=r"a CellProbe or None, got 5\. Hint: "),
    ):
        handle.probe(5)  # type: ignore[arg-type]


def test_along_another_order_every_token_shows_its_own_tile() -> None:
    probe = CellProbe(0, 0, side=GRID.tokens)
    q, k, _, _ = _record(probe)
    run, raster = token_order("hilbert", GRID), token_order("rowmajor", GRID)
    site = CallSite(0, 0, 1.0, GRID)
    mask = METHOD.select(run.apply(q[:1]), run.apply(k[:1]), site)[0]
    mask[:, GRID.video // 16 :] = True
    mask[:, :, GRID.video // 8 :] = True
    by_token = mask.repeat_interleave(16, 1)[:, : GRID.tokens]
    by_token = by_token.repeat_interleave(8, 2)[:, :, : GRID.tokens]
    place = run.inverse[raster.permutation]
    assert probe.record is not None
    found = torch.from_numpy(probe.record.maps["rowmajor"].kept)
    assert torch.equal(found, by_token[:, place][:, :, place])


def test_a_map_keeps_no_more_than_its_side() -> None:
    probe = CellProbe(0, 0, side=6)
    _record(probe)
    assert probe.record is not None
    for maps in probe.record.maps.values():
        assert maps.kept.shape == maps.weights.shape == (3, 6, 6)


def test_recording_changes_nothing() -> None:
    _, _, watched, _ = _record(CellProbe(0, 0))
    _, _, unwatched, _ = _record(CellProbe(7, 0))
    assert all(torch.equal(a, b) for a, b in zip(watched, unwatched, strict=True))


def test_a_dense_step_records_nothing() -> None:
    probe = CellProbe(0, 0)
    _record(probe, dense_steps=1)
    assert probe.record is None


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown token order"):
        CellProbe(0, 0, orders=("spiral",))


def test_head_density_map_is_the_mean_over_branches() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, GRID.tokens, 32) * 3 for _ in range(3))
    engine = AttentionEngine(METHOD, schedule=Schedule(dense_steps=0), layers=1)
    for branch, scale in (("conditional", 1.0), ("unconditional", 0.1)):
        engine.attend(q * scale, k, v, CallSite(0, 0, 1.0, GRID, branch))
    a, b = (cell.computed[0] for cell in engine.trace.cells if cell.computed is not None)
    engine.trace.cells.append(Cell(1, 0, "conditional", "dense", "dense", pairs=1))
    density = engine.trace.head_density_map()
    assert density[0][0] == pytest.approx(((a + b) / 2).tolist())
    assert density[1] == [None]
    assert Trace().head_density_map() == []
