"""One video over several processes where its sequence holds more than the video.

diffusers' plans split all of a tensor, and gather all outputs of a module. Here the video's tokens
are split where blocks begin and gathered where they end; what stands beside them (text, sound,
frames of the past) is whole in every process throughout, as text is elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.grid import TokenGrid

Dims: TypeAlias = int | tuple[int | None, ...]
"""The axis that tokens run along: of an argument, or of each item of a tuple, None for none."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """How a transformer's blocks carry the sequence that is dealt.

    Args:
        blocks: the names of the transformer's lists of them, in the order they run.
        carried: the argument that holds the sequence, which one block hands on to the next.
        every: further arguments of blocks with something for every token, where a block has them.
        ending: the argument that counts the tokens, the last of the video, that blocks treat apart
            from those before them; each process is told how many of them it has.
        dim: the axis of tokens of what is carried.
        output: its place among a block's outputs; None where it is the only one.
        text_apart: text behind the video is an argument of its own.
    """

    blocks: tuple[str, ...]
    carried: str
    every: Mapping[str, Dims]
    ending: str | None = None
    dim: int = 1
    output: int | None = None
    text_apart: bool = False


class _Sequence:
    """The tokens of the forward that goes on: a process has its part of the video, and all else.

    Nothing follows the video where its text stands apart.
    """

    def __init__(
        self, grid: Callable[[], TokenGrid | None], group: Any, *, text_apart: bool
    ) -> None:
        self._grid = grid
        self._text_apart = text_apart
        self._group = group
        self._count = dist.get_world_size(group)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """What a process has of ``x``, along ``dim`` the whole sequence or the end of one."""
        before, video, after = self._parts(x, dim, self._count)
        share = video.chunk(self._count, dim)[dist.get_rank(self._group)]
        return torch.cat([before, share, after], dim)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """``own`` undone: the video of all processes, between what each of them has."""
        before, video, after = self._parts(x, dim, 1)
        received = [torch.empty_like(video) for _ in range(self._count)]
        dist.all_gather(received, video, group=self._group)
        return torch.cat([before, *received, after], dim)

    def own_ending(self, count: int) -> int:
        """How many of the video's last ``count`` tokens a process has."""
        video = self._known_grid().video
        end = video // self._count * (dist.get_rank(self._group) + 1)
        return min(video // self._count, max(0, end - (video - count)))

    def _known_grid(self) -> TokenGrid:
        grid = self._grid()
        if grid is None:
            raise UnsupportedError(
                "a sequence whose token grid is unknown cannot be divided among several processes. "
                "Hint: run this pipeline in one process."
            )
        return grid

    def _parts(self, x: Tensor, dim: int, shares: int) -> tuple[Tensor, Tensor, Tensor]:
        """What stands before the video, the video and what follows; ``shares`` that ``x`` has."""
        grid = self._known_grid()
        video = grid.video // self._count * shares
        after = 0 if self._text_apart else grid.text - grid.before
        before, share, rest = torch.split(x, [x.shape[dim] - video - after, video, after], dim)
        return before, share.contiguous(), rest


def deal_packed(
    transformer: Any, packed: Packed, grid: Callable[[], TokenGrid | None], group: Any
) -> list[Callable[[], None]]:
    """Deal a transformer's sequence by hooks around its blocks; returns what undoes it.

    Args:
        transformer: the host's.
        packed: the plan.
        grid: says that of the forward that goes on; None where it has none.
        group: the processes that share the video.
    """
    tokens = _Sequence(grid, group, text_apart=packed.text_apart)
    blocks = [block for name in packed.blocks for block in getattr(transformer, name)]

    def own(value: Any, dims: Dims) -> Any:
        if isinstance(dims, int):
            whole = isinstance(value, Tensor)
            return tokens.own(value, dims) if whole else tuple(own(x, dims) for x in value)
        pairs = zip(value, dims, strict=True)
        return tuple(x if dim is None else tokens.own(x, dim) for x, dim in pairs)

    def split(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        first = {packed.carried: packed.dim} if module is blocks[0] else {}
        for name, dims in {**packed.every, **first}.items():
            if name in bound.arguments:
                bound.arguments[name] = own(bound.arguments[name], dims)
        if packed.ending is not None:
            bound.arguments[packed.ending] = tokens.own_ending(bound.arguments[packed.ending])
        return bound.args, bound.kwargs

    def gather(module: Any, args: tuple[Any, ...], output: Any) -> Any:
        if packed.output is None:
            return tokens.whole(output, packed.dim)
        outputs = list(output)
        outputs[packed.output] = tokens.whole(outputs[packed.output], packed.dim)
        return tuple(outputs)

    undone = [block.register_forward_pre_hook(split, with_kwargs=True).remove for block in blocks]
    return [*undone, blocks[-1].register_forward_hook(gather).remove]
