"""Timing calls against each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def time_in_turns(
    calls: dict[str, Callable[[], Any]], device: torch.device, repeats: int
) -> dict[str, float]:
    """Median milliseconds of each call; they take turns, so that drift hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    if device.type == "cuda":
        from triton.testing import do_bench

        for _ in range(repeats):
            for name, call in calls.items():
                times[name].append(do_bench(call, warmup=30, rep=120, return_mode="median"))
    else:
        for turn in range(repeats + 1):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if turn:  # the first turn warms caches and allocators.
                    times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}
