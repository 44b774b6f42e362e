"""Independent pieces of a call on a CPU, each on a thread of its own.

PyTorch shares every operation among its OpenMP threads, which wait for each other at its end by
turning in place. The `torch` implementation has hundreds of small operations a call, and where
another process wants a core, each can wait for a whole time slice, where dense attention, which is
one operation, waits once. Pieces that share nothing wait only once too, at the end of the call.
BENCHMARKS.md has what both cost on two cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import torch

Piece = TypeVar("Piece")
Answer = TypeVar("Answer")

_POOLS: Final[dict[tuple[int, int, int], ThreadPoolExecutor]] = {}
_LOCK: Final = threading.Lock()


def in_threads(
    run: Callable[[Piece], Answer],
    pieces: Sequence[Piece],
    *,
    weights: Sequence[float] | None = None,
) -> list[Answer]:
    """``[run(piece) for piece in pieces]`` on the threads that PyTorch would use for one at a time.

    Args:
        run: called without gradients and without autocast, whatever the caller's state. What it
            writes, no other piece may read or write.
        pieces: the pieces.
        weights: how long each takes in proportion; the longest start first.
    """
    total = torch.get_num_threads()
    workers = min(total, len(pieces))
    if workers < 2:
        with torch.no_grad():
            return [run(piece) for piece in pieces]
    pool = _pool(workers, total)
    order = list(range(len(pieces)))
    if weights is not None:
        order.sort(key=lambda place: -weights[place])

    # the caller's state is its own thread's; outside of inference mode its tensors are not written.
    inference = torch.is_inference_mode_enabled()

    def quietly(piece: Piece) -> Answer:
        with torch.inference_mode(inference), torch.no_grad():
            return run(piece)

    started = {place: pool.submit(quietly, pieces[place]) for place in order}
    return [started[place].result() for place in range(len(pieces))]


def _pool(workers: int, total: int) -> ThreadPoolExecutor:
    """Threads that share out ``total`` among themselves, kept for the life of the process."""
    # a forked process has none of its parent's threads.
    key = os.getpid(), workers, total
    with _LOCK:
        if key not in _POOLS:
            share = total // workers

            def take_share() -> None:
                # asking first: a thread that has not asked takes the process's number when it does.
                torch.get_num_threads()
                torch.set_num_threads(share)

            pool = ThreadPoolExecutor(workers, "vidsparse", initializer=take_share)
            # all of them at once: a thread is only made where none is idle.
            together = threading.Barrier(workers)
            list(pool.map(lambda _: together.wait(), range(workers)))
            # the number holds for the thread that sets it, and for threads that ask later.
            torch.set_num_threads(total)
            _POOLS[key] = pool
        return _POOLS[key]
