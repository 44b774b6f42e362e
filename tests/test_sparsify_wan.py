"""``sparsify`` on stock Wan pipelines: what it computes, beside what else, and what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pipelines import forward, latents_of, tiny_transformer, tiny_wan, transformer_inputs
from torch import Tensor

from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.methods import make_method
from vidsparse.pipelines import sparsify

pytestmark = pytest.mark.usefixtures("one_thread")

# sizes in pixels and frames whose token grids are even, odd, and one frame long.
SHAPES = [(9, 64, 64), (13, 80, 48), (1, 48, 112)]


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
    with pytest.raises(OptionError, match=r"options \(top_p\) were given together"):
        sparsify(tiny_wan(), make_method("fg-attn"), top_p=0.5)


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


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, vidsparse.pipelines, vidsparse.pipelines.models, vidsparse.pipelines.request\n"
        "print(sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
