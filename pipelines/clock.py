"""When the phases of a generation began and ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Seconds since the start, with the device waited for at the phases' ends and nowhere else.

    Args:
        device: what the pipeline runs on.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self.denoise_began = 0.0
        self.denoise_ended = 0.0
        self.step_began = 0.0
        self._zero = 0.0
        self._zero = self.now()

    def now(self, *, wait: bool = True) -> float:
        """Seconds since the start; ``wait`` for the device first."""
        if wait and self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - self._zero

    @contextmanager
    def first_forward_of(self, transformers: Sequence[Any]) -> Iterator[None]:
        """Take the first forward of any of ``transformers`` as the start of denoising."""
        hooks: list[Any] = []

        def begin(module: object, args: object) -> None:
            self.denoise_began = self.step_began = self.now()
            remove_all(hooks)

        eager = torch.compiler.disable(begin)  # type: ignore[no-untyped-call]
        hooks += [transformer.register_forward_pre_hook(eager) for transformer in transformers]
        try:
            yield
        finally:
            remove_all(hooks)


def remove_all(hooks: list[Any]) -> None:
    """Remove hooks of modules, and forget them."""
    while hooks:
        hooks.pop().remove()
