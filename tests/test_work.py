"""How much of a run's attention was computed: counted pair by pair, split, and read back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from budget import random_qkv

from vidsparse.engine import AttentionEngine
from vidsparse.grid import TokenGrid
from vidsparse.methods import SparseMethod, make_method
from vidsparse.schedule import Schedule
from vidsparse.selection_costs import MEASURED, selection_cost
from vidsparse.site import CallSite
from vidsparse.trace import Cell, Trace
from vidsparse.work import NOTHING_SELECTED, SELECTION_UNKNOWN, SelectionCost, Work

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[1]
SMALL, LARGE = TokenGrid(2, 8, 8), TokenGrid(3, 8, 12)


def run(grids: dict[int, TokenGrid], *, layers: int = 4, **schedule: Any) -> Trace:
    """Five steps of ``layers``, each layer with its own grid (``grids[layer]``, else SMALL)."""
    engine = AttentionEngine(
        make_method("fg-attn", top_p=0.4), schedule=Schedule(**schedule), layers=layers
    )
    engine.begin_run(5)
    for step in range(5):
        for layer in range(layers):
            grid = grids.get(layer, SMALL)
            q, k, v = random_qkv(grid.tokens, 64, torch.float32, seed=step * layers + layer)
            engine.attend(q, k, v, CallSite(layer, step, 0.5, grid))
    return engine.trace


def test_pairs_are_counted_over_the_whole_run() -> None:
    trace = run({}, dense_steps=1, dense_layers=1)
    work = trace.summary().work
    assert work is not None
    # one step of five; one layer of four in the other four.
    assert work.dense_steps == 1 / 5
    assert work.dense_layers == pytest.approx(4 / 5 / 4)
    assert work.dense_fallback == 0
    computed = sum(c.computed_share for c in trace.cells if c.sparse)
    assert work.sparse == pytest.approx(computed / 20)
    assert work.total == pytest.approx((5 + 3 + computed) / 20)


def test_calls_weigh_by_their_pairs() -> None:
    grids = {0: LARGE}
    trace = run(grids, dense_steps=0, dense_layers=1, layers=2)
    work = trace.summary().work
    assert work is not None
    large, small = LARGE.tokens**2, SMALL.tokens**2
    assert work.dense_layers == pytest.approx(large / (large + small))
    assert work.sparse == pytest.approx(
        trace.summary().computed * small / (large + small)  # type: ignore[operator]
    )


def test_a_run_of_equal_calls_follows_from_its_schedule() -> None:
    summary = run({}, dense_steps=2, dense_layers=1).summary()
    assert summary.work is not None
    assert summary.computed is not None
    expected = Work.of_schedule(dense_steps=2 / 5, dense_layers=1 / 4, computed=summary.computed)
    for name in ("total", "dense_steps", "dense_layers", "sparse"):
        assert getattr(summary.work, name) == pytest.approx(getattr(expected, name)), name


def test_calls_that_fell_back_are_a_part_of_their_own() -> None:
    engine = AttentionEngine(
        make_method("fg-attn", top_p=0.4), schedule=Schedule(dense_steps=0), layers=1
    )
    engine.begin_run(1)
    q, k, v = random_qkv(SMALL.tokens, 64, torch.float32)
    engine.attend(q, k, v, CallSite(0, 0, 0.5, LARGE))
    work = engine.trace.summary().work
    assert work is not None
    assert (work.total, work.dense_fallback, work.dense_steps) == (1.0, 1.0, 0.0)
    assert "100.0% calls that fell back to dense" in str(work)


def test_a_dense_run_computes_everything() -> None:
    work = run({}, dense_steps=1.0).summary().work
    assert work == Work.all_dense()
    assert str(work) == (
        "100.0% of all pairs computed (100.0% dense steps); "
        "selection 0.0% of dense attention (nothing to select)"
    )


def of_steps(calls: Sequence[int], *, layers: int = 4, branch: str = "conditional") -> Trace:
    """A run whose forwards made so many ``calls`` each, of a pair of steps' dense ones."""
    trace = Trace()
    for step, made in enumerate(calls):
        trace.begin_forward()
        trace.cells += [Cell(step, n, branch, "dense", "dense", 10 + n) for n in range(made)]
        trace.end_forward(0, branch)
    return trace


def test_calls_that_a_cache_left_out_are_the_runs() -> None:
    # 46 pairs a step; the second step made the first call alone, the third none.
    work = of_steps([4, 1, 0, 4]).summary().work
    assert work is not None
    assert work.total == work.dense_steps == pytest.approx((46 + 10 + 46) / (4 * 46))
    assert work.left_out == pytest.approx(1 - work.total)
    assert work.split == "55.4% dense steps, and 44.6% left out by the step cache"
    assert work.selection == 0
    assert Work.from_json(json.loads(json.dumps(work.to_json()))) == work
    assert Work.all_dense(work.left_out) == work


def test_what_a_branch_never_called_was_not_left_out() -> None:
    # a guider's own forward that skips a layer on purpose, and a branch that begins late.
    trace = of_steps([4, 4])
    for step in (1, 2):
        trace.begin_forward()
        trace.cells += [Cell(step, n, "skips", "dense", "dense", 10) for n in (0, 2)]
        trace.end_forward(0, "skips")
    assert trace.left_out == 0


def test_a_forward_that_raised_and_is_repeated_counts_nothing_twice() -> None:
    trace = Trace()
    for raised in (True, False):
        trace.begin_forward()
        trace.cells += [Cell(0, n, "conditional", "dense", "dense", 10) for n in range(2)]
        if not raised:
            trace.end_forward(0, "conditional")
    trace.begin_forward()
    trace.end_forward(0, "conditional")
    assert trace.left_out == 20


def test_no_call_no_work() -> None:
    assert Trace().summary().work is None


def trace_of(costs: list[tuple[str, SelectionCost | None]]) -> Trace:
    """A dense call of 10 pairs, then sparse ones of 10 each, by action and cost."""
    half = torch.tensor([[0.5]])
    trace = Trace([Cell(0, 0, "conditional", "dense", "dense", 10)])
    for step, (action, cost) in enumerate(costs, 1):
        cell = Cell(step, 0, "conditional", action, "torch", 10, half, half, selection=cost)
        cell.made_plan = action != "reuse"
        trace.cells.append(cell)
    return trace


def test_only_new_plans_cost_selection() -> None:
    cost = SelectionCost(0.2, "a file of rows")
    work = trace_of([("replan", cost), ("reuse", None), ("replan", cost)]).summary().work
    assert work is not None
    # two plans of 0.2, of four calls.
    assert work.selection == pytest.approx(0.1)
    assert work.selection_source == "a file of rows"


def test_one_unknown_cost_makes_the_sum_unknown() -> None:
    cost = SelectionCost(0.2, "a file of rows")
    work = trace_of([("replan", cost), ("replan", None)]).summary().work
    assert work is not None
    assert (work.selection, work.selection_source) == (None, SELECTION_UNKNOWN)
    assert f"selection unknown: {SELECTION_UNKNOWN}" in str(work)


def test_work_is_read_back_from_json() -> None:
    work = run({}, dense_steps=1, dense_layers=1).summary().work
    assert work is not None
    assert Work.from_json(json.loads(json.dumps(work.to_json()))) == work


def test_records_of_other_versions_are_read() -> None:
    # before work was counted.
    assert Work.from_json(None) is None
    # and after a part was added to the split: the total is what counts.
    later = {"total": 0.4, "dense_steps": 0.1, "sparse": 0.2, "something_new": 0.1}
    assert Work.from_json(later) == Work(total=0.4, dense_steps=0.1, sparse=0.2)
    # nor did earlier ones count what a cache left out.
    assert Work.from_json({"total": 0.4, "sparse": 0.4}) == Work(total=0.4, sparse=0.4)


def test_the_mean_over_runs() -> None:
    known = Work(total=0.5, sparse=0.5, selection=0.1, selection_source="a")
    other = Work(
        total=0.7, dense_steps=0.4, sparse=0.3, left_out=0.2, selection=0.3, selection_source="b"
    )
    mean = Work.mean([known, other])
    assert mean is not None
    assert mean.total == pytest.approx(0.6)
    assert mean.dense_steps == pytest.approx(0.2)
    assert mean.left_out == pytest.approx(0.1)
    assert mean.selection == pytest.approx(0.2)
    assert mean.selection_source == "a; b"
    unknown = Work.mean([known, Work(total=0.7)])
    assert unknown is not None
    assert (unknown.selection, unknown.selection_source) == (None, SELECTION_UNKNOWN)
    assert Work.mean([]) is None


# ---- what selection costs ----


def sparse(name: str, **options: Any) -> SparseMethod:
    method = make_method(name, **options)
    assert isinstance(method, SparseMethod)
    return method


@pytest.mark.parametrize("one", MEASURED, ids=lambda one: f"{one.device} {one.method} {one.tokens}")
def test_every_cost_is_that_of_a_row(one: Any) -> None:
    document = json.loads((ROOT / one.file).read_text("utf-8"))
    assert one.hardware in str(document["hardware"])
    found = []
    for row in document["rows"]:
        same = (row["tile"], row["seq_len"], row["dtype"]) == (one.tile, one.tokens, one.dtype)
        if same and "case" in row:
            if row["case"] == "plan and mask" and row["dense_impl"] == "cudnn":
                found.append(row["plan_ms"] / row["dense_ms"])
        elif same and row["method"] == one.method:
            asked = dict(part.split("=") for part in row["options"].split())
            own = {k: v if k == "tile" else json.loads(v) for k, v in asked.items()}
            options = make_method(one.method, **own).options()
            # a share of tiles instead of a threshold is another row of the same cost.
            if "topk" not in own and all(options[k] == v for k, v in one.options.items()):
                found.append((row["mask_ms"] + row["plan_ms"]) / row["dense_ms"])
    assert len(found) == 1
    assert one.share == pytest.approx(found[0], abs=6e-5)


def test_a_cost_is_for_the_method_as_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vidsparse.selection_costs.device_class", lambda device: "hopper")
    gpu, bf16 = torch.device("cuda"), torch.bfloat16
    method = sparse("fg-attn")
    found = selection_cost(method, gpu, bf16, 75_600)
    assert found is not None
    assert found.share == 0.0287
    assert "NVIDIA H200" in found.source
    assert "docs/benchmarks/attention-h200.json" in found.source
    # another threshold chooses other tiles at the same cost; longer calls cost no larger share.
    assert selection_cost(sparse("fg-attn", top_p=0.5), gpu, bf16, 118_896) == found
    for other in (
        selection_cost(sparse("fg-attn", tile="32x32"), gpu, bf16, 75_600),
        selection_cost(sparse("fg-attn", merge="xor"), gpu, bf16, 75_600),
        selection_cost(method, gpu, torch.float16, 75_600),
        selection_cost(method, gpu, bf16, 17_776),
        selection_cost(method, gpu, bf16, 200_000),
        selection_cost(sparse("xattention", pattern="diagonal"), gpu, bf16, 75_600),
        selection_cost(sparse("fg-attn", score="residual"), gpu, bf16, 75_600),
        selection_cost(sparse("foresight", tile="128x16", rows=16), gpu, bf16, 75_600),
    ):
        assert other is None
    assert selection_cost(sparse("foresight", tile="128x16"), gpu, bf16, 75_600) is not None
    assert selection_cost(sparse("xattention"), gpu, bf16, 75_600) == SelectionCost(
        0.0663, "measured on NVIDIA H200 at 75,600 tokens, docs/benchmarks/masks-h200.json"
    )


def test_other_devices_have_no_cost() -> None:
    method = sparse("sale")
    for device in ("meta", "mps"):
        assert selection_cost(method, torch.device(device), torch.bfloat16, 75_600) is None


def test_what_chooses_by_computed_scores_alone_costs_nothing_beside_them() -> None:
    found = selection_cost(sparse("bsfa"), torch.device("meta"), torch.float32, 1)
    assert found is not None
    assert found.share == 0


def test_nothing_selected_says_so() -> None:
    assert Work.all_dense().selection_source == NOTHING_SELECTED
