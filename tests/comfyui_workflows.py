"""Writes the example workflows of the ComfyUI nodes, and says what is in them.

    python tests/comfyui_workflows.py apps/comfyui/example_workflows

A workflow is a graph in the form that ComfyUI's page saves. ``test_comfyui_folder.py`` holds the
files to what this writes, ``test_comfyui_program.py`` every node in them to ComfyUI's definitions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# sockets that links go into, and outputs; what is a widget has its value in a node's list.
TYPES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "UNETLoader": ({}, ("MODEL",)),
    "CLIPLoader": ({}, ("CLIP",)),
    "DualCLIPLoader": ({}, ("CLIP",)),
    "VAELoader": ({}, ("VAE",)),
    "CheckpointLoaderSimple": ({}, ("MODEL", "CLIP", "VAE")),
    "CLIPVisionLoader": ({}, ("CLIP_VISION",)),
    "LoadImage": ({}, ("IMAGE", "MASK")),
    "CLIPVisionEncode": ({"clip_vision": "CLIP_VISION", "image": "IMAGE"}, ("CLIP_VISION_OUTPUT",)),
    "CLIPTextEncode": ({"clip": "CLIP"}, ("CONDITIONING",)),
    "LoraLoaderModelOnly": ({"model": "MODEL"}, ("MODEL",)),
    "ModelSamplingSD3": ({"model": "MODEL"}, ("MODEL",)),
    "FluxGuidance": ({"conditioning": "CONDITIONING"}, ("CONDITIONING",)),
    "VidsparseModel": ({"model": "MODEL"}, ("MODEL",)),
    "VidsparseReport": ({"latent": "LATENT", "model": "MODEL"}, ("LATENT", "STRING", "IMAGE")),
    "EmptyHunyuanLatentVideo": ({}, ("LATENT",)),
    "EmptyLTXVLatentVideo": ({}, ("LATENT",)),
    "LTXVConditioning": (
        {"positive": "CONDITIONING", "negative": "CONDITIONING"},
        ("CONDITIONING", "CONDITIONING"),
    ),
    "LTXVScheduler": ({"latent": "LATENT"}, ("SIGMAS",)),
    "KSamplerSelect": ({}, ("SAMPLER",)),
    "WanImageToVideo": (
        {
            "positive": "CONDITIONING",
            "negative": "CONDITIONING",
            "vae": "VAE",
            "clip_vision_output": "CLIP_VISION_OUTPUT",
            "start_image": "IMAGE",
        },
        ("CONDITIONING", "CONDITIONING", "LATENT"),
    ),
    "KSampler": (
        {
            "model": "MODEL",
            "positive": "CONDITIONING",
            "negative": "CONDITIONING",
            "latent_image": "LATENT",
        },
        ("LATENT",),
    ),
    "SamplerCustom": (
        {
            "model": "MODEL",
            "positive": "CONDITIONING",
            "negative": "CONDITIONING",
            "sampler": "SAMPLER",
            "sigmas": "SIGMAS",
            "latent_image": "LATENT",
        },
        ("LATENT", "LATENT"),
    ),
    "VAEDecode": ({"samples": "LATENT", "vae": "VAE"}, ("IMAGE",)),
    "CreateVideo": ({"images": "IMAGE"}, ("VIDEO",)),
    "SaveVideo": ({"video": "VIDEO"}, ()),
    "PreviewImage": ({"images": "IMAGE"}, ()),
    "PreviewAny": ({"source": "*"}, ()),
}
TYPES["KSamplerAdvanced"] = TYPES["KSampler"]

_SEED = (42, "fixed")
_PROMPT = "a red fox trots through fresh snow between birches, the camera follows at its height"
_NEGATIVE = "blurry, distorted, static, subtitles, watermark"

_COLUMN, _ROW = 400, 260


@dataclass(frozen=True)
class Output:
    """An output of a node, as links begin in it."""

    node: int
    slot: int = 0


@dataclass
class Graph:
    """A workflow in the making."""

    nodes: list[dict[str, Any]] = field(default_factory=list)
    links: list[list[Any]] = field(default_factory=list)
    _columns: dict[int, int] = field(default_factory=dict)

    def add(self, kind: str, *widgets: Any, title: str = "", **inputs: Output) -> Output:
        """Add a node right of all that it takes from; its first output."""
        sockets, outputs = TYPES[kind]
        assert inputs.keys() <= sockets.keys(), kind
        number = len(self.nodes) + 1
        column = max((self._column(one.node) for one in inputs.values()), default=-1) + 1
        row = self._columns.get(column, 0)
        self._columns[column] = row + 1
        entries: list[dict[str, Any]] = []
        for name, of in sockets.items():
            link = None
            if name in inputs:
                source = inputs[name]
                link = len(self.links) + 1
                place = len(entries)
                self.links.append([link, source.node, source.slot, number, place, of])
                kept = self.nodes[source.node - 1]["outputs"][source.slot]["links"]
                kept.append(link)
            entries.append({"name": name, "type": of, "link": link})
        self.nodes.append(
            {
                "id": number,
                "type": kind,
                **({"title": title} if title else {}),
                "pos": [column * _COLUMN, row * _ROW],
                "size": [340, 200],
                "flags": {},
                "order": number - 1,
                "mode": 0,
                "inputs": entries,
                "outputs": [{"name": of, "type": of, "links": []} for of in outputs],
                "properties": {"Node name for S&R": kind},
                "widgets_values": list(widgets),
            }
        )
        return Output(number)

    def _column(self, node: int) -> int:
        return int(self.nodes[node - 1]["pos"][0]) // _COLUMN

    def to_json(self) -> dict[str, Any]:
        """The graph as ComfyUI's page saves it."""
        return {
            "last_node_id": len(self.nodes),
            "last_link_id": len(self.links),
            "nodes": self.nodes,
            "links": self.links,
            "groups": [],
            "config": {},
            "extra": {},
            "version": 0.4,
        }


def _model(graph: Graph, file: str, lora: str | None, shift: float | None) -> Output:
    """A diffusion model with its LoRA, where there is one, and sparse attention behind both."""
    model = graph.add("UNETLoader", file, "default")
    if lora is not None:
        model = graph.add("LoraLoaderModelOnly", lora, 1.0, model=model)
    if shift is not None:
        model = graph.add("ModelSamplingSD3", shift, model=model)
    return _sparse(graph, model)


def _sparse(graph: Graph, model: Output) -> Output:
    return graph.add(
        "VidsparseModel", "fg-attn", 0.0, "auto", "auto", 0.2, 1.0, 4096, "", "", 0, model=model
    )


def _prompts(graph: Graph, clip: Output) -> tuple[Output, Output]:
    return (
        graph.add("CLIPTextEncode", _PROMPT, title="prompt", clip=clip),
        graph.add("CLIPTextEncode", _NEGATIVE, title="negative prompt", clip=clip),
    )


def _finish(graph: Graph, latent: Output, models: list[Output], vae: Output, fps: float) -> Graph:
    """Reports of every model, then the video."""
    for model in models:
        latent = graph.add("VidsparseReport", latent=latent, model=model)
        graph.add("PreviewAny", source=Output(latent.node, 1))
        graph.add("PreviewImage", images=Output(latent.node, 2))
    images = graph.add("VAEDecode", samples=latent, vae=vae)
    video = graph.add("CreateVideo", fps, images=images)
    graph.add("SaveVideo", "video/vidsparse", "auto", "auto", video=video)
    return graph


def _wan_parts(graph: Graph) -> tuple[Output, Output, Output]:
    clip = graph.add("CLIPLoader", "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan", "default")
    return graph.add("VAELoader", "wan_2.1_vae.safetensors"), *_prompts(graph, clip)


def _wan_start(graph: Graph, *, image: bool, vision: bool) -> tuple[Output, Output, Output, Output]:
    """VAE, both prompts and the latent to begin with, of 81 frames at 480p."""
    vae, positive, negative = _wan_parts(graph)
    if not image:
        return vae, positive, negative, graph.add("EmptyHunyuanLatentVideo", 832, 480, 81, 1)
    picture = graph.add("LoadImage", "example.png", "image")
    given: dict[str, Any] = {"start_image": picture}
    if vision:
        seer = graph.add("CLIPVisionLoader", "clip_vision_h.safetensors")
        given["clip_vision_output"] = graph.add(
            "CLIPVisionEncode", "none", clip_vision=seer, image=picture
        )
    start = graph.add(
        "WanImageToVideo", 832, 480, 81, 1, positive=positive, negative=negative, vae=vae, **given
    )
    return vae, start, Output(start.node, 1), Output(start.node, 2)


def wan21(*, image: bool, few: bool) -> Graph:
    """Wan 2.1 14B: one model."""
    graph = Graph()
    file = "wan2.1_i2v_480p_14B_fp16" if image else "wan2.1_t2v_14B_fp16"
    lora = (
        "lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors"
        if image
        else "Wan21_T2V_14B_lightx2v_cfg_step_distill_lora_rank32.safetensors"
    )
    model = _model(graph, f"{file}.safetensors", lora if few else None, 8.0)
    vae, positive, negative, start = _wan_start(graph, image=image, vision=image)
    latent = graph.add(
        "KSampler", *_SEED, 4 if few else 30, 1.0 if few else 6.0, "euler", "simple", 1.0,
        model=model, positive=positive, negative=negative, latent_image=start,
    )  # fmt: skip
    return _finish(graph, latent, [model], vae, 16.0)


def wan22(*, image: bool, few: bool) -> Graph:
    """Wan 2.2 14B: one model for the noisy steps, another for the rest, each with its report."""
    graph = Graph()
    kind = "i2v" if image else "t2v"
    version = "v1" if image else "v1.1"
    steps, cfg = (4, 1.0) if few else (20, 3.5)
    models = []
    for noise in ("high_noise", "low_noise"):
        lora = f"wan2.2_{kind}_lightx2v_4steps_lora_{version}_{noise}.safetensors"
        file = f"wan2.2_{kind}_{noise}_14B_fp8_scaled.safetensors"
        models.append(_model(graph, file, lora if few else None, 5.0 if few else 8.0))
    vae, positive, negative, latent = _wan_start(graph, image=image, vision=False)
    for number, model in enumerate(models):
        first = number == 0
        latent = graph.add(
            "KSamplerAdvanced", "enable" if first else "disable", *_SEED, steps, cfg, "euler",
            "simple", 0 if first else steps // 2, steps // 2 if first else 10000,
            "enable" if first else "disable",
            model=model, positive=positive, negative=negative, latent_image=latent,
        )  # fmt: skip
    return _finish(graph, latent, models, vae, 16.0)


def hunyuan_video(*, few: bool) -> Graph:
    """HunyuanVideo 720p: guidance is distilled, so there is one branch."""
    graph = Graph()
    lora = "hyvideo_FastVideo_LoRA-fp8.safetensors" if few else None
    file = "hunyuan_video_t2v_720p_bf16.safetensors"
    model = _model(graph, file, lora, 17.0 if few else 7.0)
    clip = graph.add(
        "DualCLIPLoader", "clip_l.safetensors", "llava_llama3_fp8_scaled.safetensors",
        "hunyuan_video", "default",
    )  # fmt: skip
    vae = graph.add("VAELoader", "hunyuan_video_vae_bf16.safetensors")
    positive, negative = _prompts(graph, clip)
    guided = graph.add("FluxGuidance", 6.0, conditioning=positive)
    start = graph.add("EmptyHunyuanLatentVideo", 1280, 720, 73, 1)
    latent = graph.add(
        "KSampler", *_SEED, 4 if few else 30, 1.0, "euler", "simple", 1.0,
        model=model, positive=guided, negative=negative, latent_image=start,
    )  # fmt: skip
    return _finish(graph, latent, [model], vae, 24.0)


def ltx(*, few: bool) -> Graph:
    """LTX-Video 13B, whose checkpoint holds its VAE."""
    graph = Graph()
    loaded = graph.add("CheckpointLoaderSimple", "ltxv-13b-0.9.7-dev.safetensors")
    model = loaded
    if few:
        lora = "ltxv-13b-0.9.7-distilled-lora128.safetensors"
        model = graph.add("LoraLoaderModelOnly", lora, 1.0, model=loaded)
    model = _sparse(graph, model)
    clip = graph.add("CLIPLoader", "t5xxl_fp16.safetensors", "ltxv", "default")
    positive, negative = _prompts(graph, clip)
    told = graph.add("LTXVConditioning", 25.0, positive=positive, negative=negative)
    start = graph.add("EmptyLTXVLatentVideo", 1216, 704, 121, 1)
    sigmas = graph.add("LTXVScheduler", 4 if few else 30, 2.05, 0.95, True, 0.1, latent=start)
    latent = graph.add(
        "SamplerCustom", True, *_SEED, 1.0 if few else 3.0,
        model=model, positive=told, negative=Output(told.node, 1),
        sampler=graph.add("KSamplerSelect", "euler"), sigmas=sigmas, latent_image=start,
    )  # fmt: skip
    return _finish(graph, latent, [model], Output(loaded.node, 2), 25.0)


WORKFLOWS: dict[str, Callable[[bool], Graph]] = {
    "wan21_t2v": lambda few: wan21(image=False, few=few),
    "wan21_i2v": lambda few: wan21(image=True, few=few),
    "wan22_t2v": lambda few: wan22(image=False, few=few),
    "wan22_i2v": lambda few: wan22(image=True, few=few),
    "hunyuan_video": lambda few: hunyuan_video(few=few),
    "ltx_video": lambda few: ltx(few=few),
}
"""Every example by its name; ``few`` adds a LoRA and takes 4 steps."""


def files() -> dict[str, str]:
    """The text of every example by its file's name."""
    return {
        f"vidsparse_{name}{'_4_steps' if few else ''}.json": json.dumps(
            build(few).to_json(), indent=1
        )
        + "\n"
        for name, build in WORKFLOWS.items()
        for few in (False, True)
    }


if __name__ == "__main__":
    for name, text in files().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
