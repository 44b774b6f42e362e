"""What a run waits for, on a CPU, where there are no kernels to count."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_pipelines import save_tiny_wan

from vidsparse.apps.studies import waiting
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("--frames", "5", "--size", "32x32", "--steps", "9", "--device", "cpu")


def test_as_many_steps_are_timed_as_are_asked_for(tmp_path: Path) -> None:
    loaded = load(save_tiny_wan(tmp_path / "tiny", layers=2), device="cpu")
    request = GenerateRequest(
        prompt="a red ball", method="dense", frames=5, width=32, height=32, steps=9
    )
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    loaded.pipe.transformer.register_forward_hook(count)
    found = waiting.waited(loaded, request, 4)
    # once to warm up, with two branches of guidance each.
    assert forwards == (1 + waiting.TIMED) * 4 * 2
    assert found.ms > 0
    assert found.busy_ms is found.kernels is None


def test_the_table_has_a_row_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_wan(tmp_path / "tiny", layers=2)
    runs = ("stock", "foresight", "balanced")
    asked = [word for run in runs for word in ("--run", run)]
    monkeypatch.setattr("sys.argv", ["waiting", str(folder), *SMALL, *asked])
    waiting.main()
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in table] == ["| run", *(f"| {run}" for run in runs)]
