"""Tiny random pipelines of LTX-Video and LTX-2."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from tiny_parts import (
    IMAGE,
    LAST_IMAGE,
    VOCABULARY,
    Tiny,
    flow_scheduler,
    ready,
    sharpen,
    t5_encoder,
    word_tokenizer,
)
from tiny_pipelines import tiny_tokenizer


def ltx(kind: str = "LTXPipeline") -> Any:
    torch.manual_seed(0)
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=32,
    ).eval()
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, True, False),
        decoder_spatio_temporal_scaling=(True, True, True, False),
        patch_size=1,
        encoder_causal=True,
        decoder_causal=False,
    ).eval()
    return ready(
        getattr(diffusers, kind)(
            scheduler=flow_scheduler(),
            vae=vae,
            text_encoder=t5_encoder(),
            tokenizer=tiny_tokenizer(),
            transformer=sharpen(transformer),
        )
    )


def ltx2(kind: str = "LTX2Pipeline", **changes: Any) -> Any:
    torch.manual_seed(0)
    rope = changes.get("rope_type", "split")
    gemma = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config={
                "vocab_size": VOCABULARY,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            vision_config={
                "hidden_size": 8,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "image_size": 8,
                "patch_size": 4,
            },
            image_token_index=4,
            mm_tokens_per_image=1,
        )
    ).eval()
    sizes = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "audio_in_channels": 4,
        "audio_out_channels": 4,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
        "num_layers": 2,
        "caption_channels": 16,
        "rope_double_precision": False,
        "rope_type": rope,
    }
    transformer = diffusers.LTX2VideoTransformer3DModel(**{**sizes, **changes}).eval()
    connectors = diffusers.pipelines.ltx2.LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        connector_rope_base_seq_len=32,
        rope_double_precision=False,
        rope_type=rope,
    ).eval()
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8, 8, 8),
        down_block_types=("LTX2VideoDownBlock3D",) * 3,
        decoder_block_out_channels=(8, 8, 8),
        layers_per_block=(1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, True),
        decoder_spatio_temporal_scaling=(True, True, True),
        decoder_inject_noise=(False,) * 4,
        downsample_type=("spatiotemporal",) * 3,
        upsample_type=("spatiotemporal",) * 3,
        upsample_residual=(False,) * 3,
        upsample_factor=(1, 1, 1),
        patch_size=1,
        decoder_causal=False,
    ).eval()
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        ch_mult=(1,),
        num_res_blocks=1,
        resolution=32,
        latent_channels=2,
        mel_bins=8,
    ).eval()
    # the audio latents, 2 channels of 8 mel bins, are packed into tokens of 16 channels.
    vocoder = diffusers.pipelines.ltx2.LTX2Vocoder(
        in_channels=16,
        hidden_channels=32,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    ).eval()
    return ready(
        getattr(diffusers, kind)(
            scheduler=flow_scheduler(),
            vae=vae,
            audio_vae=audio_vae,
            text_encoder=gemma,
            tokenizer=word_tokenizer(padding_side="left"),
            connectors=connectors,
            transformer=sharpen(transformer),
            vocoder=vocoder,
        )
    )


PLAIN_LTX2 = {"stg_scale": 0.0, "audio_stg_scale": 0.0, "modality_scale": 1.0} | {
    "audio_modality_scale": 1.0
}

LTX: dict[str, Tiny] = {
    "ltx": Tiny(build=ltx, call={"max_sequence_length": 16}, odd=(17, 96, 160)),
    "ltx-image": Tiny(
        build=lambda: ltx("LTXImageToVideoPipeline"),
        call={"image": lambda n: [IMAGE] * n, "max_sequence_length": 16},
        odd=(17, 96, 160),
    ),
    "ltx-condition": Tiny(
        # the first frame in its place, another one as tokens in front of the video.
        build=lambda: ltx("LTXConditionPipeline"),
        call={
            "image": lambda n: [IMAGE, LAST_IMAGE],
            "frame_index": lambda n: [0, 8],
            "max_sequence_length": 16,
        },
        odd=(17, 96, 160),
    ),
    "ltx2": Tiny(
        build=ltx2,
        call={"max_sequence_length": 16, **PLAIN_LTX2},
        odd=(17, 96, 160),
    ),
    "ltx2-guidance": Tiny(
        branches=("conditional", "uncond_stg", "uncond_modality"),
        # 2.3: gates on the heads, and two more forwards a step, one of which skips attention.
        build=lambda: ltx2(perturbed_attn=True, gated_attn=True),
        call={"max_sequence_length": 16, "spatio_temporal_guidance_blocks": [1]},
        odd=(17, 96, 160),
    ),
    "ltx2-image": Tiny(
        build=lambda: ltx2("LTX2ImageToVideoPipeline", rope_type="interleaved"),
        # an image is compressed like video first, which would take another package.
        call={
            "image": lambda n: [IMAGE] * n,
            "image_crf": 0,
            "max_sequence_length": 16,
            **PLAIN_LTX2,
        },
        odd=(17, 96, 160),
    ),
}
