"""Tiny random pipelines of MiniMax-H3; calls give the embeddings of their text."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3Blocks
from tiny_parts import noise, ready, sharpen


def minimax_transformer(seed: int = 0) -> Any:
    """Two layers of two heads of 32 channels, of which 24 are rotated, and a text refiner."""
    torch.manual_seed(seed)
    transformer = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        hidden_size=48,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=64,
        in_channels=4,
        audio_in_channels=8,
        text_dim=16,
        freq_dim=32,
        time_embed_hidden_dim=32,
        time_embed_dim=24,
        rope_freq_dim=4,
    ).eval()
    return sharpen(transformer, "attn")


MINIMAX_EMBEDS: dict[str, Any] = {
    # the vision tower, which would be large, and needs another package: rows of text, and in
    # front of them two of an image, which the model takes for video.
    "prompt_embeds": lambda n: noise(7, 1, 9, 16),
    "text_token_tags": lambda n: torch.tensor([0] * 2 + [1] * 7),
}


def minimax_h3(workflow: str | None = "t2va") -> Any:
    """``t2va`` from text, ``fl2va`` from keyframes as well, ``ref2va`` from references; or all."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLMiniMaxH3(
        latent_channels=4,
        block_out_channels=(8, 8),
        layers_per_block=1,
        spatial_downsample_factors=(4, 4),
        temporal_downsample_factors=(2, 2),
        norm_num_groups=4,
        decoder_num_layers=1,
        decoder_num_attention_heads=1,
        decoder_attention_head_dim=16,
        decoder_num_register_tokens=1,
        decoder_ffn_mult=1,
        latents_mean=(0.0,) * 4,
        latents_std=(1.0,) * 4,
    ).eval()
    audio_vae = diffusers.AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4,
        encoder_rates=(2, 2),
        latent_dim=16,
        latent_channels=8,
        num_attention_heads=2,
        decoder_dim=8,
        decoder_rates=(2, 2),
        decoder_kernel_sizes=(4, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3, 5),),
        # 40 latents a second, as the released one, of four samples each.
        sampling_rate=160,
        latents_mean=[0.0] * 8,
        latents_std=[1.0] * 8,
    ).eval()
    blocks = MiniMaxH3Blocks() if workflow is None else MiniMaxH3Blocks().get_workflow(workflow)
    blocks.sub_blocks.pop("text_encoder")
    pipe = blocks.init_pipeline()
    pipe.update_components(
        vae=vae,
        audio_vae=audio_vae,
        scheduler=diffusers.MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=diffusers.MiniMaxH3Scheduler(shift=3.0),
        **{
            name: minimax_transformer(seed)
            for seed, name in enumerate(("transformer", "transformer_ref"))
            if name in pipe.null_component_names
        },
    )
    return ready(pipe)


def modular_output(pipe: Any, call: dict[str, Any]) -> torch.Tensor:
    """What a modular pipeline makes of ``call``; it knows no output of latents, but has them."""
    if isinstance(pipe.scheduler, diffusers.MiniMaxH3Scheduler):
        # it counts the end of the last step too.
        call = {**call, "num_inference_steps": call["num_inference_steps"] + 1}
    if call["output_type"] == "latent":
        return pipe(**{**call, "output_type": "pt"}, output="latents")
    return pipe(**call, output="videos")
