"""LTX-2: video self-attention in ``transformer_blocks.N.attn1``; audio's attention is untouched.

Guidance is batched; spatio-temporal and modality guidance are forwards of their own in each step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines.adapter import Adapter, SparseProcessor
from vidsparse.pipelines.families import LTX_2
from vidsparse.pipelines.layout import Layout
from vidsparse.pipelines.ltx import video_layout
from vidsparse.pipelines.parallel import Shares, gathered, split_input, split_outputs
from vidsparse.pipelines.projection import rotate


def _rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, heads: int, kind: str) -> Tensor:
    """Rotary embedding of ``x`` ``[B, S, C]``; returns ``[B, S, H, D]``."""
    if kind == "interleaved":
        # over the channels of all heads, every angle twice: [B, S, C].
        return _by_head(rotate(x, cos[..., 0::2], sin[..., 0::2]), heads)
    # "split": the first half of a head's channels pairs up with the second; [B, H, S, D / 2].
    cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
    return rotate(_by_head(x, heads), cos, sin, halves=True)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """From ``[B, S, C]`` to ``[B, S, H, D]``."""
    return x.view(*x.shape[:2], heads, -1)


class LTX2SparseProcessor(SparseProcessor):
    """Stands in for ``LTX2AudioVideoAttnProcessor`` and ``LTX2PerturbedAttnProcessor``."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: tuple[Tensor, Tensor] | None = None,
        key_rotary_emb: tuple[Tensor, Tensor] | None = None,
        perturbation_mask: Tensor | None = None,
        all_perturbed: bool | Tensor | None = None,
    ) -> Tensor:
        """Self-attention of ``hidden_states`` ``[B, S, C]``.

        Samples where ``perturbation_mask`` is 0 pass their values on instead (spatio-temporal
        guidance). A mask makes the call dense.
        """
        if encoder_hidden_states is not None:
            raise self.unexpected("with text")
        value = attn.to_v(hidden_states)
        if all_perturbed is None:
            all_perturbed = perturbation_mask is not None and not bool(perturbation_mask.any())
        if all_perturbed:
            out = value
        else:
            rotary = query_rotary_emb, key_rotary_emb
            out = self._attend(attn, hidden_states, value, *rotary, attention_mask)
            if perturbation_mask is not None:
                out = torch.lerp(value, out, perturbation_mask)
        if attn.to_gate_logits is not None:
            # twice the sigmoid, so that a gate that has learned nothing is 1.
            gates = 2 * torch.sigmoid(attn.to_gate_logits(hidden_states))
            out = (_by_head(out, attn.heads) * gates.unsqueeze(-1)).flatten(2, 3)
        projected: Tensor = attn.to_out[1](attn.to_out[0](out))
        return projected

    def _attend(
        self,
        attn: Any,
        x: Tensor,
        value: Tensor,
        of_q: tuple[Tensor, Tensor] | None,
        of_k: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
    ) -> Tensor:
        q, k = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x))
        if of_q is None:
            q, k = (_by_head(part, attn.heads) for part in (q, k))
        else:
            q = _rotate_heads(q, *of_q, attn.heads, attn.rope_type)
            k = _rotate_heads(k, *(of_k or of_q), attn.heads, attn.rope_type)
        # of conditions that are attended to in part, [B, S, S].
        mask = None if mask is None else mask[:, None]
        out: Tensor = self.attend(q, k, _by_head(value, attn.heads), mask)
        return out.flatten(2, 3).type_as(q)


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    """By sizes, or by coordinates where there are conditions.

    Raises:
        UnsupportedError: several processes would need their parts of what diffusers cannot split.
    """
    marked = arguments.get("video_keyframes_mask") is not None
    if marked and getattr(transformer, "_parallel_config", None) is not None:
        raise UnsupportedError(
            "DFR marks tokens of keyframes, which diffusers does not deal to several processes. "
            "Hint: run it in one process."
        )
    return video_layout(transformer, arguments)


def _plan(transformer: Any) -> Mapping[str, Any]:
    """The video and what belongs to its tokens; text and sound stay whole.

    Sound attends to the video by the host's own exchange.
    """
    heads = transformer.config.rope_type == "split"
    angles = split_outputs(2, 4, 2) if heads else split_outputs(1, 3, 2)
    return {
        "": {"hidden_states": split_input(1, 3), "timestep": split_input(1, 2)},
        "rope": angles,
        "cross_attn_rope": angles,
        "proj_out": gathered(),
    }


ADAPTER: Final = Adapter(
    family=LTX_2,
    attention=re.compile(r"transformer_blocks\.\d+\.attn1"),
    stock_processors=("LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor"),
    processor=LTX2SparseProcessor,
    layout=_layout,
    tiled=True,
    outputs=("proj_out", "audio_proj_out"),
    shares=Shares(
        plan=_plan,
        exchanged=re.compile(r"transformer_blocks\.\d+\.video_to_audio_attn"),
    ),
)
