"""SpargeAttn: pooled top-cdf with a judge of self-similarity (the first of its two stages)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vidsparse.errors import OptionError
from vidsparse.grouping import check_merge
from vidsparse.masks import PooledTopP, pooled_scores, self_similarity, top_p_mask
from vidsparse.methods.base import (
    SparseMethod,
    as_tile,
    check_share,
    merge_option,
    option,
    tile_option,
)
from vidsparse.site import CallSite


@dataclass(frozen=True, kw_only=True)
class SpargeAttn(SparseMethod):
    """SpargeAttn (arXiv 2502.18137), section 3.2 and algorithm 1, lines 4 to 6.

    Symbols: b_q x b_k block, tau the kept cumulative mass, theta the least self-similarity of a
    block that its mean may stand for. Columns of non-self-similar key blocks leave the softmax
    (their score is -inf) and are always computed; so are rows of non-self-similar query blocks.
    The pooled scores are scaled by 1/sqrt(d), which the printed algorithm omits, and the block
    that crosses tau is kept.

    Raises:
        OptionError: ``tau`` outside (0, 1], ``theta`` outside [-1, 1], a tile or merge that does
            not exist.
    """

    name: ClassVar[str] = "spargeattn"
    title: ClassVar[str] = "SpargeAttn"
    paper: ClassVar[str] = "SpargeAttn: Accurate Sparse Attention (arXiv 2502.18137)"
    summary: ClassVar[str] = "top-cdf over pooled blocks, blocks that are not self-similar kept"

    tau: float = option(
        0.9, flag="--tau", metavar="T", help="cumulative pooled attention kept per row, in (0, 1]"
    )
    theta: float = option(
        0.3,
        flag="--theta",
        metavar="T",
        help="blocks less self-similar than this are always computed, in [-1, 1]",
    )
    tile: tuple[int, int] = tile_option((128, 64))
    merge: str = merge_option()

    def __post_init__(self) -> None:
        check_share("tau", self.tau)
        number = isinstance(self.theta, (int, float)) and not isinstance(self.theta, bool)
        if not number or not -1 <= self.theta <= 1 or math.isnan(self.theta):
            raise OptionError(f"theta must lie in [-1, 1], got {self.theta!r}")
        object.__setattr__(self, "tile", as_tile(self.tile))
        check_merge(self.merge)

    def select(self, q: Tensor, k: Tensor, site: CallSite) -> Tensor:
        """Top-cdf with the self-similarity judge, bool ``[B, H, Tq, Tk]`` (equations 4 and 5)."""
        stray_q = self_similarity(q, self.tile[0]) < self.theta
        stray_k = (self_similarity(k, self.tile[1]) < self.theta).unsqueeze(-2)
        scores = pooled_scores(q, k, self.tile).masked_fill(stray_k, -torch.inf)
        # a row whose every column is stray has no softmax; all of it is computed below.
        probabilities = scores.softmax(-1).nan_to_num(0.0)
        return top_p_mask(probabilities, self.tau) | stray_q.unsqueeze(-1) | stray_k

    def rule(self, site: CallSite, device: torch.device) -> PooledTopP:
        """Top-cdf and the judge."""
        return PooledTopP(self.tau, self.theta)
