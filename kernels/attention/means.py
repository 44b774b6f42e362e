"""Means that stand for the keys a block of query rows does not list.

Keys are cut into groups of consecutive tokens. Where a block does not list n of a group's tokens, a
pseudo key takes their place in the block's softmax: the group's mean key, with ln n added to its
score, and the group's mean value. A group of which some tokens are listed is no different: its mean
is that of the whole group, and n says how many are not listed. Listed keys are exact.

    o_i = (Σ_j∈list e^{s q_i·k_j} v_j + Σ_g n_g e^{s q_i·k̄_g} v̄_g) / (the same sum without values)

(Sol-Attn, arXiv 2607.24027, and PISA, 2602.01077, call this the zeroth order.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tokens.formats import QuantizedQK
from ..tokens.quantize import quantize_like_keys
from .gates import KEY_GROUP

GROUP_SIZES: Final = (32, 64, 128)
"""Tokens that a mean can stand for."""

COUNT_MULTIPLE: Final = KEY_GROUP
"""Columns of a table of counts are a multiple of this, so that kernels read whole steps of it."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyMeans:
    """Mean keys and values of groups of tokens, and for how many tokens each stands in each block.

    Attributes:
        k: mean keys ``[B, H, P, D]``, P = ceil(S / size), in the dtype of the keys.
        v: mean values, likewise.
        counts: tokens of every group that a block does not list, uint8 ``[B, H, G, P']``; P' is P
            rounded up to a multiple of 128, with zeros behind P.
        size: tokens of a group; the last one may be short.
        k8: the mean keys as 8-bit operands, with the format and smoothing of the call's keys, or
            None.
        k8_scale: what a run of 8-bit mean keys is multiplied by, fp32 ``[B, H, ceil(P / run)]``.
    """

    k: Tensor
    v: Tensor
    counts: Tensor
    size: int
    k8: Tensor | None = None
    k8_scale: Tensor | None = None

    @property
    def groups(self) -> int:
        """P, the number of groups."""
        return self.k.shape[2]

    def to(self, device: torch.device | str) -> KeyMeans:
        """The same numbers on ``device``."""
        k8, scale = (None if x is None else x.to(device) for x in (self.k8, self.k8_scale))
        k, v, counts = (x.to(device) for x in (self.k, self.v, self.counts))
        return replace(self, k=k, v=v, counts=counts, k8=k8, k8_scale=scale)

    def keys_in(self, dtype: torch.dtype, quantized: QuantizedQK | None) -> Tensor:
        """Mean keys ``[B, H, P, D]`` in ``dtype``, as a product with ``quantized`` sees them."""
        if quantized is None or self.k8 is None or self.k8_scale is None:
            return self.k.to(dtype)
        scale = self.k8_scale.to(dtype).repeat_interleave(quantized.k_run, 2)
        return self.k8.to(dtype) * scale[:, :, : self.groups, None]


def quantize_means(means: KeyMeans, quantized: QuantizedQK) -> KeyMeans:
    """``means`` with 8-bit keys for a call whose queries and keys are ``quantized``."""
    k8, scale = quantize_like_keys(means.k, quantized)
    return replace(means, k8=k8, k8_scale=scale)


def check_means(means: KeyMeans, q: Tensor, kv_count: Tensor, keys: int) -> None:
    """Raise a ``ValueError`` unless ``means`` fits queries ``[B, H, S, D]`` and a plan of them."""
    batch, heads, tokens, dim = q.shape
    if means.size not in GROUP_SIZES or means.size % keys:
        sizes = ", ".join(str(size) for size in GROUP_SIZES if size % keys == 0)
        raise ValueError(
            f"the group size of means must be a multiple of the {keys} keys of a chunk, and one of "
            f"{', '.join(map(str, GROUP_SIZES))}, got {means.size}. Hint: choose from {sizes}."
        )
    groups = -(-tokens // means.size)
    wanted = (batch, heads, groups, dim)
    for name, x in (("keys", means.k), ("values", means.v)):
        if x.shape != wanted or x.dtype != q.dtype:
            raise ValueError(
                f"mean {name} must be {q.dtype} {wanted} for q of {tuple(q.shape)}, "
                f"got {x.dtype} {tuple(x.shape)}"
            )
    columns = groups + -groups % COUNT_MULTIPLE
    if means.counts.shape != (*kv_count.shape, columns) or means.counts.dtype != torch.uint8:
        raise ValueError(
            f"counts of means must be uint8 {(*kv_count.shape, columns)}, "
            f"got {means.counts.dtype} {tuple(means.counts.shape)}"
        )


def group_means(x: Tensor, size: int, tokens: int | None = None) -> Tensor:
    """Means of groups of ``size`` tokens of ``x`` ``[B, H, S, D]``, in its dtype.

    Only the first ``tokens`` tokens count where that is given; a group without any has a mean of
    zero.
    """
    length = x.shape[2]
    real = length if tokens is None else tokens
    wide = x.to(torch.promote_types(x.dtype, torch.float32))[:, :, :real]
    wide = F.pad(wide, (0, 0, 0, length - real + -length % size))
    sizes = (real - torch.arange(0, length, size, device=x.device)).clamp(1, size)
    sums = wide.reshape(*x.shape[:2], -1, size, x.shape[3]).sum(3)
    return (sums / sizes.unsqueeze(-1)).to(x.dtype)


def counts_of_lists(
    kv_count: Tensor, kv_index: Tensor, keys: int, tokens: int, size: int
) -> Tensor:
    """``KeyMeans.counts`` of a plan's lists, in plain torch; shapes as in ``sparse_attention``."""
    chunks, groups = -(-tokens // keys), -(-tokens // size)
    place = torch.arange(kv_index.shape[-1], device=kv_index.device)
    # one extra column collects what is not listed.
    chunk = torch.where(place < kv_count.unsqueeze(-1), kv_index.long(), chunks)
    left = torch.ones(*kv_count.shape, chunks + 1, dtype=torch.bool, device=kv_index.device)
    left.scatter_(-1, chunk, False)
    return counts_of_chunks(left[..., :chunks], keys, tokens, size, groups)


def counts_of_chunks(left: Tensor, keys: int, tokens: int, size: int, groups: int) -> Tensor:
    """``KeyMeans.counts`` of flags ``[B, H, G, chunks]`` of what is not listed."""
    each = size // keys
    start = torch.arange(0, tokens, keys, device=left.device)
    sizes = (tokens - start).clamp_max(keys).to(torch.int32)
    lost = F.pad(left * sizes, (0, groups * each - left.shape[-1]))
    lost = lost.view(*left.shape[:-1], groups, each)
    counts = lost.sum(-1, dtype=torch.int32).to(torch.uint8)
    return F.pad(counts, (0, -groups % COUNT_MULTIPLE))
