"""BSFA: every score, and thresholds on block maxima that decide which values are worth adding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

import torch
from torch import Tensor

from vidsparse.errors import OptionError
from vidsparse.grid import TokenGrid
from vidsparse.kernels.attention.gates import PIECE_KEYS, AbsoluteGate, Gate
from vidsparse.masks import tile_count
from vidsparse.methods.base import SparseMethod, as_tile, check_share, option, tile_option
from vidsparse.methods.numbers import Numbers
from vidsparse.methods.studied import CallAblation, Settings
from vidsparse.plan import BLOCK_ROWS, SparsePlan
from vidsparse.site import CallSite

THRESHOLD: Final = "threshold"
"""Table of thresholds on scaled scores, ``[P, L, H, groups, fractions, query blocks]``."""

FRACTION: Final = "fraction"
"""Table of the kept fractions that the thresholds stand for, ``[P, L, H, fractions]``, all rows
alike."""


def always_kept(
    grid: TokenGrid, tile: tuple[int, int], device: torch.device | str | None = None
) -> Tensor:
    """Blocks that no threshold judges, bool ``[Tq, Tk]``: a query block's own tokens, and text.

    The paper keeps the diagonal, which is local coherence in a language model; on a curve through
    a video it is the block's own neighbourhood. Text tokens, last in the order, are kept both ways.
    """
    rows, keys = tile
    q_start = torch.arange(tile_count(grid.tokens, rows), device=device).unsqueeze(1) * rows
    k_start = torch.arange(tile_count(grid.tokens, keys), device=device).unsqueeze(0) * keys
    kept = (k_start < q_start + rows) & (q_start < k_start + keys)
    if grid.text:
        kept = kept | (q_start + rows > grid.video) | (k_start + keys > grid.video)
    return kept


@dataclass(frozen=True, kw_only=True)
class Bsfa(SparseMethod):
    """Block Sparse Flash Attention, sections 4.1 and 4.2 and algorithm 1.

    Symbols: B_M x B_N block, s_max the largest scaled score of a block, T the threshold of a layer,
    a head, a query block and a sparsity, k the blocks kept. Every q·k is computed; a block whose
    s_max is below T enters neither the running maximum nor the sum, and its values are not touched.
    So at most half of the work can be saved. Two things differ from the paper. k is a fraction of
    the judged blocks, since 64 blocks are few in a long sequence and all of a short one. And each
    group of denoising steps has its own thresholds, since scores grow as the noise goes.

    Raises:
        OptionError: ``keep`` outside (0, 1], or a tile that is not 128 queries by 64 or 128 keys.
    """

    name: ClassVar[str] = "bsfa"
    title: ClassVar[str] = "BSFA"
    paper: ClassVar[str] = "Block Sparse Flash Attention (Ohayon et al.)"
    summary: ClassVar[str] = (
        "exact scores, and a calibrated threshold on each block's largest decides whether its "
        "values are added; needs a preset and saves at most half of the work"
    )
    free_options: ClassVar[tuple[str, ...]] = ("keep",)
    needs_numbers: ClassVar[bool] = True
    # fractions that a preset holds: there is none between them.
    compared: ClassVar[tuple[Settings, ...]] = tuple(
        {"keep": keep} for keep in (0.1, 0.2, 0.3, 0.5)
    )
    # no tile is chosen before its scores are known.
    masks: ClassVar[tuple[Settings, ...]] = ()
    call_ablations: ClassVar[tuple[CallAblation, ...]] = (
        CallAblation(name="bsfa-density", measured="skipped", option="keep"),
    )

    keep: float = option(
        0.3,
        flag="--keep",
        metavar="SHARE",
        help="share of the judged blocks that is kept; one of those the preset was made for",
    )
    tile: tuple[int, int] = tile_option((128, 64))
    # all tiles keep all keys: there is nothing to choose a neighbour by.
    merge: str = field(default="consecutive", init=False)
    numbers: Numbers | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_share("keep", self.keep)
        object.__setattr__(self, "tile", as_tile(self.tile))
        rows, keys = self.tile
        if rows != BLOCK_ROWS or keys not in PIECE_KEYS:
            raise OptionError(
                f"bsfa needs tiles of 128 queries by 64 or 128 keys, got {rows}x{keys}. "
                "Hint: 128x64."
            )

    def check_numbers(self) -> None:
        """Raise an ``OptionError`` without numbers, or where ``keep`` is no fraction of theirs."""
        super().check_numbers()
        self._fraction()

    def select(self, q: Tensor, k: Tensor, site: CallSite, *, v: Tensor | None = None) -> Tensor:
        """All tiles, bool ``[B, H, Tq, Tk]``: no block is judged before its scores are known."""
        tiles = [tile_count(q.shape[2], size) for size in self.tile]
        return torch.ones(*q.shape[:2], *tiles, dtype=torch.bool, device=q.device)

    @property
    def gate_keys(self) -> int:
        """Keys of the pieces that the gate judges: the tile's."""
        return self.tile[1]

    def gate(self, q: Tensor, site: CallSite, plan: SparsePlan, kv_index: Tensor) -> Gate:
        """The thresholds of this layer and step, and the blocks that bypass them."""
        assert self.numbers is not None
        threshold = self.numbers.of(THRESHOLD, site, q.device)[: q.shape[1]]
        threshold = threshold[:, self.numbers.group(site), self._fraction()]
        kept = always_kept(site.grid, self.tile, q.device)
        # text rows come last and have no threshold of their own: all their blocks are kept.
        missing = kept.shape[0] - threshold.shape[-1]
        threshold = torch.nn.functional.pad(threshold, (0, missing), value=-torch.inf)
        keep = plan.listed(kept, kv_index)
        return AbsoluteGate(threshold, keep=keep, rows=self.tile[0], keys=self.tile[1])

    def _fraction(self) -> int:
        """Place of ``keep`` among the fractions of the table."""
        assert self.numbers is not None
        # on the CPU, where the tables are kept.
        stored = self.numbers.tables[FRACTION][0, 0, 0].tolist()
        for place, fraction in enumerate(stored):
            if abs(fraction - self.keep) < 1e-6:
                return place
        raise OptionError(
            f"keep must be one of the fractions that {self.numbers.source} has thresholds for "
            f"({', '.join(f'{f:g}' for f in stored)}), got {self.keep:g}"
        )
