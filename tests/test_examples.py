"""Every script of ``examples/`` runs, on a tiny random pipeline of its family."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3TextEncoderStep
from diffusers.pipelines.kandinsky6.pipeline_kandinsky6_ti2va import Kandinsky6TI2VAPipeline
from quick import slow_but
from tiny_cosmos import Unguarded
from tiny_families import TINY
from tiny_parts import IMAGE, noise
from torch import Tensor

from vidsparse.pipelines.families import FAMILIES
from vidsparse.pipelines.video import read_video

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["--frames", "9", "--width", "64", "--height", "64", "--steps", "3", "--device", "cpu"]

# by script, which has the name of its family's adapter: the tiny pipeline it runs on, and its
# video's frames.
OF_A_FAMILY = {
    "wan": ("wan", 9),
    "skyreels_v2": ("skyreels-v2", 9),
    "anyflow": ("anyflow", 9),
    "hunyuan_video": ("hunyuan", 9),
    "hunyuan_video15": ("hunyuan15", 9),
    "helios": ("helios", 33),
    "cogvideox": ("cogvideox", 9),
    "mochi": ("mochi", 13),
    "allegro": ("allegro", 9),
    "easyanimate": ("easyanimate", 9),
    "ltx": ("ltx", 9),
    "ltx2": ("ltx2", 9),
    "cosmos": ("cosmos2.5", 9),
    "cosmos3": ("cosmos3", 9),
    "kandinsky5": ("kandinsky5", 9),
    "kandinsky6": ("kandinsky6", 9),
    "motif_video": ("motif", 9),
    "minimax_h3": ("minimax", 124),
}
OF_A_USE = {"attend", "batch", "image", "own_loop", "preset"}

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


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What wants packages that tests do without: Cosmos' guardrail, processors before encoders."""
    for name in ("cosmos2_5_predict", "cosmos3_omni"):
        checker = f"diffusers.pipelines.cosmos.pipeline_{name}.CosmosSafetyChecker"
        monkeypatch.setattr(checker, Unguarded)

    def of_kandinsky6(*_: Any) -> tuple[Tensor, Tensor, None]:
        return noise(1, 1, 8, 16), noise(2, 1, 8), None

    monkeypatch.setattr(Kandinsky6TI2VAPipeline, "_get_prompt_embeds", staticmethod(of_kandinsky6))

    def of_minimax(step: Any, pipe: Any, state: Any) -> tuple[Any, Any]:
        block = step.get_block_state(state)
        block.prompt_embeds = noise(7, 1, 9, 16)
        block.text_token_tags = torch.ones(9, dtype=torch.long)
        step.set_block_state(state, block)
        return pipe, state

    monkeypatch.setattr(MiniMaxH3TextEncoderStep, "__call__", of_minimax)
    monkeypatch.setattr(MiniMaxH3TextEncoderStep, "expected_components", [])


def saved(variant: str, folder: Path) -> str:
    pipe, model = TINY[variant].build(), str(folder / "model")
    if isinstance(pipe, ModularPipeline):
        pipe.save_pretrained(model, overwrite_modular_index=True)
        return model
    if "safety_checker" in pipe.components:
        pipe.register_modules(safety_checker=None)
    pipe.save_pretrained(model)
    return model


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*OF_A_FAMILY, *OF_A_USE}


def test_every_family_has_an_example() -> None:
    assert {family.adapter for family in FAMILIES} == set(OF_A_FAMILY)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", slow_but(["wan", "own_loop"], [*OF_A_FAMILY, "own_loop"]))
def test_a_video_of_each_family(run: Run, tmp_path: Path, name: str) -> None:
    variant, frames = OF_A_FAMILY.get(name, ("wan", 9))
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
