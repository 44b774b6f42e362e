"""Video files: what is written comes back, and what goes wrong with the encoder is said."""

from __future__ import annotations

import gc
import subprocess
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest

from vidsparse.errors import (
    FolderError,
    OptionError,
    OutputError,
    UnsupportedError,
)
from vidsparse.pipelines.video import Sound, read_video, require_encoder, write_video

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("fps", [0.1, 1 / 3, 23.976, 240, 1000])
def test_every_frame_rate_that_is_taken_keeps_all_frames(tmp_path: Path, fps: float) -> None:
    write_video(ramp(5, 32, 32), tmp_path / "clip.mp4", fps=fps)
    assert len(read_video(tmp_path / "clip.mp4")) == 5


def ramp(frames: int, height: int, width: int) -> np.ndarray:
    """Smooth colours that differ everywhere: what a codec should keep almost exactly."""
    t, y, x = np.meshgrid(*(np.linspace(0, 1, n) for n in (frames, height, width)), indexing="ij")
    return (np.stack([x, y, (t + x) / 2], -1) * 200 + 20).astype(np.uint8)


@pytest.mark.parametrize("size", [(5, 64, 48), (1, 32, 32), (3, 33, 47)])
def test_a_video_comes_back_as_it_was(tmp_path: Path, size: tuple[int, int, int]) -> None:
    frames = ramp(*size)
    write_video(frames, tmp_path / "clip.mp4", fps=8)
    back = read_video(tmp_path / "clip.mp4")[:, : size[1], : size[2]]
    assert back.shape == frames.shape
    assert np.abs(back.astype(int) - frames).mean() < 2.5
    assert [p.name for p in tmp_path.iterdir()] == ["clip.mp4"]


@pytest.mark.parametrize("name", ["run-12:30/clip.mp4", "-x/clip.mp4", "clip.12:30.mp4"])
def test_a_relative_path_is_no_option_and_no_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    sound = Sound(samples=np.zeros((1, 8000), np.float32), rate=8000)
    write_video(ramp(3, 32, 32), name, fps=3, sound=sound)
    assert len(read_video(name)) == 3
    assert [p.name for p in Path(name).parent.iterdir() if p.is_file()] == [Path(name).name]


@pytest.mark.parametrize("height", [480, 720])
def test_a_file_says_how_its_colours_are_meant(tmp_path: Path, height: int) -> None:
    # browsers guess where one of the four is missing, and guess otherwise from 720 lines on.
    write_video(ramp(1, height, 64), tmp_path / "clip.mp4", fps=8)
    probe = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-i", tmp_path / "clip.mp4"],
        capture_output=True,
        text=True,
        check=False,
    )
    # range, matrix, primaries and transfer.
    assert "yuv420p(tv, smpte170m/bt709/iec61966-2-1" in probe.stderr


def test_reading_a_video_leaves_no_pipe_open(tmp_path: Path) -> None:
    write_video(ramp(3, 32, 32), tmp_path / "clip.mp4", fps=8)
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(5):
            read_video(tmp_path / "clip.mp4")
        gc.collect()
    assert [str(each.message) for each in caught] == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        write_video(ramp(1, 16, 16), tmp_path / "missing" / "clip.mp4", fps=8)


# what becomes of ffmpeg, by what stands in its place; $FFMPEG is the real one.
FAULTS = {
    "killed": ("head -c 1000 > /dev/null; kill -9 $$", "SIGKILL"),
    "too-large": ('ulimit -f 1; exec "$FFMPEG" "$@"', "File|SIGXFSZ"),
    "refused": ("cat > /dev/null; echo no such codec >&2; exit 1", "exit code 1: no such codec"),
    "cut-short": (
        '"$FFMPEG" "$@"; for last; do :; done; test -s "$last" && truncate -s 900 "$last"',
        "0 of 5 frames",
    ),
    "one-frame": (
        'for last; do :; done; case "$last" in *.tmp) "$FFMPEG" "$@" < "$FIRST";;'
        ' *) exec "$FFMPEG" "$@";; esac; cat > /dev/null',
        "1 of 5 frames",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_encoder_that_fails_is_an_error_and_keeps_the_old_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ffmpeg: Callable[[str], None],
    fault: str,
) -> None:
    script, words = FAULTS[fault]
    path = tmp_path / "out" / "clip.mp4"
    path.parent.mkdir()
    write_video(ramp(2, 64, 64), path, fps=8)
    before = path.read_bytes()
    frames = np.random.default_rng(0).integers(0, 255, (5, 64, 64, 3), dtype=np.uint8)
    (tmp_path / "first").write_bytes(frames[0].tobytes())
    monkeypatch.setenv("FIRST", str(tmp_path / "first"))
    ffmpeg(script)
    with pytest.raises(OutputError, match=words) as failed:
        write_video(frames, path, fps=8)
    # another video may well succeed.
    assert not isinstance(failed.value, FolderError)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["clip.mp4"]


def test_an_encoder_that_cannot_be_started_is_no_fault_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "nowhere"))
    for use in (require_encoder, lambda: write_video(ramp(5, 64, 64), tmp_path / "clip.mp4", 8)):
        with pytest.raises(UnsupportedError, match=r"cannot be started at .*nowhere: No such"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_fault_of_the_folder(
    tmp_path: Path, ffmpeg: Callable[[str], None]
) -> None:
    ffmpeg("echo 'muxing: No space left on device' >&2; exit 228")
    with pytest.raises(FolderError, match="No space left on device"):
        write_video(ramp(5, 64, 64), tmp_path / "clip.mp4", fps=8)


@pytest.mark.timeout(60)
def test_ctrl_c_at_any_moment_of_the_writing_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = ThreadPoolExecutor.submit

    def interrupted(self: ThreadPoolExecutor, *args: Any) -> Any:
        submit(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_video(ramp(5, 64, 64), tmp_path / "clip.mp4", fps=8)
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_raises_ends_the_writing_and_leaves_nothing(tmp_path: Path) -> None:
    told: list[None] = []

    def check() -> None:
        told.append(None)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_video(ramp(5, 16, 16), tmp_path / "clip.mp4", fps=8, check=check)
    assert len(told) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("frames", [np.zeros((2, 8, 8)), np.zeros((2, 8, 8, 4), np.uint8)])
def test_frames_of_another_kind_are_refused(tmp_path: Path, frames: np.ndarray) -> None:
    with pytest.raises(OptionError, match="frames must be uint8"):
        write_video(frames, tmp_path / "clip.mp4", fps=8)
