"""FG-Attn: fine-grained tiles kept by top-p over pooled attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from vidsparse.grouping import check_merge
from vidsparse.masks import PooledTopP, choose_tiles, pooled_scores
from vidsparse.methods.base import (
    Selection,
    SparseMethod,
    as_tile,
    means_option,
    merge_option,
    settle_means,
    settle_share,
    share_option,
    tile_option,
    topk_option,
)
from vidsparse.methods.numbers import Numbers
from vidsparse.methods.studied import Knob, Settings
from vidsparse.site import CallSite


@dataclass(frozen=True, kw_only=True)
class FgAttn(SparseMethod):
    """FG-Attn (arXiv 2509.16518), sections 5.2 and 5.3.

    Symbols: M x N tile, p the kept probability mass, R = 128 / M tiles merged into a block.
    For tile means q_avg and k_avg, A = softmax(q_avg k_avg^T / sqrt(D)); each row keeps the
    smallest set of tiles whose sum reaches p. Short tiles count like full ones, as in the paper.
    ``topk`` keeps that share of the key tiles instead, rounded up, whatever their mass.

    ``top_p`` of every layer and head may come from a preset.

    Raises:
        OptionError: ``top_p`` or ``topk`` outside (0, 1], both of them given, a tile or merge that
            does not exist.
    """

    name: ClassVar[str] = "fg-attn"
    title: ClassVar[str] = "FG-Attn"
    paper: ClassVar[str] = "FG-Attn: Leveraging Fine-Grained Sparse Attention (arXiv 2509.16518)"
    summary: ClassVar[str] = (
        "the small tiles that hold most of the attention, judged by their means"
    )
    as_published: ClassVar[Settings] = {"means": None}
    knobs: ClassVar[tuple[Knob, ...]] = (Knob("top_p", 0.0, 1.0), Knob("topk", 0.01, 1.0))
    # its own tile, and the coarse one that other methods are near.
    compared: ClassVar[tuple[Settings, ...]] = (
        {"tile": "16x16", "merge": "xor"},
        {"tile": "128x128"},
    )
    masks: ClassVar[tuple[Settings, ...]] = (
        {},
        *({"tile": tile} for tile in ("32x32", "64x64", "128x128")),
    )

    top_p: float | None = share_option(
        0.9, "--top-p", "share of pooled attention kept per row, in (0, 1]"
    )
    topk: float | None = topk_option()
    tile: tuple[int, int] = tile_option((16, 16))
    merge: str = merge_option()
    means: int | None = means_option()
    numbers: Numbers | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        settle_share(self, "top_p", self.top_p, self.topk)
        object.__setattr__(self, "tile", as_tile(self.tile))
        check_merge(self.merge)
        settle_means(self)

    def select(self, q: Tensor, k: Tensor, site: CallSite, *, v: Tensor | None = None) -> Tensor:
        """Top-p of the pooled attention, bool ``[B, H, Tq, Tk]`` (section 5.3)."""
        top_p = self.number("top_p", site, q.device)
        if isinstance(top_p, Tensor):
            top_p = top_p[: q.shape[1], None, None]
        return choose_tiles(pooled_scores(q, k, self.tile), top_p, self.topk)

    def selection(self, q: Tensor) -> Selection:
        """The project's kernels follow ``rule``."""
        return "rule"

    def rule(self, site: CallSite, device: torch.device) -> PooledTopP:
        """Top-p or top-k alone."""
        top_p = self.number("top_p", site, device)
        return PooledTopP(1.0 if top_p is None else top_p, topk=self.topk)
