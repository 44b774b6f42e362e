"""Tiny random pipelines of every family, each variant with a call that runs it in a moment.

Every part is real and built in code; the few parts that would be large (the image towers of
HunyuanVideo's image-to-video) are left out, and the call gives their embeddings instead.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import diffusers
import torch
from tiny_cosmos import COSMOS
from tiny_hunyuan import (
    HUNYUAN_EMBEDS,
    framepack,
    hunyuan_image_to_video,
    hunyuan_video,
    hunyuan_video15,
    skyreels,
)
from tiny_kandinsky import KANDINSKY
from tiny_ltx import LTX
from tiny_minimax import MINIMAX_EMBEDS, minimax_h3, modular_output
from tiny_motif import MOTIF
from tiny_parts import (
    IMAGE,
    LAST_IMAGE,
    TWO,
    Tiny,
    flow_scheduler,
    ready,
    sharpen,
    t5_encoder,
)
from tiny_pipelines import tiny_tokenizer, tiny_transformer, tiny_wan
from tiny_relatives import RELATIVES, clip_tower, cogvideox_vae

# Wan


def wan_image_to_video(*, last: bool = False) -> Any:
    parts = tiny_wan().components
    torch.manual_seed(0)
    tower = clip_tower("CLIPVisionModel")
    # noise, mask and first frame side by side: 4 channels each.
    transformer = tiny_transformer(
        in_channels=12,
        image_dim=8,
        added_kv_proj_dim=32,
        # the 5 tokens of each of two images stand in one line.
        pos_embed_seq_len=10 if last else None,
    )
    return ready(
        diffusers.WanImageToVideoPipeline(
            **{name: parts[name] for name in ("tokenizer", "text_encoder", "vae", "scheduler")},
            transformer=transformer,
            **tower,
        )
    )


def wan_two_experts() -> Any:
    """Image-to-video of 2.2: no image tower, two transformers."""
    parts = tiny_wan().components
    return ready(
        diffusers.WanImageToVideoPipeline(
            **{name: parts[name] for name in ("tokenizer", "text_encoder", "vae", "scheduler")},
            transformer=tiny_transformer(in_channels=12),
            transformer_2=tiny_transformer(1, in_channels=12),
            boundary_ratio=0.9,
        )
    )


def wan_video_to_video() -> Any:
    parts = tiny_wan().components
    names = ("tokenizer", "text_encoder", "vae", "scheduler", "transformer")
    return ready(diffusers.WanVideoToVideoPipeline(**{name: parts[name] for name in names}))


def wan_per_token_timesteps(kind: str) -> Any:
    """TI2V-5B: one model for text and image, a timestep for every token."""
    parts = tiny_wan().components
    names = ("tokenizer", "text_encoder", "vae", "scheduler", "transformer")
    cls = getattr(diffusers, kind)
    return ready(cls(**{name: parts[name] for name in names}, expand_timesteps=True))


def wan_vace() -> Any:
    torch.manual_seed(0)
    parts = tiny_wan().components
    transformer = diffusers.WanVACETransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=64,
        vace_layers=[0],
        # masked and kept frames, and 8x8 pixels of mask.
        vace_in_channels=8 + 64,
    ).eval()
    names = ("tokenizer", "text_encoder", "vae", "scheduler")
    return ready(
        diffusers.WanVACEPipeline(
            **{name: parts[name] for name in names}, transformer=sharpen(transformer)
        )
    )


# CogVideoX


def cogvideox(
    kind: str = "CogVideoXPipeline", *, version: str = "1.0", dpm: bool = False, **changes: Any
) -> Any:
    torch.manual_seed(0)
    image = "Image" in kind
    sizes: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 8 if image else 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 32,
        "num_layers": 2,
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": 9,
        "max_text_seq_length": 16,
        "use_rotary_positional_embeddings": True,
    }
    if version == "1.5":
        # its angles are cut from a grid of the largest size.
        sizes |= {"sample_width": 16, "sample_height": 16}
        sizes |= {"patch_size_t": 2, "patch_bias": False, "ofs_embed_dim": 8 if image else None}
    vae = cogvideox_vae()
    scheduler = diffusers.CogVideoXDPMScheduler if dpm else diffusers.CogVideoXDDIMScheduler
    transformer = diffusers.CogVideoXTransformer3DModel(**{**sizes, **changes}).eval()
    return ready(
        getattr(diffusers, kind)(
            tokenizer=tiny_tokenizer(),
            text_encoder=t5_encoder(),
            vae=vae,
            transformer=sharpen(transformer),
            scheduler=scheduler(
                prediction_type="v_prediction",
                rescale_betas_zero_snr=True,
                timestep_spacing="trailing",
            ),
        )
    )


# Mochi


def mochi() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        pooled_projection_dim=24,
        in_channels=12,
        text_embed_dim=32,
        time_embed_dim=8,
        max_sequence_length=16,
    ).eval()
    torch.nn.init.normal_(transformer.pos_frequencies, std=0.3)
    vae = diffusers.AutoencoderKLMochi(
        latent_channels=12,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    ).eval()
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 16
    return ready(
        diffusers.MochiPipeline(
            scheduler=flow_scheduler(shift=1.0, invert_sigmas=True),
            vae=vae,
            text_encoder=t5_encoder(),
            tokenizer=tokenizer,
            transformer=sharpen(transformer),
        )
    )


# five seconds at least, beside whose sound a smaller video would be a handful of tokens.
_MINIMAX: dict[str, Any] = {
    "size": (124, 128, 128),
    "odd": (141, 96, 160),
    "guided": None,
    "batch": False,
    "without": ("prompt",),
}

TINY: dict[str, Tiny] = {
    "wan": Tiny(branches=TWO, build=tiny_wan, call={"max_sequence_length": 16}),
    "wan-image": Tiny(
        branches=TWO,
        build=wan_image_to_video,
        call={"image": lambda n: IMAGE, "max_sequence_length": 512},
    ),
    "wan-first-last": Tiny(
        branches=TWO,
        build=lambda: wan_image_to_video(last=True),
        call={
            "image": lambda n: IMAGE,
            "last_image": lambda n: LAST_IMAGE,
            "max_sequence_length": 512,
        },
    ),
    "wan-two-experts": Tiny(
        branches=TWO,
        build=wan_two_experts,
        call={"image": lambda n: IMAGE, "max_sequence_length": 16},
    ),
    "wan-ti2v": Tiny(
        branches=TWO,
        build=lambda: wan_per_token_timesteps("WanPipeline"),
        call={"max_sequence_length": 16},
    ),
    "wan-ti2v-image": Tiny(
        branches=TWO,
        build=lambda: wan_per_token_timesteps("WanImageToVideoPipeline"),
        call={"image": lambda n: IMAGE, "max_sequence_length": 16},
    ),
    "wan-video": Tiny(
        branches=TWO,
        build=wan_video_to_video,
        # three steps of four.
        call={
            "video": [IMAGE] * 9,
            "strength": 0.8,
            "num_inference_steps": 4,
            "max_sequence_length": 16,
        },
        without=("num_frames",),
        odd=(9, 80, 48),
        batch=False,
    ),
    "wan-vace": Tiny(branches=TWO, build=wan_vace, call={"max_sequence_length": 16}, batch=False),
    **RELATIVES,
    **COSMOS,
    **KANDINSKY,
    **MOTIF,
    "hunyuan": Tiny(build=hunyuan_video, call={"max_sequence_length": 32}, exact=False),
    "hunyuan-image": Tiny(
        build=lambda: hunyuan_image_to_video("token_replace"), call=HUNYUAN_EMBEDS, exact=False
    ),
    "hunyuan-image-concat": Tiny(
        build=lambda: hunyuan_image_to_video("latent_concat"), call=HUNYUAN_EMBEDS, exact=False
    ),
    "framepack": Tiny(
        # two sections of three latent frames.
        build=framepack,
        size=(13, 64, 64),
        odd=(13, 80, 48),
        call={
            "image": lambda n: [IMAGE] * n,
            "latent_window_size": 3,
            "max_sequence_length": 32,
        },
        exact=False,
    ),
    "skyreels": Tiny(
        build=skyreels,
        call={
            "image": lambda n: [IMAGE] * n,
            "true_cfg_scale": 3.0,
            "negative_prompt": lambda n: ["a"] * n,
            "max_sequence_length": 32,
        },
        branches=TWO,
        exact=False,
    ),
    "hunyuan15": Tiny(branches=TWO, build=hunyuan_video15, guided=None, exact=False),
    "hunyuan15-image": Tiny(
        branches=TWO,
        build=lambda: hunyuan_video15(image=True),
        call={"image": lambda n: IMAGE},
        guided=None,
        exact=False,
        without=("height", "width"),
    ),
    "cogvideox": Tiny(build=cogvideox, call={"max_sequence_length": 16}),
    "cogvideox-2b": Tiny(
        # learned nothing, rotates nothing: positions are added to the patches.
        build=lambda: cogvideox(use_rotary_positional_embeddings=False),
        call={"max_sequence_length": 16},
        odd=(17, 64, 64),
    ),
    "cogvideox-dpm": Tiny(
        build=lambda: cogvideox(dpm=True),
        call={"max_sequence_length": 16},
    ),
    "cogvideox1.5": Tiny(
        build=lambda: cogvideox(version="1.5"),
        call={"max_sequence_length": 16},
    ),
    "cogvideox-image": Tiny(
        build=lambda: cogvideox("CogVideoXImageToVideoPipeline"),
        call={"image": lambda n: [IMAGE] * n, "max_sequence_length": 16},
    ),
    "cogvideox1.5-image": Tiny(
        build=lambda: cogvideox("CogVideoXImageToVideoPipeline", version="1.5"),
        call={"image": lambda n: [IMAGE] * n, "max_sequence_length": 16},
    ),
    "cogvideox-video": Tiny(
        build=lambda: cogvideox("CogVideoXVideoToVideoPipeline"),
        # three steps of four.
        call={
            "video": [IMAGE] * 9,
            "strength": 0.8,
            "num_inference_steps": 4,
            "max_sequence_length": 16,
        },
        without=("num_frames",),
        batch=False,
    ),
    "cogvideox-control": Tiny(
        build=lambda: cogvideox("CogVideoXFunControlPipeline", in_channels=8),
        call={"control_video": [IMAGE] * 9, "max_sequence_length": 16},
        without=("num_frames",),
        batch=False,
    ),
    "mochi": Tiny(
        # its branches stand in one batch, and attend apart where their text differs.
        attending=TWO,
        build=mochi,
        call={"max_sequence_length": 16},
        size=(13, 64, 64),
        odd=(19, 80, 48),
    ),
    **LTX,
    "minimax": Tiny(build=minimax_h3, call=MINIMAX_EMBEDS, **_MINIMAX),
    "minimax-keyframes": Tiny(
        build=lambda: minimax_h3("fl2va"),
        call={
            "image": lambda n: IMAGE,
            "last_image": lambda n: LAST_IMAGE,
            **MINIMAX_EMBEDS,
        },
        **_MINIMAX,
    ),
}
"""Every variant under test."""

PROMPTS = ["a red circle", "a blue square that moves left"]

# whose pipelines decode where only latents are asked for, which takes longer than the steps.
DECODING = ("helios", "minimax")


def undecoded(latents: torch.Tensor, return_dict: bool = True) -> tuple[torch.Tensor]:
    """In the place of a VAE's ``decode``: as many channels as pixels have."""
    return (latents[:, :3],)


def latents(
    name: str,
    pipe: Any,
    *,
    prompts: list[str] | None = None,
    size: tuple[int, int, int] | None = None,
    guidance: float = 3.0,
    seeds: tuple[int, ...] | None = None,
    **changes: Any,
) -> torch.Tensor:
    """Run ``pipe`` and return the denoised latents: no decoding, so quick."""
    tiny = TINY[name]
    prompts = PROMPTS[:1] if prompts is None else prompts
    frames, height, width = size or tiny.size
    seeds = tuple(range(len(prompts))) if seeds is None else seeds
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    call: dict[str, Any] = {
        "prompt": prompts if tiny.batch else prompts[0],
        "height": height,
        "width": width,
        "num_frames": frames,
        "num_inference_steps": 3,
        "generator": generators if tiny.batch else generators[0],
        "output_type": "latent",
    }
    for key in tiny.without:
        del call[key]
    if tiny.guided:
        call[tiny.guided] = guidance
    elif hasattr(pipe, "guider") and guidance != pipe.guider.guidance_scale:
        pipe.guider = pipe.guider.new(guidance_scale=guidance)
    for key, value in tiny.call.items():
        call[key] = value(len(prompts)) if callable(value) else value
    call |= changes
    with ExitStack() as stack:
        if call["output_type"] == "latent" and name.startswith(DECODING):
            stack.enter_context(mock.patch.object(pipe.vae, "decode", undecoded))
        if isinstance(pipe, diffusers.ModularPipeline):
            return modular_output(pipe, call)
        output = pipe(**call)
    # Cosmos 3 has a name of its own for it.
    output = output.video if hasattr(output, "video") else output.frames
    # FramePack has a list, of what there is after every section.
    made: torch.Tensor = output[-1] if isinstance(output, list) else output
    return made
