"""The command that trains the small models, and the folders that it leaves."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_models import FILES, MEGABYTE, PROMPTS, ROOT, files, load, seen_by_the_pipeline

from vidsparse.apps.small_model import (
    benchmark,
    card,
    fidelity,
    train,
    vae_psnr,
)
from vidsparse.apps.small_model.export import export
from vidsparse.apps.small_model.model import ClipSize, SmallModel
from vidsparse.apps.small_model.registry import SMALL_MODELS
from vidsparse.apps.small_model.wan import SHAPES
from vidsparse.apps.small_model.wan_scenes import SCENES
from vidsparse.pipelines.models import resolve_model, unknown_words
from vidsparse.pipelines.video import read_video

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Run:
    """What ``train --tiny`` leaves behind."""

    model: SmallModel
    out: Path

    @property
    def folder(self) -> Path:
        return self.out / self.model.name

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"


@pytest.fixture(
    scope="module",
    # one stands for all where time is short.
    params=[
        pytest.param(model, id=name, marks=[] if name == "shapes" else pytest.mark.slow)
        for name, model in SMALL_MODELS.items()
    ],
)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = Run(request.param, tmp_path_factory.mktemp("run"))
    train.main(["--model", run.model.name, "--out", str(run.out), "--tiny", "--device", "cpu"])
    yield run
    torch.set_num_threads(threads)


_WEIGHTS = "transformer/diffusion_pytorch_model"
SHARDED = FILES - {f"{_WEIGHTS}.safetensors"} | {
    f"{_WEIGHTS}.safetensors.index.json",
    f"{_WEIGHTS}-00001-of-00002.safetensors",
    f"{_WEIGHTS}-00002-of-00002.safetensors",
}


def generate(pipe: Any, prompts: list[str], batch: int) -> list[np.ndarray]:
    return fidelity.generate(
        pipe,
        prompts,
        frames=9,
        height=32,
        width=48,
        steps=2,
        guidance=4.0,
        seed=0,
        batch=batch,
    )


@pytest.mark.usefixtures("offline")
def test_a_miniature_training_run_exports_a_folder_that_loads_offline(trained: Run) -> None:
    assert files(trained.folder) == (SHARDED if trained.model is SCENES else FILES)
    pipe = load(trained.model, trained.folder)
    clip = generate(pipe, [trained.model.world.example_prompts[0]], 1)[0]
    assert clip.shape == (9, 32, 48, 3)
    # the latents' scale was measured, not left at one
    rng, drawn = random.Random(9), trained.model.world
    clips = drawn.render([drawn.sample(rng) for _ in range(24)], 9, 32, 32, torch.device("cpu"))
    with torch.no_grad():
        mean, log_variance = trained.model.encode(pipe.vae, clips)
    latents = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
    spread = seen_by_the_pipeline(pipe.vae, latents).std((0, 2, 3, 4))
    assert (spread - 1).abs().max() < 0.3


def test_the_export_does_not_say_where_it_was_made(trained: Run) -> None:
    for path in trained.folder.rglob("*"):
        if path.is_file():
            assert str(trained.out).encode() not in path.read_bytes(), path


def test_the_export_keeps_the_weights_to_the_last_bit_it_stores(trained: Run) -> None:
    pipe = load(trained.model, trained.folder)
    for name, cls, dtype in (
        ("transformer", trained.model.transformer_class, torch.bfloat16),
        ("vae", trained.model.vae_class, torch.float16),
    ):
        source = cls.from_pretrained(trained.checkpoints / name).state_dict()
        for key, stored in getattr(pipe, name).state_dict().items():
            rounded = source[key].to(dtype).float()
            assert torch.equal(stored, rounded) or torch.equal(stored, source[key]), key


def test_a_batch_of_prompts_draws_what_single_prompts_draw(trained: Run) -> None:
    pipe = load(trained.model, trained.folder)
    asked = trained.model.world
    prompts = [asked.caption(scene, None) for scene in asked.held_out()[:3]]
    alone, together = generate(pipe, prompts, 1), generate(pipe, prompts, 2)
    assert len(alone) == len(together) == 3
    for one, other in zip(alone, together, strict=True):
        assert np.abs(one.astype(int) - other).max() <= 1


@pytest.mark.slow
def test_fidelity_judges_a_folder_and_says_that_it_failed(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, sheet, videos = (tmp_path / name for name in ("fidelity.json", "sheet.png", "videos"))
    asked = f"--model {trained.folder} --size 32x32 --frames 9 --steps 1 --batch 24"
    kept = ["--json", str(report), "--sheet", str(sheet), "--videos", str(videos)]
    assert fidelity.main([*asked.split(), *kept]) == 1
    told = json.loads(report.read_text(encoding="utf-8"))
    assert len(told["verdicts"]) == 24
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"all right {told['right']}, " in last
    assert f"of 24 (bar {trained.model.world.bar})" in last
    assert sheet.stat().st_size > 0
    assert sorted(path.name for path in videos.iterdir()) == [f"{n:02d}.mp4" for n in range(24)]
    assert read_video(videos / "23.mp4").shape == (9, 32, 32, 3)


def test_vae_psnr_judges_a_folder_and_says_that_it_failed(
    trained: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(trained.model.recipe, sizes=(ClipSize(frames=9, side=32),))
    monkeypatch.setattr(type(trained.model), "recipe", small)
    assert vae_psnr.main(["--model", str(trained.folder), "--clips", "2"]) == 1
    assert re.match(r"9 frames of 32x32: mean \d+\.\d\d dB, ", capsys.readouterr().out)


def test_the_card_prints_what_was_measured_and_nothing_else(trained: Run, tmp_path: Path) -> None:
    unmeasured = (trained.folder / "README.md").read_text(encoding="utf-8")
    sizes = trained.model.recipe.sizes
    assert unmeasured.count("not measured") >= 1 + 2 * len(sizes)
    assert all(f"| {size} | not measured |" in unmeasured for size in sizes)
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for part in trained.checkpoints.iterdir():
        (checkpoints / part.name).symlink_to(part, target_is_directory=True)
    measured: dict[str, Any] = {
        "hardware": "one abacus",
        "minutes": 23,
        "vae_psnr": {str(size): 31.4 + i for i, size in enumerate(sizes)},
        "fidelity": {f"{size.side}x{size.side}": f"{22 + i} of 24" for i, size in enumerate(sizes)},
    }
    (checkpoints / card.MEASURED).write_text(json.dumps(measured), encoding="utf-8")
    export(trained.model, checkpoints, tmp_path / "out")
    told = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "weights: one abacus, 23 minutes." in told
    for size in sizes:
        square = f"{size.side}x{size.side}"
        assert f"| {size} | {measured['vae_psnr'][str(size)]} |" in told
        assert f"| {square}, {size.frames} frames | {measured['fidelity'][square]} |" in told
    assert len(re.findall(r"^\| \d+x\d+x\d+ \|", told, flags=re.MULTILINE)) == len(sizes)


def test_training_goes_on_from_an_exported_model(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = f"--model {trained.model.name} --out {tmp_path} --tiny --device cpu"
    train.main([*asked.split(), "--start", "transformer", "--weights", str(trained.folder)])
    told = capsys.readouterr().out
    assert "vae step" not in told
    assert "transformer: " in told
    before, after = (load(trained.model, f / trained.model.name) for f in (trained.out, tmp_path))
    # the latents keep the scale that the transformer has learnt
    for old, new in zip(
        trained.model.moments(before.vae), trained.model.moments(after.vae), strict=True
    ):
        assert torch.equal(old, new)
    changes = [
        (new - old).norm() / old.norm()
        for old, new in zip(
            before.transformer.parameters(), after.transformer.parameters(), strict=True
        )
        if old.ndim == 2 and old.norm() > 1
    ]
    assert 0 < max(changes) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("trained", [SHAPES], ids=[SHAPES.name], indirect=True)
def test_two_processes_train_one_model_on_clips_of_their_own(trained: Run, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("together_worker.py")
    start = ["--start", "latents", "--weights", str(trained.checkpoints)]
    ran = subprocess.run(
        [sys.executable, str(worker), str(tmp_path), "--model", trained.model.name, *start],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    # one of them tells and writes
    assert ran.stdout.count("exported to") == 1
    assert files(tmp_path / trained.model.name) == files(trained.folder)
    drawn = [load_file(tmp_path / f"drawn{rank}.safetensors")["values"] for rank in range(2)]
    assert drawn[0].shape != drawn[1].shape or not torch.equal(*drawn)
    first, second = (load_file(tmp_path / f"weights{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_exported_model_is_written_again_bit_for_bit(trained: Run, tmp_path: Path) -> None:
    asked = f"--model {trained.model.name} --out {tmp_path} --start export"
    train.main([*asked.split(), "--weights", str(trained.folder)])
    for name in files(trained.folder):
        made = tmp_path / trained.model.name / name
        assert made.read_bytes() == (trained.folder / name).read_bytes(), name


@pytest.mark.slow
def test_the_benchmark_prints_every_kind_of_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "_SECONDS", 0.01)
    asked = f"--model shapes --out {tmp_path} --tiny --device cpu --benchmark"
    train.main(asked.split())
    told = capsys.readouterr().out
    assert re.search(r"draw 9x32x32 batch 4: [\d.]+ clips/s drawn, [\d.]+ clips/s encoded", told)
    assert re.search(r"crop 9x16x16 batch 2: [\d.]+ it/s", told)
    assert re.search(r"step 9x32x32 batch 4: .* tokens/s of 12 a clip", told)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("trained", [SCENES], ids=[SCENES.name], indirect=True)
def test_scenes_has_heads_of_128_and_fits_32_megabytes(trained: Run) -> None:
    net = SCENES.build_transformer()
    assert net.config.attention_head_dim == 128
    assert net.config.num_layers >= 8
    weights = [path.stat().st_size for path in trained.folder.rglob("*.safetensors")]
    assert sum(weights) <= 32 * MEGABYTE
    assert max(weights) < 16 * 2**20
    assert SCENES.tokens(net, SCENES.build_vae(), SCENES.recipe.sizes[-1]) == 33_600


def test_no_placeholder_is_left_in_the_card(trained: Run) -> None:
    assert "$" not in (trained.folder / "README.md").read_text(encoding="utf-8")


def test_the_export_carries_the_licence(trained: Run) -> None:
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (trained.folder / "LICENSE").read_text(encoding="utf-8") == licence


@pytest.mark.parametrize("prompt", PROMPTS[:6])
def test_the_commands_warn_of_the_words_the_tokenizer_does_not_know(
    prompt: str, trained: Run
) -> None:
    known = trained.model.world.vocabulary
    assert unknown_words(resolve_model(trained.folder), prompt) == known.unknown(prompt)
