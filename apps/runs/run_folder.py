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
from vidsparse.files import write_text

LOCK_NAME = ".vidsparse.lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where one prompt's video and record go.

    Args:
        video: the mp4.
        record: the JSON beside it, written last: without it the video is not finished.
        finished: both exist and the record is of this very prompt.
    """

    video: Path
    record: Path
    finished: bool


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The videos and records of one prompt file under one set of settings."""

    path: Path

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Make the folder, check that it can be written to, and keep other runs out.

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
            yield
        finally:
            self._remove_if_unused()
            lock.release()

    def _remove_if_unused(self) -> None:
        # a run that failed before its first video leaves nothing behind. still under the lock, so
        # that no other run can take hold of a lock file that is about to go.
        if [path.name for path in self.path.iterdir()] == [LOCK_NAME]:
            with suppress(OSError):
                (self.path / LOCK_NAME).unlink()
                self.path.rmdir()

    def target(self, prompt: Prompt) -> Target:
        """The files of ``prompt``, and whether they are there already.

        A line that was edited gets files of its own and the old ones stay: by its new slug, or,
        where the slugs agree, by four more letters.
        """
        name = f"{prompt.number:04d}-{slug(prompt.text)}"
        own = f"{name}-{hashlib.sha256(prompt.text.encode()).hexdigest()[:4]}"
        for stem in (name, own):
            video, record = self.path / f"{stem}.mp4", self.path / f"{stem}.json"
            known = _recorded_prompt(record)
            if known == prompt.text or known is None or stem == own:
                finished = known == prompt.text and _has_bytes(video)
                return Target(video=video, record=record, finished=finished)
        raise AssertionError("the second name always returns")

    def write_record(self, target: Target, record: Mapping[str, Any]) -> None:
        """Write the record, which marks its video as finished.

        Raises:
            OutputError: the folder cannot be written to.
        """
        write_text(target.record, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _recorded_prompt(record: Path) -> str | None:
    try:
        value = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    prompt = value.get("prompt") if isinstance(value, dict) else None
    return prompt if isinstance(prompt, str) else None


def _has_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _unwritable(folder: Path, error: OSError) -> OutputError:
    reason = error.strerror or str(error)
    return OutputError(
        f"the output folder {folder} cannot be written to: {reason}. "
        "Hint: give another one with --out."
    )
