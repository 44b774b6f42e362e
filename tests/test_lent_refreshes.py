"""Dense steps and refreshes that the conditional branch of guidance makes for the other, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget import random_qkv
from engine_calls import GRID, site
from hypothesis import given
from hypothesis import strategies as st
from tiny_families import TINY, latents
from tiny_pipelines import latents_of, tiny_wan
from torch import Tensor

import vidsparse
from vidsparse.engine import AttentionEngine
from vidsparse.methods import make_method
from vidsparse.pipelines import sparsify
from vidsparse.remainder import likeness
from vidsparse.schedule import Schedule

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 12
BOTH = ("conditional", "unconditional")
LETTERS = {"dense": "d", "replan": "p", "reuse": "r", "refresh": "f"}

Operands = tuple[Tensor, Tensor, Tensor]


def engine_of(every: int = 10, *, slope: float = 0.0, **schedule: Any) -> AttentionEngine:
    method = make_method("foresight", share=0.1, unconditional_every=every, slope=slope)
    settled = {"dense_steps": 3, "refresh": 3, **schedule}
    return AttentionEngine(method, schedule=Schedule(**settled, **method.of_schedule), layers=1)


def operands(seed: int = 0, batch: int = 1) -> Operands:
    return random_qkv(GRID.tokens, 64, torch.float32, seed=seed, batch=batch)


def of(step: int, branch: str) -> Operands:
    return operands(2 * step + BOTH.index(branch))


def run(
    engine: AttentionEngine, branches: tuple[str, ...] = BOTH, guided: bool = True
) -> dict[tuple[int, str], Tensor]:
    engine.begin_run(STEPS)
    return {
        (step, branch): engine.attend(*of(step, branch), site(step, branch=branch, guided=guided))
        for step in range(STEPS)
        for branch in branches
    }


def told(engine: AttentionEngine) -> dict[str, str]:
    return {
        branch: "".join(LETTERS[c.action] for c in engine.trace.cells if c.branch == branch)
        for branch in BOTH
    }


# ---- when


@pytest.mark.parametrize(
    ("every", "conditional", "unconditional"),
    [
        (1, "ddfrrfrrfrrr", "ddfrrfrrfrrr"),
        # the first refresh is both branches' own, and every second beside it, before and after.
        (2, "dffrrfrrfrrr", "drfrrrrrfrrr"),
        (10, "fffrrfrrfrrr", "rrfrrrrrrrrr"),
    ],
)
def test_the_unconditional_branch_computes_every_nth_itself(
    every: int, conditional: str, unconditional: str
) -> None:
    engine = engine_of(every)
    assert engine.schedule.refresh_steps(STEPS) == (2, 5, 8)
    run(engine)
    assert told(engine) == {"conditional": conditional, "unconditional": unconditional}
    assert not engine._lacking


@given(
    steps=st.integers(1, 60),
    dense=st.integers(0, 20),
    wanted=st.integers(0, 20),
    every=st.integers(1, 8),
    reach=st.none() | st.integers(1, 10),
)
def test_a_step_is_lent_by_its_distance_from_the_first_refresh(
    steps: int, dense: int, wanted: int, every: int, reach: int | None
) -> None:
    schedule = Schedule(dense_steps=dense, refresh=wanted, reach=reach, unconditional_every=every)
    refreshes = schedule.refresh_steps(steps)
    lent = [step for step in range(steps) if schedule.lends(step, steps)]
    if every == 1 or not refreshes:
        assert not lent
        return
    before, after = range(refreshes[0] + 1), refreshes
    assert [step for step in lent if step in before] == [
        step for step in before if (refreshes[0] - step) % every
    ]
    assert [step for step in lent if step in after and step not in before] == [
        step for number, step in enumerate(after) if number % every
    ]
    # what serves a step later on is the refresh's, also where that comes late.
    for step in range(refreshes[0] + 1, steps):
        due = schedule.refresh_for(step, steps)
        assert schedule.lends(step, steps) == (due is not None and schedule.lends(due, steps))


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_a_bad_count_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(vidsparse.OptionError, match="unconditional_every must be a whole number"):
        make_method("foresight", unconditional_every=bad)


def test_branches_with_plans_of_their_own_lend_nothing() -> None:
    with pytest.raises(vidsparse.OptionError, match=r"plans is 'own'. Hint: --plans shared"):
        make_method("foresight", unconditional_every=2, plans="own")


# ---- what


def lacked(operands: Operands) -> tuple[Tensor, Tensor]:
    """The sparse output of a call that plans for itself, and what it lacks."""
    method = make_method("foresight", share=0.1)
    alone = AttentionEngine(method, schedule=Schedule(dense_steps=0), layers=1)
    sparse = alone.attend(*operands, site())
    return sparse, F.scaled_dot_product_attention(*operands) - sparse


def test_the_unconditional_branch_adds_what_the_conditional_one_lacked() -> None:
    engine, plain = engine_of(10), engine_of(10)
    outputs = run(engine)
    # the same plans, without what is added.
    plain._add_remainder = lambda *_: None  # type: ignore[method-assign]
    sparse = run(plain)
    refreshes = engine.schedule.refresh_steps(STEPS)
    for step in range(STEPS):
        conditional, unconditional = ((step, branch) for branch in BOTH)
        last = max((one for one in refreshes if one <= step), default=step)
        if step in (0, 1, *refreshes):
            dense = F.scaled_dot_product_attention(*of(step, "conditional"))
            assert torch.equal(outputs[conditional], dense)
        if step == refreshes[0]:
            dense = F.scaled_dot_product_attention(*of(step, "unconditional"))
            assert torch.equal(outputs[unconditional], dense)
        if refreshes[0] <= step < refreshes[1]:
            continue
        lack = lacked(of(last, "conditional"))[1]
        expected = likeness(step - last, STEPS) * lack
        rounded = 2 * float(lack.abs().max()) / 254 + 1e-4
        added = outputs[unconditional] - sparse[unconditional]
        assert float((added - expected).abs().max()) <= rounded
        assert float(added.abs().max()) > 4 * rounded


def test_branches_that_are_alike_lose_nothing_but_rounding() -> None:
    engine = engine_of(10, slope=0.5)
    engine.begin_run(STEPS)
    for step in range(STEPS):
        q, k, v = operands(step)
        first, second = (
            engine.attend(q, k, v, site(step, branch=branch, guided=True)) for branch in BOTH
        )
        limit = 4 * float(lacked((q, k, v))[1].abs().max()) / 254 + 1e-4
        assert float((first - second).abs().max()) <= limit


@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_branches_in_one_batch_are_as_one_after_another(slope: float) -> None:
    apart, together = engine_of(2, slope=slope), engine_of(2, slope=slope)
    outputs = run(apart)
    together.begin_run(STEPS)
    for step in range(STEPS):
        both = [of(step, branch) for branch in reversed(BOTH)]
        q, k, v = (torch.cat(x) for x in zip(*both, strict=True))
        out = together.attend(q, k, v, site(step, stacked=2))
        for half, branch in zip(out.chunk(2), reversed(BOTH), strict=True):
            assert torch.allclose(half, outputs[step, branch], atol=2e-5)
    assert not together._lacking
    first, second = apart.trace.summary().work, together.trace.summary().work
    assert first is not None
    assert second is not None
    assert first.total == pytest.approx(second.total, abs=1e-6)


def test_more_samples_than_one_keep_to_themselves() -> None:
    # samples are those of a branch, one branch after the other.
    together, engines = engine_of(10), [engine_of(10) for _ in range(2)]
    for engine in (together, *engines):
        engine.begin_run(STEPS)
    for step in range(STEPS):
        samples = [
            [of(step + 50 * number, branch) for branch in reversed(BOTH)] for number in (0, 1)
        ]
        rows = [samples[number][branch] for branch in (0, 1) for number in (0, 1)]
        q, k, v = (torch.cat(x) for x in zip(*rows, strict=True))
        out = together.attend(q, k, v, site(step, stacked=2))
        for number, engine in enumerate(engines):
            q, k, v = (torch.cat(x) for x in zip(*samples[number], strict=True))
            alone = engine.attend(q, k, v, site(step, stacked=2))
            assert torch.allclose(out[number::2], alone, atol=2e-5)


def test_the_work_counts_what_one_branch_computed_for_both() -> None:
    engine, own = engine_of(10), engine_of(1)
    run(engine)
    run(own)
    work, usual = engine.trace.summary().work, own.trace.summary().work
    assert work is not None
    assert usual is not None
    share = usual.sparse * STEPS / (STEPS - 5)
    # steps 0 and 1 by plans, too; one refresh of both branches, four calls of one alone.
    assert work.total == pytest.approx((1 + 4 / 2) / STEPS + share, abs=2e-3)
    assert usual.total == pytest.approx(5 / STEPS + share * (STEPS - 2) / STEPS, abs=2e-3)
    assert work.dense_steps == 0.0
    kinds = engine.trace.step_kinds()
    assert [step for step, kind in kinds.items() if kind == "refresh"] == [0, 1, 2, 5, 8]


# ---- where there is nothing to borrow


def test_without_guidance_nothing_changes() -> None:
    engine, plain = engine_of(10), engine_of(1)
    outputs = run(engine, BOTH[:1], guided=False)
    others = run(plain, BOTH[:1], guided=False)
    assert told(engine) == told(plain)
    for at, out in outputs.items():
        assert torch.equal(out, others[at])


def test_guidance_that_a_pipeline_does_not_speak_of_shows_in_the_first_step() -> None:
    engine = engine_of(10)
    run(engine, guided=False)
    assert told(engine) == {"conditional": "dffrrfrrfrrr", "unconditional": "drfrrrrrrrrr"}


def test_a_pipeline_that_speaks_of_guidance_and_has_none_is_believed_for_a_step() -> None:
    engine, plain = engine_of(10), engine_of(1)
    outputs, others = run(engine, BOTH[:1]), run(plain, BOTH[:1])
    for at, out in outputs.items():
        assert torch.equal(out, others[at])
    assert told(engine)["conditional"] == "fdfrrfrrfrrr"
    assert not engine._lacking


def test_an_unconditional_branch_that_comes_first_computes_for_itself() -> None:
    engine, plain = engine_of(10), engine_of(1)
    outputs, others = run(engine, BOTH[::-1]), run(plain, BOTH[::-1])
    for at, out in outputs.items():
        assert torch.equal(out, others[at])
    assert told(engine) == {"conditional": "fdfrrfrrfrrr", "unconditional": "ddfrrfrrfrrr"}


def test_another_branch_than_these_two_computes_for_itself() -> None:
    engine, plain = engine_of(10), engine_of(1)
    names = (*BOTH, "perturbed")
    for each in (engine, plain):
        each.begin_run(STEPS)
    for step in range(STEPS):
        for number, branch in enumerate(names):
            at = site(step, branch=branch, guided=True)
            out, other = (each.attend(*operands(number), at) for each in (engine, plain))
            if branch == "perturbed" and step in (*range(3), 5, 8):
                assert torch.equal(out, other)
    actions = [cell.action for cell in engine.trace.cells if cell.branch == "perturbed"]
    assert actions == [cell.action for cell in plain.trace.cells if cell.branch == "perturbed"]


def test_text_of_another_length_computes_for_itself() -> None:
    engine = engine_of(10)
    engine.begin_run(STEPS)
    for step in range(STEPS):
        for branch, text in zip(BOTH, (3, 9), strict=True):
            grid = replace(GRID, text=text)
            q, k, v = random_qkv(grid.tokens, 64, torch.float32, seed=step)
            out = engine.attend(q, k, v, site(step, grid=grid, branch=branch, guided=True))
            if step in (0, 1, *engine.schedule.refresh_steps(STEPS)):
                assert torch.equal(out, F.scaled_dot_product_attention(q, k, v))
    # what the pipeline says is believed for a step.
    assert told(engine) == {"conditional": "fdfrrfrrfrrr", "unconditional": "ddfrrfrrfrrr"}


def test_a_refresh_that_a_step_cache_left_out_is_made_by_one_branch_later() -> None:
    engine = engine_of(10)
    engine.begin_run(STEPS)
    for step in (*range(5), *range(6, STEPS)):
        for branch in BOTH:
            engine.attend(*of(step, branch), site(step, branch=branch, guided=True))
    # step 6 stands in the place of step 5.
    assert told(engine) == {"conditional": "fffrrfrfrrr", "unconditional": "rrfrrrrrrrr"}


def test_what_falls_back_to_dense_is_dense_in_both_branches_of_a_batch() -> None:
    method = make_method("foresight", share=0.1, unconditional_every=10)
    schedule = Schedule(dense_steps=3, refresh=3, **method.of_schedule)
    engine = AttentionEngine(method, schedule=schedule, layers=1, dense_fallback=True)
    engine.begin_run(STEPS)
    call = engine.kernel

    def broken(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        out, sums = call(*arguments, **named)
        return out.fill_(torch.nan), sums

    engine.kernel = broken
    for step in range(STEPS):
        q, k, v = operands(step, batch=2)
        out = engine.attend(q, k, v, site(step, stacked=2))
        assert torch.equal(out, F.scaled_dot_product_attention(q, k, v)), step


@pytest.mark.parametrize("stacked", [1, 2])
@pytest.mark.parametrize("every", [1, 10])
def test_a_call_that_wants_a_gradient_gets_one_and_lends_nothing(stacked: int, every: int) -> None:
    method = make_method("foresight", share=0.1, unconditional_every=every)
    schedule = Schedule(dense_steps=3, refresh=3, **method.of_schedule)
    engine = AttentionEngine(method, schedule=schedule, layers=1, implementation="reference")
    engine.begin_run(STEPS)
    for step in range(5):
        q, k, v = operands(step, batch=stacked)
        wanted = step in (0, 4)
        q.requires_grad_(wanted)
        with torch.set_grad_enabled(wanted):
            out = engine.attend(q, k, v, site(step, stacked=stacked, guided=True))
        if wanted:
            out.sum().backward()
            assert q.grad is not None
            assert bool(q.grad.isfinite().all())


def test_a_step_that_runs_again_gives_the_same_again() -> None:
    engine = engine_of(10, slope=0.5)
    engine.begin_run(STEPS)
    for step in range(STEPS):
        outputs = []
        for attempt in range(2):
            if attempt:
                engine.go_back(step)
            outputs.append(
                [
                    engine.attend(*of(step, branch), site(step, branch=branch, guided=True))
                    for branch in BOTH
                ]
            )
        if step in (0, 1, 2, 5, 8):
            assert all(map(torch.equal, *outputs))


def test_dense_layers_stay_so_in_both_branches() -> None:
    engine = engine_of(10, dense_layers=1)
    engine.begin_run(STEPS)
    for step in range(STEPS):
        for branch in BOTH:
            out = engine.attend(*of(step, branch), site(step, branch=branch, guided=True))
            assert torch.equal(out, F.scaled_dot_product_attention(*of(step, branch)))


# ---- in pipelines


@pytest.mark.parametrize("family", ["wan", "cogvideox"])
def test_a_pipeline_with_guidance_computes_less(family: str) -> None:
    # the branches of the one come one after the other, those of the other in one batch.
    pipe = TINY[family].build()
    totals = []
    for every in (1, 10):
        options: dict[str, Any] = {
            "tile": "16x16",
            "unconditional_every": every,
            "dense_steps": 2,
            "refresh": 2,
        }
        with sparsify(pipe, "foresight", **options) as handle:
            latents(family, pipe, num_inference_steps=6, guidance_scale=3.0)
            work = handle.summary().work
            assert work is not None
            totals.append(work.total)
    # one of three steps of which half is lent; the plans of it are more.
    assert totals[1] < totals[0]
    assert {cell.whole for cell in handle.trace.cells} == (
        {1.0, 0.5} if family == "cogvideox" else {1.0}
    )


@pytest.mark.parametrize(
    ("family", "lends"),
    # texts of other lengths, and a number that stands for guidance within one forward.
    [("wan", True), ("cogvideox", True), ("ltx", True), ("mochi", False), ("hunyuan", False)],
)
def test_nothing_is_kept_after_the_last_step_though_it_lends(family: str, lends: bool) -> None:
    pipe = TINY[family].build()
    options: dict[str, Any] = {
        "tile": "16x16",
        "unconditional_every": 2,
        "dense_steps": 1,
        "refresh": 4,
    }
    with sparsify(pipe, "foresight", **options) as handle:
        # the last step is a refresh that one branch makes for both.
        latents(family, pipe, num_inference_steps=4)
        assert not handle.engine._lacking
        last = [cell for cell in handle.trace.cells if cell.step == 3]
    # without a later step to keep for, all are dense otherwise.
    assert all(cell.action == "dense" for cell in last) == (not lends)


def test_a_pipeline_without_guidance_runs_as_ever() -> None:
    pipe = tiny_wan()
    found = []
    for every in (1, 10):
        with sparsify(pipe, "foresight", tile="16x16", unconditional_every=every, refresh=3):
            found.append(latents_of(pipe, num_inference_steps=6, guidance_scale=1.0))
    assert torch.equal(*found)
