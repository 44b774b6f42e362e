"""Which heads of a layer each process has, so that all have equally much to compute.

Heads that keep the tiles which hold most of their attention differ in work by ten times and more,
and a step waits for the process with the most. So heads are dealt by the densities of the step
before. All processes get equally many, so that the exchange stays one of equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from vidsparse.engine import AttentionEngine
from vidsparse.methods import SparseMethod
from vidsparse.trace import Cell

_WORTH: Final = 0.002
"""A smaller gain is not looked for: a step waits while this is computed."""


@dataclass(frozen=True)
class HeadDeal:
    """A layer's heads, dealt to ``count`` processes.

    Args:
        heads: numbers of the first process's heads, then of the second's, and so on.
        count: processes.
    """

    heads: tuple[int, ...]
    count: int
    _moved: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def moves(self) -> bool:
        """Whether it is another order than the heads' own."""
        return self.heads != tuple(range(len(self.heads)))

    def of(self, rank: int) -> tuple[int, ...]:
        """The heads of one process."""
        each = len(self.heads) // self.count
        return self.heads[rank * each : (rank + 1) * each]

    def on(self, device: torch.device) -> Tensor:
        """``heads`` as int64 ``[H]``."""
        if device not in self._moved:
            # once for a deal: a copy at every call would wait for the device.
            self._moved[device] = torch.tensor(self.heads, device=device)
        return self._moved[device]


def deal_by_work(work: Sequence[float], count: int) -> HeadDeal:
    """Deal heads of such ``work`` to ``count`` processes, equally many to each.

    The most first, each to whom has least so far and has room, equal ones in their order. Room is
    short at the end, so then heads change places in pairs while that helps the one with the most.
    """
    room = len(work) // count
    own: list[list[int]] = [[] for _ in range(count)]
    load = [0.0] * count
    for head in sorted(range(len(work)), key=lambda head: -work[head]):
        least = min((rank for rank in range(count) if len(own[rank]) < room), key=load.__getitem__)
        own[least].append(head)
        load[least] += work[head]
    while _change_places(work, own, load):
        pass
    return HeadDeal(tuple(head for heads in own for head in sorted(heads)), count)


def _change_places(work: Sequence[float], own: list[list[int]], load: list[float]) -> bool:
    """Swap the two heads that help the process with the most work best; whether any did."""
    most = max(range(len(own)), key=load.__getitem__)
    best, swap = load[most] * (1 - _WORTH), None
    for other in range(len(own)):
        for here in range(len(own[most])):
            for there in range(len(own[other])):
                moved = work[own[most][here]] - work[own[other][there]]
                after = max(load[most] - moved, load[other] + moved)
                if other != most and after < best:
                    best, swap = after, (other, here, there, moved)
    if swap is None:
        return False
    other, here, there, moved = swap
    own[most][here], own[other][there] = own[other][there], own[most][here]
    load[most] -= moved
    load[other] += moved
    return True


def imbalance(work: Tensor, count: int) -> tuple[float, float]:
    """The most work of a process and the mean, of ``work`` ``[H]`` dealt as it stands."""
    loads = work.double().view(count, -1).sum(1)
    return float(loads.max()), float(loads.mean())


def device_of(group: Any) -> torch.device:
    """What tensors that are told to others lie on."""
    return torch.device("cuda" if "nccl" in str(dist.get_backend(group)) else "cpu")


class Balancer:
    """The deals of every layer of a pipeline's transformers, made anew between steps.

    Args:
        heads: of every layer.
        beside: tells other processes, which compute another guidance branch and are to have the
            same heads, some numbers; returns theirs. None where there are no such.
    """

    def __init__(self, heads: int, beside: Callable[[Tensor], Tensor] | None = None) -> None:
        self._heads = heads
        self._beside = beside
        self._deals: dict[tuple[int, int], HeadDeal] = {}

    def deal(self, part: int, layer: int) -> HeadDeal | None:
        """How a layer's heads are dealt; None where in their order."""
        found = self._deals.get((part, layer))
        return None if found is None or not found.moves else found

    def between_steps(
        self, part: int, engine: AttentionEngine, before: int, step: int, group: Any
    ) -> None:
        """Deal a transformer's heads anew for ``step`` by what they computed in step ``before``.

        Every process of ``group`` must call.
        """
        method, schedule = engine.method, engine.schedule
        if not isinstance(method, SparseMethod) or method.equal_heads:
            return
        # the same in all processes, which must all ask or none.
        refreshes = schedule.refresh_steps(engine.steps)
        if before not in schedule.sparse_window(engine.steps) and before not in refreshes:
            return
        cells = takewhile(lambda cell: cell.step == before, reversed(engine.trace.cells))
        if self._take(part, engine.layers, cells, group, free=engine.plans_anew(step)):
            engine.forget()

    def _take(
        self, part: int, layers: int, cells: Iterable[Cell], group: Any, *, free: bool
    ) -> bool:
        """Deal anew by what the heads of this process computed in ``cells``, a step's.

        Nothing changes unless all processes are ``free`` to have other heads. Returns whether
        anything did. Waits for the device.
        """
        count = dist.get_world_size(group)
        own = torch.zeros(layers, self._heads // count, device=device_of(group))
        for cell in cells:
            if cell.computed is not None:
                own[cell.layer] += cell.computed.to(own.device).mean(0)
        told = torch.cat([own.flatten(), own.new_tensor([float(free)])])
        received = [torch.empty_like(told) for _ in range(count)]
        dist.all_gather(received, told, group=group)
        table = torch.stack(received).cpu()
        before = dict(self._deals)
        by_layer = table[:, :-1].view(count, layers, -1).transpose(0, 1).flatten(1).tolist()
        work = torch.zeros(layers, self._heads)
        for layer, given in enumerate(by_layer):
            now = self._deals.get((part, layer))
            work[layer, [*(now.heads if now else range(self._heads))]] = torch.tensor(given)
        all_free = table[:, -1].min()
        if self._beside is not None:
            theirs = self._beside(torch.cat([work.flatten(), all_free.view(1)]))
            work += theirs[:-1].view_as(work)
            all_free = torch.minimum(all_free, theirs[-1])
        if not all_free:
            return False
        for layer, of_heads in enumerate(work.tolist()):
            # none computed anything in a dense layer.
            if any(of_heads):
                self._deals[part, layer] = deal_by_work(of_heads, count)
        return before != self._deals
