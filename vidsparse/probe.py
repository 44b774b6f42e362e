"""A look inside one attention call: pooled scores and kept tiles of every head, in bounded memory.

The map of a head has as many rows as there are query tiles, thousands at full size, and a model
dozens of heads. A ``CellProbe`` keeps samples of it: at most ``side`` rows and columns, taken at
even distances along the sequence, one head at a time. It stores them twice, along the run's own
token order and along another, because a tile is a piece of the first and lies scattered in the
second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidsparse.grid import TokenGrid
from vidsparse.masks import pooled_scores, tile_count
from vidsparse.order import check_order, token_order

if TYPE_CHECKING:
    from vidsparse.methods import SparseMethod
    from vidsparse.site import CallSite

SIDE = 256
"""Rows and columns of a recorded map: 40 heads in two orders are 16 MB."""


@dataclass(frozen=True, slots=True)
class HeadMaps:
    """Every head's map along one token order.

    Attributes:
        weights: pooled attention divided by the largest of its row, float16 ``[H, rows, columns]``.
        kept: whether the tile there was selected, bool ``[H, rows, columns]``.
    """

    weights: NDArray[np.float16]
    kept: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CellRecord:
    """What one attention call looked like.

    Attributes:
        step: denoising step, from 0.
        layer: transformer layer, from 0.
        branch: ``conditional`` or ``unconditional``.
        order: the token order that the tiles were cut in.
        tile: queries x keys of a tile.
        tokens: length of the sequence.
        selected: share of pairs the method chose, by head.
        computed: share of pairs the kernel multiplied, by head.
        maps: by name of token order, the run's own first.
    """

    step: int
    layer: int
    branch: str
    order: str
    tile: tuple[int, int]
    tokens: int
    selected: tuple[float, ...]
    computed: tuple[float, ...]
    maps: dict[str, HeadMaps]

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return len(self.selected)


class CellProbe:
    """Records one call of a run; give it to ``SparseHandle.probe`` before the run.

    Args:
        step: denoising step, from 0. It must make a plan: nothing is recorded if the call is dense
            or reuses the plan of an earlier step.
        layer: transformer layer, from 0.
        branch: guidance branch.
        orders: token orders to record the maps along, beside the run's own.
        side: most rows and columns that are kept.

    Raises:
        OptionError: an unknown token order.
    """

    def __init__(
        self,
        step: int,
        layer: int,
        *,
        branch: str = "conditional",
        orders: tuple[str, ...] = ("hilbert", "rowmajor"),
        side: int = SIDE,
    ) -> None:
        for name in orders:
            check_order(name)
        self.step, self.layer, self.branch = step, layer, branch
        self.orders = orders
        self.side = side
        self.record: CellRecord | None = None

    def wants(self, site: CallSite) -> bool:
        """Whether this is the call to record."""
        where = (self.step, self.layer, self.branch)
        return self.record is None and (site.step, site.layer, site.branch) == where

    def take(
        self,
        method: SparseMethod,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        site: CallSite,
        order: str,
        shares: tuple[Tensor, Tensor],
    ) -> None:
        """Record a call: ``q``, ``k``, ``v`` ``[B, H, S, D]`` in ``order``, the first of the batch.

        ``shares`` are the plan's selected and computed densities, ``[B, H]``.
        """
        places = {
            name: _places(name, order, site.grid, method.tile, self.side, q.device)
            for name in dict.fromkeys((order, *self.orders))
        }
        found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in places}
        with torch.autocast(q.device.type, enabled=False):
            # a head at a time: at full size one map alone is a hundred megabytes.
            for head in range(q.shape[1]):
                at = replace(site, first_head=head)
                alone = (slice(1), slice(head, head + 1))
                weights, kept = _head(method, q[alone], k[alone], v[alone], at)
                for name, (rows, columns) in places.items():
                    found[name].append(
                        (weights[rows][:, columns].half().cpu(), kept[rows][:, columns].cpu())
                    )
        selected, computed = (tuple(share[0].tolist()) for share in shares)
        self.record = CellRecord(
            step=site.step,
            layer=site.layer,
            branch=site.branch,
            order=order,
            tile=method.tile,
            tokens=q.shape[2],
            selected=selected,
            computed=computed,
            maps={
                name: HeadMaps(
                    weights=torch.stack([weights for weights, _ in heads]).numpy(),
                    kept=torch.stack([kept for _, kept in heads]).numpy(),
                )
                for name, heads in found.items()
            },
        )


def _head(
    method: SparseMethod, q: Tensor, k: Tensor, v: Tensor, site: CallSite
) -> tuple[Tensor, Tensor]:
    """Pooled attention over its row's largest and the selected tiles of one head, ``[Tq, Tk]``."""
    rows, keys = method.tile
    kept = method.select(q, k, site, v=v)[0, 0]
    if site.grid.text:
        if method.text_rows == "dense":
            kept[site.grid.video // rows :] = True
        kept[:, site.grid.video // keys :] = True
    scores = pooled_scores(q, k, method.tile)[0, 0]
    return (scores - scores.amax(-1, keepdim=True)).exp(), kept


def _places(
    shown: str,
    order: str,
    grid: TokenGrid,
    tile: tuple[int, int],
    side: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The query and key tiles that a map along ``shown`` samples, when tiles are cut in ``order``.

    Along the run's own order every tile is one row or column while they fit; along another the
    samples are tokens.
    """
    found = []
    for size in tile:
        if shown == order:
            tiles = tile_count(grid.tokens, size)
            found.append(_evenly(tiles, side).to(device))
        else:
            tokens = token_order(shown, grid).permutation[_evenly(grid.tokens, side)]
            found.append((token_order(order, grid).inverse[tokens] // size).to(device))
    return found[0], found[1]


def _evenly(count: int, most: int) -> Tensor:
    """At most ``most`` numbers below ``count`` at even distances, int64."""
    taken = min(count, most)
    return ((torch.arange(taken, dtype=torch.float64) + 0.5) * count / taken).long()
