"""Tiny random pipelines, built in code: every part real, no weights from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

WORDS = ("a", "red", "blue", "circle", "square", "that", "moves", "left", "right")


def tiny_tokenizer() -> Any:
    """A T5 tokenizer whose pieces are ``WORDS``."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=pieces + [(f"▁{word}", -1.0) for word in WORDS], extra_ids=0)


def tiny_transformer(seed: int = 0, layers: int = 2, **changes: Any) -> Any:
    """A Wan transformer of two 16-channel heads."""
    torch.manual_seed(seed)
    sizes = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 32,
        "freq_dim": 32,
        "ffn_dim": 48,
        "num_layers": layers,
        "rope_max_seq_len": 64,
    }
    model = WanTransformer3DModel(**{**sizes, **changes}).eval()
    with torch.no_grad():
        for block in model.blocks:
            # as initialised, attention is nearly uniform, and no mask would be told from another.
            block.attn1.to_q.weight.mul_(6)
            block.attn1.to_k.weight.mul_(6)
    return model


def tiny_wan(
    *, seed: int = 0, layers: int = 2, two_stage: bool = False, euler: bool = False
) -> Any:
    """A complete ``WanPipeline`` in fp32 on the CPU, under one megabyte."""
    torch.manual_seed(seed)
    text_encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=4 + len(WORDS),
            d_model=32,
            d_kv=8,
            d_ff=37,
            num_heads=4,
            num_layers=1,
            dropout_rate=0.0,
        )
    ).eval()
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ).eval()
    scheduler = (
        FlowMatchEulerDiscreteScheduler(shift=3.0)
        if euler
        else UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        )
    )
    pipe = WanPipeline(
        tokenizer=tiny_tokenizer(),
        text_encoder=text_encoder,
        vae=vae,
        scheduler=scheduler,
        transformer=tiny_transformer(seed, layers),
        transformer_2=tiny_transformer(seed + 1, layers) if two_stage else None,
        boundary_ratio=0.9 if two_stage else None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save_tiny_wan(folder: Path, **options: Any) -> Path:
    """Save a tiny pipeline as a diffusers folder."""
    tiny_wan(**options).save_pretrained(folder)
    return folder


def latents_of(pipe: Any, **changes: Any) -> torch.Tensor:
    """Run ``pipe`` and return the denoised latents: no decoding, so quick."""
    call = {
        "prompt": "a red circle",
        "height": 64,
        "width": 64,
        "num_frames": 9,
        "num_inference_steps": 4,
        "guidance_scale": 3.0,
        "generator": torch.Generator("cpu").manual_seed(0),
        "output_type": "latent",
        "max_sequence_length": 16,
    }
    return pipe(**{**call, **changes}).frames


def transformer_inputs(
    frames: int, height: int, width: int, *, batch: int = 1, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """What a tiny transformer takes, for a video of so many frames and pixels."""
    gen = torch.Generator().manual_seed(1)
    shape = (batch, 4, (frames - 1) // 4 + 1, height // 8, width // 8)
    return {
        "hidden_states": torch.randn(shape, generator=gen).to(dtype),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": torch.randn(batch, 16, 32, generator=gen).to(dtype),
        "return_dict": False,
    }


def forward(transformer: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """What a transformer makes of its inputs, without gradients."""
    with torch.no_grad():
        out: torch.Tensor = transformer(**inputs)[0]
    return out
