"""Runs of sparse Wan pipelines: where each call stands, and that ``sparsify`` leaves no trace."""

from __future__ import annotations

import filecmp
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pipelines import forward, latents_of, tiny_transformer, tiny_wan, transformer_inputs

from vidsparse.errors import OptionError
from vidsparse.methods import make_method
from vidsparse.pipelines import is_sparse, restore, sparsify

pytestmark = pytest.mark.usefixtures("one_thread")


def actions(handle: Any) -> list[tuple[int, int, str, str]]:
    return [(c.step, c.layer, c.branch, c.action) for c in handle.trace.cells]


# where a call stands


def test_the_trace_names_every_step_layer_and_branch() -> None:
    pipe = tiny_wan(layers=2)
    with sparsify(pipe, dense_steps=1) as handle:
        latents_of(pipe, num_inference_steps=3)
    expected = [
        (step, layer, branch, "dense" if step == 0 else action)
        for step in range(3)
        for branch, action in (("conditional", "replan"), ("unconditional", "reuse"))
        for layer in range(2)
    ]
    assert actions(handle) == expected


def test_without_guidance_there_is_one_branch() -> None:
    pipe = tiny_wan()
    with sparsify(pipe) as handle:
        latents_of(pipe, guidance_scale=1.0)
    assert {branch for _, _, branch, _ in actions(handle)} == {"conditional"}


def test_the_branch_follows_the_context_the_pipeline_announces() -> None:
    pipe = tiny_wan(layers=1)
    inputs = transformer_inputs(5, 32, 32)
    pipe.scheduler.set_timesteps(2)
    with sparsify(pipe) as handle:
        for name in ("uncond", "cond", "cond"):
            with pipe.transformer.cache_context(name):
                forward(pipe.transformer, inputs)
    branches = [branch for _, _, branch, _ in actions(handle)]
    assert branches == ["unconditional", "conditional", "conditional"]


def test_a_loop_of_ones_own_is_followed_by_the_scheduler() -> None:
    pipe = tiny_wan(layers=1, euler=True)
    inputs = transformer_inputs(5, 32, 32)
    pipe.scheduler.set_timesteps(3)
    with sparsify(pipe, dense_steps=1) as handle:
        for t in pipe.scheduler.timesteps:
            for _ in range(2):
                noise = forward(pipe.transformer, inputs)
            pipe.scheduler.step(noise, t, inputs["hidden_states"])
    assert [(step, branch) for step, _, branch, _ in actions(handle)] == [
        (step, branch) for step in range(3) for branch in ("conditional", "unconditional")
    ]


def test_a_forward_that_raised_and_is_repeated_is_of_the_same_branch() -> None:
    pipe = tiny_wan(layers=1, euler=True)
    inputs = transformer_inputs(5, 32, 32)
    pipe.scheduler.set_timesteps(2)
    failing = True

    def fail(*args: Any) -> None:
        if failing:
            raise MemoryError

    pipe.transformer.proj_out.register_forward_pre_hook(fail)
    with sparsify(pipe, dense_steps=1) as handle:
        for t in pipe.scheduler.timesteps:
            for _ in range(2):
                failing = True
                with pytest.raises(MemoryError):
                    forward(pipe.transformer, inputs)
                failing = False
                noise = forward(pipe.transformer, inputs)
            pipe.scheduler.step(noise, t, inputs["hidden_states"])
    assert [(step, branch) for step, _, branch, _ in actions(handle)] == [
        (step, branch)
        for step in range(2)
        for branch in ("conditional", "unconditional")
        for _ in range(2)
    ]


def test_per_token_timesteps_are_accepted() -> None:
    pipe = tiny_wan()
    pipe.register_to_config(expand_timesteps=True)
    stock = latents_of(pipe)
    with sparsify(pipe, top_p=1.0, dense_steps=0):
        torch.testing.assert_close(latents_of(pipe), stock, rtol=1e-4, atol=1e-4)


def test_video_to_video_counts_its_own_steps() -> None:
    from diffusers import WanVideoToVideoPipeline

    parts = tiny_wan().components
    pipe = WanVideoToVideoPipeline(
        **{name: parts[name] for name in ("tokenizer", "text_encoder", "transformer", "vae")},
        scheduler=parts["scheduler"],
    )
    pipe.set_progress_bar_config(disable=True)
    with sparsify(pipe, dense_steps=1) as handle:
        pipe(
            video=torch.rand(1, 9, 3, 32, 32),
            prompt="a red circle",
            height=32,
            width=32,
            num_inference_steps=4,
            strength=0.5,
            output_type="latent",
            max_sequence_length=16,
        )
    assert [(step, action) for step, layer, branch, action in actions(handle)][::4] == [
        (0, "dense"),
        (1, "replan"),
    ]


def test_image_to_video_is_taken_too() -> None:
    from diffusers import WanImageToVideoPipeline
    from PIL import Image

    parts = tiny_wan().components
    pipe = WanImageToVideoPipeline(
        **{name: parts[name] for name in ("tokenizer", "text_encoder", "vae", "scheduler")},
        # noise, mask and first frame side by side: 4 channels each.
        transformer=tiny_transformer(in_channels=12),
    )
    pipe.set_progress_bar_config(disable=True)
    image = Image.new("RGB", (64, 64), (200, 30, 30))
    stock = latents_of(pipe, image=image)
    with sparsify(pipe, top_p=1.0, dense_steps=0) as handle:
        torch.testing.assert_close(latents_of(pipe, image=image), stock, rtol=1e-4, atol=1e-4)
        assert handle.summary().notes == ()


def test_the_second_transformer_makes_its_own_plans() -> None:
    pipe = tiny_wan(two_stage=True)
    with sparsify(pipe, dense_steps=0, reuse=100) as handle:
        latents_of(pipe, num_inference_steps=8, guidance_scale=1.0)
    made = [(step, layer) for step, layer, _, action in actions(handle) if action == "replan"]
    first_of_second = made[-1][0]
    assert made == [(0, 0), (0, 1), (first_of_second, 0), (first_of_second, 1)]
    assert 0 < first_of_second < 8
    assert len(handle.trace.density_map()) == 8


# one run after another


def test_every_call_of_the_pipeline_is_a_run_of_its_own() -> None:
    pipe = tiny_wan()
    with sparsify(pipe, dense_steps=0, reuse=100) as handle:
        for steps, size in ((3, 64), (1, 64), (1, 32), (2, 96)):
            latents_of(pipe, num_inference_steps=steps, height=size)
            assert handle.summary().calls == steps * 2 * 2
            assert actions(handle)[0] == (0, 0, "conditional", "replan")


class Stop(Exception):
    pass


@pytest.mark.parametrize("step", [0, 1])
def test_a_run_after_an_exception_starts_afresh(step: int) -> None:
    pipe = tiny_wan()

    def fail(pipe: Any, at: int, t: Any, tensors: Any) -> Any:
        if at == step:
            raise Stop
        return tensors

    with sparsify(pipe, dense_steps=0, reuse=100) as handle:
        expected = latents_of(pipe)
        with pytest.raises(Stop):
            latents_of(pipe, callback_on_step_end=fail)
        assert torch.equal(latents_of(pipe), expected)
        assert handle.summary().calls == 4 * 2 * 2


def test_a_run_after_an_interrupt_starts_afresh() -> None:
    pipe = tiny_wan()

    def interrupt(pipe: Any, at: int, t: Any, tensors: Any) -> Any:
        pipe._interrupt = True
        return tensors

    with sparsify(pipe, dense_steps=0, reuse=100) as handle:
        expected = latents_of(pipe)
        latents_of(pipe, callback_on_step_end=interrupt)
        assert handle.summary().calls == 1 * 2 * 2
        assert torch.equal(latents_of(pipe), expected)


def test_a_loop_of_ones_own_after_an_exception_is_as_long_as_its_list() -> None:
    pipe = tiny_wan(layers=1, euler=True)
    inputs = transformer_inputs(5, 32, 32)

    def fail(pipe: Any, at: int, t: Any, tensors: Any) -> Any:
        raise Stop

    with sparsify(pipe, dense_steps=2) as handle:
        with pytest.raises(Stop):
            latents_of(pipe, num_inference_steps=2, callback_on_step_end=fail)
        pipe.scheduler.set_timesteps(6)
        for t in pipe.scheduler.timesteps:
            noise = forward(pipe.transformer, {**inputs, "timestep": t.expand(1)})
            pipe.scheduler.step(noise, t, inputs["hidden_states"])
    assert [(step, action) for step, _, _, action in actions(handle)] == [
        (step, "dense" if step < 2 else "replan") for step in range(6)
    ]


def test_another_scheduler_may_be_put_in_while_sparse() -> None:
    pipe = tiny_wan()
    with sparsify(pipe, dense_steps=0) as handle:
        latents_of(pipe, num_inference_steps=2)
        pipe.scheduler = tiny_wan(euler=True).scheduler
        latents_of(pipe, num_inference_steps=5)
    assert len(handle.trace.density_map()) == 5


# no trace left


def state_of(pipe: Any) -> list[Any]:
    """Everything that a hook or a replaced part would show up in."""
    found: list[Any] = []
    for name, module in pipe.transformer.named_modules():
        found.append((name, sorted(vars(module)), list(module._forward_pre_hooks)))
        found.append((list(module._forward_hooks), id(getattr(module, "processor", None))))
    return found


def test_removal_restores_the_pipeline_bit_for_bit(tmp_path: Path) -> None:
    pipe = tiny_wan()
    stock = latents_of(pipe)
    before, processors = state_of(pipe), dict(pipe.transformer.attn_processors)
    handle = sparsify(pipe, top_p=0.3, dense_steps=0)
    latents_of(pipe)
    pipe.save_pretrained(tmp_path / "sparse")
    handle.remove()
    assert not handle.active
    assert state_of(pipe) == before
    assert pipe.transformer.attn_processors == processors
    assert torch.equal(latents_of(pipe), stock)
    pipe.save_pretrained(tmp_path / "stock")
    names = [p.relative_to(tmp_path / "stock") for p in (tmp_path / "stock").rglob("*.*")]
    assert names
    _, differing, missing = filecmp.cmpfiles(
        tmp_path / "stock", tmp_path / "sparse", names, shallow=False
    )
    assert (differing, missing) == ([], [])


def test_nothing_is_stored_on_the_hosts_classes() -> None:
    from diffusers import WanPipeline, WanTransformer3DModel
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

    classes = (WanPipeline, WanTransformer3DModel, WanAttention, WanAttnProcessor)
    before = [dict(vars(cls)) for cls in classes]
    pipe = tiny_wan()
    with sparsify(pipe):
        latents_of(pipe)
        assert [dict(vars(cls)) for cls in classes] == before


def test_cross_attention_is_left_alone() -> None:
    pipe = tiny_wan()
    stock = [block.attn2.processor for block in pipe.transformer.blocks]
    with sparsify(pipe):
        assert [block.attn2.processor for block in pipe.transformer.blocks] == stock


def test_removing_twice_is_harmless_and_the_trace_stays() -> None:
    pipe = tiny_wan()
    handle = sparsify(pipe)
    latents_of(pipe)
    handle.remove()
    handle.remove()
    assert handle.summary().calls == 4 * 2 * 2


def test_an_old_handle_does_not_undo_a_newer_one() -> None:
    pipe = tiny_wan()
    old = sparsify(pipe)
    old.remove()
    with sparsify(pipe) as new:
        old.remove()
        latents_of(pipe)
        assert new.summary().calls == 4 * 2 * 2


def test_a_processor_put_in_since_survives_removal() -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    pipe = tiny_wan()
    handle = sparsify(pipe)
    own = WanAttnProcessor()
    pipe.transformer.blocks[0].attn1.set_processor(own)
    handle.remove()
    assert pipe.transformer.blocks[0].attn1.processor is own
    assert type(pipe.transformer.blocks[1].attn1.processor) is WanAttnProcessor


def test_a_processor_around_ours_runs_and_goes_on_after_removal() -> None:
    pipe = tiny_wan()
    dense = latents_of(pipe)

    class Around:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            return self.inner(*arguments, **named)

    handle = sparsify(pipe, top_p=0.3, dense_steps=1)
    sparse = latents_of(pipe)
    for block in pipe.transformer.blocks:
        block.attn1.processor = Around(block.attn1.processor)
    assert torch.equal(latents_of(pipe), sparse)
    handle.remove()
    assert torch.equal(latents_of(pipe), dense)


def test_removal_in_the_middle_of_a_forward_ends_it_densely() -> None:
    pipe = tiny_wan()
    dense = latents_of(pipe)
    handle = sparsify(pipe, top_p=0.3, dense_steps=1)
    to_q = pipe.transformer.blocks[1].attn1.to_q
    hook = to_q.register_forward_hook(lambda *_: handle.remove())
    assert bool(latents_of(pipe).isfinite().all())
    hook.remove()
    assert torch.equal(latents_of(pipe), dense)


@pytest.mark.parametrize(("name", "value"), [("order", ""), ("refresh", ""), ("refresh", False)])
def test_what_is_nothing_is_not_taken_for_the_default(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        sparsify(tiny_wan(), "foresight", **{name: value})


def test_a_method_that_is_no_name_is_refused() -> None:
    nothing: Any = []
    with pytest.raises(OptionError, match="unknown method"):
        make_method(nothing)


def test_leaving_the_block_by_an_error_removes_it() -> None:
    pipe = tiny_wan()
    before = state_of(pipe)
    with pytest.raises(Stop), sparsify(pipe):
        raise Stop
    assert state_of(pipe) == before


def test_restore_undoes_it_where_the_handle_was_lost() -> None:
    pipe = tiny_wan()
    before = state_of(pipe)
    sparsify(pipe)
    assert is_sparse(pipe)
    assert restore(pipe)
    assert not is_sparse(pipe)
    assert state_of(pipe) == before
    assert not restore(pipe)


def test_a_refused_option_leaves_the_pipeline_alone() -> None:
    pipe = tiny_wan()
    before = state_of(pipe)
    for options in (
        {"top_p": 1.5},
        {"order": "zigzag"},
        {"order": ["hilbert"]},
        {"dense_steps": -1},
        {"tau": 0.5},
        {"check_finite": "no"},
        {"dense_fallback": 1},
    ):
        with pytest.raises(OptionError):
            sparsify(pipe, **options)
    assert state_of(pipe) == before


def test_a_sparse_pipeline_is_freed_when_dropped() -> None:
    pipe = tiny_wan()
    handle = sparsify(pipe)
    latents_of(pipe)
    alive = weakref.ref(pipe.transformer)
    del pipe, handle
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("removed", [False, True])
def test_a_handle_that_is_kept_keeps_no_model(removed: bool) -> None:
    pipe = tiny_wan()
    handle = sparsify(pipe)
    latents_of(pipe)
    if removed:
        handle.remove()
    alive = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert alive() is None
    # what it is kept for.
    assert handle.summary().calls
    assert not handle.active


def test_a_handle_is_active_while_its_transformer_is_the_pipelines() -> None:
    pipe, other = tiny_wan(), tiny_wan(seed=1)
    own = pipe.transformer
    with sparsify(pipe) as handle:
        for one, ours in ((other.transformer, False), (own, True)):
            pipe.transformer = one
            assert handle.active is ours
            assert is_sparse(pipe) is ours


def test_one_transformer_in_both_places_of_a_pipeline_is_followed_in_both() -> None:
    pipe = tiny_wan(two_stage=True)
    pipe.transformer_2 = pipe.transformer
    stock = latents_of(pipe)
    with sparsify(pipe, "dense") as handle:
        assert torch.equal(latents_of(pipe), stock)
        steps = {cell.step for cell in handle.trace.cells}
    assert steps == set(range(handle.engine.steps))
    with sparsify(pipe, top_p=0.3, dense_steps=0) as handle:
        assert not torch.equal(latents_of(pipe), stock)
    assert torch.equal(latents_of(pipe), stock)


def test_two_pipelines_keep_their_own_options() -> None:
    first, second = tiny_wan(), tiny_wan()
    with sparsify(first, top_p=0.3, dense_steps=0):
        alone = latents_of(first)
    stock = latents_of(second)
    with (
        sparsify(first, top_p=0.3, dense_steps=0) as sparse,
        sparsify(second, top_p=1.0, dense_steps=2) as full,
    ):
        for _ in range(2):
            assert torch.equal(latents_of(first), alone)
            torch.testing.assert_close(latents_of(second), stock, rtol=1e-4, atol=1e-4)
        assert sparse.summary().dense_step_share == 0.0
        assert full.summary().dense_step_share == 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": 5}, "a method is a name or a method that is built already, got 5"),
        ({"method": 5, "top_p": 0.5}, "a method is a name or a method that is built already"),
        ({"method": ["fg-attn"]}, "a method is a name or a method that is built already"),
        ({"method": ""}, "unknown method ''. Hint: choose from"),
        ({"preset": 5}, "a preset must be the name of a file, got 5"),
    ],
    ids=str,
)
def test_what_is_no_method_or_preset_is_refused(options: dict[str, Any], said: str) -> None:
    pipe = tiny_wan()
    before = state_of(pipe)
    with pytest.raises(OptionError, match=said):
        sparsify(pipe, **options)
    assert state_of(pipe) == before
