"""Reading back the videos that the package writes."""

from __future__ import annotations

import os
import warnings

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray


def read_video(path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """The frames of a video file, ``[T, H, W, 3]``."""
    with warnings.catch_warnings():
        # the reader leaves its pipes for the garbage collector to close.
        warnings.simplefilter("ignore", ResourceWarning)
        reader = imageio_ffmpeg.read_frames(os.fspath(path), pix_fmt="rgb24")
        width, height = next(reader)["size"]
        data = b"".join(reader)
    return np.frombuffer(data, np.uint8).reshape(-1, height, width, 3)
