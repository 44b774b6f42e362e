"""Which of many cases alike run where time is short."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """``values`` as parameters of a test; those that are not ``quick`` are marked slow."""
    return [
        pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values
    ]
