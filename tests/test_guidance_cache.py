"""The cache ``guidance``: which forwards it leaves out, and what stands in their place."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support_matrix import LIMITS, VARIANTS
from tiny_families import TINY, latents
from tiny_pipelines import latents_of, save_tiny_wan, tiny_wan
from torch import Tensor

from vidsparse import OptionError, UnsupportedError
from vidsparse.pipelines import accelerate, sparsify
from vidsparse.pipelines.again import tensors_of
from vidsparse.pipelines.caching import open_cache
from vidsparse.pipelines.compilation import compile_blocks
from vidsparse.pipelines.families import FAMILIES
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.guidance_cache import GuidanceCache
from vidsparse.pipelines.lookup import find_adapter
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest

pytestmark = pytest.mark.usefixtures("one_thread", "any_change_is_little")

STEPS = 7
TURNS = [name for name in VARIANTS.values() if ("guidance", name) not in LIMITS]


@pytest.fixture
def any_change_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    # what random weights add by guidance may be another thing in every step.
    monkeypatch.setattr(GuidanceCache, "steady", math.inf)


class Forwards:
    """What the transformers of a pipeline returned, forward by forward, and which ones ran."""

    def __init__(self, pipe: Any) -> None:
        self.outputs: list[list[Tensor]] = []
        self.ran = 0
        parts = [getattr(pipe, name, None) for name in ("transformer", "transformer_2")]
        self._hooks = [
            hook
            for part in parts
            if part is not None
            for hook in (
                part.register_forward_hook(self._returned),
                # the first of its modules that every forward runs.
                next(iter(part.children())).register_forward_pre_hook(self._runs),
            )
        ]

    def _returned(self, module: Any, args: Any, output: Any) -> None:
        self.outputs.append([one.clone() for one in tensors_of(output)])

    def _runs(self, module: Any, args: Any) -> None:
        self.ran += 1

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()


def differences(outputs: list[list[Tensor]]) -> list[list[Tensor]]:
    """Of each step, what the second forward's tensors differ by from the first's."""
    pairs = zip(outputs[::2], outputs[1::2], strict=True)
    return [[b - a for a, b in zip(*pair, strict=True)] for pair in pairs]


# ---- which


@pytest.mark.parametrize(
    ("every", "warmup", "whole", "left_out"),
    [
        # how much the difference changes takes two steps to see.
        (2, 0, (), [2, 4, 6]),
        (3, 0, (), [2, 3, 5, 6]),
        (2, 4, (), [4, 6]),
        (9, 2, (), [2, 3, 4, 5, 6]),
        # what is run anyway counts: two steps after it is the next one.
        (3, 1, (3,), [2, 4, 5]),
        (2, 7, (), []),
    ],
)
def test_the_unconditional_branch_runs_in_one_of_so_many_steps(
    every: int, warmup: int, whole: tuple[int, ...], left_out: list[int]
) -> None:
    pipe = tiny_wan()
    with GuidanceCache(pipe, every, warmup=warmup, whole=lambda steps: whole) as cached:
        forwards = Forwards(pipe)
        latents_of(pipe, num_inference_steps=STEPS)
        shares = cached.blocks_run()
    assert [step for step, share in shares.items() if share < 1] == left_out
    assert set(shares.values()) <= {0.5, 1.0}
    both = "the cache guidance left nothing out: all steps were to run both branches"
    assert cached.note == (None if left_out else both)
    assert forwards.ran == 2 * STEPS - len(left_out)
    assert len(forwards.outputs) == 2 * STEPS


def test_the_difference_is_the_one_that_was_found_last() -> None:
    pipe = tiny_wan()
    with GuidanceCache(pipe, 3):
        forwards = Forwards(pipe)
        latents_of(pipe, num_inference_steps=STEPS)
    found = differences(forwards.outputs)
    for step, of in {2: 1, 3: 1, 5: 4, 6: 4}.items():
        for now, then in zip(found[step], found[of], strict=True):
            torch.testing.assert_close(now, then, rtol=1e-5, atol=1e-5)
    # and they are no zeros, nor one and the same.
    assert float(found[0][0].abs().max()) > 1e-3
    assert not torch.allclose(found[1][0], found[4][0], rtol=1e-3, atol=1e-3)


class Swinging:
    """Has what guidance adds change its sign in every step, in some videos of a batch."""

    def __init__(self, pipe: Any, videos: slice, until: int) -> None:
        self._calls = 0

        def swing(module: Any, args: Any, output: Tensor) -> Tensor:
            step, second = divmod(self._calls, 2)
            self._calls += 1
            swung = output.clone()
            if second and step < until:
                swung[videos] += 50 * (-1) ** step
            elif second:
                swung += 50
            return swung

        self._handle = pipe.transformer.proj_out.register_forward_hook(swing)

    def stop(self) -> None:
        self._handle.remove()


def test_nothing_is_left_out_while_the_difference_swings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pipe = tiny_wan()
    for videos, until, left_out in (
        (slice(None), 99, []),
        # one video of the batch is enough.
        (slice(1, 2), 99, []),
        # after the first step that is like the one before.
        (slice(None), 3, [4, 6]),
        (slice(None), 0, [2, 4, 6]),
    ):
        with GuidanceCache(pipe) as cached:
            swinging = Swinging(pipe, videos, until)
            latents_of(pipe, num_inference_steps=STEPS, num_videos_per_prompt=2)
            swinging.stop()
            shares = cached.blocks_run()
        assert [step for step, share in shares.items() if share < 1] == left_out, (videos, until)
        changed = (
            "the cache guidance left nothing out: what guidance adds changed from step to step"
        )
        assert cached.note == (None if left_out else changed)


@pytest.mark.parametrize("name", TURNS)
def test_every_family_whose_branches_take_turns_has_it(name: str) -> None:
    pipe = TINY[name].build()
    expected = latents(name, pipe, num_inference_steps=5)
    with GuidanceCache(pipe, 2, warmup=2) as cached:
        forwards = Forwards(pipe)
        ours = latents(name, pipe, num_inference_steps=5)
        forwards.stop()
        shares = cached.blocks_run()
        again = latents(name, pipe, num_inference_steps=5)
    assert bool(ours.isfinite().all())
    assert torch.equal(again, ours)
    if len(TINY[name].branches) == 2:
        assert 0.5 in shares.values()
        assert not torch.equal(ours, expected)
    # of a video's last section or stage, which begins with a step of both.
    assert shares[0] == 1.0
    # nothing of it stays.
    assert torch.equal(latents(name, pipe, num_inference_steps=5), expected)


def test_the_families_that_have_it_are_those_whose_branches_take_turns() -> None:
    able = {each.name for each in FAMILIES if "guidance" in each.caches}
    assert able == {family for family, name in VARIANTS.items() if name in TURNS}
    for family, name in VARIANTS.items():
        pipe = TINY[name].build()
        assert find_adapter(pipe).takes_turns == (family in able)
        if family not in able:
            with pytest.raises(UnsupportedError, match=LIMITS["guidance", name].error):
                GuidanceCache(pipe)


def test_each_of_two_transformers_finds_its_own_difference() -> None:
    pipe = tiny_wan(two_stage=True)
    second: list[int] = []
    pipe.transformer_2.register_forward_pre_hook(lambda *_: second.append(len(second)))
    with GuidanceCache(pipe, 9) as cached:
        latents_of(pipe, num_inference_steps=8)
        shares = cached.blocks_run()
    first_of_second = 8 - len(second) // 2
    assert 0 < first_of_second < 7
    whole = [step for step, share in shares.items() if share == 1]
    assert whole == [0, 1, first_of_second, first_of_second + 1]


def test_a_run_without_guidance_is_left_alone() -> None:
    pipe = tiny_wan()
    expected = latents_of(pipe, guidance_scale=1.0)
    with GuidanceCache(pipe) as cached:
        assert torch.equal(latents_of(pipe, guidance_scale=1.0), expected)
        assert set(cached.blocks_run().values()) == {1.0}
        assert cached.note == "the cache guidance left nothing out: the run had no guidance"


def test_every_run_starts_anew() -> None:
    pipe = tiny_wan()

    def interrupt(pipe: Any, at: int, t: Any, tensors: Any) -> Any:
        pipe._interrupt = True
        return tensors

    with GuidanceCache(pipe) as cached:
        first, shares = latents_of(pipe, num_inference_steps=STEPS), cached.blocks_run()
        latents_of(pipe, num_inference_steps=STEPS, callback_on_step_end=interrupt)
        assert cached.blocks_run() == {0: 1.0}
        assert torch.equal(latents_of(pipe, num_inference_steps=STEPS), first)
        assert cached.blocks_run() == shares
        # another size.
        latents_of(pipe, num_inference_steps=STEPS, height=32)
        assert cached.blocks_run() == shares


def test_a_forward_that_wants_a_gradient_runs() -> None:
    pipe = tiny_wan()
    for parameter in pipe.transformer.parameters():
        parameter.requires_grad_(True)
    call: Any = inspect.unwrap(type(pipe).__call__)
    with GuidanceCache(pipe) as cached:
        options: dict[str, Any] = {"output_type": "latent", "max_sequence_length": 16}
        call(pipe, "a red circle", height=32, width=32, num_frames=5, **options,
             num_inference_steps=3)  # fmt: skip
        assert set(cached.blocks_run().values()) == {1.0}


# ---- with sparse attention


@pytest.mark.parametrize("first", ["sparse", "cache"])
def test_refreshes_and_dense_steps_run_both_branches(first: str) -> None:
    pipe = tiny_wan()
    handle = sparsify(pipe, "foresight", dense_steps=2, refresh=2)
    schedule = handle.engine.schedule
    if first == "cache":
        handle.remove()
    cached = open_cache(pipe, "guidance", dense_steps=2, steps=12, whole=schedule.refresh_steps)
    if first == "cache":
        handle = sparsify(pipe, "foresight", dense_steps=2, refresh=2)
    latents_of(pipe, num_inference_steps=12)
    run = {
        branch: {cell.step for cell in handle.trace.cells if cell.branch == branch}
        for branch in ("conditional", "unconditional")
    }
    refreshes = {cell.step for cell in handle.trace.cells if cell.action == "refresh"}
    assert refreshes == set(schedule.refresh_steps(12))
    assert run["conditional"] == set(range(12))
    assert {0, 1, *refreshes} <= run["unconditional"]
    left_out = {step for step, share in cached.blocks_run().items() if share < 1}
    assert run["unconditional"] == set(range(12)) - left_out
    # every second one of the others.
    assert len(left_out) >= 4
    # nothing waits for a forward that does not come.
    assert not handle.engine._lacking
    cached.remove()
    handle.remove()


def test_what_is_run_is_what_runs_without_the_cache() -> None:
    # up to the first step with a forward that is left out.
    pipe = tiny_wan()
    outputs = []
    for cache in (False, True):
        with sparsify(pipe, "foresight", dense_steps=2, refresh=1) as handle:
            schedule = handle.engine.schedule.refresh_steps
            cached = GuidanceCache(pipe, warmup=2, whole=schedule) if cache else None
            forwards = Forwards(pipe)
            latents_of(pipe, num_inference_steps=STEPS)
            forwards.stop()
            outputs.append(forwards.outputs)
            if cached is not None:
                left_out = min(step for step, one in cached.blocks_run().items() if one < 1)
                cached.remove()
    assert left_out == 2
    for ours, theirs in zip(*(each[: 2 * left_out + 1] for each in outputs), strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("whole", [False, True])
def test_it_goes_with_compiled_code(whole: bool) -> None:
    pipe = tiny_wan()
    with GuidanceCache(pipe) as cached:
        expected, run = latents_of(pipe, num_inference_steps=STEPS), cached.blocks_run()
    if whole:
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    else:
        compile_blocks(pipe, backend="eager")
    stock = latents_of(pipe, num_inference_steps=STEPS)
    with GuidanceCache(pipe) as cached:
        ours = latents_of(pipe, num_inference_steps=STEPS)
        assert cached.blocks_run() == run
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(latents_of(pipe, num_inference_steps=STEPS), stock)


# ---- refused


def test_a_second_one_is_refused_and_the_first_one_stays() -> None:
    pipe = tiny_wan()
    with GuidanceCache(pipe) as cached:
        with pytest.raises(UnsupportedError, match="has the cache guidance already"):
            GuidanceCache(pipe)
        latents_of(pipe)
        assert 0.5 in cached.blocks_run().values()
    with GuidanceCache(pipe):
        pass


def test_branches_on_different_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny_wan()
    monkeypatch.setattr("vidsparse.pipelines.handle.process_count", lambda: 2)
    with sparsify(pipe) as handle:
        apart = [handle.can_be_apart]
        with GuidanceCache(pipe):
            apart.append(handle.can_be_apart)
            with pytest.raises(UnsupportedError, match="a step cache does not work where guidance"):
                handle.parallelize(apart=True)
    assert apart == [True, False]


@pytest.mark.parametrize("bad", [1, 2.5, 0, True])
def test_a_bad_number_of_steps_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(OptionError, match="cache_threshold of guidance must be a whole number"):
        open_cache(tiny_wan(), "guidance", threshold=bad, dense_steps=1, steps=4)


# ---- in programs


def test_a_record_says_what_was_left_out(tmp_path: Path) -> None:
    folder = save_tiny_wan(tmp_path / "tiny", layers=2)
    loaded = load(folder, device="cpu")
    small: dict[str, Any] = {"frames": 5, "width": 32, "height": 32, "steps": STEPS}
    request = GenerateRequest(
        prompt="a red circle", model=str(folder), cache="guidance", dense_steps=2, **small
    )
    record = generate(loaded, request).record
    assert [step["blocks"] for step in record["steps"]] == [1, 1, 0.5, 1, 0.5, 1, 0.5]
    assert [step["kind"] for step in record["steps"]][:4] == ["dense", "dense", "cached", "sparse"]
    assert record["options"]["cache"] == "guidance"
    assert record["options"]["cache_threshold"] == 2
    # three of fourteen forwards.
    work = record["work"]
    assert work["left_out"] == pytest.approx(3 / 14)
    assert work["dense_steps"] == pytest.approx(2 / 7)
    assert record["total"] == pytest.approx(2 / 7 + (1 - 2 / 7 - 3 / 14) * record["computed"])
    # shares of what was run, as ever: two dense steps of seven, four calls of eleven.
    assert record["dense_step_share"] == pytest.approx(2 / 7)
    assert record["dense_call_share"] == pytest.approx(4 / 11)
    alone = GenerateRequest(
        prompt="a red circle", model=str(folder), cache="guidance", guidance=1.0, **small
    )
    notes = generate(loaded, alone).record["notes"]
    assert "the cache guidance left nothing out: the run had no guidance" in notes


def test_accelerate_puts_it_on_and_takes_it_off() -> None:
    pipe = tiny_wan()
    expected = latents_of(pipe, num_inference_steps=9)
    with accelerate(pipe, "high", steps=9, cache="guidance") as fast:
        latents_of(pipe, num_inference_steps=9)
        assert fast.cache is not None
        assert 0.5 in fast.cache.blocks_run().values()
    assert torch.equal(latents_of(pipe, num_inference_steps=9), expected)
