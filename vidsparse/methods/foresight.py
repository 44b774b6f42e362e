"""Foresight: exact attention where a mean would err most, means everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import torch
from torch import Tensor

from vidsparse.errors import OptionError
from vidsparse.masks import tile_count
from vidsparse.methods.base import (
    BlockChoice,
    Selection,
    SparseMethod,
    as_tile,
    check_plans,
    check_refreshing,
    check_share,
    check_text_rows,
    count_or_auto,
    fading_option,
    means_option,
    option,
    plans_option,
    reach_option,
    settle_means,
    slope_option,
    text_rows_option,
    tile_option,
    unconditional_every_option,
)
from vidsparse.methods.numbers import Numbers
from vidsparse.methods.studied import Knob, Settings
from vidsparse.residual import FINEST_ROWS, SUMMED_KEYS, error_of_means
from vidsparse.site import CallSite

if TYPE_CHECKING:
    from vidsparse.order import TokenOrder

ROWS: Final = (16, 32, 64, 128)
# finer tiles are nearer to the truth, and what they cost grows with the square of the length.
FINEST_TOKENS: Final = 40_000


@dataclass(frozen=True, kw_only=True)
class Foresight(SparseMethod):
    """This project's own method: equal lists for all blocks, chosen by the error of a mean.

    A block of M query rows attends a ``share`` of the key chunks (N tokens each) exactly: those
    whose mean would leave the largest squared error. The error is estimated from means and
    variances of small tiles; ``error_of_means`` has the formula. All other keys are attended by the
    means of their groups, as in Sol-Attn (arXiv 2607.24027), so that nothing is left out. Every
    block lists the same number of chunks, so all heads and all GPUs have the same work.

    After calibration (``vidsparse calibrate``) every layer and head has a share of its own, which
    is the same for all blocks of the head.

    ``rows`` is the number of query rows that are judged as one; None takes 16 up to 40,000 tokens
    and 32 beyond, but no more than M. ``text_rows`` says whether blocks that hold text choose their
    chunks, too (``sparse``), or attend to everything. ``fading``, ``reach`` and ``slope`` say what
    becomes of that which a refresh keeps, and ``unconditional_every`` which branch of guidance
    makes one; see ``SparseMethod``.

    Raises:
        OptionError: ``share`` is outside (0, 1]; ``rows`` does not divide M; ``tile``, ``means``,
            ``plans`` or ``text_rows`` has an unknown value; ``fading``, ``reach``, ``slope`` or
            ``unconditional_every`` is out of range, or the last above 1 with plans of one's own.
    """

    name: ClassVar[str] = "foresight"
    title: ClassVar[str] = "Foresight"
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = "exact where a mean would err most, means of groups everywhere else"
    free_options: ClassVar[tuple[str, ...]] = ("rows",)
    # groups of neighbours in space and time have nearer means; dropping is another matter.
    token_order: ClassVar[str] = "hilbert"
    refresh: ClassVar[int | float] = 0.2
    masks: ClassVar[tuple[Settings, ...]] = ({}, {"tile": "32x16"})

    knobs: ClassVar[tuple[Knob, ...]] = (Knob("share", 0.01, 1.0),)

    share: float = option(
        0.15, flag="--share", metavar="P", help="share of key chunks that a block attends exactly"
    )
    tile: tuple[int, int] = tile_option((128, 16))
    rows: int | None = option(
        None,
        flag="--rows",
        metavar="R",
        help="query rows judged as one: 16, 32, 64, 128, or auto, by the length",
        convert=count_or_auto,
        absent="auto",
    )
    means: int | None = means_option()
    plans: str = plans_option()
    text_rows: str = text_rows_option()
    fading: float = fading_option()
    reach: int | None = reach_option()
    slope: float = slope_option()
    unconditional_every: int = unconditional_every_option()
    merge: ClassVar[str] = "consecutive"  # type: ignore[misc]
    numbers: Numbers | None = None

    def __post_init__(self) -> None:
        check_share("share", self.share)
        object.__setattr__(self, "tile", as_tile(self.tile))
        settle_means(self)
        check_plans(self)
        check_text_rows(self)
        check_refreshing(self)
        if self.rows is not None and (self.rows not in ROWS or self.tile[0] % self.rows):
            fitting = ", ".join(str(rows) for rows in ROWS if self.tile[0] % rows == 0)
            raise OptionError(
                f"rows must divide the tile's {self.tile[0]} rows, got {self.rows!r}. "
                f"Hint: choose from {fitting}."
            )

    @property
    def looks_at_values(self) -> bool:
        """True: the score needs the variance of values."""
        return True

    @property
    def block_rows(self) -> int:
        """The tile's rows: each tile is a block with a list of its own.

        So nothing more than its list is computed.
        """
        return self.tile[0]

    @property
    def equal_heads(self) -> bool:
        """True unless calibrated shares differ between the heads of a layer.

        Where a kernel joins several tiles in a block, the joined lists differ a little.
        """
        if self.numbers is None or "share" not in self.numbers:
            return True
        table = self.numbers.tables["share"]
        return bool((table == table[:, :, :1]).all())

    def rows_for(self, tokens: int) -> int:
        """Query rows that are judged as one, in a sequence of ``tokens`` tokens."""
        by_length = FINEST_ROWS if tokens <= FINEST_TOKENS else 2 * FINEST_ROWS
        return self.rows or min(by_length, self.tile[0])

    def listed(self, chunks: int, site: CallSite, heads: int, device: torch.device) -> Tensor:
        """How many of ``chunks`` each block lists, for each of the call's heads, int32 ``[H]``.

        Never fewer than one.
        """
        if self.numbers is None or "share" not in self.numbers:
            count = min(chunks, max(1, round(self.share * chunks)))
            return torch.full((heads,), count, dtype=torch.int32, device=device)
        shares = self.numbers.of("share", site, device)[:heads]
        return (shares * chunks).round().clamp(1, chunks).int()

    def select(self, q: Tensor, k: Tensor, site: CallSite, *, v: Tensor | None = None) -> Tensor:
        """The chunks of largest ``error_of_means``, bool ``[B, H, Tq, Tk]``.

        Raises:
            OptionError: called without values.
        """
        if v is None:
            raise OptionError("foresight needs values. Hint: select(q, k, site, v=v).")
        score = error_of_means(q, k, v, self.tile, self.rows_for(q.shape[2]))
        chunks = site.grid.video_tiles(self.tile[1])
        listed = self.listed(chunks, site, q.shape[1], q.device).view(-1, 1, 1)
        order = score[..., :chunks].argsort(-1, descending=True)
        kept = torch.arange(chunks, device=q.device) < listed
        return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order, kept.expand_as(order))

    def selection(self, q: Tensor) -> Selection:
        """``blocks``, kernels of its own, for 16-bit queries and keys; otherwise ``select``."""
        able = q.dtype in (torch.bfloat16, torch.float16)
        return "blocks" if able else "select"

    def choose_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, site: CallSite, order: TokenOrder
    ) -> BlockChoice:
        """Order the tokens and choose chunks, by kernels."""
        from vidsparse.kernels.selection.residual import largest_chunks, residual_ranks
        from vidsparse.kernels.tokens.moments import (
            merge_means,
            merge_moments,
            reorder_and_measure,
        )

        tokens, (rows, keys) = q.shape[2], self.tile
        judged, summed = self.rows_for(tokens), max(keys, SUMMED_KEYS)
        q, q_tiles = reorder_and_measure(q, order.permutation, judged, about_zero=True)
        k, k_chunks = reorder_and_measure(k, order.permutation, keys)
        v, v_chunks = reorder_and_measure(v, order.permutation, keys, summed=True)
        groups = merge_moments(k_chunks, summed), merge_means(v_chunks, summed)
        scale = q.shape[-1] ** -0.5
        ranks = residual_ranks(q_tiles, k_chunks, v_chunks, groups, rows // judged, scale)
        chunks = site.grid.video_tiles(keys)
        listed = self.listed(chunks, site, q.shape[1], q.device)
        choosing = (
            site.grid.video_tiles(rows) if self.text_rows == "dense" else tile_count(tokens, rows)
        )
        words, count = largest_chunks(ranks, listed, chunks, choosing)
        # a mean that text has a part in would pull the video's keys towards it.
        means = None
        if self.means is not None and not site.grid.text:
            means = groups[0].mean, groups[1]
            if self.means != summed:
                means = merge_means(k_chunks, self.means), merge_means(v_chunks, self.means)
        return BlockChoice(q, k, v, words, count, means)
