"""The folder of one run: which videos are finished, what they are called, and one run at a time."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vidsparse.apps.runs.prompts import Prompt, slug
from vidsparse.errors import OutputError
from vidsparse.files import clear_partial, file_hash, parse_json, unwritten, write_text, write_whole

LOCK_NAME = ".vidsparse.lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoTarget:
    """Where one prompt's video and record go.

    Args:
        video: the mp4.
        record: the JSON beside it, written last: without it the video is not finished.
        finished: both exist as they were written, and the record is of this very prompt and of the
            run's settings.
    """

    video: Path
    record: Path
    finished: bool


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The videos and records of one prompt file under one set of settings.

    Args:
        path: the folder.
        settings: hash of the settings, which every record names.
    """

    path: Path
    settings: str = ""

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Make the folder, check that it can be written to, and keep other runs out.

        What a killed run left half written is cleared.

        Raises:
            OutputError: the folder cannot be made or written to, or another run holds it.
        """
        from filelock import FileLock, Timeout

        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
            lock = FileLock(self.path / LOCK_NAME)
            lock.acquire(timeout=0)
        except Timeout:
            raise OutputError(
                f"another run is writing to {self.path}. Hint: wait until it ends, or give another "
                "folder with --out."
            ) from None
        except OSError as error:
            raise _unwritable(self.path, error) from None
        try:
            clear_partial(self.path)
            yield
        finally:
            # the folder may be gone by now; what ended the run is the news, not that.
            with suppress(OSError):
                self._remove_if_unused()
            lock.release()

    def _remove_if_unused(self) -> None:
        # a run that failed before its first video leaves nothing behind. still under the lock, so
        # that no other run can take hold of a lock file that is about to go.
        if [path.name for path in self.path.iterdir()] == [LOCK_NAME]:
            (self.path / LOCK_NAME).unlink()
            self.path.rmdir()

    def target(self, prompt: Prompt, *, verify: bool = False) -> VideoTarget:
        """The files of ``prompt``, and whether they are there already.

        A video of another size than its record says is not finished, nor is one of another hash,
        which ``verify`` reads the file for, nor one whose record was edited.

        A line that was edited gets files of its own and the old ones stay: by its new slug, or,
        where the slugs agree, by four more letters.
        """
        name = f"{prompt.number:04d}-{slug(prompt.text)}"
        own = f"{name}-{hashlib.sha256(prompt.text.encode()).hexdigest()[:4]}"
        free: VideoTarget | None = None
        for stem in (name, own):
            video, record = self.path / f"{stem}.mp4", self.path / f"{stem}.json"
            known = _read_record(record)
            own_prompt = known is not None and known["prompt"] == prompt.text
            finished = (
                known is not None
                and own_prompt
                and known.get("settings") == self.settings
                and known.get("seal") == _seal(known)
                and _is_as_written(video, known.get("file"), verify)
            )
            target = VideoTarget(video=video, record=record, finished=finished)
            # a video that was finished under the second name stays the prompt's own where the files
            # under the first are gone.
            if finished or (own_prompt and free is None):
                return target
            if known is None and free is None:
                free = target
        return free or target

    def take_over(self, prompt: Prompt, other: RunFolder) -> None:
        """Copy a video that is finished in ``other`` and not here, with its record.

        Raises:
            OutputError: this folder cannot be written to.
        """
        here, there = self.target(prompt), other.target(prompt)
        if here.finished or not there.finished:
            return
        try:
            video, record = there.video.read_bytes(), parse_json(there.record.read_bytes())
        except (OSError, ValueError):
            # the run that is at work there has come to its end.
            return
        self.put(here, video, record)

    def write_record(self, target: VideoTarget, record: Mapping[str, Any]) -> None:
        """Write the record, which marks its video as finished.

        Raises:
            OutputError: the folder cannot be written to, or the video cannot be read.
        """
        try:
            file = {"bytes": target.video.stat().st_size, "sha256": file_hash(target.video)}
        except OSError as error:
            raise unwritten(target.record, error) from None
        written = {**record, "settings": self.settings, "file": file}
        written["seal"] = _seal(written)
        # what to do about it is for whoever runs the command to say.
        write_text(target.record, json.dumps(written, indent=1, ensure_ascii=False) + "\n", hint="")

    def put(self, target: VideoTarget, video: bytes, record: Mapping[str, Any]) -> None:
        """Write a video that was encoded elsewhere, and its record.

        Raises:
            OutputError: the folder cannot be written to.
        """
        try:
            write_whole(target.video, video)
        except OSError as error:
            raise unwritten(target.video, error) from None
        self.write_record(target, record)


def _read_record(path: Path) -> dict[str, Any] | None:
    """A record, None where there is none that names its prompt."""
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    known = isinstance(value, dict) and isinstance(value.get("prompt"), str)
    return value if known else None


def _seal(record: Mapping[str, Any]) -> str:
    """SHA-256 over everything that a record says: an edited one is of no video."""
    # as it is read again: numbers that are names are text then, which sorts in another order.
    told = json.loads(json.dumps({n: value for n, value in record.items() if n != "seal"}))
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _is_as_written(video: Path, file: Any, verify: bool) -> bool:
    if not isinstance(file, dict):
        return False
    try:
        if video.stat().st_size != file.get("bytes"):
            return False
        return not verify or file_hash(video) == file.get("sha256")
    except OSError:
        return False


def _unwritable(folder: Path, error: OSError) -> OutputError:
    reason = error.strerror or str(error)
    return OutputError(
        f"the output folder {folder} cannot be written to: {reason}. "
        "Hint: give another one with --out."
    )
