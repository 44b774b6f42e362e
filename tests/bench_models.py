"""The published models of ``vidsparse bench model``, so small that a CPU runs them in a second."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

# the command is imported where it is first called: not while its models are shrunk.
import vidsparse.apps.commands.bench_model  # noqa: F401
from vidsparse.apps.bench import model_settings, model_shapes
from vidsparse.apps.bench.model_shapes import MODEL_SHAPES

TINY: dict[str, dict[str, Any]] = {
    "wan-1.3b": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "text_dim": 32,
        "freq_dim": 32,
        "ffn_dim": 48,
        "num_layers": 3,
    },
    "hunyuanvideo": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "text_embed_dim": 16,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (4, 6, 6),
    },
    "mochi": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 3,
        "pooled_projection_dim": 16,
        "text_embed_dim": 16,
        "time_embed_dim": 8,
        "max_sequence_length": 112,
    },
    "cogvideox-5b": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "time_embed_dim": 8,
        "text_embed_dim": 16,
        "num_layers": 3,
        "max_text_seq_length": 20,
    },
    "ltx-2": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
        "num_layers": 3,
        "caption_channels": 16,
        "in_channels": 8,
        "out_channels": 8,
        "audio_in_channels": 8,
        "audio_out_channels": 8,
    },
    "minimax-h3": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "hidden_size": 24,
        "num_layers": 3,
        "num_refiner_layers": 1,
        "ffn_dim": 32,
        "in_channels": 4,
        "audio_in_channels": 8,
        "text_dim": 16,
        "freq_dim": 16,
        "time_embed_hidden_dim": 16,
        "time_embed_dim": 16,
        "rope_freq_dim": 2,
    },
}


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the command find small models under the published names."""
    shapes = {
        name: replace(shape, config=MappingProxyType({**shape.config, **TINY[name]}))
        for name, shape in MODEL_SHAPES.items()
        if name in TINY
    }
    for module in (model_settings, model_shapes):
        monkeypatch.setattr(module, "MODEL_SHAPES", MappingProxyType(shapes))
