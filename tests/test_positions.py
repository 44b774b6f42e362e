"""Where a forward stands in its run, by what the pipeline's scheduler says of it."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from family_checks import Stop, first_forward
from family_checks import forward as family_forward
from tiny_families import TINY, latents
from tiny_pipelines import forward, latents_of, tiny_wan, transformer_inputs

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.caching import StepCache

pytestmark = pytest.mark.usefixtures("one_thread")


def steps_of(handle: Any) -> list[tuple[int, str]]:
    return [(c.step, c.action) for c in handle.trace.cells if c.layer == 0]


def stopping_at(step: int) -> Any:
    def fail(pipe: Any, at: int, t: Any, tensors: Any) -> Any:
        if at == step:
            raise Stop
        return tensors

    return fail


def own_loop(pipe: Any, scheduler: Any, timesteps: Any) -> None:
    inputs = transformer_inputs(5, 32, 32)
    for t in timesteps:
        noise = forward(pipe.transformer, {**inputs, "timestep": t.expand(1)})
        scheduler.step(noise, t, inputs["hidden_states"])


# ---- another scheduler than the pipeline's ----


def test_a_run_under_another_pipelines_scheduler_is_refused_from_its_first_forward() -> None:
    pipe = tiny_wan(layers=1)
    other = tiny_wan(euler=True)
    other.transformer = pipe.transformer
    with sparsify(pipe, dense_steps=1) as handle:
        latents_of(pipe)
        with pytest.raises(UnsupportedError, match="scheduler of WanPipeline is at its end"):
            latents_of(other)
        assert handle.summary().calls == 4 * 2
        # what it has been told is of no later run.
        latents_of(pipe)
        assert handle.summary().calls == 4 * 2


@pytest.mark.parametrize("euler", [False, True])
def test_so_is_one_after_a_dense_run_that_nobody_followed(euler: bool) -> None:
    pipe = tiny_wan(layers=1)
    other = tiny_wan(euler=euler)
    other.transformer = pipe.transformer
    latents_of(pipe)
    with sparsify(pipe, dense_steps=1) as handle:
        with pytest.raises(UnsupportedError, match="at its end"):
            latents_of(other)
        assert not handle.trace.cells


def test_a_scheduler_of_ones_own_after_a_call_that_raised_is_refused() -> None:
    pipe = tiny_wan(layers=1, euler=True)

    def fail(*args: Any) -> None:
        if handle.trace.cells[-1].step == 2:
            raise Stop

    hook = pipe.transformer.register_forward_hook(fail)
    other = tiny_wan(euler=True).scheduler
    other.set_timesteps(6)
    with sparsify(pipe, dense_steps=0, reuse=100) as handle:
        with pytest.raises(Stop):
            latents_of(pipe)
        hook.remove()
        calls = len(handle.trace.cells)
        with pytest.raises(UnsupportedError, match="scheduler of WanPipeline is where it was"):
            own_loop(pipe, other, other.timesteps)
        assert len(handle.trace.cells) == calls


def test_a_run_under_another_scheduler_before_ones_own_was_set_is_refused() -> None:
    # UniPC's timesteps are whole numbers, all of which the list of training steps has.
    pipe, other = tiny_wan(layers=1), tiny_wan()
    other.transformer = pipe.transformer
    with (
        sparsify(pipe, dense_steps=1),
        pytest.raises(UnsupportedError, match="scheduler of WanPipeline is where it was"),
    ):
        latents_of(other)


def test_a_step_cache_takes_no_forward_of_another_scheduler_for_its_own() -> None:
    pipe, other = tiny_wan(), tiny_wan(euler=True)
    other.transformer = pipe.transformer
    with StepCache(pipe, "first-block", threshold=1e9):
        latents_of(pipe)
        with pytest.raises(UnsupportedError, match="at its end"):
            latents_of(other)


def test_forwards_after_a_run_that_repeat_its_last_one_stand_where_it_stood() -> None:
    pipe = tiny_wan(layers=1)
    inputs = transformer_inputs(5, 32, 32)
    with sparsify(pipe, dense_steps=1) as handle:
        latents_of(pipe)
        for _ in range(2):
            forward(pipe.transformer, {**inputs, "timestep": pipe.scheduler.timesteps[-1:]})
        assert [step for step, _ in steps_of(handle)[-2:]] == [3, 3]
        # any other is of no step of this run.
        with pytest.raises(UnsupportedError, match="told another timestep"):
            forward(pipe.transformer, {**inputs, "timestep": pipe.scheduler.timesteps[:1]})


def test_a_list_that_was_set_says_where_forwards_stand_that_no_scheduler_counts() -> None:
    pipe = tiny_wan(layers=1)
    inputs = transformer_inputs(5, 32, 32)
    pipe.scheduler.set_timesteps(4)
    with sparsify(pipe, dense_steps=2) as handle:
        for t in pipe.scheduler.timesteps:
            forward(pipe.transformer, {**inputs, "timestep": t.expand(1)})
        with pytest.raises(UnsupportedError, match="told another timestep"):
            forward(pipe.transformer, {**inputs, "timestep": torch.tensor([1])})
    assert [step for step, _ in steps_of(handle)] == [0, 1, 2, 3]


# ---- where a loop begins ----


@pytest.mark.parametrize("raised", [False, True])
def test_a_loop_that_starts_late_in_the_list_is_a_run_of_its_own_each_time(raised: bool) -> None:
    pipe = tiny_wan(layers=1, euler=True)

    def run(last: int) -> None:
        pipe.scheduler.set_timesteps(5)
        pipe.scheduler.set_begin_index(2)
        own_loop(pipe, pipe.scheduler, pipe.scheduler.timesteps[2:last])

    with sparsify(pipe, dense_steps=0, reuse=100) as handle:
        if raised:
            # the pipeline goes on saying that it is in a call of three steps.
            with pytest.raises(Stop):
                latents_of(pipe, num_inference_steps=3, callback_on_step_end=stopping_at(0))
        run(last=3)
        run(last=5)
    assert steps_of(handle) == [(2, "replan"), (3, "reuse"), (4, "reuse")]


def test_a_first_step_told_in_another_form_stands_where_the_scheduler_begins() -> None:
    pipe = tiny_wan(layers=1, euler=True)
    inputs = transformer_inputs(5, 32, 32)
    pipe.scheduler.set_timesteps(5)
    pipe.scheduler.set_begin_index(2)
    with sparsify(pipe, dense_steps=0, reuse=100) as handle:
        for t in pipe.scheduler.timesteps[2:]:
            noise = forward(pipe.transformer, {**inputs, "timestep": t.expand(1) / 1000})
            pipe.scheduler.step(noise, t, inputs["hidden_states"])
    assert steps_of(handle) == [(2, "replan"), (3, "reuse"), (4, "reuse")]


@pytest.mark.parametrize("name", ["wan-video", "cogvideox-video"])
def test_a_call_that_begins_with_the_second_of_two_alike_timesteps_begins_with_dense_steps(
    name: str,
) -> None:
    pipe = TINY[name].build()
    # of second order: all timesteps but the first stand twice in its list.
    heun = diffusers.FlowMatchHeunDiscreteScheduler, diffusers.HeunDiscreteScheduler
    pipe.scheduler = heun[name == "cogvideox-video"].from_config(pipe.scheduler.config)
    with sparsify(pipe, "fg-attn", top_p=0.3, dense_steps=3) as handle:
        latents(name, pipe, num_inference_steps=8, strength=0.8)
        seen = dict(steps_of(handle))
        assert handle.engine.steps == pipe.num_timesteps == 11
    assert list(seen) == list(range(11))
    assert [seen[step] == "dense" for step in range(4)] == [True] * 3 + [False]


def test_a_pipeline_that_does_not_say_whether_a_call_goes_on_is_believed_of_its_first_step() -> (
    None
):
    name = "easyanimate-inpaint"
    pipe = TINY[name].build()
    arguments = first_forward(name, pipe, num_inference_steps=4)
    with sparsify(pipe, dense_steps=0, reuse=100) as handle:
        latents(name, pipe, num_inference_steps=4)
        pipe.scheduler.set_timesteps(6)
        for t in pipe.scheduler.timesteps[3:]:
            told = t.expand(arguments["timestep"].shape)
            noise = family_forward(pipe.transformer, {**arguments, "timestep": told}, torch.float32)
            pipe.scheduler.step(noise, t, noise)
    assert [step for step, _ in steps_of(handle)] == [3, 4, 5]


def test_a_call_that_raised_says_nothing_of_the_loop_after_it() -> None:
    name = "cogvideox"
    pipe = TINY[name].build()
    arguments = first_forward(name, pipe)
    with sparsify(pipe, dense_steps=2) as handle:
        with pytest.raises(Stop):
            latents(name, pipe, num_inference_steps=4, callback_on_step_end=stopping_at(1))
        assert pipe.current_timestep is not None
        pipe.scheduler.set_timesteps(4)
        for t in pipe.scheduler.timesteps:
            told = t.expand(arguments["timestep"].shape)
            family_forward(pipe.transformer, {**arguments, "timestep": told}, torch.float32)
    assert steps_of(handle) == [(0, "dense"), (1, "dense"), (2, "replan"), (3, "replan")]
