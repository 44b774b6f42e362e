"""FG-Attn: fine-grained tiles kept by top-p over pooled attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

import torch
from torch import Tensor

from vidsparse.errors import OptionError
from vidsparse.grouping import check_merge
from vidsparse.masks import PooledTopP, choose_tiles, choosing_bytes, pooled_scores
from vidsparse.methods.base import (
    Selection,
    SparseMethod,
    as_tile,
    check_plans,
    means_option,
    merge_option,
    option,
    plans_option,
    settle_means,
    settle_share,
    share_option,
    tile_option,
    topk_option,
)
from vidsparse.methods.numbers import Numbers
from vidsparse.methods.studied import Knob, Settings
from vidsparse.plan import BLOCK_ROWS
from vidsparse.residual import error_of_means
from vidsparse.site import CallSite

SCORES: Final = ("mass", "residual")
"""What ``score`` can be."""

# tiles whose mean leaves no error are alike.
LEAST_ERROR: Final = 1e-30


@dataclass(frozen=True, kw_only=True)
class FgAttn(SparseMethod):
    """FG-Attn (arXiv 2509.16518), sections 5.2 and 5.3.

    Symbols: M x N tile, p the kept probability mass, R = 128 / M tiles merged into a block (on a
    CPU blocks have 64 rows: R = 64 / M). For tile means q_avg and k_avg, A = softmax(q_avg k_avg^T
    / sqrt(D)); each row keeps the smallest set of tiles whose sum reaches p. Short tiles count like
    full ones, as in the paper.

    ``topk`` keeps that share of the key tiles instead, rounded up, whatever their mass.

    ``score="residual"`` puts ``error_of_means``, foresight's score, in the place of A: where
    skipped tiles enter by their means, the tiles whose mean would err most are computed. It is for
    studies, which tell the choice of tiles apart from what becomes of the others, and runs in
    torch.

    ``top_p`` of every layer and head may come from a preset.

    Raises:
        OptionError: ``top_p`` or ``topk`` is outside (0, 1], or both are given; ``score``, ``tile``
            or ``merge`` has an unknown value.
    """

    name: ClassVar[str] = "fg-attn"
    title: ClassVar[str] = "FG-Attn"
    paper: ClassVar[str] = "FG-Attn: Leveraging Fine-Grained Sparse Attention (arXiv 2509.16518)"
    summary: ClassVar[str] = (
        "the small tiles that hold most of the attention, judged by their means"
    )
    as_published: ClassVar[Settings] = {"means": None, "plans": "own"}
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
    score: str = option(
        "mass",
        flag="--score",
        metavar="NAME",
        help="what tiles are kept by: mass, the pooled attention, or residual, the error that "
        "their mean would leave",
        convert=str,
        choices=SCORES,
    )
    tile: tuple[int, int] = tile_option((16, 16))
    merge: str = merge_option()
    means: int | None = means_option()
    plans: str = plans_option()
    numbers: Numbers | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        settle_share(self, "top_p", self.top_p, self.topk)
        if self.score not in SCORES:
            raise OptionError(
                f"unknown score {self.score!r}. Hint: choose from {', '.join(SCORES)}."
            )
        object.__setattr__(self, "tile", as_tile(self.tile))
        check_merge(self.merge)
        settle_means(self)
        check_plans(self)

    @property
    def looks_at_values(self) -> bool:
        """True with ``score="residual"``."""
        return self.score == "residual"

    @property
    def equal_heads(self) -> bool:
        """True with ``topk`` and tiles of a whole block.

        Smaller tiles are joined, and joined lists differ in length.
        """
        return self.topk is not None and self.tile[0] >= BLOCK_ROWS

    def select(self, q: Tensor, k: Tensor, site: CallSite, *, v: Tensor | None = None) -> Tensor:
        """Top-p of the pooled attention, bool ``[B, H, Tq, Tk]`` (section 5.3).

        Raises:
            OptionError: the residual score is asked for without values.
        """
        top_p = self.number("top_p", site, q.device)
        if isinstance(top_p, Tensor):
            top_p = top_p[: q.shape[1], None, None]
        if self.score == "mass":
            return choose_tiles(pooled_scores(q, k, self.tile), top_p, self.topk)
        if v is None:
            raise OptionError("the residual score needs values. Hint: select(q, k, site, v=v).")
        errors = error_of_means(q, k, v, self.tile)
        # the softmax of logarithms is each error's share of their sum.
        return choose_tiles(errors.clamp_min(LEAST_ERROR).log(), top_p, self.topk)

    @property
    def mask_bytes(self) -> int:
        """Least bytes that ``select`` takes for a tile of its mask."""
        return choosing_bytes(None if self.topk is not None else self.top_p)

    def selection(self, q: Tensor) -> Selection:
        """``rule``, which kernels follow; ``select`` for the residual score, which they lack."""
        return "rule" if self.score == "mass" else "select"

    def rule(self, site: CallSite, device: torch.device) -> PooledTopP:
        """Top-p, or top-k."""
        top_p = self.number("top_p", site, device)
        return PooledTopP(1.0 if top_p is None else top_p, topk=self.topk)
