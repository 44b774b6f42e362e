"""What processes send each other in a step: counted, and sent again alone to be timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Like:
    """A tensor to be made when it is wanted; ``place`` tells those of one call apart."""

    place: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor, place: str = "") -> _Like:
        return _Like(place, tuple(x.shape), x.dtype, x.device)


@dataclass(slots=True)
class Traffic:
    """The exchanges of attention that ran while it was ``recorded``.

    What diffusers gathers at the end of a forward, and flags of one number, are not among them.

    Attributes:
        sent: bytes that this process gave to others.
    """

    sent: int = 0
    _again: list[Callable[[], None]] = field(default_factory=list)
    _buffers: dict[_Like, Tensor] = field(default_factory=dict)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Count what the block exchanges, and remember it for ``replay``."""
        notes: dict[str, Callable[..., None]] = {
            "all_to_all_single": self._all_to_all,
            "all_gather": self._gather,
            "broadcast": self._broadcast,
            "batch_isend_irecv": self._pass_on,
            "send": self._send,
            "recv": self._receive,
        }
        with ExitStack() as stack:
            for name, note in notes.items():
                # callers look it up in torch.distributed, and it runs as ever.
                stack.enter_context(mock.patch.object(dist, name, _noted(name, note)))
            yield

    def replay(self) -> None:
        """Exchange as much again, in the same order; every process that took part must call."""
        for again in self._again:
            again()

    def forget(self) -> None:
        """Let go of what ``replay`` needs."""
        self._again.clear()
        self._buffers.clear()

    def _buffer(self, like: _Like) -> Tensor:
        if like not in self._buffers:
            self._buffers[like] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        return self._buffers[like]

    def _all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        received: list[int] | None = None,
        sent: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> None:
        kept = len(input) // dist.get_world_size(group)
        if sent is not None:
            kept = sent[dist.get_rank(group)]
        self.sent += (len(input) - kept) * input.element_size() * math.prod(input.shape[1:])
        out, given = _Like.of(output, "received"), _Like.of(input)

        def again() -> None:
            out_, given_ = self._buffer(out), self._buffer(given)
            dist.all_to_all_single(out_, given_, received, sent, group=group)

        self._again.append(again)

    def _gather(self, tensors: list[Tensor], tensor: Tensor, group: Any = None) -> None:
        self.sent += tensor.nbytes * (len(tensors) - 1)
        given = _Like.of(tensor)
        outs = [_Like.of(one, f"received {place}") for place, one in enumerate(tensors)]

        def again() -> None:
            dist.all_gather([self._buffer(out) for out in outs], self._buffer(given), group=group)

        self._again.append(again)

    def _broadcast(self, tensor: Tensor, src: int, group: Any = None) -> None:
        if dist.get_rank() == src:
            self.sent += tensor.nbytes * (dist.get_world_size(group) - 1)
        given = _Like.of(tensor)
        self._again.append(lambda: dist.broadcast(self._buffer(given), src, group=group))

    def _send(self, tensor: Tensor, dst: int) -> None:
        self.sent += tensor.nbytes
        given = _Like.of(tensor)
        self._again.append(lambda: dist.send(self._buffer(given), dst))

    def _receive(self, tensor: Tensor, src: int) -> None:
        out = _Like.of(tensor, "received")

        def again() -> None:
            dist.recv(self._buffer(out), src)

        self._again.append(again)

    def _pass_on(self, ops: Sequence[dist.P2POp]) -> None:
        self.sent += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        # without the tensors, which are not to be kept.
        plain = [
            (op.op, _Like.of(op.tensor, f"passed {place}"), op.peer, op.group)
            for place, op in enumerate(ops)
        ]

        def again() -> None:
            asked = [
                dist.P2POp(op, self._buffer(like), peer, group) for op, like, peer, group in plain
            ]
            for work in dist.batch_isend_irecv(asked):
                work.wait()

        self._again.append(again)


def _noted(name: str, note: Callable[..., None]) -> Callable[..., Any]:
    """``torch.distributed``'s function of that name, of whose calls ``note`` is told first."""
    run: Final = getattr(dist, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return run(*args, **kwargs)

    return call
