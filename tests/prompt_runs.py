"""``vidsparse generate`` on a file of two prompts, and a stand-in for its model: fixtures.

Videos come into the folder that the fixture ``out`` of the test's own file names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from vidsparse.apps.cli import main
from vidsparse.pipelines import generate as generating
from vidsparse.pipelines import models as modelling
from vidsparse.pipelines.generate import Generated

PROMPTS = "# a comment\n\na red circle that moves right\n  a blue square that moves left  \n"
SMALL = ("--frames", "5", "--size", "32x32", "--steps", "2", "--device", "cpu")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "two.txt"
    path.write_text(PROMPTS, encoding="utf-8")
    return path


class Machine:
    """Stands in for the model: remembers what was asked for, and draws noise."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.loads = 0
        self.fail_on = ""
        self.before: Callable[[str], object] = lambda prompt: None

    def load(self, ref: Any, **options: Any) -> Any:
        self.loads += 1
        return SimpleNamespace(ref=ref, compile=False, linear="none")

    def generate_batch(
        self,
        loaded: Any,
        requests: Any,
        progress: Any = None,
        ring: int | None = None,
        apart: bool | None = False,
    ) -> list[Generated]:
        return [self.generate(request, progress) for request in requests]

    def generate(self, request: Any, progress: Any) -> Generated:
        if self.fail_on and self.fail_on in request.prompt:
            raise RuntimeError("the kernel\nfell over")
        self.before(request.prompt)
        self.made.append(request.prompt)
        for step in range(1, request.steps + 1):
            progress(step, request.steps, 0.1)
        shape = (request.frames, request.height, request.width, 3)
        frames = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
        record = {
            "prompt": request.prompt,
            "options": request.options(),
            "total": 0.625,
            "selected": 0.25,
            "computed": 0.5,
            "times": {"total": 1.5},
            "notes": [],
        }
        return Generated(frames=frames, record=record)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    stand_in = Machine()
    monkeypatch.setattr(modelling, "load", stand_in.load)
    monkeypatch.setattr(generating, "generate_batch", stand_in.generate_batch)
    return stand_in


Run = Callable[..., Result]


@pytest.fixture
def generate(tiny_model: Path, prompts: Path, out: Path) -> Run:
    def run(*options: str, file: str | None = None, stdin: bytes | None = None) -> Result:
        arguments = ["generate", file or str(prompts), "--model", str(tiny_model), *SMALL]
        return CliRunner().invoke(main, [*arguments, "--out", str(out), *options], input=stdin)

    return run


def video_names(out: Path) -> list[str]:
    """Names of the videos in a folder and below it, in order."""
    return sorted(path.name for path in out.rglob("*.mp4"))
