"""How close one video is to another: PSNR, SSIM and a measure of flicker, on 8-bit frames.

All functions take frames as they are before encoding, ``uint8 [T, H, W, 3]`` (one frame:
``[H, W, 3]``), so that a codec's losses never enter. Conventions, the same everywhere:

- PSNR: data range 255, in dB. A video's PSNR is that of the squared error averaged over all its
  frames, not the average of its frames' PSNRs: the latter has no value once one frame is exact.
- SSIM: scikit-image with the window of Wang et al. 2004 (Gaussian, sigma 1.5, population
  covariance), data range 255, averaged over the colour channels. A video's SSIM is the mean over
  frames.
- Flicker: PSNR between the frame-to-frame differences of the two videos. An offset that stays put
  cancels in it, one that comes and goes does not, so a value well below the video's PSNR means
  that the two differ in motion or flicker.
- Temporal flickering and smoothness look at one video by itself, and are given for both. VBench
  takes the first on videos that stand still; of others it counts their motion too, so that only
  the two sides beside each other say something.
- No difference at all has no finite PSNR: it is ``None``, never infinity; ``identical`` says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidsparse.errors import OptionError

Frames = NDArray[np.uint8]
Sides = tuple[float | None, float | None]
"""A value of the reference, and of the video that is judged."""

DATA_RANGE = 255.0
SSIM_WINDOW = "Gaussian, sigma 1.5, population covariance (Wang et al. 2004)"


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameQuality:
    """One frame against its reference.

    Args:
        psnr: dB, or None where the frames are identical.
        ssim: structural similarity, 1.0 for identical frames; None where it was not asked for.
        identical: every 8-bit value is the same.
    """

    psnr: float | None
    ssim: float | None
    identical: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoQuality:
    """One video against its reference.

    Args:
        psnr: dB over all frames together, or None where the videos are identical.
        ssim: mean over the frames it was computed on.
        flicker: PSNR in dB between the frame-to-frame differences, or None where these are
            identical or the video has a single frame.
        identical: every 8-bit value of every frame is the same.
        frames: the measures of each frame, in order.
        flickering: ``temporal_flickering`` of both videos.
        smoothness: ``motion_smoothness`` of both videos.
    """

    psnr: float | None
    ssim: float
    flicker: float | None
    identical: bool
    frames: tuple[FrameQuality, ...]
    flickering: Sides = (None, None)
    smoothness: Sides = (None, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Mean and standard deviation of one measure over several videos.

    Args:
        mean: arithmetic mean, None without values.
        std: sample standard deviation (divisor n - 1), None for fewer than two values.
        count: values that entered; None values (identical videos) are left out.
    """

    mean: float | None
    std: float | None
    count: int


def psnr(reference: Frames, other: Frames) -> float | None:
    """Peak signal-to-noise ratio of two frames or two videos in dB, data range 255.

    Returns:
        None where the two are identical.

    Raises:
        OptionError: not uint8, or the shapes differ.
    """
    _check(reference, other)
    return _decibel(_squared_error(reference, other) / reference.size)


def ssim(reference: Frames, other: Frames) -> float:
    """Structural similarity (SSIM) of two frames ``[H, W, 3]``, 1 where they are the same.

    The window is Gaussian, 11x11 pixels with sigma 1.5 (Wang et al. 2004); the data range is 255,
    and the value is the mean over the colour channels.

    Raises:
        OptionError: not uint8, the shapes differ, or a side is under 11 pixels (the window's size).
    """
    from skimage.metrics import structural_similarity

    _check(reference, other)
    if reference.ndim != 3 or min(reference.shape[:2]) < 11:
        raise OptionError(
            f"SSIM needs one frame [H, W, 3] of at least 11x11 pixels, got {reference.shape}"
        )
    # single precision halves the time and moves the result by less than 1e-6.
    value = structural_similarity(
        reference.astype(np.float32),
        other.astype(np.float32),
        channel_axis=-1,
        data_range=DATA_RANGE,
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
    )
    return float(value)


def flicker(reference: Frames, other: Frames) -> float | None:
    """PSNR in dB between the frame-to-frame differences of two videos ``[T, H, W, 3]``.

    Returns:
        None where the differences are identical, or where there is only one frame.

    Raises:
        OptionError: not uint8, not four dimensions, or the shapes differ.
    """
    _check(reference, other, dimensions=4)
    total, count = 0, 0
    # the difference of differences is the change of the error: two errors are enough per step.
    previous: NDArray[np.int16] | None = None
    for a, b in zip(reference, other, strict=True):
        error = a.astype(np.int16) - b.astype(np.int16)
        if previous is not None:
            change = error - previous
            total += _sum_of_squares(change)
            count += change.size
        previous = error
    return _decibel(total / count) if count else None


def temporal_flickering(video: Frames) -> float | None:
    """How little a video ``[T, H, W, 3]`` changes from frame to frame: 1 where it stands still.

    It is 1 minus the mean absolute difference of consecutive frames over 255, as VBench defines it
    (arXiv 2311.17982, "temporal flickering").

    Returns:
        None where there is only one frame.

    Raises:
        OptionError: not uint8, or not four dimensions.
    """
    _check(video, video, dimensions=4)
    return _steadiness(_mean_absolute(b.astype(np.int16) - a) for a, b in pairwise(video))


def motion_smoothness(video: Frames) -> float | None:
    """How near every second frame of ``[T, H, W, 3]`` is to the mean of its neighbours; 1 at best.

    VBench's "motion smoothness" (arXiv 2311.17982) with the mean of both neighbours where VBench
    has a trained network make the frame between them. Cuts, jitter and fast motion lower it.

    Returns:
        None where there are fewer than three frames.

    Raises:
        OptionError: not uint8, or not four dimensions.
    """
    _check(video, video, dimensions=4)
    # twice the difference to the mean, which whole numbers hold.
    return _steadiness(
        _mean_absolute(2 * middle.astype(np.int16) - before - after) / 2
        for before, middle, after in zip(video[::2], video[1::2], video[2::2], strict=False)
    )


def _mean_absolute(values: NDArray[np.int16]) -> float:
    return float(np.abs(values).mean())


def _steadiness(differences: Iterable[float]) -> float | None:
    found = list(differences)
    return 1 - float(np.mean(found)) / DATA_RANGE if found else None


def compare_videos(
    reference: Frames,
    other: Frames,
    *,
    ssim_every: int = 1,
    pool: Executor | None = None,
) -> VideoQuality:
    """Measure one video ``[T, H, W, 3]`` against its reference, per frame and over all frames.

    Args:
        reference: the dense video.
        other: the video to judge.
        ssim_every: compute SSIM on every n-th frame only, from the first; it is the slow part.
        pool: an executor that computes the frames' SSIM in parallel; None computes in this thread.

    Raises:
        OptionError: not uint8, not four dimensions, the shapes differ, or ``ssim_every`` below 1.
    """
    _check(reference, other, dimensions=4)
    if ssim_every < 1:
        raise OptionError(f"ssim_every must be a whole number from 1, got {ssim_every}")
    errors = [_squared_error(a, b) for a, b in zip(reference, other, strict=True)]
    measured = range(0, len(errors), ssim_every)
    # an exact frame needs no window: its SSIM is 1 by definition.
    pending = [index for index in measured if errors[index]]
    pairs = ([reference[i] for i in pending], [other[i] for i in pending])
    values: Iterable[float] = pool.map(ssim, *pairs) if pool else map(ssim, *pairs)
    similar: dict[int, float] = dict.fromkeys(measured, 1.0)
    similar.update(zip(pending, values, strict=True))
    size = reference[0].size
    frames = tuple(
        FrameQuality(psnr=_decibel(error / size), ssim=similar.get(index), identical=error == 0)
        for index, error in enumerate(errors)
    )
    return VideoQuality(
        psnr=_decibel(sum(errors) / (size * len(errors))),
        ssim=float(np.mean(list(similar.values()))),
        flicker=flicker(reference, other),
        identical=not any(errors),
        frames=frames,
        flickering=(temporal_flickering(reference), temporal_flickering(other)),
        smoothness=(motion_smoothness(reference), motion_smoothness(other)),
    )


def spread_of(values: Sequence[float | None]) -> Spread:
    """Mean and sample standard deviation of the values that are not None."""
    known = [value for value in values if value is not None]
    return Spread(
        mean=float(np.mean(known)) if known else None,
        std=float(np.std(known, ddof=1)) if len(known) > 1 else None,
        count=len(known),
    )


def amplified_difference(reference: Frames, other: Frames, gain: int = 4) -> Frames:
    """``|reference - other| * gain``, clipped to 8 bits: what a viewer looks at, not a measure."""
    _check(reference, other)
    difference = np.abs(reference.astype(np.int32) - other) * gain
    clipped: Frames = np.minimum(difference, 255).astype(np.uint8)
    return clipped


def _check(reference: NDArray[Any], other: NDArray[Any], dimensions: int | None = None) -> None:
    if reference.dtype != np.uint8 or other.dtype != np.uint8:
        raise OptionError(
            f"metrics compare 8-bit frames, got {reference.dtype} and {other.dtype}. "
            "Hint: round to uint8 first, so that both sides lose the same."
        )
    if reference.shape != other.shape:
        raise OptionError(
            f"the two videos must have one shape, got {reference.shape} and {other.shape}"
        )
    if dimensions is not None and reference.ndim != dimensions:
        raise OptionError(f"a video is [T, H, W, 3], got an array of shape {reference.shape}")
    if reference.size == 0:
        raise OptionError(f"there is nothing to compare in an array of shape {reference.shape}")


def _squared_error(reference: Frames, other: Frames) -> int:
    # a frame at a time keeps the wider copies small.
    if reference.ndim == 4:
        return sum(_squared_error(a, b) for a, b in zip(reference, other, strict=True))
    return _sum_of_squares(reference.astype(np.int16) - other)


def _sum_of_squares(values: NDArray[np.int16]) -> int:
    # float64 holds these integers exactly up to 2^53. einsum, because frames are already shared out
    # over threads: a BLAS product would start as many again for each of them and spin.
    wide = values.astype(np.float64).ravel()
    return int(np.einsum("i,i->", wide, wide))


def _decibel(mean_squared_error: float) -> float | None:
    if mean_squared_error == 0:
        return None
    return 10.0 * math.log10(DATA_RANGE**2 / mean_squared_error)
