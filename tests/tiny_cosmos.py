"""Tiny random pipelines of Cosmos 1, 2 and 2.5.

The mask of padded borders, which diffusers resizes by another package, is left out of them all.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from diffusers import ConfigMixin, ModelMixin
from diffusers.models.transformers.transformer_cosmos import CosmosLearnablePositionalEmbed
from tiny_parts import (
    IMAGE,
    TWO,
    VOCABULARY,
    Tiny,
    flow_scheduler,
    ready,
    sharpen,
    t5_encoder,
    word_tokenizer,
)
from tiny_pipelines import tiny_tokenizer, tiny_wan


class Unguarded(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """In place of NVIDIA's guardrail, a package of large models: lets everything pass."""

    config_name = "config.json"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.zeros(1))

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


class Positions(CosmosLearnablePositionalEmbed):  # type: ignore[misc]
    """Stays in fp32, as the host keeps it where it loads a model, and measures lengths in it."""

    def _apply(self, *args: Any, **kwargs: Any) -> Positions:
        return self


def _transformer(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "mlp_ratio": 2,
        "text_embed_dim": 32,
        "adaln_lora_dim": 4,
        "max_size": (4, 32, 32),
        "concat_padding_mask": False,
        "extra_pos_embed_type": None,
    }
    model = diffusers.CosmosTransformer3DModel(**{**sizes, **changes}).eval()
    return sharpen(model)


def cosmos(kind: str = "CosmosTextToWorldPipeline") -> Any:
    """Of 1.0, whose positions are learnt as well."""
    # one more channel tells frames that are given from those to make.
    more = {"in_channels": 5} if "Video" in kind else {}
    transformer = _transformer(extra_pos_embed_type="learnable", **more)
    transformer.learnable_pos_embed = Positions(32, (4, 32, 32), (1, 2, 2)).requires_grad_(False)
    for table in transformer.learnable_pos_embed.parameters():
        table.normal_()
    vae = diffusers.AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
        patch_size=4,
        scaling_factor=1.0,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    ).eval()
    return ready(
        getattr(diffusers, kind)(
            tokenizer=tiny_tokenizer(),
            text_encoder=t5_encoder(),
            vae=vae,
            transformer=transformer,
            scheduler=diffusers.EDMEulerScheduler(
                sigma_min=0.002,
                sigma_max=80,
                sigma_data=0.5,
                final_sigmas_type="sigma_min",
            ),
            safety_checker=Unguarded(),
        )
    )


def cosmos2() -> Any:
    return ready(
        diffusers.Cosmos2VideoToWorldPipeline(
            tokenizer=tiny_tokenizer(),
            text_encoder=t5_encoder(),
            vae=tiny_wan().vae,
            transformer=_transformer(in_channels=5),
            scheduler=flow_scheduler(use_karras_sigmas=True),
            safety_checker=Unguarded(),
        )
    )


def cosmos25() -> Any:
    torch.manual_seed(0)
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
    parts = tiny_wan().components
    # what the user asks for; diffusers' own instructions would take more tokens than the video.
    asked = "{{ messages[-1]['content'][0]['text'] }}"
    return ready(
        diffusers.Cosmos2_5_PredictBasePipeline(
            tokenizer=word_tokenizer(chat_template=asked),
            text_encoder=qwen,
            vae=parts["vae"],
            transformer=_transformer(
                in_channels=5,
                use_crossattn_projection=True,
                # of both layers of the encoder.
                crossattn_proj_in_channels=32,
                encoder_hidden_states_channels=32,
            ),
            scheduler=parts["scheduler"],
            safety_checker=Unguarded(),
        )
    )


def cosmos3() -> Any:
    """Two heads of queries for each of keys, and sound behind the video."""
    torch.manual_seed(0)
    transformer = diffusers.Cosmos3OmniTransformer(
        head_dim=16,
        hidden_size=32,
        intermediate_size=48,
        latent_channel=4,
        patch_latent_dim=16,
        num_attention_heads=4,
        num_hidden_layers=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY + 1,
        rope_axes_dim=(4, 2, 2),
        # as the edge model has it.
        qk_norm_for_text=False,
        use_und_k_norm_for_gen=True,
        sound_gen=True,
        sound_dim=4,
    ).eval()
    with torch.no_grad():
        for layer in transformer.layers:
            for norm in (layer.self_attn.norm_added_q, layer.self_attn.norm_added_k):
                norm.weight.mul_(3)
    sound_tokenizer = diffusers.Cosmos3AVAEAudioTokenizer(
        sampling_rate=160,
        vocoder_input_dim=4,
        dec_dim=4,
        dec_c_mults=(1, 2),
        dec_strides=(2, 4),
        encoder_enabled=False,
    ).eval()
    parts = tiny_wan().components
    return ready(
        diffusers.Cosmos3OmniPipeline(
            transformer=transformer,
            text_tokenizer=word_tokenizer(
                chat_template="{{ messages[-1]['content'] }}",
                extra_special_tokens=["<|vision_start|>"],
            ),
            vae=parts["vae"],
            scheduler=parts["scheduler"],
            sound_tokenizer=sound_tokenizer,
            safety_checker=Unguarded(),
        )
    )


COSMOS: dict[str, Tiny] = {
    "cosmos3": Tiny(
        branches=TWO,
        build=cosmos3,
        # beside text that holds the size and the length.
        size=(9, 128, 128),
        call={"image": lambda n: IMAGE, "enable_sound": True},
        exact=False,
        batch=False,
    ),
    "cosmos": Tiny(branches=TWO, exact=False, build=cosmos, call={"max_sequence_length": 16}),
    "cosmos-video": Tiny(
        branches=TWO,
        exact=False,
        build=lambda: cosmos("CosmosVideoToWorldPipeline"),
        call={"image": lambda n: IMAGE, "max_sequence_length": 16},
        batch=False,
    ),
    "cosmos2": Tiny(
        branches=TWO,
        exact=False,
        build=cosmos2,
        call={"image": lambda n: IMAGE, "max_sequence_length": 16},
        batch=False,
    ),
    "cosmos2.5": Tiny(branches=TWO, exact=False, build=cosmos25, call={"max_sequence_length": 16}),
    "cosmos2.5-video": Tiny(
        branches=TWO,
        exact=False,
        build=cosmos25,
        call={"video": lambda n: [IMAGE] * 9, "max_sequence_length": 16},
        batch=False,
    ),
}
