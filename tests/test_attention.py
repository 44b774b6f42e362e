"""The engine: what each call does, what it keeps, and what the trace says about it."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget import Work, check_output, stock, truth
from engine_calls import GRID, engine_of, qkv, site
from torch import Tensor

import vidsparse
from vidsparse.attention import attend
from vidsparse.engine import AttentionEngine
from vidsparse.grid import TokenGrid
from vidsparse.kernels.attention.gates import AbsoluteGate, Gate, RelativeGate
from vidsparse.kernels.dispatch import sparse_attention
from vidsparse.methods import METHODS, FgAttn, SparseMethod, make_method
from vidsparse.order import ORDERS, token_order
from vidsparse.plan import SparsePlan
from vidsparse.planning import plan_attention
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class CountedDense:
    """A pipeline's own attention that knows how often it was called, and with what."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls.append((q, k, v))
        return F.scaled_dot_product_attention(q, k, v)


# ---- right output ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("order", ORDERS)
def test_keeping_everything_is_dense_attention(
    order: str, implementation: str, dtype: torch.dtype
) -> None:
    grid = TokenGrid(3, 7, 9, text=5)
    q, k, v = qkv(grid, dtype=dtype, batch=2)
    got = attend(q, k, v, grid, top_p=1, order=order, implementation=implementation)
    true = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    check_output(got, F.scaled_dot_product_attention(q, k, v), true)


@pytest.mark.parametrize("where", [{}, {"text_first": True}, {"lead": 7}], ids=str)
@pytest.mark.parametrize("method", ["fg-attn", "spargeattn"])
def test_a_sparse_call_is_the_masked_attention_of_its_plan(
    method: str, where: dict[str, Any]
) -> None:
    grid = TokenGrid(5, 12, 12, text=20, **where)
    q, k, v = qkv(grid, batch=2)
    own = {"fg-attn": {"top_p": 0.3}, "spargeattn": {"tau": 0.3, "theta": -1}}[method]
    made = make_method(method, tile="64x16", **own)
    assert isinstance(made, SparseMethod)
    order = token_order("hilbert", grid)
    q, k, v = (order.apply(x) for x in (q, k, v))
    plan = plan_attention(made, q, k, CallSite(0, 0, 0.0, grid))
    assert plan.computed.max().item() < 0.9
    work = Work(plan.q_tiles, plan.kv_count, plan.kv_index, plan.tile, plan.tokens)
    true, _ = truth(q, k, v, work, 1 / 8)
    q, k, v = (order.undo(x) for x in (q, k, v))
    got = attend(q, k, v, grid, made)
    check_output(order.apply(got), stock(q, k, v, work.mask(), 1 / 8), true)


def test_strided_inputs_give_the_same() -> None:
    q, k, v = qkv(batch=2)
    expected = attend(q, k, v, GRID, top_p=0.4)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(attend(q, k, v, GRID, top_p=0.4), expected)


def test_attend_takes_a_method_by_name_or_made() -> None:
    q, k, v = qkv()
    by_name = attend(q, k, v, GRID, "fg-attn", top_p=0.4, tile="32x8")
    assert torch.equal(by_name, attend(q, k, v, GRID, FgAttn(top_p=0.4, tile=(32, 8))))
    assert not torch.equal(by_name, attend(q, k, v, GRID, "dense"))


def test_attend_refuses_what_does_not_fit() -> None:
    q, k, v = qkv()
    with pytest.raises(vidsparse.OptionError, match=r"q has 264 tokens, and a grid .* has 263"):
        attend(q, k, v, TokenGrid(1, 1, 263))
    with pytest.raises(vidsparse.OptionError, match=r"options \(top_p\) were given together"):
        attend(q, k, v, GRID, FgAttn(), top_p=0.5)
    with pytest.raises(vidsparse.OptionError, match="unknown token order"):
        attend(q, k, v, GRID, order="spiral")
    with pytest.raises(vidsparse.OptionError, match="unknown implementation 'cuda'"):
        attend(q, k, v, GRID, implementation="cuda")
    with pytest.raises(vidsparse.UnsupportedError, match=r"'triton' .* not on cpu\. Hint: auto"):
        attend(q, k, v, GRID, implementation="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_it_computes_in_the_dtype_stock_attention_would(dtype: torch.dtype) -> None:
    q, k, v = qkv()
    low = q.bfloat16(), k.bfloat16(), v.bfloat16()
    expected = attend(*low, grid=GRID, top_p=0.4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # rotary embeddings may leave q and k in fp32 beside a v in 16 bits.
        got = attend(q.to(dtype), k.to(dtype), v.bfloat16(), GRID, top_p=0.4)
    assert got.dtype == dtype
    assert torch.equal(got, expected.to(dtype))


# ---- dense calls ----


def test_warm_up_calls_the_given_dense_attention_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a dense call must not plan, reorder or run a sparse kernel")

    monkeypatch.setattr("vidsparse.engine.token_order", never)
    engine = engine_of(dense_steps=2)
    engine.router = engine.planner = engine.kernel = never
    engine.begin_run(5)
    q, k, v = qkv()
    dense = CountedDense()
    for step in (0, 1):
        out = engine.attend(q, k, v, site(step), dense)
        assert torch.equal(out, F.scaled_dot_product_attention(q, k, v))
    assert [[a is b for a, b in zip(c, (q, k, v), strict=True)] for c in dense.calls] == [
        [True] * 3
    ] * 2
    with pytest.raises(AssertionError, match="must not plan"):
        engine.attend(q, k, v, site(2), dense)


def test_a_sparse_call_leaves_dense_alone() -> None:
    dense = CountedDense()
    engine = engine_of(top_p=0.4)
    engine.begin_run(1)
    engine.attend(*qkv(), site(), dense)
    assert dense.calls == []


def test_the_dense_method_is_always_the_pipelines_own() -> None:
    engine = engine_of("dense")
    engine.begin_run(3)
    dense = CountedDense()
    for step in range(3):
        engine.attend(*qkv(), site(step), dense)
    assert len(dense.calls) == 3
    assert engine.trace.summary().dense_step_share == 1.0


def test_a_grid_that_does_not_match_runs_dense_and_says_so() -> None:
    engine = engine_of(top_p=0.4)
    engine.begin_run(1)
    q, k, v = qkv()
    dense = CountedDense()
    out = engine.attend(q, k, v, site(grid=TokenGrid(3, 8, 12, text=1)), dense)
    assert len(dense.calls) == 1
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v))
    (cell,) = engine.trace.cells
    assert cell.action == (
        "dense: a grid of 3x8x12 video and 1 text tokens does not match 264 tokens"
    )
    assert (cell.implementation, cell.selected, cell.computed) == ("dense", None, None)
    summary = engine.trace.summary()
    assert summary.notes == (cell.action,)
    assert cell.action in str(summary)


def test_a_call_that_the_host_keeps_dense_is_the_hosts_own_and_says_why() -> None:
    engine = engine_of(top_p=0.4)
    engine.begin_run(1)
    q, k, v = qkv()
    dense = CountedDense()
    out = engine.attend(q, k, v, site(), dense, dense_because="it has a mask")
    assert len(dense.calls) == 1
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v))
    (cell,) = engine.trace.cells
    assert cell.action == "dense: it has a mask"
    work = engine.trace.summary().work
    assert work is not None
    assert work.dense_fallback == work.total == 1.0


# ---- plans over a run ----


def actions(engine: AttentionEngine) -> list[str]:
    return [cell.action for cell in engine.trace.cells]


def test_the_trace_shows_dense_replan_reuse() -> None:
    engine = engine_of(dense_steps=1, dense_last_steps=1, reuse=3, top_p=0.4)
    engine.begin_run(7)
    for step in range(7):
        engine.attend(*qkv(), site(step))
    expected = ["dense", "replan", "reuse", "reuse", "replan", "reuse", "dense"]
    assert actions(engine) == expected


def test_a_reused_plan_is_the_one_made_before() -> None:
    engine = engine_of(reuse=2, top_p=0.3, means=None)
    engine.begin_run(2)
    first, second = qkv(seed=0), qkv(seed=9)
    engine.attend(*first, site(0))
    reused = engine.attend(*second, site(1))
    order = token_order("hilbert", GRID)
    assert isinstance(engine.method, SparseMethod)
    plan = plan_attention(engine.method, order.apply(first[0]), order.apply(first[1]), site())
    q, k, v = (order.apply(x) for x in second)
    expected, _ = sparse_attention(
        q, k, v, plan.q_tiles, plan.kv_count, plan.kv_index, tile=(16, 16)
    )
    assert torch.equal(reused, order.undo(expected))
    assert not torch.equal(reused, attend(*second, GRID, top_p=0.3, means=None))


def test_layers_and_branches_keep_plans_of_their_own() -> None:
    engine = engine_of(layers=2, reuse=2, top_p=0.3, plans="own")
    engine.begin_run(2)
    places = list(itertools.product((0, 1), ("conditional", "unconditional")))
    inputs = {place: qkv(seed=i) for i, place in enumerate(places)}
    made = {}
    for layer, branch in places:
        made[layer, branch] = engine.attend(*inputs[layer, branch], site(0, layer, branch=branch))
    # the same inputs again: only the place's own plan gives the same output bit for bit.
    for layer, branch in places:
        again = engine.attend(*inputs[layer, branch], site(1, layer, branch=branch))
        assert torch.equal(again, made[layer, branch])
    assert actions(engine) == ["replan"] * 4 + ["reuse"] * 4


@pytest.mark.parametrize(
    ("change", "grid"),
    [
        ({"batch": 2}, GRID),
        ({"heads": 3}, GRID),
        ({}, TokenGrid(3, 8, 10)),
        ({}, TokenGrid(8, 3, 11)),  # as many tokens, in another order
    ],
    ids=["batch", "heads", "length", "grid of the same length"],
)
def test_a_plan_made_for_other_shapes_is_not_reused(
    change: dict[str, int], grid: TokenGrid
) -> None:
    engine = engine_of(reuse=4, top_p=0.3)
    engine.begin_run(4)
    engine.attend(*qkv(), site(0))
    changed = qkv(grid, seed=1, **change)
    got = engine.attend(*changed, site(1, grid=grid))
    assert actions(engine) == ["replan", "replan"]
    assert torch.equal(got, attend(*changed, grid, top_p=0.3))
    engine.attend(*changed, site(2, grid=grid))
    assert actions(engine)[-1] == "reuse"


def test_a_new_run_starts_with_an_empty_trace_and_no_plans() -> None:
    engine = engine_of(reuse=9, top_p=0.3)
    engine.begin_run(2)
    engine.attend(*qkv(), site(0))
    before = engine.trace
    engine.begin_run(2)
    assert engine.trace is not before
    assert len(before.cells) == 1
    engine.attend(*qkv(), site(1))
    assert actions(engine) == ["replan"]


def test_two_engines_do_not_disturb_each_other() -> None:
    q, k, v = qkv()
    engines = [engine_of(top_p=p, reuse=2) for p in (0.2, 0.8)]
    alone = [attend(q, k, v, GRID, top_p=p) for p in (0.2, 0.8)]
    for engine in engines:
        engine.begin_run(2)
    for step in range(2):
        for engine, expected in zip(engines, alone, strict=True):
            assert torch.equal(engine.attend(q, k, v, site(step)), expected)


# ---- checking for NaN ----


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("step", "action"), [(0, "dense, dense"), (3, "replan, torch")], ids=["dense", "sparse"]
)
def test_check_finite_names_layer_and_step(step: int, action: str, bad: float) -> None:
    engine = engine_of(layers=6, dense_steps=1, check_finite=True)
    engine.begin_run(5)
    q, k, v = qkv()
    engine.attend(q, k, v, site(step, 5))
    v[0, 1, 7, 3] = bad
    with pytest.raises(
        vidsparse.VidsparseError, match=rf"layer 5 at step {step} \(unconditional, {action}\)"
    ):
        engine.attend(q, k, v, site(step, 5, branch="unconditional"))


def test_without_check_finite_nan_passes() -> None:
    engine = engine_of()
    engine.begin_run(1)
    q, k, v = qkv()
    v[...] = math.nan
    assert bool(engine.attend(q, k, v, site()).isnan().all())


# ---- the trace ----


def traced_run() -> AttentionEngine:
    """Four steps of three layers: one dense step, one dense layer, two branches."""
    engine = engine_of(layers=3, dense_steps=1, dense_layers=1, top_p=0.3)
    engine.begin_run(4)
    for step, layer in itertools.product(range(4), range(3)):
        for branch in ("conditional", "unconditional"):
            q, k, v = qkv(seed=step * 3 + layer, batch=2)
            engine.attend(q, k, v, site(step, layer, branch=branch))
    return engine


def test_the_summary_averages_sparse_calls_only() -> None:
    engine = traced_run()
    cells = engine.trace.cells
    sparse = [c for c in cells if c.action != "dense"]
    summary = engine.trace.summary()
    assert (summary.calls, len(sparse)) == (24, 12)
    for name in ("selected", "computed"):
        mean = sum(getattr(c, name).mean().item() for c in sparse) / 12
        assert getattr(summary, name) == pytest.approx(mean)
    assert summary.selected is not None
    assert summary.computed is not None
    assert summary.selected < summary.computed < 1
    assert summary.dense_step_share == 0.25
    assert summary.dense_call_share == 0.5
    assert summary.implementation == "torch"
    seconds = [c.seconds or 0 for c in cells]
    assert summary.attention_seconds == pytest.approx(sum(seconds))
    assert min(seconds) > 0


def test_the_summary_reads_as_one_line() -> None:
    text = str(traced_run().trace.summary())
    # one step of four dense, one layer of three in the others.
    assert re.match(
        r"\d\d\.\d% of all pairs computed \(25\.0% dense steps, 25\.0% dense layers, "
        r"\d\d\.\d% sparse calls\); selection ",
        text,
    )
    assert "; sparse calls selected 0." in text
    assert ", computed 0." in text
    assert "25% of steps dense; 24 attention calls in " in text
    assert "by torch" in text


def test_a_run_without_sparse_calls_has_no_densities() -> None:
    engine = engine_of(dense_steps=1.0)
    engine.begin_run(2)
    engine.attend(*qkv(), site(0))
    summary = engine.trace.summary()
    assert (summary.selected, summary.computed) == (None, None)
    assert summary.dense_step_share == summary.dense_call_share == 1.0
    assert "all calls dense" in str(summary)
    assert "the pipeline's dense attention" in str(summary)


def test_an_empty_trace_has_a_summary() -> None:
    trace = vidsparse.Trace()
    assert trace.summary().calls == 0
    assert trace.density_map() == []
    assert trace.to_json() == []


def test_the_density_map_is_steps_by_layers() -> None:
    engine = traced_run()
    found = engine.trace.density_map()
    assert [len(row) for row in found] == [3, 3, 3, 3]
    assert found[0] == [1.0, 1.0, 1.0]
    assert [row[0] for row in found] == [1.0] * 4
    here = [c.computed.mean().item() for c in engine.trace.cells if (c.step, c.layer) == (2, 1)]
    assert found[2][1] == pytest.approx(sum(here) / 2)


def test_a_place_that_was_not_called_is_none_in_the_map() -> None:
    engine = engine_of(layers=3)
    engine.begin_run(3)
    engine.attend(*qkv(), site(1, 2))
    first, second = engine.trace.density_map()
    assert first == [None, None, None]
    assert second[:2] == [None, None]
    assert second[2] is not None


def test_the_trace_is_json_with_densities_per_head() -> None:
    engine = traced_run()
    rows = json.loads(json.dumps(engine.trace.to_json(), allow_nan=False))
    assert len(rows) == 24
    assert rows[0] == {
        "step": 0,
        "layer": 0,
        "branch": "conditional",
        "action": "dense",
        "implementation": "dense",
        "pairs": 2 * 2 * 264**2,
        "whole": 1.0,
        "selected": None,
        "computed": None,
        "skipped": None,
        "seconds": rows[0]["seconds"],
    }
    last, cell = rows[-1], engine.trace.cells[-1]
    assert (last["step"], last["layer"], last["branch"]) == (3, 2, "unconditional")
    assert last["action"] == "reuse"
    assert last["computed"] == pytest.approx(cell.computed.mean(0).tolist(), abs=1e-5)
    assert len(last["selected"]) == 2


WITHOUT_PRESET = [n for n, cls in METHODS.items() if not getattr(cls, "needs_numbers", False)]


@pytest.mark.parametrize("name", WITHOUT_PRESET)
def test_every_method_runs_in_an_engine(name: str) -> None:
    engine = engine_of(name)
    engine.begin_run(2)
    q, k, v = qkv(dtype=torch.bfloat16)
    out = engine.attend(q, k, v, site())
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert bool(out.isfinite().all())
    (cell,) = engine.trace.cells
    assert cell.implementation == ("dense" if name == "dense" else "torch")


# ---- gates and 8 bits ----


@dataclass(frozen=True, kw_only=True)
class Gated(FgAttn):
    """FG-Attn with a gate that depends on the step, and 8-bit products."""

    kind: str = "relative"
    bits: str | None = None

    @property
    def gate_keys(self) -> int:
        return 64

    def gate(self, q: Tensor, site: CallSite, plan: SparsePlan, kv_index: Tensor) -> Gate:
        if self.kind == "relative":
            return RelativeGate(-0.5 - site.step, rows=32)
        # no score reaches the first step's threshold.
        return AbsoluteGate(torch.tensor(1e9 if site.step == 0 else -torch.inf), rows=64)

    @property
    def quantize(self) -> str | None:  # type: ignore[override]
        return self.bits


def engine_with(method: SparseMethod, **schedule: Any) -> AttentionEngine:
    engine = AttentionEngine(method, schedule=Schedule(dense_steps=0, **schedule), layers=1)
    engine.begin_run(3)
    return engine


@pytest.mark.parametrize("bits", [None, "int8", "fp8"])
@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_a_methods_gate_and_8_bits_reach_the_kernel(implementation: str, bits: str | None) -> None:
    grid = TokenGrid(3, 8, 16)
    method = Gated(top_p=0.9999, merge="xor", bits=bits)
    q, k, v = qkv(grid, batch=2)
    # the first half of the keys outweighs the other for every query.
    q[..., 0] += 4
    k[:, :, : grid.tokens // 2, 0] += 8
    engine = engine_with(method)
    engine.order = "rowmajor"
    engine.implementation = implementation
    got = engine.attend(q, k, v, site(grid=grid))
    plan = plan_attention(method, q, k, site(grid=grid))
    skipped = torch.empty_like(plan.kv_count)
    expected, _ = sparse_attention(
        q, k, v, plan.q_tiles, plan.kv_count, plan.kv_index, tile=plan.tile,
        implementation="reference", gate=RelativeGate(-0.5, rows=32), quantize=bits,
        skipped=skipped,
    )  # fmt: skip
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    (cell,) = engine.trace.cells
    assert cell.implementation == implementation
    assert cell.skipped is not None
    assert cell.computed is not None
    share = skipped.sum(-1) / grid.tokens**2
    assert share.min().item() > 0
    torch.testing.assert_close(cell.skipped, share)
    torch.testing.assert_close(cell.computed, plan.computed - share / 2)


def test_a_pair_without_its_product_with_v_is_half_computed() -> None:
    engine = engine_with(Gated(top_p=1, kind="absolute"))
    out = engine.attend(*qkv(), site(step=0))
    assert bool((out == 0).all())
    summary = engine.trace.summary()
    assert (summary.selected, summary.computed, summary.skipped) == (1, 0.5, 1)
    assert summary.sparsity == 0.5
    assert "computed 0.500 (1.000 without the product with V)" in str(summary)
    record = engine.trace.to_json()[0]
    assert (record["computed"], record["skipped"]) == ([0.5, 0.5], [1, 1])
    assert engine.trace.density_map() == [[0.5]]


def test_a_reused_plan_gets_the_gate_of_its_own_step() -> None:
    engine = engine_with(Gated(top_p=1, kind="absolute"), reuse=3)
    q, k, v = qkv()
    first, second = (engine.attend(q, k, v, site(step=step)) for step in (0, 1))
    assert [cell.action for cell in engine.trace.cells] == ["replan", "reuse"]
    assert bool((first == 0).all())
    torch.testing.assert_close(second, F.scaled_dot_product_attention(q, k, v))
    # the plan that waits keeps its own density.
    assert [cell.computed.mean().item() for cell in engine.trace.cells] == [0.5, 1]


def test_without_a_gate_nothing_is_said_of_skipping() -> None:
    engine = engine_with(FgAttn(top_p=0.5))
    engine.attend(*qkv(), site())
    summary = engine.trace.summary()
    assert summary.skipped is None
    assert summary.computed is not None
    assert summary.sparsity == 1 - summary.computed
    assert engine.trace.to_json()[0]["skipped"] is None


def test_a_method_is_told_which_heads_it_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    @dataclass(frozen=True, kw_only=True)
    class Watching(FgAttn):
        def select(
            self, q: Tensor, k: Tensor, site: CallSite, *, v: Tensor | None = None
        ) -> Tensor:
            seen.append((site.layer, site.step, site.first_head, q.shape[1]))
            return super().select(q, k, site)

    monkeypatch.setattr("vidsparse.planning.MASK_TILES", 1)
    engine_with(Watching()).attend(*qkv(heads=3), site(2, layer=0))
    assert seen == [(0, 2, 0, 1), (0, 2, 1, 1), (0, 2, 2, 1)]
