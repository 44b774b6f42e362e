"""The sound that a model makes becomes its video's audio track; the pictures are the same."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from tiny_ltx import ltx2

from vidsparse.apps.cli import main
from vidsparse.errors import NonFiniteError, OptionError
from vidsparse.pipelines.generate import generate, generate_batch
from vidsparse.pipelines.models import LoadedPipeline, load
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.pipelines.video import Sound, read_video, write_video

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {"frames": 9, "width": 64, "height": 64, "steps": 2, "dense_steps": 1}


def _heard(path: Path, channels: int) -> tuple[NDArray[np.float32], str]:
    """The samples ``[C, N]`` of a file's sound, and what ffmpeg says of its streams."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "f32le", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    samples = np.frombuffer(done.stdout, "<f4").reshape(-1, channels).T
    return samples, done.stderr.decode()


def _frames(count: int = 8) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 255, (count, 32, 48, 3), dtype=np.uint8)


@pytest.mark.parametrize(("channels", "rate"), [(1, 16_000), (2, 24_000), (2, 48_000)])
def test_sound_comes_back_as_it_was(tmp_path: Path, channels: int, rate: int) -> None:
    moments = np.arange(rate) / rate
    tones = [np.sin(2 * np.pi * 440 * (place + 1) * moments) / 2 for place in range(channels)]
    sound = Sound(samples=np.stack(tones).astype(np.float32), rate=rate)
    write_video(_frames(), tmp_path / "loud.mp4", 8, sound=sound)
    found, said = _heard(tmp_path / "loud.mp4", channels)
    assert re.search(rf"Audio: aac.* {rate} Hz, {'mono' if channels == 1 else 'stereo'}", said)
    # the encoder fills its last block.
    assert rate <= found.shape[1] <= rate + 2 * 1024
    for tone, heard in zip(sound.samples, found[:, :rate], strict=True):
        middle = slice(rate // 4, 3 * rate // 4)
        assert np.corrcoef(tone[middle], heard[middle])[0, 1] > 0.99


def test_sound_leaves_the_pictures_alone_and_nothing_behind(tmp_path: Path) -> None:
    silence = Sound(samples=np.zeros((2, 4000), np.float32), rate=16_000)
    write_video(_frames(), tmp_path / "mute.mp4", 8)
    write_video(_frames(), tmp_path / "loud.mp4", 8, sound=silence)
    mute, loud = (read_video(tmp_path / f"{name}.mp4") for name in ("mute", "loud"))
    np.testing.assert_array_equal(mute, loud)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loud.mp4", "mute.mp4"]


def test_a_failed_video_leaves_no_sound_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise KeyboardInterrupt

    silence = Sound(samples=np.zeros((2, 4000), np.float32), rate=16_000)
    with pytest.raises(KeyboardInterrupt):
        write_video(_frames(), tmp_path / "loud.mp4", 8, full, sound=silence)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "sound",
    [
        Sound(samples=np.zeros(10, np.float32), rate=16_000),
        Sound(samples=np.zeros((2, 0), np.float32), rate=16_000),
        Sound(samples=np.zeros((2, 10), np.float64), rate=16_000),
        Sound(samples=np.zeros((2, 10), np.float32), rate=0),
    ],
    ids=["flat", "empty", "float64", "no rate"],
)
def test_what_is_no_sound_is_refused(tmp_path: Path, sound: Sound) -> None:
    with pytest.raises(OptionError, match="sound must be float32"):
        write_video(_frames(), tmp_path / "loud.mp4", 8, sound=sound)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "ltx2"
    ltx2().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedPipeline:
    return load(folder, device="cpu")


def _waves(loaded: LoadedPipeline, into: list[torch.Tensor]) -> Any:
    """A hook that keeps what the model's vocoder makes."""
    return loaded.pipe.vocoder.register_forward_hook(lambda *call: into.append(call[-1]))


@pytest.mark.parametrize("method", ["dense", "fg-attn"])
def test_a_video_has_the_sound_that_its_model_made(loaded: LoadedPipeline, method: str) -> None:
    made: list[torch.Tensor] = []
    hook = _waves(loaded, made)
    try:
        (one, other) = generate_batch(
            loaded,
            [
                GenerateRequest(prompt=prompt, method=method, device="cpu", **SMALL)
                for prompt in ("rain on a roof", "a bell")
            ],
        )
    finally:
        hook.remove()
    (waves,) = made
    for each, wave in zip((one, other), waves.numpy(), strict=True):
        assert each.sound is not None
        np.testing.assert_array_equal(each.sound.samples, np.clip(wave, -1, 1))
        channels, samples = wave.shape
        assert each.record["sound"] == {
            "rate": 16_000,
            "channels": channels,
            "seconds": samples / 16_000,
        }


def test_sound_that_is_no_number_ends_the_prompt(loaded: LoadedPipeline) -> None:
    vocoder = loaded.pipe.vocoder
    hook = vocoder.register_forward_hook(lambda *call: call[-1] * torch.nan)
    try:
        with pytest.raises(NonFiniteError, match="in the sound"):
            generate(loaded, GenerateRequest(prompt="rain", method="dense", device="cpu", **SMALL))
    finally:
        hook.remove()


def test_the_command_writes_the_track_and_knows_the_file_again(
    folder: Path, tmp_path: Path
) -> None:
    options = ["--frames", "9", "--size", "64x64", "--steps", "2", "--dense-steps", "1"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("rain on a roof\n")
    command = ["generate", str(prompts), "--model", str(folder), "--out", str(tmp_path)]
    runner = CliRunner()
    done = runner.invoke(main, [*command, *options])
    assert done.exit_code == 0, done.stderr
    (video,) = tmp_path.rglob("*.mp4")
    record = json.loads(video.with_suffix(".json").read_text())
    _, said = _heard(video, record["sound"]["channels"])
    assert "Audio: aac" in said
    assert len(read_video(video)) == 9
    again = runner.invoke(main, [*command, *options, "--verify"])
    assert again.exit_code == 0
    assert "there already" in again.stderr + again.stdout
