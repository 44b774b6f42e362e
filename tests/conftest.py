"""Fixtures shared by the rooms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised float memory holds NaN, so that an output nobody wrote shows."""
    import torch

    def poisoned(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            fresh = allocate(*args, **kwargs)
            return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

        return call

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch on one thread: the tensors of these tests are too small for two."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
