"""``sparsify`` on stock Wan pipelines: what it computes, and that it leaves no trace."""

from __future__ import annotations

import copy
import filecmp
import gc
import pickle
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from counting_backend import CountingBackend
from quick import slow_but
from tiny_pipelines import latents_of, tiny_transformer, tiny_wan
from torch import Tensor, nn

from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.methods import make_method
from vidsparse.pipelines import is_sparse, restore, sparsify
from vidsparse.pipelines.compilation import compile_blocks

pytestmark = pytest.mark.usefixtures("one_thread")

# sizes in pixels and frames whose token grids are even, odd, and one frame long.
SHAPES = [(9, 64, 64), (13, 80, 48), (1, 48, 112)]


def transformer_inputs(
    frames: int, height: int, width: int, *, batch: int = 1, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(1)
    shape = (batch, 4, (frames - 1) // 4 + 1, height // 8, width // 8)
    return {
        "hidden_states": torch.randn(shape, generator=gen).to(dtype),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": torch.randn(batch, 16, 32, generator=gen).to(dtype),
        "return_dict": False,
    }


def forward(transformer: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        out: Tensor = transformer(**inputs)[0]
    return out


def actions(handle: Any) -> list[tuple[int, int, str, str]]:
    return [(c.step, c.layer, c.branch, c.action) for c in handle.trace.cells]


# what it computes


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("method", "options"), [("fg-attn", {"top_p": 1.0}), ("spargeattn", {"tau": 1.0})]
)
def test_full_mask_stays_within_twice_the_stock_error(
    shape: tuple[int, int, int], dtype: torch.dtype, method: str, options: dict[str, Any]
) -> None:
    truth = forward(
        tiny_transformer().double(), transformer_inputs(*shape, batch=2, dtype=torch.float64)
    )
    pipe = tiny_wan()
    pipe.transformer.to(dtype)
    inputs = transformer_inputs(*shape, batch=2, dtype=dtype)
    stock = forward(pipe.transformer, inputs)
    with sparsify(pipe, method, dense_steps=0, **options) as handle:
        ours = forward(pipe.transformer, inputs)
        assert handle.summary().computed == 1.0
    assert ours.dtype == dtype
    # one error can be lucky: rounding of the largest value is allowed in any case.
    floor = torch.finfo(dtype).eps * truth.abs().max()
    budget = max(2 * (stock - truth).abs().max(), floor)
    assert (ours - truth).abs().max() <= budget


def test_method_dense_equals_stock_bit_for_bit() -> None:
    pipe = tiny_wan()
    stock = latents_of(pipe)
    with sparsify(pipe, "dense") as handle:
        assert torch.equal(latents_of(pipe), stock)
        assert handle.summary().dense_call_share == 1.0


def test_dense_steps_equal_stock_bit_for_bit() -> None:
    pipe = tiny_wan()
    stock = latents_of(pipe)
    with sparsify(pipe, top_p=0.2, dense_steps=1.0):
        assert torch.equal(latents_of(pipe), stock)


def test_a_small_top_p_skips_work_and_changes_the_video() -> None:
    pipe = tiny_wan()
    stock = latents_of(pipe, num_frames=17)
    with sparsify(pipe, top_p=0.2, dense_steps=0) as handle:
        sparse = latents_of(pipe, num_frames=17)
        summary = handle.summary()
    assert summary.selected is not None
    assert summary.selected < 0.8
    assert not torch.equal(sparse, stock)
    assert bool(sparse.isfinite().all())


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_batch_of_two_equals_two_single_runs(guidance: float) -> None:
    pipe = tiny_wan()
    prompts = ["a red circle", "a blue square that moves left"]

    def seeds(count: int) -> list[torch.Generator]:
        return [torch.Generator("cpu").manual_seed(7) for _ in range(count)]

    with sparsify(pipe, top_p=0.5, dense_steps=1):
        both = latents_of(pipe, prompt=prompts, generator=seeds(2), guidance_scale=guidance)
        single = [
            latents_of(pipe, prompt=[p], generator=seeds(1), guidance_scale=guidance)
            for p in prompts
        ]
    torch.testing.assert_close(both, torch.cat(single), rtol=1e-4, atol=1e-4)


def test_fused_projections_give_the_same_video() -> None:
    pipe = tiny_wan()
    with sparsify(pipe, top_p=0.5, dense_steps=1):
        apart = latents_of(pipe)
        pipe.transformer.fuse_qkv_projections()
        fused = latents_of(pipe)
    torch.testing.assert_close(fused, apart, rtol=1e-4, atol=1e-4)


def test_lora_weights_take_part() -> None:
    peft = pytest.importorskip("peft")
    pipe = tiny_wan()
    pipe.transformer.add_adapter(
        peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    stock = latents_of(pipe)
    with sparsify(pipe, top_p=1.0, dense_steps=0):
        torch.testing.assert_close(latents_of(pipe), stock, rtol=1e-4, atol=1e-4)
        pipe.transformer.disable_adapters()
        assert not torch.allclose(latents_of(pipe), stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
def test_group_offload_works_beside_it(kind: str) -> None:
    pipe = tiny_wan()
    stock = latents_of(pipe)
    with sparsify(pipe, top_p=1.0, dense_steps=0):
        pipe.transformer.enable_group_offload(
            onload_device=torch.device("cpu"), offload_type=kind, num_blocks_per_group=1
        )
        torch.testing.assert_close(latents_of(pipe), stock, rtol=1e-4, atol=1e-4)


def test_layerwise_casting_works_beside_it() -> None:
    pipe = tiny_wan()
    pipe.transformer.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
    )
    stock = latents_of(pipe)
    with sparsify(pipe, top_p=1.0, dense_steps=0):
        torch.testing.assert_close(latents_of(pipe), stock, rtol=1e-4, atol=1e-4)


def test_first_block_cache_works_beside_it() -> None:
    from diffusers import FirstBlockCacheConfig

    pipe = tiny_wan(layers=3)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1.0))
    with sparsify(pipe, top_p=0.5, dense_steps=0, reuse=2) as handle:
        assert bool(latents_of(pipe, num_inference_steps=6).isfinite().all())
        skipped = handle.trace.density_map()
    assert [row[0] is not None for row in skipped] == [True] * 6
    assert any(row[-1] is None for row in skipped)


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
    for options in ({"top_p": 1.5}, {"order": "zigzag"}, {"dense_steps": -1}, {"tau": 0.5}):
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


# what the user sets on the pipeline


def test_an_attention_backend_serves_dense_calls_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models import attention_dispatch

    pipe = tiny_wan()
    attention = pipe.transformer.blocks[0].attn1
    used: list[Any] = []
    dispatch = attention_dispatch.dispatch_attention_fn

    def watch(*args: Any, backend: Any = None, **kwargs: Any) -> Tensor:
        used.append(backend)
        out: Tensor = dispatch(*args, backend=backend, **kwargs)
        return out

    monkeypatch.setattr(attention_dispatch, "dispatch_attention_fn", watch)
    with sparsify(pipe, "dense"):
        attention.set_attention_backend("_native_math")
        forward(pipe.transformer, transformer_inputs(5, 32, 32))
    assert [str(getattr(b, "value", b)) for b in used] == ["_native_math", "None"]
    assert attention.processor._attention_backend.value == "_native_math"


def test_context_parallelism_is_refused_before_and_after() -> None:
    pipe = tiny_wan()
    processor = pipe.transformer.blocks[1].attn1.processor
    processor._parallel_config = object()
    with pytest.raises(UnsupportedError, match="context parallelism"):
        sparsify(pipe)
    processor._parallel_config = None
    with (
        sparsify(pipe),
        pytest.raises(UnsupportedError, match="context parallelism"),
    ):
        pipe.transformer.blocks[1].attn1.processor._parallel_config = object()


# errors


def test_an_unknown_pipeline_is_told_which_are_supported() -> None:
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(8,),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    with pytest.raises(UnsupportedError, match=r"DDPMPipeline is not .* WanPipeline"):
        sparsify(DDPMPipeline(unet, DDPMScheduler()))
    with pytest.raises(UnsupportedError, match="int is not a supported pipeline"):
        sparsify(3)


def test_a_subclass_of_a_supported_pipeline_is_supported() -> None:
    from diffusers import WanPipeline

    class Own(WanPipeline):  # type: ignore[misc]
        pass

    pipe = tiny_wan()
    pipe.__class__ = Own
    with sparsify(pipe) as handle:
        latents_of(pipe)
        assert handle.summary().calls == 4 * 2 * 2


def test_a_pipeline_without_transformer_is_refused() -> None:
    pipe = tiny_wan()
    pipe.transformer = None
    with pytest.raises(UnsupportedError, match="has no transformer"):
        sparsify(pipe)


def test_sparse_already_is_an_error_that_says_how_to_go_on() -> None:
    pipe = tiny_wan()
    with sparsify(pipe), pytest.raises(UnsupportedError, match=r"sparse already.*remove\(\)"):
        sparsify(pipe)


def test_somebodys_own_processor_is_refused() -> None:
    pipe = tiny_wan()

    class Own:
        def __call__(self, attn: Any, hidden_states: Tensor, *rest: Any) -> Tensor:
            return hidden_states

    pipe.transformer.blocks[1].attn1.set_processor(Own())
    with pytest.raises(UnsupportedError, match=r"blocks\.1\.attn1 is Own, which sparsify does not"):
        sparsify(pipe)


def test_options_beside_a_built_method_are_refused() -> None:
    with pytest.raises(OptionError, match="top_p given beside a method"):
        sparsify(tiny_wan(), make_method("fg-attn"), top_p=0.5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": 5}, "a method is a name or a method that is built already, got 5"),
        ({"method": 5, "top_p": 0.5}, "a method is a name or a method that is built already"),
        ({"method": ["fg-attn"]}, "a method is a name or a method that is built already"),
        ({"method": ""}, "unknown method ''. Hint: choose from"),
        ({"preset": 5}, "a preset is a file's name, got 5"),
    ],
    ids=str,
)
def test_what_is_no_method_or_preset_is_refused(options: dict[str, Any], said: str) -> None:
    pipe = tiny_wan()
    before = state_of(pipe)
    with pytest.raises(OptionError, match=said):
        sparsify(pipe, **options)
    assert state_of(pipe) == before


def test_a_built_method_is_taken_as_it_is() -> None:
    method = make_method("fg-attn", top_p=0.5)
    with sparsify(tiny_wan(), method) as handle:
        assert handle.method is method


def test_a_sparse_pipeline_refuses_to_be_copied_or_saved_whole(tmp_path: Path) -> None:
    pipe = tiny_wan()
    with sparsify(pipe):
        for copied in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(UnsupportedError, match="cannot be copied or saved whole"):
                copied(pipe.transformer)
        with pytest.raises(UnsupportedError, match="cannot be copied or saved whole"):
            torch.save(pipe.transformer, tmp_path / "whole.pt")
        block = pipe.transformer.blocks[0]
        for part in (block, block.attn1.processor):
            save = partial(torch.save, f=tmp_path / "part.pt")
            takes: list[Any] = [copy.deepcopy, pickle.dumps, save]
            for take in takes:
                with pytest.raises(UnsupportedError, match="processor cannot be copied or saved"):
                    take(part)
        # weights alone can be.
        torch.save(pipe.transformer.state_dict(), tmp_path / "weights.pt")
        pipe.transformer.save_pretrained(tmp_path / "model")
    copy.deepcopy(pipe.transformer)
    torch.save(pipe.transformer, tmp_path / "whole.pt")


def gradients(transformer: Any) -> dict[str, torch.Tensor | None]:
    """Of a transformer's sum, by parameter; forwards and backwards with gradients on."""
    transformer.zero_grad()
    with torch.enable_grad():
        out = transformer(**transformer_inputs(5, 32, 32))[0]
        torch.autograd.backward(out.sum())
    return {name: p.grad for name, p in transformer.named_parameters()}


def test_dense_steps_have_their_gradients_and_sparse_ones_say_no_in_the_forward() -> None:
    pipe = tiny_wan()
    stock = gradients(pipe.transformer)
    assert any(grad is not None and bool(grad.any()) for grad in stock.values())
    for options in ({"method": "dense"}, {"dense_steps": 1.0}):
        with sparsify(pipe, **options):
            ours = gradients(pipe.transformer)
        for name, grad in stock.items():
            torch.testing.assert_close(ours[name], grad, rtol=1e-5, atol=1e-6)
    with sparsify(pipe, dense_steps=0):
        with pytest.raises(UnsupportedError, match="for inference only, and gradients are asked"):
            gradients(pipe.transformer)
        assert all(p.grad is None for p in pipe.transformer.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_a_compiled_block_says_so_too(implementation: str) -> None:
    pipe = tiny_wan()
    with sparsify(pipe, dense_steps=0, implementation=implementation):
        compile_blocks(pipe, backend="eager")
        with pytest.raises(Exception, match="for inference only, and gradients are asked"):
            gradients(pipe.transformer)
        assert all(p.grad is None for p in pipe.transformer.parameters())


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", slow_but(["aot_eager"], ["aot_eager", "inductor"]))
def test_dense_steps_have_their_gradients_compiled_too(backend: str) -> None:
    stock = gradients(tiny_wan().transformer)
    pipe = tiny_wan()
    with sparsify(pipe, dense_steps=1.0) as handle:
        compile_blocks(pipe, backend=backend)
        ours = gradients(pipe.transformer)
        assert handle.summary().dense_call_share == 1.0
    for name, grad in stock.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-5)


def test_a_transformer_that_outlives_its_pipeline_says_so() -> None:
    pipe = tiny_wan()
    transformer = pipe.transformer
    sparsify(pipe)
    del pipe
    gc.collect()
    with pytest.raises(UnsupportedError, match="no longer exists"):
        forward(transformer, transformer_inputs(5, 32, 32))


def test_a_scheduler_without_steps_is_refused() -> None:
    class Mute:
        pass

    pipe = tiny_wan()
    with sparsify(pipe):
        pipe.scheduler = Mute()
        with pytest.raises(UnsupportedError, match="Mute does not say which step"):
            forward(pipe.transformer, transformer_inputs(5, 32, 32))


# compilation


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("how", slow_but(["blocks", "whole"], ["whole", "in place", "blocks"]))
def test_a_full_graph_serves_all_layers_steps_and_branches(how: str) -> None:
    pipe, backend = tiny_wan(layers=4), CountingBackend()
    stock = latents_of(pipe)
    with sparsify(pipe, top_p=1.0, dense_steps=2) as handle:
        if how == "whole":
            pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=backend)
        elif how == "in place":
            pipe.transformer.compile(fullgraph=True, backend=backend)
        else:
            pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
        for _ in range(2):
            compiled = latents_of(pipe)
        assert backend.graphs == 1
        assert handle.summary().calls == 4 * 4 * 2
        assert handle.summary().dense_step_share == 0.5
    torch.testing.assert_close(compiled, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_dynamo")
def test_new_options_and_a_second_pipeline_need_no_new_graph() -> None:
    first, second, backend = tiny_wan(), tiny_wan(seed=5), CountingBackend()
    for pipe in (first, second):
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
    for top_p in (0.9, 0.3):
        with sparsify(first, top_p=top_p), sparsify(second, "spargeattn", order="rowmajor"):
            latents_of(first)
            latents_of(second)
    assert backend.graphs == 1


def compile_before(pipe: Any, how: str, **options: Any) -> None:
    if how == "whole":
        pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, **options)
    else:
        compile_blocks(pipe, **options)


# under Python 3.13.0 with torch 2.10 or 2.11 nothing tells compiled code of a new processor.
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_a_pipeline_compiled_before_is_made_sparse_and_restored(how: str) -> None:
    pipe, backend = tiny_wan(), CountingBackend()
    compile_before(pipe, how, backend=backend)
    stock = latents_of(pipe)
    for _ in range(2):
        with sparsify(pipe, top_p=0.3, dense_steps=0) as handle:
            assert not torch.equal(latents_of(pipe), stock)
            assert handle.summary().calls == 4 * 2 * 2
        assert torch.equal(latents_of(pipe), stock)
    assert backend.graphs == 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_compiled_code_that_looks_at_no_processor_is_an_error_and_not_a_dense_video(
    how: str,
) -> None:
    pipe = tiny_wan()
    unsafe = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    compile_before(pipe, how, backend="eager", options=unsafe)
    stock = latents_of(pipe)
    handle = sparsify(pipe, top_p=0.3, dense_steps=0)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"none of its attention calls came here.*reset"):
            latents_of(pipe)
    torch.compiler.reset()
    latents_of(pipe)
    assert handle.summary().calls == 4 * 2 * 2
    handle.remove()
    torch.compiler.reset()
    assert torch.equal(latents_of(pipe), stock)


@pytest.mark.parametrize("options", [{"dense_steps": 0}, {"dense_steps": 1.0}, {"method": "dense"}])
def test_blocks_that_run_what_was_captured_before_are_an_error(options: dict[str, Any]) -> None:
    pipe = tiny_wan()
    for block in pipe.transformer.blocks:
        captured = copy.deepcopy(block)
        block.forward = captured.forward
    stock = latents_of(pipe)
    with (
        sparsify(pipe, **options),
        pytest.raises(UnsupportedError, match=r"none of its attention calls came here.*made anew"),
    ):
        latents_of(pipe)
    assert torch.equal(latents_of(pipe), stock)


def test_showing_changes_to_compiled_code_leaves_modules_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vidsparse.pipelines.forwards._MUTE", True)
    pipe = tiny_wan()
    before = [(name, list(vars(one)["_modules"])) for name, one in pipe.transformer.named_modules()]
    stock = latents_of(pipe)
    with sparsify(pipe, top_p=1.0):
        latents_of(pipe)
    after = [(name, list(vars(one)["_modules"])) for name, one in pipe.transformer.named_modules()]
    assert after == before
    assert torch.equal(latents_of(pipe), stock)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_compiles_the_blocks() -> None:
    pipe = tiny_wan()
    stock = latents_of(pipe)
    with sparsify(pipe, top_p=1.0, dense_steps=1):
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
        compiled = latents_of(pipe)
    torch.testing.assert_close(compiled, stock, rtol=1e-4, atol=1e-4)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, vidsparse.pipelines, vidsparse.pipelines.models, vidsparse.pipelines.request\n"
        "print(sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
