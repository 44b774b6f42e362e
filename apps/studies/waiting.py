"""What a run waits for: its GPU, or Python that launches kernels on it.

    python -m vidsparse.apps.studies.waiting shapes --size 256x256 --frames 33

A step is at least as long as its kernels, and at least as long as it takes to launch them. Where a
model is small the second is more, and no kernel that gets faster is felt.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from vidsparse.markdown import markdown_table
from vidsparse.pipelines import accelerate, sparsify
from vidsparse.pipelines.generate import denoise
from vidsparse.pipelines.models import LoadedPipeline, load
from vidsparse.pipelines.request import GenerateRequest

TIMED: Final = 3
LARGEST: Final = 5
"""Kernels that are named."""

RUNS: Final[Mapping[str, Callable[[Any, int], AbstractContextManager[Any]]]] = {
    "stock": lambda pipe, steps: nullcontext(),
    "dense, our kernel": lambda pipe, steps: sparsify(pipe, "dense"),
    "foresight": lambda pipe, steps: sparsify(pipe, "foresight", share=0.11, dense_steps=0.12),
    "exact": lambda pipe, steps: accelerate(pipe, "exact", steps=steps),
    "balanced": lambda pipe, steps: accelerate(pipe, "balanced", steps=steps),
    "balanced, layers not in 8 bits": lambda pipe, steps: accelerate(
        pipe, "balanced", steps=steps, linear="none"
    ),
    "balanced, fg-attn": lambda pipe, steps: accelerate(
        pipe, "balanced", steps=steps, method="fg-attn", linear="none"
    ),
}
"""What is put on a pipeline that takes so many steps."""


@dataclass(frozen=True, slots=True)
class Waited:
    """One run's steps.

    Args:
        ms: a step, of the median run.
        busy_ms: of it, kernels on the GPU; None on a CPU.
        kernels: launched in a step; None on a CPU.
        largest: of them those that take most: name, and milliseconds of a step.
    """

    ms: float
    busy_ms: float | None = None
    kernels: float | None = None
    largest: tuple[tuple[str, float], ...] = ()


def waited(loaded: LoadedPipeline, request: GenerateRequest, steps: int) -> Waited:
    """Time the first ``steps`` of a request, and count its kernels.

    The pipeline runs as it is.
    """
    gpu = torch.device(loaded.device).type == "cuda"

    def run() -> float:
        began = time.perf_counter()
        denoise(loaded, [request], steps - 1)
        if gpu:
            torch.cuda.synchronize(loaded.device)
        return time.perf_counter() - began

    # what is compiled or chosen once.
    run()
    ms = statistics.median(run() for _ in range(TIMED)) * 1e3 / steps
    if not gpu:
        return Waited(ms)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
    events = [event for event in seen.key_averages() if event.self_device_time_total > 0]
    taken = {event.key: event.self_device_time_total / 1e3 / steps for event in events}
    largest = sorted(taken.items(), key=lambda each: each[1], reverse=True)[:LARGEST]
    kernels = sum(event.count for event in events) / steps
    return Waited(ms, sum(taken.values()), kernels, tuple(largest))


def main() -> None:
    """Run a model in several ways, and print a table of what each waits for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a bundled model or a folder")
    parser.add_argument("--size", metavar="WxH", help="of the video")
    parser.add_argument("--frames", type=int, help="of the video")
    parser.add_argument("--steps", type=int, help="of the run")
    parser.add_argument("--device", help="where; a GPU where there is one")
    parser.add_argument("--run", choices=RUNS, action="append", help="all of them by default")
    given = parser.parse_args()
    width, _, height = (given.size or "").partition("x")
    sizes: dict[str, Any] = {"width": int(width), "height": int(height)} if given.size else {}
    rows = []
    for name in given.run or RUNS:
        # compiled blocks and rounded weights stay: each has a pipeline of its own.
        loaded = load(given.model, device=given.device)
        steps = given.steps or loaded.ref.defaults.steps
        request = GenerateRequest(
            prompt=next(iter(loaded.ref.example_prompts), "a video"),
            model=given.model, method="dense", steps=steps, frames=given.frames, **sizes,
        )  # fmt: skip
        with RUNS[name](loaded.pipe, steps):
            found = waited(loaded, request, steps - 1)
        shown = [found.ms, found.busy_ms, found.kernels]
        named = "; ".join(f"{kernel[:40]} {ms:.1f} ms" for kernel, ms in found.largest)
        rows.append([name, *("" if each is None else f"{each:.1f}" for each in shown), named])
    print(markdown_table(("run", "ms a step", "GPU busy, ms", "kernels a step", "of which"), rows))


if __name__ == "__main__":
    main()
