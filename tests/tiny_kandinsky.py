"""Tiny random pipelines of Kandinsky 5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from tiny_hunyuan import hunyuan_vae
from tiny_parts import (
    IMAGE,
    TWO,
    VOCABULARY,
    Tiny,
    fitting,
    flow_scheduler,
    noise,
    ready,
    word_tokenizer,
)


def _prepared(transformer: Any) -> Any:
    """Gates that are open, as initialised none is, and uneven attention."""
    with torch.no_grad():
        for name, module in transformer.named_modules():
            kind = name.rpartition(".")[-1]
            if "modulation" in kind:
                module.out_layer.bias.normal_(std=0.5)
            if kind == "self_attention":
                module.query_norm.weight.mul_(3)
                module.key_norm.weight.mul_(3)
    return fitting(transformer)


def _of_text() -> dict[str, Any]:
    """Text encoders and their tokenizers."""
    qwen = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
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
                "hidden_size": 8,
                "intermediate_size": 8,
                "out_hidden_size": 16,
                "num_heads": 2,
                "patch_size": 4,
            },
        )
    ).eval()
    clip = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()
    return {
        "text_encoder": qwen,
        "tokenizer": word_tokenizer(),
        "text_encoder_2": clip,
        "tokenizer_2": word_tokenizer(model_max_length=77),
    }


def kandinsky5(kind: str = "Kandinsky5T2VPipeline", **changes: Any) -> Any:
    torch.manual_seed(0)
    transformer = diffusers.Kandinsky5Transformer3DModel(
        **{
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "in_text_dim": 16,
            "in_text_dim2": 8,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 48,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": (4, 6, 6),
            "visual_cond": True,
            **changes,
        }
    ).eval()
    return ready(
        getattr(diffusers, kind)(
            **_of_text(),
            transformer=_prepared(transformer),
            vae=hunyuan_vae(),
            scheduler=flow_scheduler(),
        )
    )


def _lengths(n: int) -> torch.Tensor:
    return torch.arange(n + 1, dtype=torch.int32) * 8


def _of(seed: int, *shape: int) -> Callable[[int], torch.Tensor]:
    return lambda n: noise(seed, 2, *shape)[:n]


# the host pads the text of a batch, and video attends to the padding.
EMBEDS: dict[str, Any] = {
    "prompt_embeds_qwen": _of(1, 8, 16),
    "prompt_embeds_clip": _of(2, 8),
    "prompt_cu_seqlens": _lengths,
    "negative_prompt_embeds_qwen": _of(3, 8, 16),
    "negative_prompt_embeds_clip": _of(4, 8),
    "negative_prompt_cu_seqlens": _lengths,
}


def kandinsky6(**changes: Any) -> Any:
    """Its calls give embeddings: the processor in the tokenizer's place needs another package."""
    torch.manual_seed(0)
    transformer = diffusers.Kandinsky6Transformer3DModel(
        **{
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "in_text_dim": 16,
            "in_text_dim2": 8,
            "in_audio_dim": 4,
            "out_audio_dim": 4,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 48,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": (4, 6, 6),
            "visual_token_type_num_embeddings": 2,
            # as the released weights have them.
            "ca_rope": True,
            "cross_gates": True,
            "fix_modulation": True,
            **changes,
        }
    ).eval()
    audio_vae = diffusers.MMAudioVAE(
        mel_bins=8,
        latent_channels=4,
        hidden_channels=8,
        channel_multipliers=(1, 2),
        layers_per_block=1,
        sample_rate=400,
        n_fft=16,
        hop_length=8,
    )
    vocoder = diffusers.MMAudioVocoder(
        num_mels=8,
        upsample_initial_channel=8,
        upsample_rates=(4, 2),
        upsample_kernel_sizes=(8, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3),),
    )
    return ready(
        diffusers.Kandinsky6TI2VAPipeline(
            transformer=_prepared(transformer),
            vae=hunyuan_vae(),
            **_of_text(),
            scheduler=flow_scheduler(),
            audio_vae=audio_vae.eval(),
            vocoder=vocoder.eval(),
        )
    )


EMBEDS_6: dict[str, Any] = {
    "prompt": None,
    "prompt_embeds": _of(1, 8, 16),
    "pooled_prompt_embeds": _of(2, 8),
    "negative_prompt_embeds": _of(3, 8, 16),
    "negative_pooled_prompt_embeds": _of(4, 8),
}

KANDINSKY: dict[str, Tiny] = {
    "kandinsky6": Tiny(
        # a reference frame behind the video.
        branches=TWO,
        build=kandinsky6,
        call={"image": lambda n: [IMAGE] * n, **EMBEDS_6},
    ),
    "kandinsky5": Tiny(branches=TWO, build=kandinsky5, call=EMBEDS),
    "kandinsky5-image": Tiny(
        branches=TWO,
        build=lambda: kandinsky5("Kandinsky5I2VPipeline"),
        # the host takes those after the fourth frame of the latent for the measure of all before.
        size=(21, 64, 64),
        odd=(25, 80, 48),
        call={"image": lambda n: IMAGE, **EMBEDS},
        batch=False,
    ),
}
