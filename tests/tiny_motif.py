"""Tiny random pipelines of Motif-Video."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from tiny_parts import (
    IMAGE,
    TWO,
    VOCABULARY,
    Tiny,
    fitting,
    flow_scheduler,
    ready,
    sharpen,
    word_tokenizer,
)
from tiny_pipelines import tiny_wan


def _text_encoder() -> Any:
    return transformers.T5Gemma2Encoder(
        transformers.T5Gemma2EncoderConfig(
            text_config={
                "vocab_size": VOCABULARY,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "dropout_rate": 0.0,
            },
            vision_config={
                "hidden_size": 12,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 12,
                "patch_size": 4,
            },
            mm_tokens_per_image=9,
            boi_token_index=3,
            eoi_token_index=4,
            image_token_index=5,
        ),
        eoi_token_index=4,
    ).eval()


def motif(kind: str = "MotifVideoPipeline", *, padding_side: str = "right", **changes: Any) -> Any:
    torch.manual_seed(0)
    transformer = diffusers.MotifVideoTransformer3DModel(
        **{
            # noise, a given frame and its mask.
            "in_channels": 9,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 1,
            "num_single_layers": 2,
            "mlp_ratio": 2.0,
            "text_embed_dim": 16,
            "image_embed_dim": 12,
            "rope_axes_dim": (4, 6, 6),
            "enable_text_cross_attention_dual": True,
            "enable_text_cross_attention_single": True,
            **changes,
        }
    ).eval()
    fitting(transformer.time_text_embed)
    tokenizer = word_tokenizer(
        padding_side=padding_side, model_input_names=["input_ids", "attention_mask"]
    )
    return ready(
        getattr(diffusers, kind)(
            scheduler=flow_scheduler(use_dynamic_shifting=True),
            vae=tiny_wan().vae,
            text_encoder=_text_encoder(),
            tokenizer=tokenizer,
            transformer=sharpen(transformer, ".attn"),
            guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
            feature_extractor=transformers.SiglipImageProcessor(size={"height": 12, "width": 12}),
        )
    )


MOTIF: dict[str, Tiny] = {
    "motif": Tiny(
        branches=TWO,
        build=motif,
        call={"max_sequence_length": 16},
        guided=None,
        exact=False,
    ),
    "motif-left": Tiny(
        branches=TWO,
        build=lambda: motif(padding_side="left"),
        call={"max_sequence_length": 16},
        guided=None,
        exact=False,
    ),
    "motif-image": Tiny(
        branches=TWO,
        build=lambda: motif("MotifVideoImage2VideoPipeline"),
        call={"image": lambda n: IMAGE, "max_sequence_length": 16},
        guided=None,
        exact=False,
        batch=False,
    ),
}
