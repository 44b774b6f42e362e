"""What workers are given to do: a video of a prompt, or both sides of some and their measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vidsparse.apps.runs.crew import Made
from vidsparse.apps.runs.maker import Maker
from vidsparse.apps.runs.prepared import PreparedPrompt

if TYPE_CHECKING:
    from vidsparse.pipelines.request import GenerateRequest


@dataclass(frozen=True, slots=True)
class Generation:
    """The video of a request, and its record."""

    request: GenerateRequest

    def run(self, maker: Maker, *, first: bool, fresh: bool) -> list[Made]:
        """As ``Task.run``."""
        from vidsparse.pipelines.video import write_video

        assert self.request.fps is not None
        (generated,) = maker([self.request], "")
        if not first:
            return []
        with TemporaryDirectory() as folder:
            file = Path(folder) / "video.mp4"
            write_video(generated.frames, file, self.request.fps, sound=generated.sound)
            return [Made(file.read_bytes(), generated.record)]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A chunk of prompts, dense and sparse: both sides' videos in one, and what was measured.

    Args:
        chunk: the prompts that are made at once.
        parts: as ``Comparison`` has it.
        turns: likewise.
    """

    chunk: tuple[PreparedPrompt, ...]
    parts: bool
    turns: int = 1

    @property
    def request(self) -> GenerateRequest:
        """That of the first prompt."""
        return self.chunk[0].request

    def run(self, maker: Maker, *, first: bool, fresh: bool) -> list[Made]:
        """As ``Task.run``."""
        from vidsparse.apps.runs.comparison import Comparison, runs_of, warm_ups
        from vidsparse.apps.runs.run_folder import RunFolder
        from vidsparse.files import parse_json

        if fresh:
            for requests in warm_ups(self.chunk, maker.defaults, self.parts):
                maker(requests, "warm-up")
        if not first:
            for name, requests in runs_of(self.chunk, self.parts, self.turns):
                maker(requests, name)
            return []
        with TemporaryDirectory() as path:
            folder = RunFolder(Path(path))
            comparison = Comparison(
                maker, folder.path, kept=folder, parts=self.parts, turns=self.turns
            )
            comparison.run(self.chunk)
            targets = [folder.target(one.prompt) for one in self.chunk]
            return [
                Made(target.video.read_bytes(), parse_json(target.record.read_bytes()))
                for target in targets
            ]
