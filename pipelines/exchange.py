"""What processes that share a layer's heads out send each other around attention.

On the way there each gives the others their heads of its own tokens, and gets its heads of theirs:
``[B, S / N, H, D]`` becomes ``[B, S, H / N, D]``. On the way back it is the other way round. Each
element of a batch travels by itself, so that what comes lies where attention reads it, whatever
order heads are dealt in: one copy there, before it is sent, and one back, after it has come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vidsparse.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Dealing:
    """How one call's tokens and heads are dealt.

    Args:
        group: the N processes that share heads out.
        front: tokens in front of the video that are whole in every process.
        text: such tokens in front and behind.
        order: the heads ``[H]`` of the first process, then of the second, and so on; None for
            their own order.
    """

    group: Any
    front: int
    text: int
    order: Tensor | None

    def of_heads(self, heads: int) -> slice:
        """This process's place among the dealt heads.

        Raises:
            UnsupportedError: they are no multiple of the processes.
        """
        count = dist.get_world_size(self.group)
        if heads % count:
            raise UnsupportedError(
                f"{count} processes cannot share {heads} attention heads equally. "
                "Hint: take a number of processes that divides the heads, or a ring as well."
            )
        place = dist.get_rank(self.group)
        return slice(heads // count * place, heads // count * (place + 1))


@dataclass(frozen=True, slots=True)
class Travelling:
    """Something that was sent and something that comes, which is there after ``arrived``."""

    coming: Tensor
    works: tuple[Any, ...]
    sent: tuple[Tensor, ...]

    def arrived(self) -> Tensor:
        """What has come; on a GPU all that is computed with it waits, not the caller."""
        for work in self.works:
            work.wait()
        return self.coming


def send_to_heads(x: Tensor, dealing: Dealing) -> Travelling:
    """Start to send ``[B, S / N + text, H, D]``; ``[B, S + text, H / N, D]`` comes.

    Raises:
        UnsupportedError: H is no multiple of the N processes.
    """
    own = dealing.of_heads(x.shape[2])
    count, front = dist.get_world_size(dealing.group), dealing.front
    batch, each = x.shape[0], own.stop - own.start
    tokens = x.shape[1] - dealing.text
    end = front + count * tokens
    coming = x.new_empty(batch, end - front + dealing.text, each, x.shape[3])
    sent, works = [], []
    (wide,) = _wide(x)
    for element, its in zip(wide, coming, strict=True):
        video = element[front : front + tokens]
        parts = video.new_empty(count, tokens, each, video.shape[-1])
        if dealing.order is None:
            parts.copy_(torch.unflatten(video, 1, (count, each)).transpose(0, 1))
        else:
            for part, heads in zip(parts, torch.split(dealing.order, each), strict=True):
                torch.index_select(video, 1, heads, out=part)
        sent.append(parts.flatten(0, 1).view(x.dtype))
        works.append(_all_to_all(its[front:end], sent[-1], dealing.group))
    if dealing.text:
        its_heads = own if dealing.order is None else dealing.order[own]
        coming[:, :front] = x[:, :front, its_heads]
        coming[:, end:] = x[:, front + tokens :, its_heads]
    return Travelling(coming, tuple(works), tuple(sent))


def bring_to_tokens(x: Tensor, dealing: Dealing) -> Tensor:
    """From ``[B, S + text, H / N, D]`` back to ``[B, S / N + text, H, D]``.

    The text is gathered, whose heads every process has in part.
    """
    count, front = dist.get_world_size(dealing.group), dealing.front
    x = x.contiguous()
    batch, all_tokens, each, width = x.shape
    end = front + all_tokens - dealing.text
    tokens = (end - front) // count
    videos = [x.new_empty(count * tokens, each, width) for _ in range(batch)]
    works = [
        _all_to_all(video, one[front:end], dealing.group)
        for video, one in zip(videos, x, strict=True)
    ]
    out = x.new_empty(batch, tokens + dealing.text, count * each, width)
    if dealing.text:
        beside = torch.cat([x[:, :front], x[:, end:]], 1)
        text = beside.new_empty(count, *beside.shape)
        dist.all_gather(list(text), beside, group=dealing.group)
        _place_heads(out[:, :front], text[:, :, :front], dealing.order)
        _place_heads(out[:, front + tokens :], text[:, :, front:], dealing.order)
    for video, work, one in zip(videos, works, out, strict=True):
        work.wait()
        of_heads = torch.unflatten(video, 0, (count, 1, tokens))
        _place_heads(one[None, front : front + tokens], of_heads, dealing.order)
    return out


def _place_heads(out: Tensor, dealt: Tensor, order: Tensor | None) -> None:
    """Copy ``dealt`` ``[N, B, S, H / N, D]`` to ``out`` ``[B, S, H, D]``, heads in their order."""
    out, dealt = _wide(out, dealt)
    if order is None:
        torch.unflatten(out, 2, (dealt.shape[0], -1)).copy_(dealt.permute(1, 2, 0, 3, 4))
        return
    for part, heads in zip(dealt, torch.split(order, dealt.shape[3]), strict=True):
        out.index_copy_(2, heads, part)


def _all_to_all(coming: Tensor, sent: Tensor, group: Any) -> Any:
    return dist.all_to_all_single(coming, sent, group=group, async_op=True)


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors as values of 16 bytes where all can be read so.

    torch's copies between strides work out an address for every value, which takes more time than
    the memory does where a value has two bytes.
    """
    for x in tensors:
        places = (*x.stride()[:-1], x.shape[-1], x.storage_offset())
        if x.stride(-1) != 1 or any(place * x.element_size() % 16 for place in places):
            return tensors
    return tuple(x.view(torch.complex128) for x in tensors)
