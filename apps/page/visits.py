"""What every visitor of the page has made and has running. Files stay when a visit ends."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vidsparse.apps.runs.prompts import slug

if TYPE_CHECKING:
    from vidsparse.apps.page.tasks import Clip, Pair, ReportFiles
    from vidsparse.pipelines.request import GenerateRequest
    from vidsparse.probe import CellRecord

# visits that never said goodbye, and videos of one visit, that are remembered.
MOST_VISITS = 500
MOST_CLIPS = 60


@dataclass
class Visit:
    """One visitor, from opening the page to closing it.

    Args:
        folder: where the visit's files go.
        clips: finished videos, the latest first.
        jobs: waiting or running, by the tab that asked for them.
        pair: the last comparison.
        cell: the last recorded cell.
        reports: the last report, one entry for each setting.
        shown: the video that the Generate tab shows.
        images: pictures that were uploaded, decoded and written anew, by their names in a request.
    """

    folder: Path
    clips: list[Clip] = field(default_factory=list)
    jobs: dict[str, list[Any]] = field(default_factory=dict)
    pair: Pair | None = None
    cell: CellRecord | None = None
    reports: list[ReportFiles] = field(default_factory=list)
    shown: Clip | None = None
    images: dict[str, Path] = field(default_factory=dict)
    _number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next_stem(self, prompt: str) -> Path:
        """The path, less its suffix, of the next video's files, which no folder is made for yet."""
        with self._lock:
            self._number += 1
            number = self._number
        return self.folder / f"{number:04d}-{slug(prompt)}"

    def remember(self, clip: Clip) -> None:
        """Put a finished video first in the history."""
        self.clips.insert(0, clip)
        del self.clips[MOST_CLIPS:]

    def dense_seconds(self, request: GenerateRequest) -> float | None:
        """Denoising seconds of the last dense run that had the same to do, or None."""
        for clip in self.clips:
            if clip.request.method == "dense" and _work(clip.request) == _work(request):
                seconds: float = clip.record["times"]["denoise"]
                return seconds
        return None

    def cancel(self, tab: str | None = None) -> int:
        """Ask the jobs of ``tab``, or all, to stop; returns how many there were."""
        asked = 0
        for name, jobs in self.jobs.items():
            if tab is None or name == tab:
                for job in tuple(jobs):
                    job.cancel()
                    asked += 1
        return asked


def _work(request: GenerateRequest) -> tuple[Any, ...]:
    """What decides how long dense denoising takes."""
    same = ("model", "frames", "width", "height", "steps", "device", "dtype")
    guided = request.guidance is not None and request.guidance > 1
    return (*(getattr(request, name) for name in same), guided)


class Visits:
    """The visitors by the session that Gradio gives their page.

    Args:
        out: the output folder; every visit gets a folder of its own in it, whose name the session
            does not tell.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, session: str) -> Visit:
        """The visit of a session, begun if it is new."""
        with self._lock:
            visit = self._visits.get(session)
            if visit is None:
                name = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(8)}"
                visit = self._visits[session] = Visit(folder=self._out / name)
            self._visits.move_to_end(session)
            while len(self._visits) > MOST_VISITS:
                # those that have nothing running go first: new visits are free to begin, and must
                # not end what others wait for.
                idle = (name for name, each in self._visits.items() if not any(each.jobs.values()))
                self._visits.pop(next(idle, next(iter(self._visits)))).cancel()
        return visit

    def end(self, session: str) -> None:
        """Forget a visit and stop what it has running."""
        with self._lock:
            visit = self._visits.pop(session, None)
        if visit is not None:
            visit.cancel()
