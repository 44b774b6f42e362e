"""Steps that compute everything again, and what they leave to the steps after them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget import random_qkv
from engine_calls import GRID, site
from hypothesis import given
from hypothesis import strategies as st
from tiny_pipelines import latents_of, save_tiny_wan, tiny_wan
from torch import Tensor

import vidsparse
from vidsparse import room
from vidsparse.engine import AttentionEngine
from vidsparse.methods import make_method
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.caching import StepCache
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.remainder import (
    Keeping,
    Remainder,
    likeness,
    weights,
)
from vidsparse.schedule import Action, Schedule
from vidsparse.work import SelectionCost

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 10


def engine_of(
    method: str = "foresight", *, layers: int = 1, plans: str = "shared", **schedule: Any
) -> AttentionEngine:
    options: dict[str, Any] = {"share": 0.1} if method == "foresight" else {"topk": 0.1}
    options |= {name: schedule.pop(name) for name in ("fading", "slope") if name in schedule}
    return AttentionEngine(
        make_method(method, plans=plans, **options),
        schedule=Schedule(**{"dense_steps": 2, "refresh": 3, **schedule}),
        layers=layers,
    )


def operands(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return random_qkv(GRID.tokens, 64, torch.float32, seed=seed)


def run(engine: AttentionEngine, calls: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    engine.begin_run(len(calls))
    return [engine.attend(*one, site(step)) for step, one in enumerate(calls)]


# ---- when


def row(schedule: Schedule, steps: int) -> str:
    letters = {"dense": "d", "replan": "p", "reuse": "r", "refresh": "f"}
    return "".join(letters[schedule.decide(step, steps, 0, 1)] for step in range(steps))


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        ({"dense_steps": 3, "refresh": 4}, 20, "ddfrrfrrrrfrrrfrrrrr"),
        ({"dense_steps": 3, "refresh": 1}, 10, "ddfrrrrrrr"),
        ({"dense_steps": 0, "refresh": 2}, 8, "frrfrrrr"),
        ({"dense_steps": 2, "refresh": 2, "dense_last_steps": 2}, 10, "dfrrfrrrdd"),
        # beyond its reach a refresh is as if it had not been.
        ({"dense_steps": 3, "refresh": 1, "reach": 3}, 10, "ddfrrrpppp"),
        ({"dense_steps": 3, "refresh": 4, "reach": 3}, 20, "ddfrrfrrrpfrrrfrrrpp"),
        ({"dense_steps": 3, "refresh": 1, "reach": 3, "reuse": 2}, 10, "ddfrrrprpr"),
        # a plan that may serve longer does so without what was kept with it.
        ({"dense_steps": 3, "refresh": 1, "reach": 1, "reuse": 3}, 10, "ddfrrprrpr"),
        ({"dense_steps": 3, "refresh": 1, "reach": 9}, 10, "ddfrrrrrrr"),
        # where all are refreshes none keeps anything.
        ({"dense_steps": 1, "refresh": 1.0}, 4, "dddd"),
        ({"dense_steps": 1, "refresh": 0, "reuse": 2}, 5, "dprpr"),
        ({"dense_steps": 1.0, "refresh": 3}, 4, "dddd"),
    ],
)
def test_refreshes_begin_with_the_last_dense_step_and_grow_apart(
    options: dict[str, Any], steps: int, expected: str
) -> None:
    assert row(Schedule(**options), steps) == expected


@given(
    steps=st.integers(1, 120),
    dense=st.integers(0, 30),
    last=st.integers(0, 10),
    wanted=st.integers(1, 130),
    reach=st.none() | st.integers(1, 40),
)
def test_there_are_as_many_refreshes_as_asked_for_or_as_fit(
    steps: int, dense: int, last: int, wanted: int, reach: int | None
) -> None:
    schedule = Schedule(dense_steps=dense, dense_last_steps=last, refresh=wanted, reach=reach)
    window, found = schedule.sparse_window(steps), schedule.refresh_steps(steps)
    if not window:
        assert found == ()
        return
    first = max(0, window.start - 1)
    assert len(found) == min(wanted, window.stop - first)
    assert found[0] == first
    assert found[-1] < window.stop
    assert all(one < other for one, other in itertools.pairwise(found))
    for step in window:
        nearest = max(one for one in found if one <= step)
        reached = reach is None or step - nearest <= reach
        assert schedule.refresh_for(step, steps) == (nearest if reached else None)
        assert schedule.plan_step(step, steps) == (nearest if reached else step)


@pytest.mark.parametrize("name", ["refresh", "dense_steps"])
def test_a_count_of_one_is_not_a_share_of_one_in_the_same_process(name: str) -> None:
    # the two are equal numbers, and so are schedules that hold them.
    amounts: dict[str, Any] = {"dense_steps": 2, "refresh": 2}
    one = Schedule(**{**amounts, name: 1})
    whole = Schedule(**{**amounts, name: 1.0})
    assert one == whole
    assert len(one.refresh_steps(10)) == (1 if name == "refresh" else 2)
    assert len(whole.refresh_steps(10)) == (9 if name == "refresh" else 0)
    assert len(one.refresh_steps(10)) == (1 if name == "refresh" else 2)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_a_bad_reach_is_refused_by_name(bad: Any) -> None:
    for make in (Schedule, vidsparse.make_method):
        name = () if make is Schedule else ("foresight",)
        with pytest.raises(vidsparse.OptionError, match="reach must be a whole number of steps"):
            make(*name, reach=bad)


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf"), 10**400, True, "2"])
def test_a_bad_fading_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(vidsparse.OptionError, match="fading must be a number from 0 to 1000"):
        make_method("foresight", fading=bad)


@pytest.mark.parametrize("bad", [-1, 1.5, True, "2"])
def test_a_bad_number_of_refreshes_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(vidsparse.OptionError, match="refresh"):
        Schedule(refresh=bad)


# ---- what a run does


@pytest.mark.parametrize("method", ["foresight", "fg-attn", "xattention"])
def test_where_nothing_changes_every_step_is_dense_to_8_bits(method: str) -> None:
    q, k, v = operands()
    dense = F.scaled_dot_product_attention(q, k, v)
    outputs = run(engine_of(method), [(q, k, v)] * STEPS)
    plain = run(engine_of(method, refresh=0), [(q, k, v)] * STEPS)
    lacking = (plain[-1] - dense).abs()
    assert float(lacking.mean()) > 0.01
    rounded = lacking.amax(-1, keepdim=True) / 254 + 1e-5
    refreshes = Schedule(dense_steps=2, refresh=3).refresh_steps(STEPS)
    for step, out in enumerate(outputs):
        age = min((step - one for one in refreshes if one <= step), default=0)
        faded = (1 - likeness(age, STEPS)) * lacking
        assert bool(((out - dense).abs() <= faded + rounded).all())


def test_what_is_kept_counts_less_with_every_step_and_alike_in_runs_of_any_length() -> None:
    factors = [likeness(age, 20) for age in range(20)]
    assert factors[0] == 1
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] > 0.5
    assert likeness(10, 50) == pytest.approx(likeness(4, 20))


def test_a_model_has_a_fading_of_its_own() -> None:
    q, k, v = operands()
    outputs = run(engine_of(fading=2.5), [(q, k, v)] * STEPS)
    dense = F.scaled_dot_product_attention(q, k, v)
    plain = run(engine_of(refresh=0), [(q, k, v)] * STEPS)[-1]
    rounded = (dense - plain).abs().amax(-1, keepdim=True) / 254 + 1e-5
    age = STEPS - 1 - Schedule(dense_steps=2, refresh=3).refresh_steps(STEPS)[-1]
    assert age > 1
    faded = math.exp(-2.5 * age / STEPS)
    expected = torch.lerp(plain, dense, faded)
    assert bool(((outputs[-1] - expected).abs() <= rounded).all())


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan"), True, "0.5"])
def test_a_bad_slope_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(vidsparse.OptionError, match="slope must be a number from 0 to 1, got"):
        make_method("foresight", slope=bad)


def test_two_remainders_in_a_line_go_on_for_as_long_as_they_took() -> None:
    # without fading a slope of one is the line through both, which ends where the gap is over.
    for age, expected in ((0, 5.0), (2, 6.0), (4, 7.0), (9, 7.0)):
        last, before = weights(age, 4, 20, 0.0, 1.0)
        assert last * 5.0 + before * 3.0 == pytest.approx(expected)
    assert weights(3, 4, 20, 0.6) == (likeness(3, 20, 0.6), 0.0)


def test_steps_follow_the_slope_of_the_last_two_refreshes() -> None:
    calls = [operands(seed) for seed in range(STEPS)]
    engine, without = engine_of(slope=0.5, fading=0.5), engine_of(fading=0.5)
    outputs, others = run(engine, calls), run(without, calls)
    refreshes = engine.schedule.refresh_steps(STEPS)
    lacked = {}
    for step in refreshes:
        dense = F.scaled_dot_product_attention(*calls[step])
        # the plan of a refresh is its own, so that a run that plans there anew has its output.
        alone = engine_of(dense_steps=0, refresh=0)
        lacked[step] = dense - run(alone, [calls[step]])[0]
    rounded = 4 * max(one.abs().max() for one in lacked.values()) / 254 + 1e-4
    for step, (out, other) in enumerate(zip(outputs, others, strict=True)):
        known = [one for one in refreshes if one <= step]
        if step in refreshes or len(known) < 2:
            assert torch.equal(out, other)
            continue
        new, old = known[-1], known[-2]
        onward = likeness(step - new, STEPS, 0.5) * 0.5 * min((step - new) / (new - old), 1)
        change = onward * (lacked[new] - lacked[old])
        assert float((out - other - change).abs().max()) <= rounded
        assert float(change.abs().max()) > 2 * rounded
    assert not engine._lacking


def test_no_more_than_two_remainders_of_a_call_are_kept() -> None:
    q, k, v = operands()
    engine = engine_of(slope=0.5, refresh=4)
    engine.begin_run(STEPS)
    last = engine.schedule.refresh_steps(STEPS)[-1]
    for step in range(last + 1):
        engine.attend(q, k, v, site(step))
    (kept,) = engine._lacking.values()
    assert kept.step == last
    assert kept.earlier is not None
    assert kept.earlier.earlier is None
    # run again, it still follows the refresh before it.
    engine.attend(q, k, v, site(last))
    (again,) = engine._lacking.values()
    assert again.earlier is not None
    assert (again.step, again.earlier.step) == (last, kept.earlier.step)


def test_beyond_the_reach_of_a_refresh_steps_are_as_without_it() -> None:
    calls = [operands(seed) for seed in range(STEPS)]
    engine = engine_of(refresh=1, reach=2)
    outputs = run(engine, calls)
    without = engine_of(refresh=0)
    plain = run(without, calls)
    kept, all_steps = engine.schedule.refresh_steps(STEPS)[0], range(STEPS)
    assert [cell.action for cell in engine.trace.cells] == [
        "refresh" if step == kept else "reuse" if 0 < step - kept <= 2 else one.action
        for step, one in zip(all_steps, without.trace.cells, strict=True)
    ]
    for step in all_steps:
        assert torch.equal(outputs[step], plain[step]) == (step not in (kept + 1, kept + 2))
    # nothing waits for the end of the run.
    assert not engine._lacking


def test_steps_beyond_the_reach_plan_for_both_branches_and_the_next_refresh_keeps_anew() -> None:
    engine = engine_of(refresh=3, reach=1)
    engine.begin_run(STEPS)
    for step in range(STEPS):
        for branch in ("cond", "uncond"):
            engine.attend(*operands(step), replace(site(step), branch=branch))
    told: dict[str, list[tuple[str, int | None]]] = {"cond": [], "uncond": []}
    for cell in engine.trace.cells:
        told[cell.branch].append((cell.action, cell.plan_step))
    expected = row(engine.schedule, STEPS)
    assert set("fpr") <= set(expected)
    letters = {"dense": "d", "replan": "p", "reuse": "r", "refresh": "f"}
    assert "".join(letters[action] for action, _ in told["cond"]) == expected
    # the other branch goes by the plans of the first.
    assert "".join(letters[action] for action, _ in told["uncond"]) == expected.replace("p", "r")
    sparse = engine.schedule.sparse_window(STEPS)
    for step in sparse:
        made = engine.schedule.plan_step(step, STEPS)
        assert (told["cond"][step][1], told["uncond"][step][1]) == (made, made)


def test_a_refresh_gives_the_dense_output_itself() -> None:
    calls = [operands(seed) for seed in range(STEPS)]
    engine = engine_of()
    outputs = run(engine, calls)
    refreshed = engine.schedule.refresh_steps(STEPS)
    assert len(refreshed) == 3
    for step in (0, *refreshed):
        assert torch.equal(outputs[step], F.scaled_dot_product_attention(*calls[step]))


def test_slow_changes_cost_far_less_than_without() -> None:
    (q, k, v), other = operands(0), operands(1)
    calls = [
        (
            torch.lerp(q, other[0], step / 100),
            torch.lerp(k, other[1], step / 100),
            torch.lerp(v, other[2], step / 100),
        )
        for step in range(STEPS)
    ]

    def error(outputs: list[Tensor]) -> float:
        dense = [F.scaled_dot_product_attention(*one) for one in calls]
        return sum(float((out - right).norm()) for out, right in zip(outputs, dense, strict=True))

    assert error(run(engine_of(), calls)) < 0.25 * error(run(engine_of(refresh=0), calls))


def test_a_trace_tells_what_computed_all_pairs_from_what_a_plan_went_through() -> None:
    engine = engine_of(dense_steps=1, refresh=2)
    q, k, v = operands()
    run(engine, [(q, k, v)] * 5)
    cells = [(cell.action, cell.implementation, cell.dense_by) for cell in engine.trace.cells]
    # the first refresh is the last dense step.
    assert cells == [
        ("refresh", "torch", "dense"),
        ("reuse", "torch", None),
        ("refresh", "torch", "dense"),
        ("reuse", "torch", None),
        ("reuse", "torch", None),
    ]
    summary = engine.trace.summary()
    assert summary.implementation == "torch"
    # on a CPU dense calls are the pipeline's own.
    assert summary.notes == ()


def test_layers_and_branches_keep_remainders_of_their_own() -> None:
    places = list(itertools.product(range(2), ("conditional", "unconditional")))

    def outputs(which: list[int]) -> dict[int, list[Tensor]]:
        engine = engine_of(layers=2, plans="own")
        engine.begin_run(STEPS)
        found: dict[int, list[Tensor]] = {number: [] for number in which}
        for step in range(STEPS):
            for number in which:
                layer, branch = places[number]
                at = site(step, layer, branch=branch)
                found[number].append(engine.attend(*operands(number), at))
        return found

    together = outputs([0, 1, 2, 3])
    for number in together:
        (alone,) = outputs([number]).values()
        assert all(map(torch.equal, together[number], alone))


@pytest.mark.parametrize(
    ("options", "first_run", "expected"),
    [
        # the schedule's refreshes are those of steps 1, 3 and 6.
        ({"reach": 1}, 4, "plan"),
        # without a reach the steps beyond are dense or refresh.
        ({"dense_last_steps": 3, "refresh": 2}, 6, "refresh"),
        ({}, 4, "refresh"),
    ],
)
def test_a_late_refresh_at_the_end_of_its_reach_is_none(
    options: dict[str, Any], first_run: int, expected: str
) -> None:
    engine = engine_of(**options)
    engine.begin_run(STEPS)
    due = engine.schedule.refresh_for(first_run, STEPS)
    assert due is not None
    assert due < first_run
    for step in (*range(due), *range(first_run, STEPS)):
        engine.attend(*operands(), site(step))
    actions = {cell.step: cell.action for cell in engine.trace.cells}
    assert actions[first_run] == {"plan": "replan"}.get(expected, expected)


def test_a_plan_made_anew_adds_nothing_that_an_older_one_lacked() -> None:
    # refreshes of a reach of one: steps 1, 3, 6 and 9 of 12.
    inputs = [operands(seed) for seed in range(12)]
    engine, plain = (engine_of(dense_steps=1, refresh=4, reach=1) for _ in range(2))
    first, second, *_ = engine.schedule.refresh_steps(len(inputs))
    engine.begin_run(len(inputs))
    for step in range(second + 2):
        # a step cache leaves the second out.
        if step != second:
            out = engine.attend(*inputs[step], site(step))
    assert engine.trace.cells[-1].action == "replan"
    # in another run nothing was kept before.
    plain.begin_run(len(inputs))
    expected = plain.attend(*inputs[second + 1], site(second + 1))
    assert first < second
    torch.testing.assert_close(out, expected)


def test_a_slope_is_that_of_plans_of_one_branch() -> None:
    # what never changes has no slope; plans of the two branches lack different things.
    inputs = {name: operands(seed) for seed, name in enumerate(("conditional", "unconditional"))}
    errors = {}
    for slope in (0.0, 0.5):
        engine = engine_of(dense_steps=1, slope=slope, fading=0.0)
        late = engine.schedule.refresh_steps(12)[1]
        engine.begin_run(12)
        for step in range(late + 3):
            for branch, one in inputs.items():
                # a step cache leaves it out in the one branch, which plans for both in the next.
                if step != late or branch == "unconditional":
                    out = engine.attend(*one, site(step, branch=branch, guided=True))
        exact = F.scaled_dot_product_attention(*inputs["unconditional"])
        errors[slope] = float((out - exact).norm() / exact.norm())
    assert errors[0.5] <= errors[0.0] < 0.02


def test_a_late_refresh_asks_for_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def none_left(self: AttentionEngine, q: Tensor, at: Any) -> bool:
        asked.append(at.step)
        return False

    monkeypatch.setattr(AttentionEngine, "_find_room", none_left)
    engine = engine_of()
    engine.begin_run(STEPS)
    # a step cache left the first refresh out.
    for step in range(2, STEPS):
        engine.attend(*operands(), site(step))
    assert asked == [2]
    assert {cell.action for cell in engine.trace.cells} == {"replan"}
    assert not engine._lacking


@pytest.mark.parametrize("steps", [12, 13])
def test_nothing_is_kept_while_the_video_is_decoded(steps: int) -> None:
    # the last of an even number of steps is one that the cache leaves out.
    pipe = tiny_wan(euler=True)
    kept: list[int] = []
    decode = pipe.vae.decode

    def decoded(*arguments: Any, **named: Any) -> Any:
        kept.append(len(handle.engine._lacking) + len(handle.engine._plans))
        return decode(*arguments, **named)

    pipe.vae.decode = decoded
    with sparsify(pipe, "foresight", tile="16x16", refresh=0.2) as handle:
        cache = StepCache(pipe, "taylorseer", warmup=3)
        latents_of(pipe, num_inference_steps=steps, output_type="np")
        assert cache.blocks_run()[11] == 0
        summary = handle.summary()
    assert summary.work.refresh > 0
    assert kept == [0]


@pytest.mark.parametrize("method", ["foresight", "fg-attn"])
def test_a_video_that_is_watched_keeps_nothing_while_it_is_decoded(
    method: str, tmp_path: Path
) -> None:
    loaded = load(save_tiny_wan(tmp_path / "tiny"), device="cpu")
    kept: list[int] = []
    handles: list[Any] = []
    decode = loaded.pipe.vae.decode

    def decoded(*arguments: Any, **named: Any) -> Any:
        kept.append(len(handles[0].engine._lacking) + len(handles[0].engine._plans))
        return decode(*arguments, **named)

    loaded.pipe.vae.decode = decoded
    small: dict[str, Any] = {"frames": 5, "width": 32, "height": 32, "steps": 5}
    request = GenerateRequest(
        prompt="a red circle", model=str(tmp_path / "tiny"), method=method, reuse=9, **small
    )
    generate(loaded, request, attach=handles.append)
    assert "reuse" in {cell.action for cell in handles[0].trace.cells}
    assert kept == [0]


def test_a_refresh_that_a_step_cache_left_out_is_made_up_for() -> None:
    engine = engine_of(refresh=3)
    engine.begin_run(STEPS)
    left_out = engine.schedule.refresh_steps(STEPS)[1]
    for step in range(STEPS):
        if step != left_out:
            engine.attend(*operands(), site(step))
    actions = {cell.step: cell.action for cell in engine.trace.cells}
    assert actions[left_out - 1] == "reuse"
    assert actions[left_out + 1] == "refresh"


def test_shapes_that_change_in_a_run_are_refreshed() -> None:
    engine = engine_of(refresh=1)
    engine.begin_run(STEPS)
    engine.attend(*operands(), site(1))
    q, k, v = (torch.cat([x, x]) for x in operands())
    engine.attend(q, k, v, site(2))
    assert [cell.action for cell in engine.trace.cells] == ["refresh", "refresh"]


@pytest.mark.parametrize(("before", "after"), [(3, 9), (9, 3), (9, 0)])
def test_a_text_that_changes_in_length_is_refreshed(before: int, after: int) -> None:
    # a prompt that is changed between two steps.
    engine = engine_of(refresh=1)
    engine.begin_run(STEPS)
    for step, text in ((1, before), (2, before), (3, after), (4, after)):
        grid = replace(GRID, text=text)
        engine.attend(*random_qkv(grid.tokens, 64, torch.float32, seed=step), site(step, grid=grid))
    actions = [cell.action for cell in engine.trace.cells]
    assert actions == ["refresh", "reuse", "refresh", "reuse"]


def test_a_branch_that_comes_in_later_refreshes_once_and_leaves_the_other_s_plan() -> None:
    engine = engine_of(refresh=2)
    engine.begin_run(STEPS)
    second = engine.schedule.refresh_steps(STEPS)[1]
    for step in range(second):
        for number, branch in enumerate(("conditional", "unconditional")[: 1 + (step > 2)]):
            engine.attend(*operands(number), site(step, branch=branch))
    actions = {
        branch: [cell.action for cell in engine.trace.cells if cell.branch == branch]
        for branch in ("conditional", "unconditional")
    }
    assert actions["conditional"] == ["dense", "refresh", *["reuse"] * (second - 2)]
    assert actions["unconditional"] == ["refresh", *["reuse"] * (second - 4)]
    assert len(actions["unconditional"]) > 1


def test_nothing_is_held_once_the_last_step_is_done() -> None:
    engine = engine_of()
    run(engine, [operands()] * STEPS)
    assert engine._lacking == {}


def test_work_counts_a_refresh_whole_and_the_plan_beside_it() -> None:
    engine = engine_of()
    run(engine, [operands()] * STEPS)
    work = engine.trace.summary().work
    assert work is not None
    computed = [cell.computed_share for cell in engine.trace.cells]
    refreshes = [c.computed_share for c in engine.trace.cells if c.action == Action.REFRESH]
    assert len(refreshes) == 3
    assert min(refreshes) > 1.05
    assert work.refresh == pytest.approx(sum(refreshes) / STEPS)
    assert work.total == pytest.approx(sum(computed) / STEPS)
    assert work.total == pytest.approx(work.dense_steps + work.refresh + work.sparse)
    assert "refreshes" in str(work)
    # the head map shows plans' outputs alone.
    heads = engine.trace.head_density_map()
    assert [step for step, layers in enumerate(heads) if layers[0] is None] == [
        0,
        *engine.schedule.refresh_steps(STEPS),
    ]


@pytest.mark.parametrize("plans", ["shared", "own"])
def test_a_refresh_by_the_other_branch_s_plan_chose_nothing(
    monkeypatch: pytest.MonkeyPatch, plans: str
) -> None:
    cost = SelectionCost(0.2, "a file of rows")
    monkeypatch.setattr("vidsparse.engine.selection_cost", lambda *call: cost)
    engine = engine_of(plans=plans)
    engine.begin_run(STEPS)
    branches = ("conditional", "unconditional")
    for step in range(STEPS):
        for number, branch in enumerate(branches):
            engine.attend(*operands(number), site(step, branch=branch))
    made = dict.fromkeys(branches, 0)
    for cell in engine.trace.cells:
        made[cell.branch] += cell.made_plan
    assert made == {"conditional": 3, "unconditional": 0 if plans == "shared" else 3}
    work = engine.trace.summary().work
    assert work is not None
    assert work.selection == pytest.approx(0.2 * sum(made.values()) / (2 * STEPS))


@pytest.mark.gpu
@pytest.mark.parametrize("host", [True, False])
def test_without_room_it_waits_in_the_machine_s_memory_or_nothing_is_kept(
    host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (x.cuda().bfloat16() for x in operands())
    # plans have room as before.
    monkeypatch.setattr("vidsparse.engine.free_bytes", lambda device: 0)
    if not host:
        monkeypatch.setattr(room, "_free_of_machine", lambda: 0)
    engine = engine_of()
    engine.begin_run(STEPS)
    outputs = [engine.attend(q, k, v, site(step)) for step in range(STEPS)]
    notes = engine.trace.summary().notes
    actions = {cell.action for cell in engine.trace.cells}
    if not host:
        assert actions == {"dense", "replan"}
        assert any("nothing was kept" in note for note in notes)
        return
    assert actions == {"dense", "refresh", "reuse"}
    assert any("in the machine's memory" in note for note in notes)
    dense = F.scaled_dot_product_attention(q, k, v)
    plain = engine_of(refresh=0)
    plain.begin_run(STEPS)
    without = [plain.attend(q, k, v, site(step)) for step in range(STEPS)]
    assert float((outputs[3] - dense).norm()) < 0.3 * float((without[3] - dense).norm())


@pytest.mark.gpu
@pytest.mark.parametrize("slope", [0.0, 0.5])
@pytest.mark.parametrize("stays", [0, 2])
def test_what_waits_in_the_machine_s_memory_gives_the_same_output(
    stays: int, slope: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = 3
    calls = [[x.cuda().bfloat16() for x in operands(seed)] for seed in range(STEPS)]
    monkeypatch.setattr("vidsparse.remainder._SMALL", 0)
    each = Keeping(4).bytes_for(calls[0][0])
    # with a slope each keeps two.
    most = layers * (1 + (slope > 0))
    outputs, held = [], []
    for on_gpu in (most, stays):
        engine = engine_of(layers=layers, slope=slope)
        engine.begin_run(STEPS)
        engine.spared = partial(int, on_gpu * each)
        outputs.append(
            [
                engine.attend(q + layer, k + layer, v + layer, site(step, layer=layer)).cpu()
                for step, (q, k, v) in enumerate(calls)
                for layer in range(layers)
            ]
        )
        held.append(engine._keeping)
        assert engine.trace.summary().notes == ()
    assert held == [Keeping(4), Keeping(4, stays)]
    assert all(torch.equal(here, there) for here, there in zip(*outputs, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_as_many_stay_on_the_gpu_as_may(slope: float, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.cuda().bfloat16() for x in operands())
    monkeypatch.setattr("vidsparse.remainder._SMALL", 0)
    # twice, and what was locked in the machine's memory for the first run is no less room.
    kept = []
    for _ in range(2):
        engine = engine_of(layers=4, slope=slope)
        engine.begin_run(STEPS)
        engine.spared = partial(int, 3 * Keeping(4).bytes_for(q))
        most = []
        for step in range(STEPS - 1):
            for layer in range(4):
                engine.attend(q, k, v, site(step, layer=layer))
            most.append(engine._lacking.count_on_gpu())
        assert max(most) == 3
        kept.append(engine._keeping)
    assert kept == [Keeping(4, 3)] * 2


@pytest.mark.gpu
def test_a_call_that_fails_leaves_no_copy_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.cuda().bfloat16() for x in operands())
    monkeypatch.setattr("vidsparse.remainder._SMALL", 0)
    engine = engine_of()
    engine.begin_run(STEPS)
    for step in range(2):
        engine.attend(q, k, v, site(step))
    waited = []
    monkeypatch.setattr(Remainder, "wait", lambda each: waited.append(each.there is not None))
    monkeypatch.setattr(engine, "kernel", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.attend(q, k, v, site(2))
    assert waited == [True]
