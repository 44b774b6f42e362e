"""Sol-Attn: blocks above a threshold of their own row are exact, all others enter by means."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from vidsparse.errors import OptionError
from vidsparse.grouping import check_merge
from vidsparse.masks import pooled_mean
from vidsparse.methods.base import (
    SparseMethod,
    as_tile,
    check_plans,
    means_option,
    merge_option,
    option,
    plans_option,
    settle_means,
    tile_option,
)
from vidsparse.methods.numbers import Numbers
from vidsparse.methods.studied import Knob, Settings
from vidsparse.site import CallSite


@dataclass(frozen=True, kw_only=True)
class SolAttn(SparseMethod):
    """Sol-Attn (arXiv 2607.24027): its routing of blocks, and zeroth-order means for the rest.

    Symbols: q̄_i, k̄_j mean query and key of a block. Block (i, j) is exact where
    q̄_i·k̄_j > m_i + tau s_i, with m_i = q̄_i·mean_j(k̄_j) and s_i² = Σ_d q̄_id² var_j(k̄_jd), the
    mean and the spread that the row's scores would have if channels were independent (the paper's
    "diag" threshold); where it lies on the diagonal or beside it; and where it holds text. Keys of
    all other blocks enter the softmax as the means of groups of ``means`` tokens.

    The paper routes inside its kernel, 64 rows at a time; here the map is made first, and blocks of
    128 rows (64 on a CPU) attend the union of their tiles. Tau of every layer and head may come
    from a preset.

    Raises:
        OptionError: ``tau`` is no number; ``tile``, ``merge`` or ``means`` has an unknown value.
    """

    name: ClassVar[str] = "sol-attn"
    title: ClassVar[str] = "Sol-Attn"
    paper: ClassVar[str] = "Sol-Attn (arXiv 2607.24027)"
    summary: ClassVar[str] = "blocks above their row's own threshold exact, means for the rest"
    as_published: ClassVar[Settings] = {"plans": "own"}
    knobs: ClassVar[tuple[Knob, ...]] = (Knob("tau", 4.0, -4.0),)
    masks: ClassVar[tuple[Settings, ...]] = ({},)

    tau: float = option(
        1.0, flag="--tau", metavar="T", help="deviations above a row's mean score that are exact"
    )
    tile: tuple[int, int] = tile_option((64, 64))
    merge: str = merge_option("consecutive")
    means: int | None = means_option()
    plans: str = plans_option()
    numbers: Numbers | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        number = isinstance(self.tau, (int, float)) and not isinstance(self.tau, bool)
        if not number or not math.isfinite(self.tau):
            raise OptionError(f"tau must be a finite number, got {self.tau!r}")
        object.__setattr__(self, "tile", as_tile(self.tile))
        check_merge(self.merge)
        settle_means(self)
        check_plans(self)

    def select(self, q: Tensor, k: Tensor, site: CallSite, *, v: Tensor | None = None) -> Tensor:
        """The blocks above their row's threshold or near the diagonal, bool ``[B, H, Tq, Tk]``."""
        rows, keys = pooled_mean(q, self.tile[0]), pooled_mean(k, self.tile[1])
        # text is exact, so its keys should not move the threshold of the others.
        video = keys[:, :, : max(1, site.grid.video_tiles(self.tile[1]))]
        mean = rows @ video.mean(2).unsqueeze(-1)
        spread = (rows.square() @ video.var(2, correction=0).unsqueeze(-1)).sqrt()
        tau: float | Tensor = self.number("tau", site, q.device)
        if isinstance(tau, Tensor):
            tau = tau[: q.shape[1], None, None]
        chosen = rows @ keys.mT > mean + tau * spread
        return chosen | self._beside_diagonal(*chosen.shape[2:], device=q.device)

    def _beside_diagonal(self, rows: int, columns: int, *, device: torch.device) -> Tensor:
        """Blocks at most one away from those that share a token with the row, ``[Tq, Tk]``."""
        first = torch.arange(rows, device=device) * self.tile[0]
        near = (first // self.tile[1] - 1).unsqueeze(1)
        far = ((first + self.tile[0] - 1) // self.tile[1] + 1).unsqueeze(1)
        column = torch.arange(columns, device=device)
        return (column >= near) & (column <= far)
