"""Frames, and sound where there is some, to an mp4 file."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vidsparse.errors import OptionError, OutputError, UnsupportedError
from vidsparse.files import partial_name, put_in_place, unwritten

# x264's constant rate factor: at 14 the small clips made here look like their frames, and a two
# second clip of 256x256 stays near 100 kB.
_RATE_FACTOR = 14

# ffmpeg turns RGB into YUV by BT.601. A file that does not say so has wrong colours in browsers
# from 720 lines on, where they take it for BT.709; they believe it only where all four are said.
_COLOURS: Final = {
    "colorspace": "smpte170m",
    "color_primaries": "bt709",
    "color_trc": "iec61966-2-1",
    "color_range": "tv",
}

_SAID: Final = tuple(
    (os.strerror(code), code)
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOENT, errno.EACCES, errno.EIO)
)
"""How ffmpeg words the faults of a folder."""

_HINT: Final = "Hint: pip install imageio-ffmpeg, or give a path in IMAGEIO_FFMPEG_EXE."


def require_encoder() -> None:
    """Check that ffmpeg, which writes videos, is there and can be started.

    Raises:
        UnsupportedError: it cannot.
    """
    path, quiet = _encoder(), subprocess.DEVNULL
    try:
        # how it ends says nothing here: what it cannot encode, it says when it is asked to.
        subprocess.run([path, "-version"], stdin=quiet, stdout=quiet, stderr=quiet, check=False)
    except OSError as error:
        raise _unstartable(path, error) from None


def _encoder() -> str:
    """The path of ffmpeg.

    Raises:
        UnsupportedError: there is none.
    """
    import imageio_ffmpeg

    try:
        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError:
        raise UnsupportedError(f"there is no ffmpeg to write videos with. {_HINT}") from None


def _unstartable(path: str, error: OSError) -> UnsupportedError:
    reason = error.strerror or error
    return UnsupportedError(
        f"ffmpeg, which writes videos, cannot be started at {path}: {reason}. {_HINT}"
    )


@dataclass(frozen=True, kw_only=True)
class Sound:
    """Sound of a video: ``samples`` float32 ``[C, N]`` between -1 and 1, ``rate`` in Hz."""

    samples: NDArray[np.float32]
    rate: int

    def facts(self) -> dict[str, float | int]:
        """Its facts as JSON values, for a record."""
        channels, samples = self.samples.shape
        return {"rate": self.rate, "channels": channels, "seconds": samples / self.rate}


def write_video(
    frames: NDArray[np.uint8],
    path: str | os.PathLike[str],
    fps: float,
    check: Callable[[], object] | None = None,
    *,
    sound: Sound | None = None,
    rate_factor: int = _RATE_FACTOR,
) -> None:
    """Write ``frames`` ``[T, H, W, 3]`` as an H.264 mp4 that every player shows.

    ``sound`` becomes its AAC track.

    The file appears whole or not at all: it is written beside its place under a hidden name, read
    back, put on the disk and only then moved to its place; what was there before stays until then.
    Odd sizes gain one row or column, since the format halves the colour planes. ``check`` is called
    before every frame; if it raises, writing ends and no file stays. ``rate_factor`` is x264's: 14
    looks like the frames, larger numbers make smaller files that look worse.

    Raises:
        OptionError: frames or samples have another shape or dtype, or a rate is not positive.
        FolderError: the folder is gone or cannot be written to, or the disk is full.
        OutputError: the encoder failed, or the file does not hold these frames.
        UnsupportedError: there is no encoder.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise OptionError(
            f"frames must be uint8 [T, H, W, 3], got {frames.dtype} {list(frames.shape)}"
        )
    if not (math.isfinite(fps) and fps > 0):
        raise OptionError(f"fps must be above 0, got {fps}")
    if sound is not None and (
        sound.samples.ndim != 2
        or sound.samples.dtype != np.float32
        or not sound.samples.size
        or sound.rate <= 0
    ):
        raise OptionError(
            f"sound must be float32 [C, N] at a rate above 0, got {sound.samples.dtype} "
            f"{list(sound.samples.shape)} at {sound.rate}"
        )
    path = Path(path)
    frames = np.pad(
        frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge"
    )
    partial, heard = partial_name(path), partial_name(path)
    try:
        # ffmpeg would say the usual faults of a folder in a sentence of its own.
        partial.touch(exist_ok=False)
        if sound is not None:
            # one pipe is taken by the frames. Samples of one moment stand beside each other.
            heard.write_bytes(np.ascontiguousarray(sound.samples.T, "<f4").tobytes())
        _encode(frames, partial, fps, check, rate_factor, _heard(sound, heard))
        found = _count_frames(partial)
        if found != len(frames):
            raise OutputError(
                f"{path} cannot be written: {found} of {len(frames)} frames could be read back"
            )
        put_in_place(partial, path)
    except OutputError:
        raise
    except OSError as error:
        raise unwritten(path, error) from error
    finally:
        partial.unlink(missing_ok=True)
        heard.unlink(missing_ok=True)


def _heard(sound: Sound | None, samples: Path) -> list[str]:
    """ffmpeg's words for the sound whose samples are in a file."""
    if sound is None:
        return ["-an"]
    return [
        "-f", "f32le", "-ar", str(sound.rate), "-ac", str(len(sound.samples)),
        "-i", _named(samples),
        "-c:a", "aac", "-b:a", "192k",
    ]  # fmt: skip


def _encode(
    frames: NDArray[np.uint8],
    path: Path,
    fps: float,
    check: Callable[[], object] | None,
    rate_factor: int,
    heard: list[str],
) -> None:
    """Have ffmpeg write the file, and raise an ``OSError`` that says why where it did not."""
    ffmpeg = _encoder()
    _, height, width, _ = frames.shape
    # imageio's own writer never looks at how ffmpeg ended.
    command = [
        ffmpeg, "-y", "-v", "error",
        "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}",
        "-r", str(Fraction(fps).limit_denominator()), "-i", "-", *heard,
        "-vf", "setparams=" + ":".join(
            f"{name.replace('color_range', 'range')}={value}" for name, value in _COLOURS.items()
        ),
        *(word for name, value in _COLOURS.items() for word in (f"-{name}", value)),
        "-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", str(rate_factor),
        "-movflags", "+faststart+write_colr", "-f", "mp4", _named(path),
    ]  # fmt: skip
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # Ctrl-C is ours to handle: ffmpeg would end a file that we are about to remove.
            process_group=0 if os.name == "posix" else -1,
        )
    except OSError as error:
        raise _unstartable(ffmpeg, error) from None
    assert process.stdin is not None
    assert process.stderr is not None
    with process, ThreadPoolExecutor(1) as pool:
        try:
            said = pool.submit(process.stderr.read)
            # where it ends early, its words or its status say why.
            with suppress(BrokenPipeError):
                for frame in frames:
                    if check is not None:
                        check()
                    process.stdin.write(np.ascontiguousarray(frame).data)
            with suppress(OSError):
                process.stdin.close()
            words = said.result().decode(errors="replace").split("\n")
            status = process.wait()
        except BaseException:
            # at any moment: the pool waits for its words, and ffmpeg for more frames.
            process.kill()
            with suppress(OSError):
                process.stdin.close()
            raise
    if status == 0:
        return
    lines = [line.strip() for line in words if line.strip()]
    for reason, code in _SAID:
        if any(reason in line for line in lines):
            raise OSError(code, reason)
    if not path.parent.is_dir():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    raise OSError(f"ffmpeg {_ended(status)}{f': {lines[-1]}' if lines else ''}")


def _named(path: str | os.PathLike[str]) -> str:
    """A path as ffmpeg takes it: a relative one may begin like an option or with a protocol."""
    return os.path.abspath(path)


def _ended(status: int) -> str:
    if status > 0:
        return f"ended with exit code {status}"
    return f"was ended by {signal.Signals(-status).name} ({signal.strsignal(-status)})"


def read_video(path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """The frames of a video file, ``[T, H, W, 3]``.

    Raises:
        OutputError: it cannot be read.
        UnsupportedError: there is no ffmpeg to read it with.
    """
    # not by imageio's reader: where ffmpeg ends before it does, it leaves ffmpeg's pipes open.
    command = [_encoder(), "-v", "error", "-i", _named(path), "-f", "image2pipe", "-c:v", "ppm"]
    done = subprocess.run(
        [*command, "-"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode or not done.stdout:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        reason = _ended(done.returncode) if done.returncode else "it holds no frame"
        raise OutputError(f"the video {path} cannot be read: {said or reason}")
    # each frame is a picture with a head of its own, all of one length: P6, width height, 255.
    head = b"\n".join([*done.stdout.split(b"\n", 3)[:3], b""])
    width, height = map(int, head.split()[1:3])
    pictures = np.frombuffer(done.stdout, np.uint8).reshape(-1, len(head) + height * width * 3)
    return np.ascontiguousarray(pictures[:, len(head) :]).reshape(-1, height, width, 3)


def _count_frames(path: Path) -> int:
    """How many frames of a video can be decoded; none of a file that is no video."""
    import imageio_ffmpeg

    try:
        count, _ = imageio_ffmpeg.count_frames_and_secs(_named(path))
    except (RuntimeError, ValueError):
        return 0
    return int(count or 0)
