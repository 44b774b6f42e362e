"""Tile masks from pooled queries and keys.

Shapes: ``B`` batch, ``H`` heads, ``S`` tokens, ``D`` head dim, ``M`` x ``N`` tile (queries x keys),
``Tq = ceil(S / M)``, ``Tk = ceil(S / N)``. A last tile may be short; its mean is over the tokens
it has. A mask is bool ``[B, H, Tq, Tk]``, true where a tile is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.errors import OptionError
from vidsparse.kernels.selection.shares import count_of_share

QUERY_TILES = (16, 32, 64, 128)
KEY_TILES = (1, 8, 16, 32, 64, 128)


def tile_count(tokens: int, size: int) -> int:
    """Number of tiles of ``size`` tokens that cover ``tokens``."""
    return -(-tokens // size)


def tile_sizes(tokens: int, size: int, device: torch.device | str | None = None) -> Tensor:
    """Tokens in each tile, ``[ceil(tokens / size)]`` int64; only the last can be short."""
    sizes = torch.full((tile_count(tokens, size),), size, dtype=torch.int64, device=device)
    sizes[-1] -= tile_count(tokens, size) * size - tokens
    return sizes


def check_tile(tile: tuple[int, int]) -> None:
    """Raise an ``OptionError`` unless ``tile`` is (M, N) with M and N that kernels exist for."""
    if len(tile) != 2 or tile[0] not in QUERY_TILES or tile[1] not in KEY_TILES:
        raise OptionError(
            f"tile must be MxN with M (queries) in {', '.join(map(str, QUERY_TILES))} and N (keys) "
            f"in {', '.join(map(str, KEY_TILES))}, got {'x'.join(map(str, tile))}. Hint: 16x16."
        )


def parse_tile(text: str) -> tuple[int, int]:
    """Read ``"16x16"`` (queries x keys) as ``(16, 16)``.

    Raises:
        OptionError: not of that form, or sizes that no kernel handles.
    """
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise OptionError(f"tile must look like MxN (queries x keys), got {text!r}. Hint: 16x16.")
    tile = (int(parts[0]), int(parts[1]))
    check_tile(tile)
    return tile


def _tiles(x: Tensor, size: int) -> tuple[Tensor, int]:
    """Cut ``[B, H, S, D]`` into ``[B, H, T, size, D]``, zero-padded; also the padding."""
    padding = tile_count(x.shape[2], size) * size - x.shape[2]
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    return torch.unflatten(x, 2, (-1, size)), padding


def pooled_mean(x: Tensor, size: int) -> Tensor:
    """Mean token of every tile: ``[B, H, S, D]`` to fp32 ``[B, H, ceil(S / size), D]``.

    FG-Attn section 5.3 (q_avg, k_avg); SpargeAttn algorithm 1, line 4.
    """
    if size == 1:
        return x.float()
    tiles, padding = _tiles(x, size)
    # the sum runs in fp32 whatever the input: a bf16 sum of 128 tokens has two digits left.
    mean = tiles.sum(3, dtype=torch.float32) / size
    if padding:
        mean[:, :, -1] *= size / (size - padding)
    return mean


def self_similarity(x: Tensor, size: int) -> Tensor:
    """SpargeAttn's CosSim of every tile: ``[B, H, S, D]`` to fp32 ``[B, H, ceil(S / size)]``.

    The paper (section 3.2) defines CosSim(X) = mean(X X^T) / |max(X X^T)|. Both parts need no
    product of tokens: the mean over all pairs is the squared length of the mean token, and by
    Cauchy-Schwarz the largest pair is the longest token with itself.
    """
    tiles, _ = _tiles(x, size)
    # the norm runs in fp32 without an fp32 copy of the tokens.
    work = torch.promote_types(x.dtype, torch.float32)
    longest = torch.linalg.vector_norm(tiles, dim=-1, dtype=work).amax(3).square().float()
    pairs = pooled_mean(x, size).square().sum(-1)
    # a tile of zeros is as similar to itself as can be.
    return torch.where(longest > 0, pairs / longest.clamp_min(1e-38), torch.ones_like(pairs))


@dataclass(frozen=True, slots=True)
class PooledTopP:
    """A selection that the kernels know: top-p or top-k of pooled attention, stray tiles kept.

    Attributes:
        top_p: share of the pooled attention that each row keeps, or one for every head, fp32
            ``[H]``; not looked at where ``topk`` is given.
        theta: key tiles less self-similar leave the softmax and are kept in every row, query tiles
            less self-similar keep everything; None judges no tile. One number, or one for every
            head.
        topk: share of the key tiles that each row keeps, those with the largest pooled scores.
    """

    top_p: float | Tensor
    theta: float | Tensor | None = None
    topk: float | None = None


def pooled_scores(
    q: Tensor, k: Tensor, tile: tuple[int, int], scale: float | None = None
) -> Tensor:
    """Pooled scores q_avg k_avg^T / sqrt(D), fp32 ``[B, H, Tq, Tk]`` (FG-Attn section 5.3)."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return (pooled_mean(q, tile[0]) * scale) @ pooled_mean(k, tile[1]).transpose(-1, -2)


def top_p_mask(probabilities: Tensor, top_p: float | Tensor) -> Tensor:
    """The smallest set of each row whose sum reaches ``top_p``, as a bool mask of the same shape.

    ``top_p`` may be a tensor of shares that broadcasts against ``[..., 1]``.

    The tile that crosses the threshold is kept, so no row is ever empty; SpargeAttn's printed
    ``Top_Cdf`` drops it, which would leave a row with one dominant tile without any key. Equal
    probabilities are taken in order of position. ``top_p = 1`` keeps everything, whatever the
    rounding of the running sum.
    """
    if not isinstance(top_p, Tensor) and top_p >= 1:
        return torch.ones_like(probabilities, dtype=torch.bool)
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    # a tile is kept while the tiles before it have not reached the share.
    before = F.pad(ordered.cumsum(-1)[..., :-1], (1, 0))
    kept = before < top_p * probabilities.sum(-1, keepdim=True)
    # a row of zeros or NaN reaches nothing, and keeps its first tile all the same.
    kept[..., 0] = True
    if isinstance(top_p, Tensor):
        kept |= top_p >= 1
    # shares of more dimensions than the rows have make several masks of one order.
    return torch.zeros_like(kept).scatter_(-1, index.expand_as(kept), kept)


def top_k_mask(scores: Tensor, count: int) -> Tensor:
    """The ``count`` largest of each row as a bool mask of the same shape; fewer where -inf is left.

    Equal scores are taken in order of position. A row of -inf or NaN keeps its first tile.
    """
    ordered, index = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(
        dim=-1, descending=True, stable=True
    )
    kept = ordered > -torch.inf
    kept[..., count:] = False
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter_(-1, index, kept)


def choosing_bytes(top_p: object) -> int:
    """Bytes that ``choose_tiles`` takes for a tile at the least; ``top_p`` is None for a share.

    The tile's flag and score in fp32; and to find top-p the scores in order, and the places of that
    order in 64 bits.
    """
    return 5 if top_p is None else 16


def choose_tiles(scores: Tensor, top_p: float | Tensor | None, topk: float | None) -> Tensor:
    """Top-p of the softmax of ``scores`` ``[..., Tq, Tk]``, or the share ``topk`` of its columns.

    One of the two is given. Columns of -inf are outside both.
    """
    if topk is not None:
        return top_k_mask(scores, count_of_share(topk, scores.shape[-1]))
    assert top_p is not None
    return top_p_mask(scores.softmax(-1).nan_to_num(0.0), top_p)


def pack_bits(mask: Tensor) -> Tensor:
    """A bool mask ``[..., K]`` in words of 32, int32 ``[..., ceil(K / 32)]``, the first lowest."""
    padded = F.pad(mask, (0, -mask.shape[-1] % 32))
    bits = padded.view(*padded.shape[:-1], -1, 32).to(torch.int32)
    place = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits << place).sum(-1, dtype=torch.int32)


def unpack_bits(words: Tensor, columns: int) -> Tensor:
    """The bool mask ``[..., columns]`` of which ``pack_bits`` made ``words``."""
    place = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> place) & 1).bool().flatten(-2)[..., :columns]


def bits_between(words: Tensor, first: int, count: int, columns: int) -> Tensor:
    """``count`` bits of ``words`` ``[..., W]`` from bit ``first`` on, as ``pack_bits`` packs them.

    Returns:
        int32 ``[..., ceil(columns / 32)]``, zero behind the bits that were asked for.
    """
    start, shift = divmod(first, 32)
    wanted = tile_count(count, 32)
    part = F.pad(words[..., start : start + wanted + 1], (0, 1))
    low = part[..., :wanted]
    if shift:
        # the sign must not come along.
        low = (low >> shift) & ((1 << (32 - shift)) - 1)
        low = low | (part[..., 1 : wanted + 1] << (32 - shift))
    if count % 32:
        kept = torch.full((wanted,), -1, dtype=torch.int32, device=words.device)
        kept[-1] = (1 << (count % 32)) - 1
        low = low & kept
    return F.pad(low, (0, tile_count(columns, 32) - wanted))


def count_bits(words: Tensor) -> Tensor:
    """How many bits are set in ``words`` ``[..., W]`` int32: int32 ``[...]``."""
    # by halves: pairs, fours and bytes hold the count of their own bits.
    x = words - ((words >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).sum(-1, dtype=torch.int32)
