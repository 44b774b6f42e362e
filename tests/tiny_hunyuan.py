"""Tiny random pipelines of HunyuanVideo, its relatives and HunyuanVideo 1.5."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from tiny_parts import (
    IMAGE,
    VOCABULARY,
    flow_scheduler,
    noise,
    prompt_mask,
    ready,
    sharpen,
    word_tokenizer,
)

# HunyuanVideo


HUNYUAN_SIZES: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "patch_size": 2,
    "patch_size_t": 1,
    "guidance_embeds": True,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (4, 6, 6),
}


def hunyuan_transformer(**changes: Any) -> Any:
    torch.manual_seed(0)
    made = diffusers.HunyuanVideoTransformer3DModel(**{**HUNYUAN_SIZES, **changes})
    return sharpen(made.eval(), ".attn")


def hunyuan_vae() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    ).eval()


def hunyuan_video() -> Any:
    transformer = hunyuan_transformer()
    llama = transformers.LlamaModel(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
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
    return ready(
        diffusers.HunyuanVideoPipeline(
            text_encoder=llama,
            tokenizer=word_tokenizer(),
            text_encoder_2=clip,
            tokenizer_2=word_tokenizer(model_max_length=77),
            transformer=transformer,
            vae=hunyuan_vae(),
            scheduler=flow_scheduler(shift=7.0),
        )
    )


def skyreels() -> Any:
    """HunyuanVideo's transformer with the image beside the noise, guided by two forwards."""
    parts = hunyuan_video().components
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "vae", "scheduler")
    return ready(
        diffusers.HunyuanSkyreelsImageToVideoPipeline(
            **{name: parts[name] for name in names}, transformer=hunyuan_transformer(in_channels=8)
        )
    )


def hunyuan_image_to_video(condition: str, *, towers: bool = False) -> Any:
    """Without the towers for image and text the call gives their embeddings."""
    concat = condition == "latent_concat"
    parts: dict[str, Any] = dict.fromkeys(
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "image_processor")
    )
    if towers:
        of_text = hunyuan_video().components
        parts |= {name: of_text[name] for name in ("text_encoder_2", "tokenizer_2")}
        parts["tokenizer"] = word_tokenizer(extra_special_tokens=["<image>", "<|end_header_id|>"])
        parts["text_encoder"] = transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                # 24 x 24 patches: the pipeline counts on 576 tokens of an image.
                vision_config=transformers.CLIPVisionConfig(
                    hidden_size=8,
                    intermediate_size=16,
                    num_hidden_layers=2,
                    num_attention_heads=1,
                    image_size=48,
                    patch_size=2,
                ),
                text_config=of_text["text_encoder"].config,
                image_token_index=4,
                pad_token_id=0,
            )
        ).eval()
        parts["image_processor"] = transformers.CLIPImageProcessor(
            crop_size=48, size={"shortest_edge": 48}
        )
    return ready(
        diffusers.HunyuanVideoImageToVideoPipeline(
            **parts,
            transformer=hunyuan_transformer(
                in_channels=9 if concat else 4,
                guidance_embeds=not concat,
                image_condition_type=condition,
            ),
            vae=hunyuan_vae(),
            scheduler=flow_scheduler(shift=7.0),
        )
    )


def framepack() -> Any:
    parts = hunyuan_video().components
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "vae", "scheduler")
    torch.manual_seed(0)
    transformer = diffusers.HunyuanVideoFramepackTransformer3DModel(
        **HUNYUAN_SIZES,
        has_image_proj=True,
        image_proj_dim=12,
        has_clean_x_embedder=True,
    ).eval()
    return ready(
        diffusers.HunyuanVideoFramepackPipeline(
            **{name: parts[name] for name in names},
            **siglip_tower(),
            transformer=sharpen(transformer, ".attn"),
        )
    )


HUNYUAN_EMBEDS: dict[str, Any] = {
    "prompt": None,
    "prompt_embeds": lambda n: noise(1, 2, 24, 16)[:n],
    "prompt_attention_mask": lambda n: prompt_mask(n, 24, 9, 17),
    "pooled_prompt_embeds": lambda n: noise(2, 2, 8)[:n],
    "negative_prompt_embeds": lambda n: noise(3, 2, 24, 16)[:n],
    "negative_prompt_attention_mask": lambda n: prompt_mask(n, 24, 5),
    "negative_pooled_prompt_embeds": lambda n: noise(4, 2, 8)[:n],
    "image": lambda n: [IMAGE] * n,
}


def siglip_tower() -> dict[str, Any]:
    """An image encoder of nine tokens, and its processor."""
    config = transformers.SiglipVisionConfig(
        hidden_size=12,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=12,
        patch_size=4,
    )
    return {
        "image_encoder": transformers.SiglipVisionModel(config).eval(),
        "feature_extractor": transformers.SiglipImageProcessor(size={"height": 12, "width": 12}),
    }


# HunyuanVideo 1.5

# the template's first 108 tokens are cut off; one more keeps an empty prompt from being none.
_CHAT = "{% for i in range(108) %}a {% endfor %}{{ messages[-1]['content'] }}"


def hunyuan_video15(image: bool = False) -> Any:
    torch.manual_seed(0)
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=32,
        image_embed_dim=12,
        rope_axes_dim=(4, 6, 6),
        target_size=64,
    ).eval()
    qwen = transformers.Qwen2_5_VLTextModel(
        transformers.Qwen2_5_VLTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            rope_scaling={"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()
    parts = {
        "text_encoder": qwen,
        "tokenizer": word_tokenizer(chat_template=_CHAT),
        "text_encoder_2": transformers.T5EncoderModel(
            transformers.T5Config(
                vocab_size=400, d_model=32, d_kv=8, d_ff=37, num_heads=4, num_layers=1
            )
        ).eval(),
        "tokenizer_2": transformers.ByT5Tokenizer(),
        "transformer": sharpen(transformer, ".attn"),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16, 16, 16),
            layers_per_block=1,
            spatial_compression_ratio=8,
        ).eval(),
        "scheduler": flow_scheduler(shift=7.0),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
    }
    if image:
        parts |= siglip_tower()
    name = "HunyuanVideo15ImageToVideoPipeline" if image else "HunyuanVideo15Pipeline"
    pipe = getattr(diffusers, name)(**parts)
    return ready(with_little_text(pipe))


def with_little_text(pipe: Any) -> Any:
    """Make HunyuanVideo 1.5's room for text as small as the rest; saving forgets it."""
    pipe.tokenizer_max_length = 16
    pipe.tokenizer_2_max_length = 12
    pipe.vision_num_semantic_tokens = 9
    return pipe
