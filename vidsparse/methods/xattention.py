"""XAttention: blocks scored by their antidiagonals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.errors import OptionError
from vidsparse.grouping import check_merge
from vidsparse.kernels.selection.shares import count_of_share
from vidsparse.masks import tile_count, top_k_mask, top_p_mask
from vidsparse.methods.base import (
    Selection,
    SparseMethod,
    as_tile,
    check_plans,
    check_whole,
    means_option,
    merge_option,
    option,
    optional_number,
    plans_option,
    settle_means,
    settle_share,
    share_option,
    tile_option,
    topk_option,
)
from vidsparse.methods.numbers import Numbers
from vidsparse.methods.studied import Ablation, Knob, Settings
from vidsparse.site import CallSite

STRIDES: Final = (4, 8, 16, 64)
PATTERNS: Final = ("antidiagonal", "diagonal", "random")

# strided scores held at once, in numbers: 256 MB in fp32. All of them would be 1.4 GB a head at
# 75,600 tokens and stride 4.
SCORES_AT_ONCE = 2**26


def query_turn(pattern: str, stride: int) -> Tensor:
    """Which query of a group meets key 0, 1, .. of another group, int64 ``[stride]``.

    ``random`` is one pairing for all groups, from a fixed seed, so that reruns agree.
    """
    if pattern == "antidiagonal":
        return torch.arange(stride - 1, -1, -1)
    if pattern == "diagonal":
        return torch.arange(stride)
    return torch.randperm(stride, generator=torch.Generator().manual_seed(0))


def whole_groups(x: Tensor, stride: int) -> Tensor:
    """``[B, H, S, D]`` with its last tokens repeated until groups of ``stride`` are whole.

    A short last group of r tokens repeats them in turn, so that every sum along an antidiagonal has
    as many terms as any other and no token is left out.
    """
    tokens = x.shape[2]
    short = tokens % stride
    if not short:
        return x
    again = tokens - short + torch.arange(stride - short, device=x.device) % short
    return torch.cat([x, x.index_select(2, again)], 2)


def strided_scores(q: Tensor, k: Tensor, stride: int, pattern: str) -> tuple[Tensor, Tensor]:
    """The two factors of the strided scores, fp32 ``[B, H, ceil(S / stride), stride * D]``.

    Their product at (t, u) is the sum of q·k over ``stride`` elements of the S x S square of query
    group t and key group u, scaled by 1 / (sqrt(D) * stride).
    """
    turn = query_turn(pattern, stride).to(q.device)
    scale = 1 / (math.sqrt(q.shape[-1]) * stride)
    rows = torch.unflatten(whole_groups(q, stride), 2, (-1, stride)).index_select(3, turn)
    columns = torch.unflatten(whole_groups(k, stride), 2, (-1, stride))
    return rows.flatten(3).float() * scale, columns.flatten(3).float()


def block_sums(
    q: Tensor, k: Tensor, tile: tuple[int, int], stride: int, pattern: str = "antidiagonal"
) -> Tensor:
    """What each block holds of the strided attention, fp32 ``[B, H, Tq, Tk]``; rows sum to 1.

    Softmax over all key groups, summed over the groups of a block and divided by its query groups.
    ``q``, ``k`` are ``[B, H, S, D]``.
    """
    rows, columns = strided_scores(q, k, stride, pattern)
    batch, heads, groups, _ = columns.shape
    per_row, per_column = tile[0] // stride, tile[1] // stride
    padding = -groups % per_column
    chunk = max(1, SCORES_AT_ONCE // (batch * heads * groups * per_row)) * per_row
    sums = []
    for start in range(0, groups, chunk):
        probabilities = (rows[:, :, start : start + chunk] @ columns.mT).softmax(-1)
        across = torch.unflatten(F.pad(probabilities, (0, padding)), -1, (-1, per_column)).sum(-1)
        short = -across.shape[2] % per_row
        down = torch.unflatten(F.pad(across, (0, 0, 0, short)), 2, (-1, per_row)).sum(3)
        # a short last tile has fewer query groups.
        down[:, :, -1] *= per_row / (per_row - short)
        sums.append(down / per_row)
    return torch.cat(sums, 2)


@dataclass(frozen=True, kw_only=True)
class XAttention(SparseMethod):
    """XAttention (Xu et al., 2025), algorithm 1 and its block selection.

    Symbols: B block (here M x N, the tile), S stride, tau threshold, d_h head dim. Each S x S
    square of the attention map is represented by the sum of the S scores on its antidiagonal. That
    is what queries and keys reshaped to [L / S, S d_h] give, queries in falling order:
    A = Softmax(Q_reshaped K_reshaped^T / (sqrt(d_h) S)). A block's importance is the sum of A over
    it; each row of blocks keeps the smallest set that holds tau of the row's sum. (The printed
    find_blocks compares with tau itself, though the sum over a row of blocks is its number of query
    groups: B / S, not 1.)

    ``topk`` keeps a share of the key blocks in every row (the paper's ratio), ``blocks`` a number
    of them (its top-K). ``pattern`` takes other elements of the squares, for the ablation. Tau of
    every layer and head comes from a preset, else this option holds.

    Raises:
        OptionError: a number is out of range; more than one way to select is given; ``stride`` does
            not divide the tile; ``stride``, ``pattern``, ``tile`` or ``merge`` has an unknown
            value.
    """

    name: ClassVar[str] = "xattention"
    title: ClassVar[str] = "XAttention"
    paper: ClassVar[str] = "XAttention: Block Sparse Attention with Antidiagonal Scoring"
    summary: ClassVar[str] = "the blocks with the largest sums along the diagonals of their scores"
    free_options: ClassVar[tuple[str, ...]] = ("merge",)
    # threshold, a share of the key tiles of each row, and a number of them: no more than 7,488
    # tokens have.
    as_published: ClassVar[Settings] = {"means": None, "plans": "own"}
    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob("tau", 0.0, 1.0),
        Knob("topk", 0.01, 1.0),
        Knob("blocks", 1, 58, whole=True),
    )
    masks: ClassVar[tuple[Settings, ...]] = tuple({"stride": stride} for stride in STRIDES)
    ablations: ClassVar[tuple[Ablation, ...]] = (
        Ablation(
            name="patterns",
            lines={
                pattern: tuple({"pattern": pattern, "stride": stride} for stride in (8, 16))
                for pattern in PATTERNS
            },
            columns=("stride", "pattern"),
        ),
        Ablation(
            name="strides",
            lines={f"stride {stride}": ({"stride": stride},) for stride in STRIDES},
            columns=("stride",),
        ),
        Ablation(name="selections", lines={"": ({},)}, knobs=knobs),
    )

    tau: float | None = share_option(0.9, "--tau", "share of a row's sums kept, in (0, 1]")
    topk: float | None = topk_option()
    blocks: int | None = option(
        None,
        flag="--blocks",
        metavar="N",
        help="keep this many key tiles in every row instead",
        convert=lambda text: None if optional_number(text) is None else int(text),
    )
    stride: int = option(
        8,
        flag="--stride",
        metavar="S",
        help="side of the squares that a sum stands for: 4, 8, 16 or 64",
        convert=int,
    )
    pattern: str = option(
        "antidiagonal",
        flag="--pattern",
        metavar="NAME",
        help="elements that are summed: antidiagonal, diagonal or random",
        convert=str,
    )
    tile: tuple[int, int] = tile_option((128, 128))
    merge: str = merge_option()
    means: int | None = means_option()
    plans: str = plans_option()
    numbers: Numbers | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.blocks is not None and self.topk is not None:
            raise OptionError(
                f"xattention selects by topk or by blocks, got topk={self.topk!r} and "
                f"blocks={self.blocks!r}. Hint: leave one out."
            )
        if self.blocks is not None:
            check_whole("blocks", self.blocks)
        if self.blocks is None:
            settle_share(self, "tau", self.tau, self.topk)
        elif self.tau not in (None, 0.9):
            raise OptionError(
                f"xattention selects by tau or by blocks, got tau={self.tau!r} and "
                f"blocks={self.blocks!r}. Hint: leave one out."
            )
        else:
            object.__setattr__(self, "tau", None)
        if self.stride not in STRIDES or isinstance(self.stride, bool):
            raise OptionError(
                f"stride must be one of {', '.join(map(str, STRIDES))}, got {self.stride!r}"
            )
        if self.pattern not in PATTERNS:
            raise OptionError(
                f"unknown pattern {self.pattern!r}. Hint: choose from {', '.join(PATTERNS)}."
            )
        object.__setattr__(self, "tile", as_tile(self.tile))
        if self.tile[0] % self.stride or self.tile[1] % self.stride:
            raise OptionError(
                f"a stride of {self.stride} does not divide a tile of {self.tile[0]}x"
                f"{self.tile[1]}. Hint: both sides must be multiples of the stride."
            )
        check_merge(self.merge)
        settle_means(self)
        check_plans(self)

    def count(self, tokens: int) -> int | None:
        """Key tiles that every row of ``tokens`` tokens keeps, or None where tau decides."""
        tiles = tile_count(tokens, self.tile[1])
        if self.topk is not None:
            return count_of_share(self.topk, tiles)
        return None if self.blocks is None else min(self.blocks, tiles)

    def share(self, q: Tensor, site: CallSite) -> float | Tensor:
        """Tau at a call: one number, or one for each head of ``q``, fp32 ``[H]``."""
        tau: float | Tensor | None = self.number("tau", site, q.device)
        if tau is None:
            return 1.0
        return tau[: q.shape[1]] if isinstance(tau, Tensor) else tau

    def select(self, q: Tensor, k: Tensor, site: CallSite, *, v: Tensor | None = None) -> Tensor:
        """The blocks of the largest sums, bool ``[B, H, Tq, Tk]`` (algorithm 1)."""
        sums = block_sums(q, k, self.tile, self.stride, self.pattern)
        count = self.count(q.shape[2])
        if count is not None:
            return top_k_mask(sums, count)
        tau = self.share(q, site)
        return top_p_mask(sums, tau[:, None, None] if isinstance(tau, Tensor) else tau)

    def selection(self, q: Tensor) -> Selection:
        """``words``, kernels of its own, for 16-bit queries and keys; otherwise ``select``."""
        from vidsparse.kernels.selection.antidiagonal import can_score

        return "words" if can_score(q) else "select"

    def words(self, q: Tensor, k: Tensor, site: CallSite) -> tuple[Tensor, Tensor]:
        """``select`` by kernels, for 16-bit queries and keys."""
        from vidsparse.kernels.selection.antidiagonal import antidiagonal_words

        text = site.grid.text > 0
        return antidiagonal_words(
            q,
            k,
            tile=self.tile,
            stride=self.stride,
            turn=None if self.pattern == "antidiagonal" else query_turn(self.pattern, self.stride),
            top_p=self.share(q, site),
            count=self.count(q.shape[2]),
            full_rows=site.grid.video // self.tile[0] if text else None,
            full_columns=site.grid.video // self.tile[1] if text else None,
        )
