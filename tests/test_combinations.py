"""Sparse attention beside what people combine it with, on a tiny pipeline of every family.

The table of ``support_matrix.py`` says what works; here each of its cells is run.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import peft
import pytest
import torch
from counting_backend import CountingBackend
from family_checks import first_forward
from quick import slow_but
from support_matrix import COMBINATIONS, LIMITS, VARIANTS, VERSIONS, page
from tiny_families import PROMPTS, TINY, latents
from tiny_parts import unfitted

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.adapter import SparseProcessor, transformers_of
from vidsparse.pipelines.compilation import compile_blocks
from vidsparse.pipelines.families import FAMILIES
from vidsparse.pipelines.linear import quantize_linear
from vidsparse.pipelines.lookup import find_adapter

pytestmark = pytest.mark.usefixtures("one_thread")

Prepare = Callable[[Any], object]


def works(combination: str, *, quick: str | None = None) -> Any:
    """The variants that a combination works on; all but ``quick``, where given, are slow."""
    names = [name for name in VARIANTS.values() if (combination, name) not in LIMITS]
    return pytest.mark.parametrize("name", slow_but(names if quick is None else [quick], names))


def check(name: str, prepare: Prepare, *, steps: int = 2, **changes: Any) -> torch.Tensor:
    """Hold a full mask beside ``prepare`` to the stock pipeline beside it, in both orders.

    Returns what the stock pipeline makes.
    """
    build = TINY[name].build
    stock = build()
    prepare(stock)
    call = {"num_inference_steps": steps, **changes}
    expected = latents(name, stock, **call)
    for first in (True, False):
        pipe = build()
        if first:
            prepare(pipe)
        with sparsify(pipe, top_p=1.0, dense_steps=1) as handle:
            if not first:
                prepare(pipe)
            ours = latents(name, pipe, **call)
            summary = handle.summary()
        assert summary.notes == ()
        assert summary.computed == 1.0
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(expected), **CLOSE)
    return expected


CLOSE: Any = {"rtol": 1e-4, "atol": 1e-4}


@cache
def plain(name: str, steps: int) -> torch.Tensor:
    """What the stock pipeline makes with nothing beside it."""
    return latents(name, TINY[name].build(), num_inference_steps=steps)


# compilation


def compile_whole(pipe: Any, backend: Any) -> None:
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=backend)


def compile_regions(pipe: Any, backend: Any) -> None:
    compile_blocks(pipe, backend=backend)


def check_compiled(name: str, compile: Callable[[Any, Any], None]) -> None:
    torch._dynamo.reset()
    pipe, backend = TINY[name].build(), CountingBackend()
    with sparsify(pipe, top_p=1.0, dense_steps=1) as handle:
        compile(pipe, backend)
        ours = latents(name, pipe, num_inference_steps=2)
        assert handle.summary().dense_step_share == 0.5
        assert handle.summary().notes == ()
    torch.testing.assert_close(ours, plain(name, 2), **CLOSE)
    # dense and sparse steps, layers and branches share the graphs that the stock pipeline has,
    # which are no fewer than one.
    assert backend.graphs > 0
    if backend.graphs > 1:
        torch._dynamo.reset()
        pipe, stock = TINY[name].build(), CountingBackend()
        compile(pipe, stock)
        latents(name, pipe, num_inference_steps=2)
        assert backend.graphs == stock.graphs


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@works("compile")
def test_compile(name: str) -> None:
    check_compiled(name, compile_whole)


@pytest.mark.usefixtures("fresh_dynamo")
@works("compile-blocks", quick="wan")
def test_compile_blocks(name: str) -> None:
    check_compiled(name, compile_regions)


# weights


def _group_offload(pipe: Any, kind: str) -> None:
    pipe.transformer.enable_group_offload(
        onload_device=torch.device("cpu"), offload_type=kind, num_blocks_per_group=1
    )


GROUP_OFFLOADS = [partial(_group_offload, kind=kind) for kind in ("leaf_level", "block_level")]


def lora_of(name: str) -> dict[str, torch.Tensor]:
    """A LoRA file's contents, with weights large enough to see."""
    transformer = TINY[name].build().transformer
    transformer.add_adapter(
        peft.LoraConfig(r=2, target_modules=["to_q", "to_query", "to_v"], init_lora_weights=False)
    )
    weights = peft.get_peft_model_state_dict(transformer, adapter_name="default")
    return {f"transformer.{key}": value for key, value in weights.items()}


@works("lora", quick="wan")
def test_lora(name: str) -> None:
    weights = lora_of(name)

    def load(pipe: Any) -> None:
        if hasattr(pipe, "load_lora_weights"):
            pipe.load_lora_weights(dict(weights), adapter_name="style")
        else:
            pipe.transformer.load_lora_adapter(dict(weights), adapter_name="style")

    def scale(pipe: Any) -> None:
        load(pipe)
        pipe.transformer.set_adapters(["style"], [0.5])

    def fuse(pipe: Any) -> None:
        load(pipe)
        pipe.transformer.fuse_lora()

    def unload(pipe: Any) -> None:
        load(pipe)
        pipe.transformer.unload_lora()

    loaded, scaled, fused = (check(name, prepare) for prepare in (load, scale, fuse))
    # of as many steps as what it is held against.
    unstyled = plain(name, 2)
    for styled in (loaded, scaled, fused):
        assert not torch.allclose(styled, unstyled, **CLOSE)
    assert not torch.allclose(loaded, scaled, **CLOSE)
    assert torch.equal(check(name, unload), unstyled)


@works("layerwise-casting", quick="wan")
def test_layerwise_casting(name: str) -> None:
    check(
        name,
        lambda pipe: pipe.transformer.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
        ),
    )


@works("torchao", quick="wan")
def test_torchao(name: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def quantize(pipe: Any) -> None:
        quantize_(pipe.transformer, Int8WeightOnlyConfig())

    check(name, quantize)


@cache
def stock_linear(name: str, linear: str) -> torch.Tensor:
    """What the stock pipeline makes with linear layers in that format."""
    return latents(name, with_linear(name, linear), num_inference_steps=2)


def with_linear(name: str, linear: str) -> Any:
    pipe = TINY[name].build()
    for transformer in transformers_of(pipe, find_adapter(pipe)):
        unfitted(transformer)
    # the tiny models have two blocks of narrow layers.
    quantize_linear(pipe, linear, edges=0, smallest=16)
    return pipe


def check_linear(name: str, *prepares: Prepare, linear: str = "int8") -> None:
    """Hold a full mask over such layers, beside each of these, to the stock pipeline over such.

    What differs in the last bit may round to another unit in a later layer, so the two may be as
    far apart as rounding has put either of them, and no farther.
    """
    exact, expected = plain(name, 2), stock_linear(name, linear)
    assert 0 < (expected - exact).norm() < 0.2 * exact.norm()
    for prepare in prepares:
        pipe = with_linear(name, linear)
        with sparsify(pipe, top_p=1.0, dense_steps=1) as handle:
            prepare(pipe)
            ours = latents(name, pipe, num_inference_steps=2)
            assert handle.summary().notes == ()
            assert handle.summary().computed == 1.0
        assert (ours - expected).norm() <= (expected - exact).norm()


@works("linear", quick="wan")
def test_linear(name: str) -> None:
    check_linear(name, lambda pipe: None)


@pytest.mark.slow
@works("linear-offload")
def test_linear_offload(name: str) -> None:
    check_linear(
        name,
        *GROUP_OFFLOADS,
        lambda pipe: accelerate.cpu_offload_with_hook(pipe.transformer, torch.device("cpu")),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@works("linear-compile")
def test_linear_compile(name: str) -> None:
    backend = CountingBackend()
    check_linear(name, lambda pipe: compile_regions(pipe, backend))
    assert backend.graphs > 0


@pytest.mark.usefixtures("bf16_cpu")
@works("linear-bf16", quick="wan")
def test_linear_bf16(name: str) -> None:
    check_linear(name, lambda pipe: None, linear="bf16")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo", "bf16_cpu")
@works("linear-bf16-compile")
def test_linear_bf16_compile(name: str) -> None:
    backend = CountingBackend()
    check_linear(name, lambda pipe: compile_regions(pipe, backend), linear="bf16")
    assert backend.graphs > 0


# memory


@works("group-offload", quick="wan")
def test_group_offload(name: str) -> None:
    for offload in GROUP_OFFLOADS:
        check(name, offload)


@works("model-offload", quick="wan")
def test_model_offload(name: str) -> None:
    # enable_model_cpu_offload wants an accelerator; these are the hooks that it puts in.
    check(
        name, lambda pipe: accelerate.cpu_offload_with_hook(pipe.transformer, torch.device("cpu"))
    )


@works("vae-tiling", quick="wan")
def test_vae_tiling(name: str) -> None:
    check(name, lambda pipe: pipe.vae.enable_tiling(), output_type="np")


# step caches


def check_cache(name: str, config: Callable[[], Any]) -> None:
    check(name, lambda pipe: pipe.transformer.enable_cache(config()), steps=6)
    pipe = TINY[name].build()
    pipe.transformer.enable_cache(config())
    with sparsify(pipe, top_p=0.5, dense_steps=0, reuse=2) as handle:
        assert bool(latents(name, pipe, num_inference_steps=6).isfinite().all())
        called = handle.trace.density_map()
    # some step runs the whole transformer, and some step leaves its last layer out. steps at the
    # end that leave all out have no row.
    assert any(None not in row for row in called)
    assert any(row[-1] is None for row in called) or len(called) < 6


@works("first-block-cache", quick="wan")
def test_first_block_cache(name: str) -> None:
    check_cache(name, lambda: diffusers.FirstBlockCacheConfig(threshold=10.0))


@works("mag-cache", quick="wan")
def test_mag_cache(name: str) -> None:
    check_cache(
        name,
        lambda: diffusers.MagCacheConfig(
            mag_ratios=[1.0] * 6, num_inference_steps=6, threshold=10.0, retention_ratio=0.2
        ),
    )


# processors


@works("fuse-qkv", quick="wan")
def test_fuse_qkv(name: str) -> None:
    check(name, lambda pipe: pipe.transformer.fuse_qkv_projections())
    # back and forth while sparse.
    pipe = TINY[name].build()
    expected = latents(name, pipe)
    with sparsify(pipe, top_p=1.0, dense_steps=0) as handle:
        pipe.transformer.fuse_qkv_projections()
        latents(name, pipe)
        pipe.transformer.unfuse_qkv_projections()
        torch.testing.assert_close(latents(name, pipe), expected, **CLOSE)
        assert handle.summary().computed == 1.0


def test_cogvideox_fused_while_sparse_and_unfused_after_removal_has_nothing_of_ours(
    tmp_path: Path,
) -> None:
    pipe = TINY["cogvideox"].build()
    arguments = first_forward("cogvideox", pipe)
    stock = {name: type(one) for name, one in pipe.transformer.attn_processors.items()}
    with sparsify(pipe):
        pipe.transformer.fuse_qkv_projections()
    pipe.transformer.unfuse_qkv_projections()
    assert {name: type(one) for name, one in pipe.transformer.attn_processors.items()} == stock
    copy.deepcopy(pipe.transformer)
    torch.save(pipe.transformer, tmp_path / "whole.pt")
    with torch.enable_grad():
        torch.autograd.backward(pipe.transformer(**arguments)[0].sum())
    assert pipe.transformer.transformer_blocks[0].attn1.to_q.weight.grad is not None


def test_cogvideox_unfused_after_removal_is_the_stock_model() -> None:
    pipe = TINY["cogvideox"].build()
    expected = latents("cogvideox", pipe)
    handle = sparsify(pipe, top_p=0.3, dense_steps=0)
    pipe.transformer.fuse_qkv_projections()
    handle.remove()
    # the host puts back the processors that it found, which were ours.
    pipe.transformer.unfuse_qkv_projections()
    assert torch.equal(latents("cogvideox", pipe), expected)
    with sparsify(pipe, top_p=0.3, dense_steps=0) as handle:
        latents("cogvideox", pipe)
        assert handle.summary().selected is not None
    processors = pipe.transformer.attn_processors.values()
    assert not any(isinstance(processor, SparseProcessor) for processor in processors)
    assert torch.equal(latents("cogvideox", pipe), expected)


@works("save", quick="wan")
def test_save(name: str, tmp_path: Path) -> None:
    pipe = TINY[name].build()
    expected = latents(name, pipe, prompts=PROMPTS)
    with sparsify(pipe, top_p=0.3, dense_steps=0):
        pipe.save_pretrained(str(tmp_path))
    if isinstance(pipe, diffusers.ModularPipeline):
        loaded = type(pipe)(pipe.blocks, pretrained_model_name_or_path=str(tmp_path))
        loaded.load_components()
    else:
        loaded = type(pipe).from_pretrained(tmp_path, local_files_only=True)
    # weights of a file lie at odd addresses, from which products are added in another order.
    loaded.transformer = copy.deepcopy(loaded.transformer)
    loaded.set_progress_bar_config(disable=True)
    for key, value in vars(pipe).items():
        if key.endswith(("_max_length", "_tokens")):
            setattr(loaded, key, value)
    assert torch.equal(latents(name, loaded, prompts=PROMPTS), expected)
    assert not [p for p in tmp_path.rglob("*.json") if "vidsparse" in p.read_text()]


# what does not work


def attempt(combination: str, name: str) -> None:
    """Do what a combination asks of the stock pipeline, up to the point where it fails."""
    pipe, backend = TINY[name].build(), CountingBackend()
    transformer = pipe.transformer
    first_block = diffusers.FirstBlockCacheConfig(threshold=10.0)
    mag = diffusers.MagCacheConfig(mag_ratios=[1.0] * 3, num_inference_steps=3)
    {
        "compile": lambda: compile_whole(pipe, backend),
        "first-block-cache": lambda: transformer.enable_cache(first_block),
        "mag-cache": lambda: transformer.enable_cache(mag),
        "lora": lambda: lora_of(name),
        "fuse-qkv": lambda: transformer.fuse_qkv_projections(),
    }[combination]()
    latents(name, pipe)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("combination", "name"), [cell for cell, limit in LIMITS.items() if limit.host]
)
def test_what_the_host_cannot_do_fails_without_us_too(combination: str, name: str) -> None:
    # what the host raises is of no class that one could name.
    with pytest.raises(Exception, match=LIMITS[combination, name].error):
        attempt(combination, name)


@pytest.mark.parametrize("name", list(VARIANTS.values()))
def test_parallelism_is_refused_before_and_after(name: str) -> None:
    # of Wan, what is not Ulysses is refused.
    error = "context parallelism"
    pipe = TINY[name].build()
    with sparsify(pipe):
        for module in pipe.transformer.modules():
            if isinstance(getattr(module, "processor", None), SparseProcessor):
                # what enable_parallelism does to the model, then to every processor that has such
                # an attribute.
                config = pipe.transformer._parallel_config = object()
                with pytest.raises(UnsupportedError, match=error):
                    module.processor._parallel_config = config
                # so that it can be asked again once the handle is removed.
                assert pipe.transformer._parallel_config is None
    pipe.transformer._parallel_config = object()
    with pytest.raises(UnsupportedError, match=error):
        sparsify(pipe)


def test_the_page_is_current() -> None:
    assert set(VARIANTS) == {family.name for family in FAMILIES}
    assert {combination for combination, _ in LIMITS} <= set(COMBINATIONS)
    # a test of this module for every line, save the one that is refused throughout.
    tested = {name.removeprefix("test_").replace("_", "-") for name in globals()}
    # those of --cache are in test_caching.py and test_guidance_cache.py, several processes in
    # test_parallel.py.
    assert set(COMBINATIONS) - tested == {
        "context-parallel",
        "first-block",
        "guidance",
        "parallelize",
        "taylorseer",
    }
    committed = Path(__file__).parents[1] / "docs" / "support.md"
    assert committed.read_text(encoding="utf-8") == page(), (
        "docs/support.md is old. Hint: python tests/support_matrix.py docs/support.md"
    )


def test_the_oldest_hosts_are_those_that_can_be_installed() -> None:
    asked = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    for host, oldest, _ in VERSIONS:
        name = host.partition(" ")[0]
        assert set(re.findall(rf'"{name}>=([\d.]+)', asked)) == {oldest}
