"""What a reader of videos says: what each prompt asked for, and what its frames show."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One prompt: what was asked for, what the frames show.

    Both are of the same dataclass, whose fields are what the reader looks at; those that are not
    compared are faults that nobody asks for.
    """

    prompt: str
    asked: Any
    shown: Any

    @property
    def right(self) -> bool:
        """Everything as asked."""
        return bool(self.asked == self.shown)

    @property
    def parts(self) -> dict[str, bool]:
        """Whether each field is as asked."""
        return {
            field.name: getattr(self.asked, field.name) == getattr(self.shown, field.name)
            for field in fields(self.asked)
            if field.compare
        }

    @property
    def faults(self) -> dict[str, bool]:
        """Whether the frames show each of the faults."""
        return {
            field.name: bool(getattr(self.shown, field.name))
            for field in fields(self.shown)
            if not field.compare
        }
