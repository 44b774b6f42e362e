"""Frames to an mp4 file."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vidsparse.errors import OptionError, OutputError

# x264's constant rate factor: at 14 the small clips made here look like their frames, and a two
# second clip of 256x256 stays near 100 kB.
_RATE_FACTOR = 14


def write_video(
    frames: NDArray[np.uint8],
    path: str | os.PathLike[str],
    fps: float,
    check: Callable[[], object] | None = None,
) -> None:
    """Write ``frames`` ``[T, H, W, 3]`` as an H.264 mp4 that every player shows.

    The file appears whole or not at all: it is written beside its place under a hidden name and
    moved there. Odd sizes gain one row or column, since the format halves the colour planes.
    ``check`` is called before every frame; what it raises ends the writing, and no file stays.

    Raises:
        OptionError: frames of another shape or type, or a frame rate that is not positive.
        OutputError: the folder cannot be written, or the encoder failed.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise OptionError(
            f"frames must be uint8 [T, H, W, 3], got {frames.dtype} {list(frames.shape)}"
        )
    if not (math.isfinite(fps) and fps > 0):
        raise OptionError(f"fps must be above 0, got {fps}")
    import imageio_ffmpeg

    path = Path(path)
    frames = np.pad(
        frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge"
    )
    height, width = frames.shape[1:3]
    partial = path.with_name(f".{path.stem}-{secrets.token_hex(4)}.mp4")
    try:
        # ffmpeg's own complaint would arrive through a pipe, late; the usual ones are told here.
        partial.touch(exist_ok=False)
        writer = imageio_ffmpeg.write_frames(
            str(partial),
            (width, height),
            fps=fps,
            codec="libx264",
            pix_fmt_in="rgb24",
            pix_fmt_out="yuv420p",
            quality=None,
            macro_block_size=1,
            ffmpeg_log_level="error",
            output_params=["-crf", str(_RATE_FACTOR), "-movflags", "+faststart"],
        )
        writer.send(None)
        try:
            for frame in frames:
                if check is not None:
                    check()
                writer.send(np.ascontiguousarray(frame))
        finally:
            writer.close()
        os.replace(partial, path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
