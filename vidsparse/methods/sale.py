"""SALE: every element of the attention map estimated in 4 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.grouping import check_merge
from vidsparse.kernels.tokens.formats import FourBitQK
from vidsparse.kernels.tokens.quantize import quantize_four_bits
from vidsparse.masks import tile_count, tile_sizes
from vidsparse.methods.base import (
    Selection,
    SparseMethod,
    as_tile,
    check_eight_bits,
    check_plans,
    check_share,
    check_whole,
    eight_bit_option,
    means_option,
    merge_option,
    option,
    plans_option,
    settle_means,
    tile_option,
)
from vidsparse.methods.numbers import Numbers
from vidsparse.methods.studied import CallAblation, Knob, Settings
from vidsparse.site import CallSite

# estimates held at once, in numbers: what a CPU keeps near, 16 MB in fp32.
ESTIMATES_AT_ONCE = 2**22


def local_tiles(
    tokens: int, tile: tuple[int, int], local: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """The key tiles of each query tile's local area: first, and one past the last, int64 ``[Tq]``.

    They are those that the ``local`` tokens centred on the query tile reach, cut at the sequence's
    ends.
    """
    start = torch.arange(tile_count(tokens, tile[0]), device=device) * tile[0]
    low = start + tile_sizes(tokens, tile[0], device) // 2 - local // 2
    first = (low // tile[1]).clamp_min(0)
    stop = (low + local + tile[1] - 1) // tile[1]
    return first, stop.clamp_max(tile_count(tokens, tile[1]))


def reference_area(
    tokens: int,
    tile: tuple[int, int],
    local: int,
    sink_from: int | None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Tiles of the sink and the local area, bool ``[Tq, Tk]``; the sink starts at a key tile."""
    first, stop = local_tiles(tokens, tile, local, device)
    column = torch.arange(tile_count(tokens, tile[1]), device=device)
    area = (column >= first.unsqueeze(1)) & (column < stop.unsqueeze(1))
    if sink_from is not None:
        area[:, sink_from:] = True
    return area


def relative_scores(
    q: Tensor,
    k: Tensor,
    tile: tuple[int, int],
    local: int,
    sink_from: int | None = None,
    *,
    rounded: bool = True,
) -> Tensor:
    """The largest logarithm of a relative attention score in every tile.

    Args:
        q: queries ``[B, H, S, D]``.
        k: keys ``[B, H, S, D]``.
        tile: (M, N).
        local: tokens of the local area.
        sink_from: key tile that the sink starts with; None is no sink.
        rounded: estimate scores from 4 bits, as the method does; False takes q and k as they are.

    Returns:
        fp32 ``[B, H, Tq, Tk]`` (fp64 of fp64); infinite in the sink and local tiles.
    """
    batch, heads, tokens, dim = q.shape
    rows, keys = tile
    area = reference_area(tokens, tile, local, sink_from, q.device)
    four = quantize_four_bits(q, k, keys) if rounded else _unrounded(q, k, keys)
    k4 = torch.cat([four.k.float(), four.offset.unsqueeze(-1)], -1).mT
    # on the host, where they are slices.
    first, stop = local_tiles(tokens, tile, local)
    sink = slice(tokens if sink_from is None else sink_from * keys, tokens)
    padding = -tokens % keys
    at_once = max(1, ESTIMATES_AT_ONCE // (batch * heads * tokens * rows))
    found = []
    for start in range(0, area.shape[0], at_once):
        tiles = slice(start, min(start + at_once, area.shape[0]))
        row = slice(tiles.start * rows, min(tiles.stop * rows, tokens))
        near = slice(int(first[tiles.start]) * keys, min(int(stop[tiles.stop - 1]) * keys, tokens))
        # in full precision over the sink and local areas: ln(l) + m, their log-sum-exp.
        scores = q[:, :, row].float() @ k[:, :, near].float().mT / math.sqrt(dim)
        kept = area[tiles, near.start // keys : tile_count(near.stop, keys)]
        kept = kept.repeat_interleave(rows, 0)[: row.stop - row.start]
        kept = kept.repeat_interleave(keys, 1)[:, : near.stop - near.start]
        scores = scores.masked_fill(~kept, -math.inf)
        if sink.start < tokens:
            # those of the sink that are near too must not count twice.
            beyond = slice(max(sink.start, near.stop), tokens)
            far = q[:, :, row].float() @ k[:, :, beyond].float().mT / math.sqrt(dim)
            before = slice(sink.start, max(sink.start, near.start))
            early = q[:, :, row].float() @ k[:, :, before].float().mT / math.sqrt(dim)
            scores = torch.cat([scores, far, early], -1)
        known = scores.logsumexp(-1, keepdim=True)
        scale = four.q_scale[:, :, row, None]
        # the offset, which depends on row and column, is one more product.
        estimate = torch.cat([four.q[:, :, row].float(), 1 / scale], -1) @ k4
        best = F.pad(estimate, (0, padding), value=-math.inf)
        best = torch.unflatten(best, -1, (-1, keys)).amax(-1)
        best = best * four.k_scale.unsqueeze(2) * scale + four.shift[:, :, row, None]
        best = best / math.sqrt(dim) - known
        best = F.pad(best, (0, 0, 0, -best.shape[2] % rows), value=-math.inf)
        best = torch.unflatten(best, 2, (-1, rows)).amax(3)
        found.append(best.masked_fill(area[tiles], math.inf))
    return torch.cat(found, 2)


def _unrounded(q: Tensor, k: Tensor, keys: int) -> FourBitQK:
    """Queries and keys as they are, in the form of rounded ones."""
    batch, heads, tokens = q.shape[:3]
    zero, one = (q.new_full((batch, heads, tokens), value).float() for value in (0.0, 1.0))
    tiles = one[:, :, : tile_count(tokens, keys)]
    return FourBitQK(q=q, k=k, q_scale=one, k_scale=tiles, offset=zero, shift=zero, k_run=keys)


def relative_scores_mask(
    q: Tensor,
    k: Tensor,
    tau: float | Tensor,
    tile: tuple[int, int],
    local: int,
    sink_from: int | None = None,
) -> Tensor:
    """Tiles in which some element's relative attention score may reach ``tau``.

    ``tau`` is a number, or one for every head, fp32 ``[H]``; the rest as in ``relative_scores``.

    Returns:
        bool ``[B, H, Tq, Tk]``; sink and local tiles are true.
    """
    logarithm = tau.log().view(-1, 1, 1) if isinstance(tau, Tensor) else math.log(tau)
    return relative_scores(q, k, tile, local, sink_from) >= logarithm


@dataclass(frozen=True, kw_only=True)
class Sale(SparseMethod):
    """SALE: Low-bit Estimation for Efficient Sparse Attention, section 3 and algorithm 1.

    Symbols: b_q x b_k block (here M x N, the tile), I_SL the keys of the sink and local areas,
    m_i and l_i the maximum and the sum of row i over them in full precision, S' = Q'K'^T / sqrt(d)
    the estimate of all scores from 4-bit queries and keys, tau the threshold. A block is computed
    unless all its relative attention scores exp(S'[i, j] - m_i) / l_i are below tau. With
    logarithms that is one comparison for each element, S'[i, j] >= ln(tau l_i) + m_i (equation 3
    prints ln(tau l_i + m_i)). m is a running maximum, which the printed algorithm overwrites.

    Attention here looks both ways: the sink is the text, where there is any, and the local area is
    centred on the query tile and holds it. Queries and keys are smoothed by their means over the
    head; each query has a scale of its own, and each tile of keys has one. q·k of the selected
    tiles runs in int8 where that is faster. Tau of every layer and head comes from a preset, else
    this option holds.

    Raises:
        OptionError: ``tau`` is outside (0, 1]; ``local`` is below 1; ``quantize``, ``tile`` or
            ``merge`` has an unknown value.
    """

    name: ClassVar[str] = "sale"
    title: ClassVar[str] = "SALE"
    paper: ClassVar[str] = "SALE: Low-bit Estimation for Efficient Sparse Attention"
    summary: ClassVar[str] = "every score estimated in 4 bits and compared with its neighbourhood's"
    free_options: ClassVar[tuple[str, ...]] = ("quantize", "merge")
    as_published: ClassVar[Settings] = {"means": None, "plans": "own"}
    # from a score as high as all of a neighbourhood's down to a millionth of it.
    knobs: ClassVar[tuple[Knob, ...]] = (Knob("tau", 1.0, 1e-6, logarithmic=True),)
    eight_bits: ClassVar[tuple[Settings, ...]] = ({},)
    # Table 5, at the paper's threshold and at one that keeps about a third of the small model's
    # pairs.
    call_ablations: ClassVar[tuple[CallAblation, ...]] = (
        CallAblation(
            name="sale-recall",
            measured="recall",
            settings={"tau 0.004": {"tau": 0.004}, "tau 0.02": {"tau": 0.02}},
        ),
    )

    tau: float = option(
        0.004,
        flag="--tau",
        metavar="T",
        help="tiles with a relative attention score from this one on are kept, in (0, 1]",
    )
    local: int = option(
        256,
        flag="--local",
        metavar="N",
        help="tokens around a query tile that are always computed",
        convert=int,
    )
    quantize: str = eight_bit_option()
    tile: tuple[int, int] = tile_option((64, 32))
    merge: str = merge_option()
    means: int | None = means_option()
    plans: str = plans_option()
    numbers: Numbers | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_share("tau", self.tau)
        check_eight_bits(self.quantize)
        check_whole("local", self.local)
        object.__setattr__(self, "tile", as_tile(self.tile))
        check_merge(self.merge)
        settle_means(self)
        check_plans(self)

    def threshold(self, q: Tensor, site: CallSite) -> float | Tensor:
        """Tau at a call: one number, or one for each head of ``q``, fp32 ``[H]``."""
        tau: float | Tensor = self.number("tau", site, q.device)
        return tau[: q.shape[1]] if isinstance(tau, Tensor) else tau

    def select(self, q: Tensor, k: Tensor, site: CallSite, *, v: Tensor | None = None) -> Tensor:
        """Tiles with an element that may matter, bool ``[B, H, Tq, Tk]`` (algorithm 1)."""
        tau = self.threshold(q, site)
        return relative_scores_mask(q, k, tau, self.tile, self.local, self.sink_from(site))

    def sink_from(self, site: CallSite) -> int | None:
        """Key tile that the sink, the text, starts with; None where there is no text."""
        return site.grid.video // self.tile[1] if site.grid.text else None

    def selection(self, q: Tensor) -> Selection:
        """``words``, kernels of its own, for 16-bit q and k and tiles of 8 keys or more."""
        from vidsparse.kernels.selection.sale import can_estimate

        return "words" if can_estimate(q, self.tile) else "select"

    def words(self, q: Tensor, k: Tensor, site: CallSite) -> tuple[Tensor, Tensor]:
        """``select`` by kernels, for 16-bit queries and keys and tiles of 8 keys or more."""
        from vidsparse.kernels.selection.sale import sale_words

        text = site.grid.text > 0
        return sale_words(
            q,
            k,
            self.threshold(q, site),
            tile=self.tile,
            local=self.local,
            full_rows=site.grid.video // self.tile[0] if text else None,
            full_columns=self.sink_from(site),
        )
