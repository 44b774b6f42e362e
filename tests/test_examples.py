"""Every script of ``examples/`` runs, on a tiny random pipeline of its family."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from quick import slow_but
from tiny_families import TINY
from tiny_parts import IMAGE

from vidsparse.pipelines.video import read_video

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["--frames", "9", "--width", "64", "--height", "64", "--steps", "3", "--device", "cpu"]

# the tiny pipeline a script runs on, and its video's frames where they are not 9.
OF_A_FAMILY = {
    "wan": ("wan", 9),
    "skyreels_v2": ("skyreels-v2", 9),
    "hunyuan_video": ("hunyuan", 9),
    "hunyuan_video15": ("hunyuan15", 9),
    "cogvideox": ("cogvideox", 9),
    "mochi": ("mochi", 13),
    "ltx": ("ltx", 9),
    "ltx2": ("ltx2", 9),
    "own_loop": ("wan", 9),
}

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a script in an empty folder; returns what it printed."""

    def script(name: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return script


def saved(variant: str, folder: Path) -> str:
    TINY[variant].build().save_pretrained(folder / "model")
    return str(folder / "model")


def test_every_example_is_run_here() -> None:
    others = {"attend", "batch", "image", "preset"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*OF_A_FAMILY, *others}


@pytest.mark.parametrize("name", slow_but(["wan", "own_loop"], OF_A_FAMILY))
def test_a_video_of_each_family(run: Run, tmp_path: Path, name: str) -> None:
    variant, frames = OF_A_FAMILY[name]
    printed = run(
        name, "--model", saved(variant, tmp_path), *SMALL, "--frames", str(frames),
        "--prompt", "a red circle", "--out", "made.mp4",
    )  # fmt: skip
    assert read_video(tmp_path / "made.mp4").shape == (frames, 64, 64, 3)
    assert "computed" in printed
    assert "torch" in printed


def test_a_batch(run: Run, tmp_path: Path) -> None:
    printed = run(
        "batch", "--model", saved("wan", tmp_path), *SMALL,
        "--prompts", "a red circle", "a blue square that moves left",
    )  # fmt: skip
    assert printed.count("PSNR") == 2
    for number in (0, 1):
        assert read_video(tmp_path / f"batch-{number}.mp4").shape == (9, 64, 64, 3)


def test_a_video_from_an_image(run: Run, tmp_path: Path) -> None:
    IMAGE.save(tmp_path / "first.png")
    printed = run(
        "image", "first.png", "--model", saved("wan-image", tmp_path), *SMALL,
        "--prompt", "a red circle",
    )  # fmt: skip
    assert read_video(tmp_path / "image.mp4").shape == (9, 64, 64, 3)
    assert "computed" in printed


def test_a_preset(run: Run, tmp_path: Path) -> None:
    printed = run(
        "preset", "--model", saved("wan", tmp_path), *SMALL, "--prompts", "a red circle",
        "--out", "made",
    )  # fmt: skip
    assert json.loads((tmp_path / "made.json").read_text("utf-8"))["method"] == "spargeattn"
    assert "computed" in printed


def test_one_attention_call(run: Run) -> None:
    printed = run("attend", "--tokens", "5", "8", "9", "--heads", "1", "--device", "cpu")
    assert "360 tokens" in printed
    assert 0 < float(printed.split()[-1]) < 0.5
