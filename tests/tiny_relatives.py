"""Tiny random pipelines around the blocks of another family: SkyReels-V2, Wan-Animate and so on."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from tiny_parts import (
    IMAGE,
    LAST_IMAGE,
    TWO,
    VOCABULARY,
    Tiny,
    flow_scheduler,
    noise,
    ready,
    sharpen,
    t5_encoder,
    word_tokenizer,
)
from tiny_pipelines import tiny_tokenizer, tiny_wan

_PARTS = ("tokenizer", "text_encoder", "vae", "scheduler")
_WAN_SIZES: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 48,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}


def cogvideox_vae() -> Any:
    return diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        # half of it is a tile, and tiles overlap by whole latents.
        sample_height=96,
        sample_width=80,
    ).eval()


def clip_tower(kind: str) -> dict[str, Any]:
    """An image encoder of one of transformers' classes, and its processor."""
    config = transformers.CLIPVisionConfig(
        hidden_size=8,
        projection_dim=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        intermediate_size=16,
    )
    return {
        "image_encoder": getattr(transformers, kind)(config).eval(),
        "image_processor": transformers.CLIPImageProcessor(crop_size=8, size={"shortest_edge": 8}),
    }


def _around(kind: str, transformer: str, *, tower: str | None = None, **changes: Any) -> Any:
    """A pipeline of Wan's tiny parts around another transformer."""
    parts = tiny_wan().components
    torch.manual_seed(0)
    extra = {} if tower is None else clip_tower(tower)
    model = getattr(diffusers, transformer)(**{**_WAN_SIZES, **changes}).eval()
    return ready(
        getattr(diffusers, kind)(
            **{name: parts[name] for name in _PARTS}, **extra, transformer=sharpen(model)
        )
    )


# an image of its own takes two more groups of channels: mask and frame.
_WITH_IMAGE = {"in_channels": 12, "out_channels": 4, "image_dim": 8, "added_kv_proj_dim": 32}


def skyreels_v2() -> Any:
    return _around(
        "SkyReelsV2Pipeline", "SkyReelsV2Transformer3DModel", in_channels=4, out_channels=4
    )


def skyreels_v2_image() -> Any:
    return _around(
        "SkyReelsV2ImageToVideoPipeline",
        "SkyReelsV2Transformer3DModel",
        tower="CLIPVisionModelWithProjection",
        **_WITH_IMAGE,
    )


def skyreels_v2_forcing(kind: str = "", **changes: Any) -> Any:
    """By diffusion forcing, whose pipelines have no image tower."""
    return _around(
        f"SkyReelsV2DiffusionForcing{kind}Pipeline",
        "SkyReelsV2Transformer3DModel",
        in_channels=4,
        out_channels=4,
        **changes,
    )


def wan_animate() -> Any:
    return _around(
        "WanAnimatePipeline",
        "WanAnimateTransformer3DModel",
        tower="CLIPVisionModel",
        **_WITH_IMAGE,
        latent_channels=4,
        motion_encoder_channel_sizes={"4": 4, "8": 4, "16": 4},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


def chronoedit() -> Any:
    return _around(
        "ChronoEditPipeline",
        "ChronoEditTransformer3DModel",
        tower="CLIPVisionModel",
        **{**_WITH_IMAGE, "added_kv_proj_dim": 48},
        # the host takes a third of the channels for each axis, which must be whole pairs.
        attention_head_dim=24,
        rope_temporal_skip_len=4,
    )


def lucy_edit() -> Any:
    # the video to edit stands beside the noise.
    return _around("LucyEditPipeline", "WanTransformer3DModel", in_channels=8, out_channels=4)


def helios(kind: str = "HeliosPipeline", **changes: Any) -> Any:
    """Sections of three latent frames; the scheduler's own gamma is singular on some machines."""
    parts = tiny_wan().components
    torch.manual_seed(0)
    sizes = {name: size for name, size in _WAN_SIZES.items() if name != "rope_max_seq_len"}
    sizes |= {"in_channels": 4, "out_channels": 4, "rope_dim": (4, 6, 6), **changes}
    transformer = diffusers.HeliosTransformer3DModel(**sizes).eval()
    one = {} if "Pyramid" in kind else {"stages": 1, "stage_range": [0, 1]}
    parts |= {"scheduler": diffusers.HeliosScheduler(gamma=0.3, **one)}
    return ready(
        getattr(diffusers, kind)(
            **{name: parts[name] for name in _PARTS}, transformer=sharpen(transformer)
        )
    )


def consisid() -> Any:
    from diffusers.pipelines.consisid.pipeline_consisid import ConsisIDPipeline

    torch.manual_seed(0)
    transformer = diffusers.ConsisIDTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=16,
        in_channels=8,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=32,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        max_text_seq_length=16,
        use_rotary_positional_embeddings=True,
        is_train_face=True,
        cross_attn_interval=2,
        cross_attn_dim_head=16,
        cross_attn_num_heads=2,
        LFE_id_dim=8,
        LFE_vit_dim=8,
        LFE_depth=1,
        LFE_dim_head=8,
        LFE_num_heads=2,
        LFE_num_id_token=2,
        LFE_num_querie=4,
        LFE_output_dim=32,
        LFE_ff_mult=2,
        LFE_num_scale=1,
    ).eval()
    # the host offers the class only where OpenCV, which draws poses, is installed.
    return ready(
        ConsisIDPipeline(
            tokenizer=tiny_tokenizer(),
            text_encoder=t5_encoder(),
            vae=cogvideox_vae(),
            transformer=sharpen(transformer),
            scheduler=diffusers.CogVideoXDPMScheduler(
                prediction_type="v_prediction",
                rescale_betas_zero_snr=True,
                timestep_spacing="trailing",
            ),
        )
    )


def anyflow() -> Any:
    parts = tiny_wan().components
    torch.manual_seed(0)
    transformer = diffusers.AnyFlowTransformer3DModel(**_WAN_SIZES, in_channels=4, out_channels=4)
    parts |= {"scheduler": diffusers.FlowMapEulerDiscreteScheduler(shift=3.0)}
    return ready(
        diffusers.AnyFlowPipeline(
            **{name: parts[name] for name in _PARTS}, transformer=sharpen(transformer.eval())
        )
    )


def allegro() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=48,
        sample_width=8,
        sample_height=8,
        sample_frames=3,
        caption_channels=32,
    ).eval()
    vae = diffusers.AutoencoderKLAllegro(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2, latent_channels=4
    ).eval()
    return ready(
        diffusers.AllegroPipeline(
            tokenizer=tiny_tokenizer(),
            text_encoder=t5_encoder(),
            vae=vae,
            transformer=sharpen(transformer),
            scheduler=diffusers.DDIMScheduler(),
        )
    )


_CHAT = "{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}"


def easyanimate(kind: str = "EasyAnimatePipeline", **changes: Any) -> Any:
    torch.manual_seed(0)
    transformer = diffusers.EasyAnimateTransformer3DModel(
        **{
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "time_embed_dim": 8,
            "text_embed_dim": 16,
            "num_layers": 2,
            # the second block has no weights for text.
            "mmdit_layers": 1,
            **changes,
        }
    ).eval()
    qwen = transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(
            text_config={
                "vocab_size": VOCABULARY,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default"},
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            vision_config={
                "depth": 1,
                "embed_dim": 8,
                "hidden_size": 16,
                "num_heads": 2,
                "patch_size": 4,
            },
        )
    ).eval()
    vae = diffusers.AutoencoderKLMagvit(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2
    ).eval()
    return ready(
        getattr(diffusers, kind)(
            vae=vae,
            text_encoder=qwen,
            tokenizer=word_tokenizer(chat_template=_CHAT),
            transformer=sharpen(transformer),
            scheduler=flow_scheduler(),
        )
    )


# two sections, the second behind what was made.
HELIOS_CALL: dict[str, Any] = {"num_latent_frames_per_chunk": 3, "max_sequence_length": 16}

RELATIVES: dict[str, Tiny] = {
    "helios": Tiny(
        branches=TWO,
        build=helios,
        size=(18, 64, 64),
        odd=(18, 80, 48),
        call=HELIOS_CALL,
    ),
    "helios-pyramid": Tiny(
        # of three stages the last is of the size of what was made before, whose keys weigh more.
        branches=TWO,
        build=lambda: helios("HeliosPyramidPipeline", is_amplify_history=True),
        size=(18, 64, 64),
        odd=(18, 128, 64),
        call={**HELIOS_CALL, "pyramid_num_inference_steps_list": [3, 3, 3]},
        # the host draws further noise for a whole batch.
        batch=False,
        without=("num_inference_steps",),
    ),
    "wan-animate": Tiny(
        branches=TWO,
        build=wan_animate,
        call={
            "image": lambda n: IMAGE,
            "pose_video": lambda n: [IMAGE] * 9,
            "face_video": lambda n: [LAST_IMAGE] * 9,
            "segment_frame_length": 9,
            "max_sequence_length": 512,
        },
        without=("num_frames",),
        batch=False,
    ),
    "chronoedit": Tiny(
        branches=TWO,
        build=chronoedit,
        call={"image": lambda n: IMAGE, "max_sequence_length": 512},
    ),
    "lucy-edit": Tiny(
        branches=TWO,
        build=lucy_edit,
        call={"video": lambda n: [IMAGE] * 9, "max_sequence_length": 16},
        odd=(9, 80, 48),
        batch=False,
    ),
    "consisid": Tiny(
        build=consisid,
        call={
            "image": lambda n: [IMAGE] * n,
            "id_cond": lambda n: noise(1, 1, 8),
            "id_vit_hidden": lambda n: [noise(2, 1, 5, 8)],
            "max_sequence_length": 16,
        },
    ),
    "anyflow": Tiny(build=anyflow, call={"max_sequence_length": 16}),
    "allegro": Tiny(build=allegro, call={"max_sequence_length": 16, "clean_caption": False}),
    "easyanimate": Tiny(
        # the host wants a negative prompt where there is guidance.
        build=easyanimate,
        # beside 256 tokens of text.
        size=(13, 128, 128),
        call={"negative_prompt": lambda n: [""] * n},
    ),
    "easyanimate-inpaint": Tiny(
        # the mask and the video without what it covers stand beside the noise.
        build=lambda: easyanimate("EasyAnimateInpaintPipeline", in_channels=9),
        size=(9, 128, 128),
        odd=(9, 80, 48),
        call={
            "video": lambda n: noise(1, 1, 3, 9, 64, 64).sigmoid(),
            "mask_video": lambda n: torch.full((1, 1, 9, 64, 64), 255.0),
            "negative_prompt": lambda n: [""] * n,
        },
        batch=False,
    ),
    "skyreels-v2": Tiny(branches=TWO, build=skyreels_v2, call={"max_sequence_length": 16}),
    "skyreels-v2-image": Tiny(
        branches=TWO,
        build=skyreels_v2_image,
        call={"image": lambda n: IMAGE, "max_sequence_length": 512},
    ),
    "skyreels-v2-forcing": Tiny(
        branches=TWO, build=skyreels_v2_forcing, call={"max_sequence_length": 16}
    ),
    "skyreels-v2-forcing-image": Tiny(
        branches=TWO,
        # frames a second are told too, for which the host takes one prompt.
        build=lambda: skyreels_v2_forcing("ImageToVideo", inject_sample_info=True),
        call={"image": lambda n: IMAGE, "max_sequence_length": 16},
        batch=False,
    ),
    "skyreels-v2-forcing-video": Tiny(
        branches=TWO,
        build=lambda: skyreels_v2_forcing("VideoToVideo"),
        call={
            "video": lambda n: [IMAGE] * 5,
            "max_sequence_length": 16,
            "base_num_frames": 9,
            "overlap_history": 5,
        },
        batch=False,
    ),
}
