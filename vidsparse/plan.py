"""From a tile mask to the work of a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.grouping import MERGES, WINDOW_TILES, check_merge, merge_consecutive
from vidsparse.kernels.attention.checks import INDEX_MULTIPLE
from vidsparse.kernels.attention.means import COUNT_MULTIPLE, counts_of_chunks
from vidsparse.kernels.hardware import triton_reason
from vidsparse.masks import pack_bits, tile_count, tile_sizes, unpack_bits

# rows of a block on a GPU, and what papers mean by merging.
BLOCK_ROWS = 128


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """Which keys each block of query rows attends; made and kept on the device.

    Every head has its longest blocks first, so that a kernel which starts them in order ends with
    the short ones. Key chunks are kept as bits, which makes a plan that is kept for later steps
    small (at 75,600 tokens, 40 heads and 16x16 tiles 15 MB instead of 225).

    Attributes:
        q_tiles: query tiles of a block, int32 ``[B, H, G, R]``; -1 where a block has fewer.
        kv_count: number of key chunks of a block, int32 ``[B, H, G]``.
        kv_bits: the key chunks, a bit for each, int32 ``[B, H, G, ceil(Tk / 32)]``; the first
            chunk of a word in its lowest bit.
        tile: (M, N), query rows of a tile and keys of a chunk.
        tokens: length S of the sequence.
        selected: share of query-key pairs the method chose, fp32 ``[B, H]``.
        computed: share of pairs the kernel multiplies after merging, fp32 ``[B, H]``.
    """

    q_tiles: Tensor
    kv_count: Tensor
    kv_bits: Tensor
    tile: tuple[int, int]
    tokens: int
    selected: Tensor
    computed: Tensor

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.q_tiles.shape[-1] * self.tile[0]

    @property
    def kv_index(self) -> Tensor:
        """The numbers of each block's key chunks, rising: ``[B, H, G, C]``; new at every access.

        int16 if that holds all numbers, else int32. C is a multiple of 16; only the first
        ``kv_count`` numbers of a list mean anything.
        """
        return self.list_keys(by_kernel=triton_reason(self.kv_bits.device) is None)

    def list_keys(self, *, by_kernel: bool) -> Tensor:
        """``kv_index``, made by one of Triton's kernels or in torch."""
        chunks = tile_count(self.tokens, self.tile[1])
        dtype = torch.int16 if chunks <= torch.iinfo(torch.int16).max else torch.int32
        shape = (*self.kv_bits.shape[:-1], chunks + -chunks % INDEX_MULTIPLE)
        if by_kernel:
            from vidsparse.kernels.selection.plan import list_bits

            index = torch.empty(shape, dtype=dtype, device=self.kv_bits.device)
            list_bits(self.kv_bits, index)
            return index
        # a sort that keeps the order of equals puts the numbers of the bits that are set first.
        bits = unpack_bits(self.kv_bits, self.kv_bits.shape[-1] * 32)[..., : shape[-1]]
        return bits.to(torch.uint8).argsort(dim=-1, descending=True, stable=True).to(dtype)

    def left_out(self, size: int, *, by_kernel: bool) -> Tensor:
        """Tokens of every group of ``size`` that a block does not list, uint8 ``[B, H, G, P']``.

        P' is the number of groups rounded up to a multiple of 128, with zeros behind them.
        ``size`` is a multiple of N.
        """
        groups = tile_count(self.tokens, size)
        if by_kernel:
            from vidsparse.kernels.selection.plan import count_left_out

            columns = groups + -groups % COUNT_MULTIPLE
            return count_left_out(self.kv_bits, self.tile[1], self.tokens, size, columns)
        chunks = tile_count(self.tokens, self.tile[1])
        left = ~unpack_bits(self.kv_bits, chunks)
        return counts_of_chunks(left, self.tile[1], self.tokens, size, groups)

    def shared(self, branches: int) -> SparsePlan:
        """The plan of the last of ``branches`` equal parts of the batch, repeated for all parts."""
        part = self.kv_count.shape[0] // branches

        def last(x: Tensor) -> Tensor:
            return x[-part:].repeat(branches, *[1] * (x.ndim - 1))

        return replace(
            self,
            q_tiles=last(self.q_tiles),
            kv_count=last(self.kv_count),
            kv_bits=last(self.kv_bits),
            selected=last(self.selected),
            computed=last(self.computed),
        )

    def with_text(
        self, video: int, tokens: int, tiles: range | None = None, *, text_rows: str = "dense"
    ) -> SparsePlan:
        """This plan for a sequence whose text has another length: ``tokens`` tokens in all.

        ``video`` tokens stand before the text in both. What was chosen among them stays; tiles with
        text in them are computed in full in the new one, both ways, and so is a tile that the video
        does not fill. If this plan had no text, the new shares are exact except for that last tile.
        ``text_rows`` says what rows of text have in this plan: everything, or, if ``sparse``, as
        many keys as each row of the video.

        A plan made by ``own_rows`` must say which query ``tiles`` it has.
        """
        (rows, keys), device = self.tile, self.kv_bits.device
        batch, heads, _, per_block = self.q_tiles.shape
        whole_rows, whole_keys = video // rows, video // keys
        chunks, before = tile_count(tokens, keys), tile_count(self.tokens, rows)
        tiles = range(before) if tiles is None else tiles
        # of these tiles: how many hold video alone, and the text, which all stands in the last.
        own = min(tiles.stop, whole_rows) - tiles.start
        last = own + tile_count(tokens, rows) - whole_rows if tiles.stop == before else own

        # blocks of the video, without the tiles that held text.
        q_tiles = self.q_tiles.masked_fill(self.q_tiles >= own, -1)
        first = whole_keys // 32
        of_text = unpack_bits(self.kv_bits[..., first:], tile_count(self.tokens, keys) - 32 * first)
        listed = of_text[..., whole_keys - 32 * first :].sum(-1, dtype=torch.int32)
        count = self.kv_count - listed + (chunks - whole_keys)
        number = torch.arange(tile_count(chunks, 32) * 32, device=device)
        of_video, every = pack_bits(number < whole_keys), pack_bits(number < chunks)
        width = every.shape[-1]
        bits = F.pad(self.kv_bits[..., :width], (0, max(0, width - self.kv_bits.shape[-1])))
        bits = bits & of_video | every & ~of_video
        # one that had nothing else has nothing to do, and goes where there is no room for it.
        idle = (q_tiles < 0).all(-1)
        count = count.masked_fill(idle, 0)
        bits = bits.masked_fill(idle.unsqueeze(-1), 0)
        busy = idle.int().argsort(dim=-1, stable=True)[..., :own]
        q_tiles, bits = (
            x.gather(2, busy.unsqueeze(-1).expand(*busy.shape, x.shape[-1]))
            for x in (q_tiles, bits)
        )

        # those of the text, which list everything and so go first.
        text = torch.arange(own, last, dtype=torch.int32, device=device)
        text = F.pad(text, (0, -len(text) % per_block), value=-1).view(-1, per_block)
        alike = (batch, heads, len(text))

        def fitted(share: Tensor) -> Tensor:
            """A share of pairs: what it had among whole tiles of the video, and the text now."""
            of_rows, of_keys = whole_rows * rows, whole_keys * keys
            pairs = share.double() * float(self.tokens) ** 2
            if self.tokens > video:
                if text_rows == "dense":
                    pairs -= (self.tokens - of_rows) * self.tokens
                else:
                    pairs *= of_rows / float(self.tokens)
                pairs -= of_rows * (self.tokens - of_keys)
            else:
                pairs *= of_rows * of_keys / float(video) ** 2
            pairs += (tokens - of_rows) * tokens + of_rows * (tokens - of_keys)
            return (pairs / float(tokens) ** 2).float()

        return replace(
            self,
            q_tiles=torch.cat([text.expand(batch, heads, -1, -1), q_tiles], 2),
            kv_count=torch.cat([count.new_full(alike, chunks), count.gather(2, busy)], 2),
            kv_bits=torch.cat([every.expand(*alike, -1), bits], 2),
            tokens=tokens,
            selected=fitted(self.selected),
            computed=fitted(self.computed),
        )

    def listed(self, mask: Tensor, kv_index: Tensor) -> Tensor:
        """Which chunks of each list are in ``mask`` ``[Tq, Tk]``: bool in ``kv_index``'s shape.

        A chunk of a block's list is flagged if the mask has it for any of the block's tiles. Flags
        past the end of a list mean nothing.
        """
        flags = torch.empty(kv_index.shape, dtype=torch.bool, device=kv_index.device)
        # one head at a time: gathering wants numbers of 64 bits.
        for head in range(kv_index.shape[1]):
            tiles = self.q_tiles[:, head].long()
            of_tiles = mask[tiles.clamp_min(0)] & (tiles >= 0).unsqueeze(-1)
            # past its end a list is whatever the memory held.
            chunk = kv_index[:, head].long().clamp(0, mask.shape[-1] - 1)
            flags[:, head] = of_tiles.any(2).gather(-1, chunk)
        return flags


def plan_of_blocks(words: Tensor, count: Tensor, tile: tuple[int, int], tokens: int) -> SparsePlan:
    """The plan of blocks whose key chunks were chosen for the blocks themselves.

    Args:
        words: the chunks of every block, int32 ``[B, H, G, ceil(Tk / 32)]``; blocks are tiles of M
            rows in the order of the sequence.
        count: how many they are, int32 ``[B, H, G]``.
        tile: (M, N).
        tokens: S.
    """
    batch, heads, blocks, _ = words.shape
    device = words.device
    rows = tile_sizes(tokens, tile[0], device)
    last = tile_count(tokens, tile[1]) - 1
    has_last = (words[..., last // 32] >> (last % 32)) & 1
    keys = count * tile[1] - has_last * ((last + 1) * tile[1] - tokens)
    share = ((keys * rows).sum(-1).double() / float(tokens) ** 2).float()
    # blocks that hold text stand last in the sequence. Where they keep everything they are the
    # longest, so they go first.
    number = torch.arange(blocks - 1, -1, -1, dtype=torch.int32, device=device)
    return SparsePlan(
        q_tiles=number.view(1, 1, -1, 1).expand(batch, heads, -1, -1).contiguous(),
        kv_count=count.flip(-1),
        kv_bits=words.flip(-2),
        tile=tile,
        tokens=tokens,
        selected=share,
        computed=share,
    )


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

    pairs = float(tokens) ** 2
    # products only of numbers that TF32 holds too: where it is allowed, counts stay exact.
    selected = ((mask.to(torch.float32) @ keys) * rows).sum(-1) / pairs
    block_keys = union.to(torch.float32) @ keys
    sorted_rows = rows_held.gather(2, longest)
    computed = (block_keys * sorted_rows).sum(-1) / pairs
    return SparsePlan(
        q_tiles=q_tiles.gather(2, longest.unsqueeze(-1).expand(-1, -1, -1, per_block)),
        kv_count=count.gather(2, longest),
        kv_bits=pack_bits(union),
        tile=tile,
        tokens=tokens,
        selected=selected,
        computed=computed,
    )


def make_plan_of_bits(
    words: Tensor,
    keys: Tensor,
    tile: tuple[int, int],
    tokens: int,
    merge: str = "xor",
    *,
    block_rows: int = BLOCK_ROWS,
) -> SparsePlan:
    """``make_plan`` by Triton's kernels, of a mask in words of 32 bits.

    Args:
        words: the mask, int32 ``[B, H, Tq, ceil(Tk / 32)]``, as ``pack_bits`` makes it.
        keys: key tokens that each query tile keeps, int32 ``[B, H, Tq]``.
        tile: (M, N).
        tokens: S.
        merge: a name from ``vidsparse.grouping.MERGES``.
        block_rows: query rows of a block.

    Raises:
        OptionError: unknown ``merge``.
    """
    from vidsparse.kernels.selection.plan import group_by_xor, join_blocks

    check_merge(merge)
    per_block = max(1, block_rows // tile[0])
    if merge == "consecutive" or per_block == 1:
        q_tiles = merge_consecutive(words, per_block)
    else:
        q_tiles = group_by_xor(words, per_block, WINDOW_TILES if merge == "xor-window" else None)
    q_tiles, count, bits, computed = join_blocks(words, q_tiles, tile, tokens)
    rows = tile_sizes(tokens, tile[0], words.device)
    # whole numbers up to the end: fp32 would lose some of 5.7e9 pairs.
    selected = (keys * rows).sum(-1)
    pairs = float(tokens) ** 2
    return SparsePlan(
        q_tiles=q_tiles,
        kv_count=count,
        kv_bits=bits,
        tile=tile,
        tokens=tokens,
        selected=(selected.double() / pairs).float(),
        computed=(computed.double() / pairs).float(),
    )
