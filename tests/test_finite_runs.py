"""A run whose attention comes to NaN or infinity ends and names the call; what is kept for that."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import TINY
from tiny_pipelines import save_tiny_wan
from torch import Tensor

from vidsparse import finite
from vidsparse.errors import NonFiniteError
from vidsparse.pipelines.again import Forward
from vidsparse.pipelines.compilation import compile_blocks
from vidsparse.pipelines.generate import generate, generate_batch
from vidsparse.pipelines.handle import SparseHandle, attention_shape
from vidsparse.pipelines.models import LoadedPipeline, load
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.pipelines.watch import Watch
from vidsparse.site import CallSite

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_wan(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedPipeline:
    return load(folder, device="cpu")


def a_request(**changes: Any) -> GenerateRequest:
    made: dict[str, Any] = {
        "prompt": "a red circle", "frames": 9, "width": 64, "height": 64, "steps": 4,
        "guidance": 3.0, "device": "cpu", "method": "fg-attn", "dense_steps": 1, "dense_layers": 1,
    }  # fmt: skip
    return GenerateRequest(**(made | changes))


class Breaker:
    """Makes values, or queries, of one attention call NaN: an ``attach`` of ``generate``.

    Args:
        step: of the run, from 0.
        layer: from 0.
        branch: of guidance; both where None.
        times: how often, before it is right again.
    """

    def __init__(
        self, step: int, layer: int, branch: str | None = None, times: int | None = None
    ) -> None:
        self.at, self.branch, self.times = (step, layer), branch, times

    def __call__(self, handle: SparseHandle) -> None:
        for engine in handle.engines:
            engine.observer = self.look

    def look(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
        here = (site.step, site.layer) == self.at and self.branch in (None, site.branch)
        if here and self.times != 0:
            self.times = self.times and self.times - 1
            self.spoil(q, v, site)

    def spoil(self, q: Tensor, v: Tensor, site: CallSite) -> None:
        # one key of the last sample.
        v[-1, 1, 5, 3] = torch.inf


def answers_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a look is read at the next."""

    class Event:
        def synchronize(self) -> None:
            pass

    true = finite._on_host

    def late(*arguments: Any) -> Any:
        order, flags, _ = true(*arguments)
        return order, flags, Event()

    monkeypatch.setattr(finite, "_on_host", late)


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a look is read at the next; tests run both ways."""
    if request.param:
        answers_come_late(monkeypatch)
    return bool(request.param)


def words_of(step: int, layer: int, branch: str, how: str, steps: int = 4) -> str:
    return re.escape(
        f"attention returned NaN or infinity in layer {layer + 1}, step {step + 1} of {steps} "
        f"({branch}: {how})"
    )


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("branch", ["conditional", "unconditional"])
@pytest.mark.parametrize(
    ("step", "layer", "how"),
    [
        (0, 1, "dense, dense"),
        (2, 0, "dense, dense"),
        (2, 1, "replan, torch"),
        (3, 2, "replan, torch"),
    ],
)
def test_generate_ends_and_names_step_layer_and_branch(
    step: int,
    layer: int,
    how: str,
    branch: str,
    loaded: LoadedPipeline,
) -> None:
    request = a_request(method_options={"plans": "own"})
    with pytest.raises(NonFiniteError, match=words_of(step, layer, branch, how)):
        generate(loaded, request, attach=Breaker(step, layer, branch))


def test_after_a_run_that_ended_so_the_next_is_what_it_would_have_been(folder: Path) -> None:
    model, request = load(folder, device="cpu"), a_request(reuse=2)
    expected = generate(model, request).frames
    with pytest.raises(NonFiniteError):
        generate(model, request, attach=Breaker(2, 1))
    assert (generate(model, request).frames == expected).all()


def test_one_video_of_a_batch_ends_it(loaded: LoadedPipeline) -> None:
    requests = [a_request(), a_request(prompt="a blue square that moves left")]
    with pytest.raises(NonFiniteError, match=words_of(2, 1, "conditional", "replan, torch")):
        generate_batch(loaded, requests, attach=Breaker(2, 1))


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(
    ("changes", "step", "how"),
    [
        # a plan of step 1 serves step 2; of step 3 there is a new one when step 2 is read late.
        ({"reuse": 2}, 2, "reuse, torch"),
        ({"reuse": 2}, 3, "replan, torch"),
        # the last dense step is the refresh.
        ({"method": "foresight", "refresh": 1}, 0, "refresh, torch"),
        ({"method": "foresight", "refresh": 1}, 1, "reuse, torch"),
        ({"method": "foresight", "refresh": 1}, 2, "reuse, torch"),
        ({"method": "foresight", "refresh": 1}, 3, "reuse, torch"),
    ],
)
def test_plans_of_other_steps_and_refreshes_are_named_as_they_were(
    changes: dict[str, Any], step: int, how: str, loaded: LoadedPipeline
) -> None:
    with pytest.raises(NonFiniteError, match=words_of(step, 1, "conditional", how)):
        generate(loaded, a_request(**changes), attach=Breaker(step, 1, "conditional"))


class BadKernel:
    """A kernel whose sparse output is not finite in a layer from a step on: an ``attach``."""

    def __init__(self, step: int, layer: int) -> None:
        self.at = step, layer

    def __call__(self, handle: SparseHandle) -> None:
        (engine,) = handle.engines
        true, site = engine.kernel, None

        def look(q: Tensor, k: Tensor, v: Tensor, now: CallSite) -> None:
            nonlocal site
            site = now

        def kernel(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
            out, lse = true(*args, **options)
            if site.step >= self.at[0] and site.layer == self.at[1]:
                out[0, 0, 7, 3] = torch.nan
            return out, lse

        engine.observer, engine.kernel = look, kernel


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("step", [2, 3])
def test_a_sparse_kernel_that_fails_between_refreshes_is_named(
    step: int, loaded: LoadedPipeline
) -> None:
    # the last sparse step has let go of what was kept for it, and is run again as a refresh.
    request = a_request(method="foresight", refresh=1)
    with pytest.raises(NonFiniteError, match=words_of(step, 1, "conditional", "reuse, torch")):
        generate(loaded, request, attach=BadKernel(step, 1))


@pytest.mark.parametrize("changes", [{"reuse": 3}, {"method": "foresight", "refresh": 2}], ids=str)
@pytest.mark.parametrize("step", range(6))
def test_what_later_steps_have_left_is_not_taken_for_the_step_that_failed(
    step: int, changes: dict[str, Any], loaded: LoadedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_come_late(monkeypatch)
    # right when it is run again, but the step after it has kept what came of it.
    breaker = Breaker(step, 1, "conditional", times=1)
    with pytest.raises(NonFiniteError, match=f"in the transformer, step {step + 1} of 6"):
        generate(loaded, a_request(steps=6, **changes), attach=breaker)


def test_a_step_that_went_by_an_older_plan_goes_by_it_again(
    loaded: LoadedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_come_late(monkeypatch)
    planned: list[bool] = []

    def attach(handle: SparseHandle) -> None:
        (engine,) = handle.engines
        planner = engine.planner

        def plan(*args: Any) -> Any:
            planned.append(engine.guard is not None)
            return planner(*args)

        engine.planner = plan
        Breaker(2, 1)(handle)

    # of step 1 for steps 2 and 3; a plan that has served step 3 has served its last.
    with pytest.raises(NonFiniteError, match=words_of(2, 1, "conditional", "reuse, torch", 5)):
        generate(loaded, a_request(steps=5, reuse=3), attach=attach)
    assert planned
    assert not any(planned)


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize(("cache", "threshold"), [("first-block", 1e-9), ("taylorseer", 2)])
def test_a_step_that_a_cache_would_leave_out_is_run_whole_again(
    cache: str, threshold: float, layer: int, loaded: LoadedPipeline
) -> None:
    request = a_request(cache=cache, cache_threshold=threshold, steps=7)
    words = words_of(2, layer, "conditional", "replan, torch" if layer else "dense, dense", 7)
    with pytest.raises(NonFiniteError, match=words):
        generate(loaded, request, attach=Breaker(2, layer))


def test_a_cache_that_would_leave_the_step_out_when_it_is_run_again_is_off_by_then(
    tmp_path: Path,
) -> None:
    # a pipeline that does not announce its forwards: the cache takes the second run for a new step.
    tiny = TINY["easyanimate"]
    tiny.build().save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", device="cpu")
    frames, height, width = tiny.size
    layer = attention_shape(model.pipe)[1] - 1
    request = a_request(
        frames=frames, width=width, height=height, steps=7, cache="taylorseer", dense_layers=0
    )
    with pytest.raises(NonFiniteError, match=words_of(4, layer, "conditional", "replan, torch", 7)):
        generate(model, request, attach=Breaker(4, layer))


def test_a_first_block_is_named_also_where_the_others_were_left_out(
    loaded: LoadedPipeline,
) -> None:
    request = a_request(cache="first-block", cache_threshold=10.0, steps=5)
    with pytest.raises(NonFiniteError, match=words_of(3, 0, "conditional", "dense, dense", 5)):
        generate(loaded, request, attach=Breaker(3, 0))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("how", ["blocks", "in place", "around"])
def test_what_is_compiled_is_run_again_too(how: str, folder: Path) -> None:
    model = load(folder, device="cpu")
    pipe = model.pipe
    if how == "blocks":
        compile_blocks(pipe, backend="aot_eager")
    elif how == "in place":
        pipe.transformer.compile(fullgraph=True, backend="aot_eager")
    else:
        pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="aot_eager")
    with pytest.raises(NonFiniteError, match=words_of(2, 1, "conditional", "replan, torch")):
        generate(model, a_request(), attach=Breaker(2, 1))
    assert generate(model, a_request()).frames.any()


@pytest.mark.parametrize("step", [0, 3])
def test_either_transformer_of_a_pair_is_run_again(step: int, tmp_path: Path) -> None:
    model = load(save_tiny_wan(tmp_path / "two", two_stage=True), device="cpu")
    with pytest.raises(NonFiniteError, match=rf"in layer 2, step {step + 1} of 4 \(conditional"):
        generate(model, a_request(), attach=Breaker(step, 1))


# ---- what the second run does not show ----


def test_a_call_that_is_right_when_it_is_run_again_ends_the_run_all_the_same(
    loaded: LoadedPipeline,
) -> None:
    words = "in the transformer, step 3 of 4 (unconditional), and no attention call could be"
    with pytest.raises(NonFiniteError, match=re.escape(words)):
        generate(loaded, a_request(), attach=Breaker(2, 1, "unconditional", times=1))


def test_a_step_that_cannot_be_run_again_ends_the_run_all_the_same(
    loaded: LoadedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(forward: Forward) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Forward, "run_again", fails)
    with pytest.raises(NonFiniteError, match="in the transformer, step 3 of 4"):
        generate(loaded, a_request(), attach=Breaker(2, 1))


def test_a_forward_whose_input_has_changed_since_is_not_run_again(
    loaded: LoadedPipeline,
) -> None:
    def change(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        # as a scheduler that writes into the latents it was given.
        kwargs["hidden_states"].mul_(1)

    hook = loaded.pipe.transformer.register_forward_hook(change, with_kwargs=True)
    try:
        with pytest.raises(NonFiniteError, match="in the transformer, step 3 of 4"):
            generate(loaded, a_request(), attach=Breaker(2, 1))
    finally:
        hook.remove()


def test_latents_that_are_not_finite_though_the_outputs_are_end_the_run(
    loaded: LoadedPipeline,
) -> None:
    scheduler = loaded.pipe.scheduler
    true = scheduler.step

    def step(*args: Any, **options: Any) -> Any:
        made = true(*args, **options)
        made[0][0, 0, 0, 0, 0] = torch.inf if scheduler.step_index == 2 else 0.0
        return made

    vars(scheduler)["step"] = step
    try:
        with pytest.raises(NonFiniteError, match="NaN or infinity in step 2 of 4"):
            generate(loaded, a_request())
    finally:
        del vars(scheduler)["step"]


@pytest.mark.usefixtures("late")
def test_the_last_step_is_looked_at_before_anything_is_decoded(loaded: LoadedPipeline) -> None:
    decoded: list[object] = []
    hook = loaded.pipe.vae.decoder.register_forward_pre_hook(lambda *_: decoded.append(1))
    try:
        with pytest.raises(NonFiniteError, match=r"layer 3, step 4 of 4"):
            generate(loaded, a_request(), attach=Breaker(3, 2))
    finally:
        hook.remove()
    assert not decoded


def test_the_step_of_latents_is_named_also_where_it_is_read_a_step_later(
    late: bool, loaded: LoadedPipeline
) -> None:
    watch = Watch(loaded.pipe, None)
    bad = torch.tensor([1.0, torch.inf])
    watch.end_step(torch.ones(2), 0, 4)
    if late:
        watch.end_step(bad, 1, 4)
    with pytest.raises(NonFiniteError, match="in step 2 of 4"):
        watch.end_step(bad, 1 + late, 4)
    last = Watch(loaded.pipe, None)
    with pytest.raises(NonFiniteError, match="in step 1 of 1"):
        last.end_step(bad, 0, 1)


# ---- rows that do not reach the output ----


class TextBreaker(Breaker):
    """The same of one row of the text, which nothing else attends to in the last layer."""

    def spoil(self, q: Tensor, v: Tensor, site: CallSite) -> None:
        assert site.grid.text
        q[:, :, 1 if site.grid.text_first else -1, 0] = torch.nan


@pytest.mark.parametrize("dense_steps", [0, 2])
@pytest.mark.parametrize("name", ["cogvideox", "hunyuan"])
def test_a_row_of_text_that_the_transformer_throws_away_ends_the_run_too(
    name: str, dense_steps: int, tmp_path: Path
) -> None:
    tiny = TINY[name]
    tiny.build().save_pretrained(tmp_path / name)
    model = load(tmp_path / name, device="cpu")
    frames, height, width = tiny.size
    request = GenerateRequest(
        prompt="a red circle", frames=frames, width=width, height=height, steps=2, device="cpu",
        method="fg-attn", dense_steps=dense_steps,
    )  # fmt: skip
    layer = attention_shape(model.pipe)[1] - 1
    with pytest.raises(NonFiniteError, match=rf"layer {layer + 1}, step 2 of 2"):
        generate(model, request, attach=TextBreaker(1, layer))


# ---- several processes ----


@pytest.fixture(scope="module")
def told_together(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two processes was told, of which the second's kernel is broken."""
    out = tmp_path_factory.mktemp("told")
    worker = Path(__file__).with_name("finite_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(folder), str(out)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"{rank}.json").read_text("utf-8")) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("heads", "layer 2, step 2 of 3 (conditional: replan"),
        ("ring", "layer 2, step 2 of 3 (conditional: replan"),
        ("apart", "layer 2, step 2 of 3 (unconditional: replan"),
        ("heads, once", "in the transformer, step 2 of 3 (conditional)"),
        ("apart, once", "in the transformer, step 2 of 3 (unconditional)"),
    ],
)
def test_all_processes_end_with_the_same_words_and_can_go_on(
    case: str, words: str, told_together: list[dict[str, str]]
) -> None:
    first, second = told_together
    assert words in first[case]
    assert first[case] == second[case]
    assert first[f"{case}, then"] == second[f"{case}, then"]


# ---- what is kept ----


def test_inputs_are_kept_until_their_step_was_looked_at(
    loaded: LoadedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_come_late(monkeypatch)
    kept: list[weakref.ref[Tensor]] = []
    most = 0

    def look(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal most
        most = max(most, len({id(one()) for one in kept if one() is not None}))
        kept.append(weakref.ref(kwargs["hidden_states"]))

    hook = loaded.pipe.transformer.register_forward_pre_hook(look, with_kwargs=True)
    try:
        generate(loaded, a_request(steps=6))
    finally:
        hook.remove()
    # of the step that goes on, and the two before it.
    assert most <= 3
    assert not any(one() is not None for one in kept)
