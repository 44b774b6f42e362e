"""Everything: nothing is chosen, and dense attention runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vidsparse.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Dense(Method):
    """Compute every query-key pair; the yardstick."""

    name: ClassVar[str] = "dense"
    title: ClassVar[str] = "Dense attention"
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = "every query-key pair"
