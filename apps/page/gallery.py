"""The finished videos of a visit: its folder says which there are, whatever was closed since."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vidsparse.apps.page.tasks import Clip
from vidsparse.errors import VidsparseError
from vidsparse.files import parse_json
from vidsparse.pipelines.request import recorded_request

# of the folder's videos, that are shown at once; the others are found by searching.
MOST_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A finished video, as far as it is needed to find it.

    Args:
        record: the JSON file beside it.
        words: what a search looks at: prompt, method, and what follows from them.
        prompt: what it shows.
        method: that made it.
        seed: of its noise.
        total: share of the attention that was computed, None where all was.
        seconds: that it took.
    """

    record: Path
    words: str
    prompt: str
    method: str
    seed: int
    total: float | None
    seconds: float


class Gallery:
    """What lies in a folder.

    Args:
        folder: of a visit; it need not be there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # by record and the time that it was written at; what is no record of a video stays None.
        self._read: dict[tuple[Path, int], Kept | None] = {}
        self._lock = threading.Lock()

    def find(self, search: str = "") -> list[Kept]:
        """The videos with all words of ``search`` in their prompt or method, the latest first."""
        words = search.lower().split()
        return [each for each in self._all() if all(word in each.words for word in words)]

    def by_stem(self) -> dict[str, Kept]:
        """All videos by what their files are called."""
        return {each.record.stem: each for each in self._all()}

    def clip(self, kept: Kept) -> Clip | None:
        """A video with all that is told of it, None where its files have gone meanwhile."""
        return _clip(kept.record)

    def _all(self) -> list[Kept]:
        with self._lock:
            known, self._read = self._read, {}
            for record in self._folder.glob("*.json"):
                try:
                    key = record, record.stat().st_mtime_ns
                except OSError:
                    # it was removed just now.
                    continue
                self._read[key] = known[key] if key in known else _kept(record)
            found = [(key[1], kept) for key, kept in self._read.items() if kept is not None]
        return [kept for _, kept in sorted(found, key=lambda each: each[0], reverse=True)]


def _kept(record: Path) -> Kept | None:
    clip = _clip(record)
    if clip is None:
        return None
    request, told = clip.request, clip.record
    try:
        return Kept(
            record=record,
            words=f"{request.prompt} {request.method} {request.model}".lower(),
            prompt=request.prompt,
            method=request.method,
            seed=request.seed,
            total=None if told["computed"] is None else told["total"],
            seconds=told["times"]["total"],
        )
    except (TypeError, LookupError):
        return None


def _clip(record: Path) -> Clip | None:
    """The video of a record as it was written here, None where it is anything else."""
    video, poster = record.with_suffix(".mp4"), record.with_suffix(".jpg")
    try:
        told = parse_json(record.read_bytes())
        if not isinstance(told, Mapping) or not (video.is_file() and poster.is_file()):
            return None
        request = recorded_request(told["prompt"], dict(told["options"]))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, VidsparseError):
        # of another version, or edited by hand.
        return None
    return Clip(request=request, record=dict(told), video=video, poster=poster)
