"""From a tile mask to the work of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vidsparse.grouping import MERGES, check_merge, merge_consecutive
from vidsparse.masks import tile_sizes

# rows of a block on a GPU, and what papers mean by merging.
BLOCK_ROWS = 128


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """Which keys each block of query rows attends; made and kept on the device.

    Blocks stand longest first in every head, so that a kernel which starts them in order ends
    with the short ones.

    Attributes:
        q_tiles: query tiles of a block, int32 ``[B, H, G, R]``; -1 where a block has fewer.
        kv_count: key chunks of a block, int32 ``[B, H, G]``.
        kv_index: their numbers in rising order, int32 ``[B, H, G, C]``; only the first
            ``kv_count`` of a row mean anything.
        tile: (M, N), query rows of a tile and keys of a chunk.
        tokens: length S of the sequence.
        selected: share of query-key pairs the method chose, fp32 ``[B, H]``.
        computed: share of pairs the kernel multiplies after merging, fp32 ``[B, H]``.
    """

    q_tiles: Tensor
    kv_count: Tensor
    kv_index: Tensor
    tile: tuple[int, int]
    tokens: int
    selected: Tensor
    computed: Tensor


def make_plan(
    mask: Tensor,
    tile: tuple[int, int],
    tokens: int,
    merge: str = "xor",
    *,
    block_rows: int = BLOCK_ROWS,
) -> SparsePlan:
    """Group the query tiles of ``mask`` ``[B, H, Tq, Tk]`` into blocks and list their keys.

    A block holds ``block_rows / M`` tiles, and one where a tile has more rows than that.
    ``merge`` is a name from ``vidsparse.grouping.MERGES``. All shapes follow from the input's
    shapes, so nothing waits for a GPU.

    Raises:
        OptionError: unknown ``merge``.
    """
    check_merge(merge)
    per_block = max(1, block_rows // tile[0])
    group = MERGES[merge] if per_block > 1 else merge_consecutive
    q_tiles = group(mask, per_block)
    batch, heads, blocks, _ = q_tiles.shape
    k_tiles = mask.shape[-1]

    rows = tile_sizes(tokens, tile[0], mask.device)
    keys = tile_sizes(tokens, tile[1], mask.device).to(torch.float32)
    # -1 points at an extra tile that keeps nothing and has no rows.
    member = q_tiles.long()
    absent = member < 0
    member = member.clamp_min(0).flatten(2)
    union = mask.gather(2, member.unsqueeze(-1).expand(-1, -1, -1, k_tiles))
    union = union.view(batch, heads, blocks, per_block, k_tiles)
    union = (union & ~absent.unsqueeze(-1)).any(3)
    rows_held = rows[member].view(batch, heads, blocks, per_block).masked_fill(absent, 0).sum(-1)

    count = union.sum(-1, dtype=torch.int32)
    longest = count.argsort(dim=-1, descending=True, stable=True)
    union = union.gather(2, longest.unsqueeze(-1).expand(-1, -1, -1, k_tiles))
    index = union.to(torch.uint8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)

    pairs = float(tokens) ** 2
    # products only of numbers that TF32 holds too: where it is allowed, counts stay exact.
    selected = ((mask.to(torch.float32) @ keys) * rows).sum(-1) / pairs
    block_keys = union.to(torch.float32) @ keys
    sorted_rows = rows_held.gather(2, longest)
    computed = (block_keys * sorted_rows).sum(-1) / pairs
    return SparsePlan(
        q_tiles=q_tiles.gather(2, longest.unsqueeze(-1).expand(-1, -1, -1, per_block)),
        kv_count=count.gather(2, longest),
        kv_index=index,
        tile=tile,
        tokens=tokens,
        selected=selected,
        computed=computed,
    )
