"""The branches of guidance attend by one plan, so that guidance does not magnify how they err."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import random_qkv
from tiny_families import TINY, latents
from torch import Tensor

from vidsparse import sparsify
from vidsparse.engine import AttentionEngine
from vidsparse.errors import OptionError
from vidsparse.grid import TokenGrid
from vidsparse.methods import SPARSE_METHODS, make_method
from vidsparse.plan import SparsePlan
from vidsparse.planning import Ordered
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

GRID = TokenGrid(3, 8, 11)
BRANCHES = ("conditional", "unconditional")

pytestmark = pytest.mark.usefixtures("one_thread")


def engine_of(plans: str = "shared", **schedule: Any) -> AttentionEngine:
    engine = AttentionEngine(
        make_method("fg-attn", topk=0.3, plans=plans),
        schedule=Schedule(**{"dense_steps": 1, **schedule}),
        layers=1,
    )
    engine.begin_run(4)
    return engine


def attend(engine: AttentionEngine, step: int, branch: str, seed: int, **where: Any) -> Tensor:
    q, k, v = random_qkv(GRID.tokens, 64, torch.float32, seed=seed)
    return engine.attend(q, k, v, CallSite(0, step, 1.0, GRID, branch, **where))


def actions(engine: AttentionEngine) -> list[tuple[int, str, str]]:
    return [(cell.step, cell.branch, cell.action) for cell in engine.trace.cells if cell.step]


@pytest.mark.parametrize("reuse", [1, 2])
@pytest.mark.parametrize("refresh", [0, 2])
def test_the_second_branch_of_a_step_attends_by_the_first_one_s_plan(
    reuse: int, refresh: int
) -> None:
    shared, own = (engine_of(plans, reuse=reuse, refresh=refresh) for plans in ("shared", "own"))
    planned: dict[AttentionEngine, list[tuple[int, str]]] = {shared: [], own: []}
    for engine, made_for in planned.items():
        make = engine.planner

        def planner(
            *args: Any, made_for: list[tuple[int, str]] = made_for, make: Any = make
        ) -> Ordered:
            made_for.append((args[3].step, args[3].branch))
            return make(*args)

        engine.planner = planner
        for step in range(4):
            for seed, branch in enumerate(BRANCHES):
                attend(engine, step, branch, seed)
    # the last dense step is the first refresh; of two, the other comes later.
    steps = [0, 2] if refresh else [1, 3] if reuse == 2 else [1, 2, 3]
    assert planned[shared] == [(step, "conditional") for step in steps]
    assert planned[own] == [(step, branch) for step in steps for branch in BRANCHES]
    # both counted with what they attend by.
    first, second = (
        [c.computed for c in shared.trace.cells if c.branch == one and c.computed is not None]
        for one in BRANCHES
    )
    assert all(map(torch.equal, first, second))
    made = [cell.plan_step for cell in shared.trace.cells if cell.branch == BRANCHES[1]]
    assert made == [cell.plan_step for cell in shared.trace.cells if cell.branch == BRANCHES[0]]


def test_a_branch_that_comes_again_in_its_step_and_another_window_plan_anew() -> None:
    engine = engine_of()
    for branch in BRANCHES:
        attend(engine, 0, branch, 0)
    attend(engine, 1, "conditional", 1)
    attend(engine, 1, "conditional", 2)
    attend(engine, 1, "conditional 2", 3, window=2)
    attend(engine, 1, "unconditional 2", 4, window=2)
    assert [action for _, _, action in actions(engine)] == ["replan", "replan", "replan", "reuse"]


@pytest.mark.parametrize("small", [True, False])
def test_lists_of_a_short_video_s_plan_are_made_once_for_all_calls_that_it_serves(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr("vidsparse.kept._SMALL", 0)
    engine, fresh = engine_of(reuse=3), engine_of(reuse=3)
    made: list[int] = []
    of = SparsePlan.list_keys

    def list_keys(plan: SparsePlan, *, by_kernel: bool) -> Tensor:
        made.append(1)
        return of(plan, by_kernel=by_kernel)

    monkeypatch.setattr(SparsePlan, "list_keys", list_keys)
    counted = []
    for step in (1, 2, 3):
        for branch in BRANCHES:
            out = attend(engine, step, branch, seed=step)
            counted.append(len(made))
            # one that keeps none gives the same.
            for kept in fresh._plans.values():
                kept.lists = None
            assert torch.equal(out, attend(fresh, step, branch, seed=step))
            made.clear()
    # the first two calls plan: from the second branch on it is known that another follows.
    assert counted == ([1, 0, 0, 0, 0, 0] if small else [1] * 6)


def test_no_plan_waits_where_there_is_no_other_branch() -> None:
    engine = engine_of()
    for step in range(4):
        attend(engine, step, "conditional", step)
    assert engine._plans == {}


def test_what_guidance_makes_of_the_branches_errs_less_by_a_shared_plan() -> None:
    g = 5.0
    base = random_qkv(GRID.tokens, 64, torch.float32, seed=0)
    noise = random_qkv(GRID.tokens, 64, torch.float32, seed=1)
    # what a prompt changes is small beside what both branches are about.
    other = [x + 0.1 * y for x, y in zip(base, noise, strict=True)]
    operands = {"conditional": base, "unconditional": other}
    errors = {}
    for plans in ("shared", "own"):
        engine = engine_of(plans)
        for step in range(2):
            out = {
                branch: engine.attend(q, k, v, CallSite(0, step, 1.0, GRID, branch))
                for branch, (q, k, v) in operands.items()
            }
            if step == 0:
                dense = out
        lacks = {branch: dense[branch] - out[branch] for branch in BRANCHES}
        guided = g * lacks["conditional"] - (g - 1) * lacks["unconditional"]
        errors[plans] = float(guided.norm() / dense["conditional"].norm())
    assert errors["shared"] < 0.9 * errors["own"]


def test_branches_that_stand_in_one_batch_attend_by_the_last_one_s_plan() -> None:
    engine = engine_of(dense_steps=0)
    halves = [random_qkv(GRID.tokens, 64, torch.float32, batch=2, seed=seed) for seed in (0, 1)]
    q, k, v = (torch.cat(pair) for pair in zip(*halves, strict=True))
    out = engine.attend(q, k, v, CallSite(0, 0, 1.0, GRID, stacked=2))
    alone = engine_of(dense_steps=0)
    last = alone.attend(*halves[1], CallSite(0, 0, 1.0, GRID))
    assert torch.equal(out[2:], last)
    # the first half by the same plan, kept for the next step.
    alone = engine_of(dense_steps=0, reuse=2)
    alone.attend(*halves[1], CallSite(0, 0, 1.0, GRID))
    assert torch.equal(out[:2], alone.attend(*halves[0], CallSite(0, 1, 1.0, GRID)))


@pytest.mark.parametrize(("guidance", "stacked"), [(1.0, 1), (4.0, 2)])
def test_a_pipeline_says_whether_branches_stand_in_one_batch(guidance: float, stacked: int) -> None:
    pipe = TINY["cogvideox"].build()
    seen = set()
    with sparsify(pipe, "fg-attn", dense_steps=0) as handle:
        for engine in handle.engines:
            engine.observer = lambda q, k, v, site: seen.add((q.shape[0], site.stacked))
        latents("cogvideox", pipe, guidance_scale=guidance)
    assert seen == {(stacked, stacked)}


def test_papers_plan_for_every_branch() -> None:
    for name, cls in SPARSE_METHODS.items():
        if cls.as_published:
            assert cls.as_published["plans"] == "own", name
            assert make_method(name).options()["plans"] == "shared"
    with pytest.raises(OptionError, match="plans must be one of shared, own, got 'both'"):
        make_method("fg-attn", plans="both")
