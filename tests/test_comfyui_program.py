"""The nodes inside the real ComfyUI, on a CPU, with tiny random models of its own classes.

``VIDSPARSE_COMFYUI`` names a checkout of it, and its requirements must be installed. The protocol
alone, without ComfyUI, is in ``test_comfyui.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfyui_workflows
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

HOST = os.environ.get("VIDSPARSE_COMFYUI")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(HOST is None, reason="VIDSPARSE_COMFYUI names no checkout of ComfyUI"),
]

if HOST is not None:
    sys.path.insert(0, HOST)
    from comfy.cli_args import args

    args.cpu = True
    import comfy.model_patcher
    import comfy.sample
    import comfy.supported_models as supported

    from vidsparse.apps.comfyui import NODE_CLASS_MAPPINGS as NODES
    from vidsparse.apps.comfyui.folder import write_folder
    from vidsparse.apps.comfyui.session import session_of

STEPS, CFG = 4, 3.0

WAN = {
    "image_model": "wan2.1", "dim": 128, "num_heads": 2, "num_layers": 3, "ffn_dim": 128,
    "freq_dim": 32, "text_dim": 32, "in_dim": 16,
}  # fmt: skip
HUNYUAN = {
    "image_model": "hunyuan_video", "in_channels": 16, "out_channels": 16, "context_in_dim": 32,
    "vec_in_dim": 24, "hidden_size": 128, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2,
    "depth_single_blocks": 2, "axes_dim": [16, 24, 24], "theta": 256, "patch_size": [1, 2, 2],
    "qkv_bias": True, "guidance_embed": True, "byt5": False, "meanflow": False,
}  # fmt: skip
LTX = {
    "image_model": "ltxv", "in_channels": 128, "cross_attention_dim": 128, "num_layers": 2,
    "attention_head_dim": 64, "num_attention_heads": 2, "caption_channels": 32,
}  # fmt: skip


def patcher(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights as ComfyUI's loaders hand one on."""
    config.set_inference_dtype(dtype, None if dtype == torch.float32 else torch.float32)
    model = config.get_model({})
    generator = torch.Generator().manual_seed(3)
    for value in model.diffusion_model.parameters():
        noise = torch.randn(value.shape, generator=generator)
        scale = 1.5 * value[0].numel() ** -0.5 if value.ndim > 1 else 0.3
        value.data.copy_(noise * scale + (value.ndim == 1))
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def wan(**changes: Any) -> Any:
    """Wan from text."""
    dtype = changes.pop("dtype", torch.float32)
    return patcher(supported.WAN21_T2V({**WAN, "model_type": "t2v", **changes}), dtype)


def wan_from_image() -> Any:
    return patcher(supported.WAN21_I2V({**WAN, "model_type": "i2v", "in_dim": 36}))


def hunyuan() -> Any:
    """With what later versions ask for as well, as their loaders have it for such weights."""
    from comfy.ldm.hunyuan_video.model import HunyuanVideoParams

    later = {"use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False}
    asked = {field.name for field in dataclasses.fields(HunyuanVideoParams)}
    more = {name: value for name, value in later.items() if name in asked}
    return patcher(supported.HunyuanVideo({**HUNYUAN, **more}))


def ltx() -> Any:
    return patcher(supported.LTXV(LTX))


def with_lora(model: Any) -> Any:
    """What LoraLoader does: patches of weights on a clone."""
    clone = model.clone()
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: (torch.randn(value.shape, generator=generator) * 0.02,)
        for name, value in model.model.state_dict().items()
        if name.endswith("self_attn.q.weight")
    }
    assert clone.add_patches({name: ("diff", w) for name, w in weights.items()}, 1.0)
    return clone


class StoredInt8(torch.nn.Linear):
    """Weights kept as int8 and taken apart at every call, as GGUF's loader has them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.comfy_cast_weights = True

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().max() / 127
        return F.linear(x, (self.weight / scale).round().to(torch.int8).to(x) * scale, self.bias)


def wan_with_own_linears() -> Any:
    import comfy.ops

    class Operations(comfy.ops.manual_cast):  # type: ignore[misc]
        Linear = StoredInt8

    config = supported.WAN21_T2V({**WAN, "model_type": "t2v"})
    config.custom_operations = Operations
    return patcher(config)


def sample(model: Any, *, cfg: float = CFG, sampler: str = "euler", steps: int = STEPS) -> Tensor:
    """The latent of one run of ComfyUI's sampler."""
    channels = model.get_model_object("latent_format").latent_channels
    # no multiple of a patch, where the model itself can: HunyuanVideo's cannot.
    height = 17 if type(model.model.diffusion_model).__name__ == "WanModel" else 16
    shape = (1, channels, 5, 10, 8) if channels == 128 else (1, channels, 5, height, 16)
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(shape, generator=generator)
    texts = torch.randn(2, 1, 11, 32, generator=generator)
    pooled = torch.randn(2, 1, 24, generator=generator)
    mask = {"attention_mask": torch.ones(1, 11, dtype=torch.int64)} if channels == 128 else {}
    conditions = [
        [[text, {"pooled_output": pool, "guidance": 6.0, **mask}]]
        for text, pool in zip(texts, pooled, strict=True)
    ]
    return comfy.sample.sample(
        model, noise, steps, cfg, sampler, "simple", *conditions, torch.zeros(shape),
        disable_pbar=True, seed=1,
    )  # fmt: skip


def sparse(model: Any, **changes: Any) -> Any:
    settings = {
        "method": "fg-attn", "quality": 1.0, "tile": "auto", "means": "auto",
        "start_percent": 0.0, "end_percent": 1.0, "min_tokens": 0,
    }  # fmt: skip
    return NODES["VidsparseModel"]().run(model, **{**settings, **changes})[0]


def report(model: Any, latent: Tensor) -> str:
    return NODES["VidsparseReport"]().run({"samples": latent}, model)["result"][1]


def in_fp64(model: Any) -> Any:
    """The same model with exact attention: stock attention is wrong by its distance to it."""

    def exact(
        stock: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        out: Tensor = stock(q.double(), k.double(), v.double(), heads, *args, **kwargs)
        return out.to(q.dtype)

    clone = model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = exact
    return clone


def check_full_mask(model: Any) -> str:
    """Sampling at full mask errs at most twice as much as stock attention; returns the report."""
    truth, stock = sample(in_fp64(model)), sample(model)
    ours_model = sparse(model)
    ours = sample(ours_model)
    floor = torch.finfo(ours.dtype).eps * truth.abs().max()
    error, allowed = ((x - truth).abs().max().item() for x in (ours, stock))
    print(f"largest error: ours {error:.2e}, stock {allowed:.2e}, floor {floor:.2e}")
    assert error <= max(2 * allowed, floor)
    trace = session_of(ours_model).engine.trace
    assert trace.cells
    assert all(cell.sparse for cell in trace.cells)
    assert trace.summary().computed == 1.0
    return report(ours_model, ours)


MODELS = [
    wan,
    wan_from_image,
    hunyuan,
    ltx,
    lambda: wan(dtype=torch.float8_e4m3fn),
    lambda: with_lora(wan()),
    wan_with_own_linears,
]
IDS = ["wan", "wan-from-image", "hunyuan", "ltx", "fp8-weights", "lora", "own-linears"]


@pytest.mark.parametrize("build", MODELS, ids=IDS)
def test_a_sampler_run_at_full_mask_is_the_stock_one(build: Callable[[], Any]) -> None:
    text = check_full_mask(build())
    assert "NOTHING" not in text


def test_the_weights_of_those_models_are_what_their_names_say() -> None:
    block = wan(dtype=torch.float8_e4m3fn).model.diffusion_model.blocks[0]
    assert block.self_attn.q.weight.dtype == torch.float8_e4m3fn
    block = wan_with_own_linears().model.diffusion_model.blocks[0]
    assert type(block.self_attn.q) is StoredInt8
    plain = wan()
    assert not torch.equal(sample(with_lora(plain)), sample(plain))


def test_guidance_branches_apart_are_the_stock_ones_too() -> None:
    model = wan()
    # more memory than there is for both at once.
    model.model.memory_usage_factor = 1e12
    check_full_mask(model)
    ours = sparse(model)
    sample(ours)
    branches = {cell.branch for cell in session_of(ours).engine.trace.cells}
    assert branches == {"conditional", "unconditional"}


def test_every_layer_and_step_is_told_apart() -> None:
    ours = sparse(wan())
    sample(ours)
    cells = session_of(ours).engine.trace.cells
    assert [(c.step, c.layer) for c in cells] == [(s, n) for s in range(STEPS) for n in range(3)]
    # no video self-attention is taken for anything else: one cross-attention a block.
    assert list(session_of(ours).others.values()) == [STEPS * 3]


def test_samplers_that_run_a_step_twice_keep_their_steps() -> None:
    ours = sparse(wan())
    sample(ours, sampler="heun")
    cells = session_of(ours).engine.trace.cells
    assert {cell.step for cell in cells} == set(range(STEPS))
    assert len(cells) == 3 * (2 * STEPS - 1)


def test_most_calls_are_sparse_at_top_p_08_by_the_report() -> None:
    ours = sparse(wan(), quality=0.8, start_percent=0.2)
    latent = sample(ours, steps=8)
    trace = session_of(ours).engine.trace
    share = sum(cell.sparse for cell in trace.cells) / len(trace.cells)
    text = report(ours, latent)
    print(text)
    assert share > 0.7
    assert all(cell.computed.mean() < 1 for cell in trace.cells if cell.sparse)
    assert f"sparse: {round(share * len(trace.cells))} calls" in text
    assert "step before start_percent 0.2" in text


def test_the_model_that_came_in_is_left_as_it_was() -> None:
    model = wan()
    before = sample(model)
    ours = sparse(model, quality=0.5)
    assert not torch.equal(sample(ours), before)
    assert torch.equal(sample(model), before)
    assert model.model_options == {"transformer_options": {}}
    assert not model.attachments
    assert not any(model.wrappers.values())
    # what a run leaves in the sparse model is its trace alone.
    assert "optimized_attention_override" not in ours.model_options["transformer_options"]


def test_an_override_that_is_there_serves_the_dense_calls() -> None:
    model = in_fp64(wan())
    ours = sparse(model, start_percent=1.0)
    assert torch.equal(sample(ours), sample(model))
    assert "NOTHING WAS SPARSE: step before start_percent 1" in report(ours, torch.zeros(1))


def test_an_override_set_by_a_later_node_is_chained_too() -> None:
    later = in_fp64(sparse(wan(), quality=0.8))
    sample(later)
    assert session_of(later).ran_sparse


def test_an_error_in_a_run_leaves_no_trace_in_the_next() -> None:
    ours = sparse(wan(), quality=0.8)
    first = sample(ours)
    engine = session_of(ours).engine
    kernel = engine.kernel

    def out_of_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    engine.kernel = out_of_memory
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        sample(ours)
    engine.kernel = kernel
    assert torch.equal(sample(ours), first)


def test_comfyui_loads_the_folder_that_is_written(tmp_path: Path) -> None:
    import nodes

    (tmp_path / "custom_nodes").mkdir()
    assert asyncio.run(nodes.load_custom_node(str(write_folder(tmp_path))))
    assert nodes.NODE_CLASS_MAPPINGS["VidsparseModel"] is NODES["VidsparseModel"]
    assert nodes.NODE_DISPLAY_NAME_MAPPINGS["VidsparseReport"] == "vidsparse report"


def definitions() -> dict[str, Any]:
    """ComfyUI's own nodes, and ours."""
    import nodes

    found = {**nodes.NODE_CLASS_MAPPINGS, **NODES}
    for file in ("wan", "hunyuan", "lt", "model_advanced", "video", "custom_sampler", "flux",
                 "preview_any"):  # fmt: skip
        module = importlib.import_module(f"comfy_extras.nodes_{file}")
        found |= getattr(module, "NODE_CLASS_MAPPINGS", {})
        if hasattr(module, "comfy_entrypoint"):
            for cls in asyncio.run(_listed(module)):
                found[cls.GET_SCHEMA().node_id] = cls
    return found


async def _listed(module: Any) -> Any:
    return await (await module.comfy_entrypoint()).get_node_list()


def test_every_node_of_the_workflows_is_as_comfyui_defines_it() -> None:
    known = definitions()
    for name, text in comfyui_workflows.files().items():
        for node in json.loads(text)["nodes"]:
            described = known[node["type"]].INPUT_TYPES()
            inputs = {**described.get("required", {}), **described.get("optional", {})}
            sockets = {one["name"]: one["type"] for one in node["inputs"]}
            for socket, of in sockets.items():
                # ComfyUI's own type names compare as text.
                assert inputs[socket][0] == of, (name, node["type"], socket)
            left = [each for each in inputs if each not in sockets]
            # what the page adds: how a seed goes on, and the button of an image.
            added = sum("seed" in each for each in left) + (node["type"] == "LoadImage")
            if node["type"] == "CreateVideo":
                left.remove("audio")
            values = node["widgets_values"]
            assert len(values) == len(left) + added, (name, node["type"], left)
            required = described.get("required", {})
            linked = {one["name"] for one in node["inputs"] if one["link"] is not None}
            assert {each for each in required if each in sockets} <= linked, (name, node["type"])
            outputs = known[node["type"]].RETURN_TYPES
            assert [one["type"] for one in node["outputs"]] == [str(of) for of in outputs] or (
                node["type"] == "CLIPTextEncode"
            )


def test_a_compiled_model_leaves_its_graph_for_the_call() -> None:
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    model = wan(num_layers=1)
    ours = sparse(model, quality=0.8)
    plain = sample(ours, steps=2)
    set_torch_compile_wrapper(model=ours, backend="eager")
    torch.testing.assert_close(sample(ours, steps=2), plain, rtol=1e-4, atol=1e-4)
    assert all(cell.sparse for cell in session_of(ours).engine.trace.cells)
