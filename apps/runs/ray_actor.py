"""What a Ray actor is before it imports vidsparse; sent to it as code, not as a name to import.

Ray puts the folder that the command was run in at the front of its workers' path. A folder of any
package's name there, vidsparse's included, would be imported in its place.
"""

from __future__ import annotations

import sys
from typing import Any


class WorkerOfRay:
    """A ``Worker`` in an actor's process, of the package that is installed there.

    Args:
        folder: absolute path of the folder that is not to be looked into; None: no such folder.
    """

    def __init__(self, folder: str | None) -> None:
        sys.path[:] = [place for place in sys.path if place != folder]
        from vidsparse.apps.runs.crew import Worker

        self._worker = Worker()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call ``Worker.name``."""
        return getattr(self._worker, name)(*arguments)
