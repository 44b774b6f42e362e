"""A page whose server takes its time over pictures.

It stands in a file of its own: the process that serves has to import it by name.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Slow:
    """The page's server looks at pictures only while there is a file of that path."""

    path: Path

    def __call__(self) -> None:
        """In the page's process, before it serves."""
        from vidsparse.apps.page import build

        rewrite = build.rewrite_image

        def later(*arguments: Any, **named: Any) -> Any:
            while not self.path.exists():
                time.sleep(0.02)
            return rewrite(*arguments, **named)

        setattr(build, rewrite.__name__, later)
