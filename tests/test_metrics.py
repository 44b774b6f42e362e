"""Metrics against hand values and scikit-image, and what the flicker measure is for."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from vidsparse.errors import OptionError
from vidsparse.metrics import (
    amplified_difference,
    compare_videos,
    flicker,
    motion_smoothness,
    psnr,
    spread_of,
    ssim,
    temporal_flickering,
)


def _video(frames: int = 5, height: int = 24, width: int = 35, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.integers(20, 230, (frames, height, width, 3), dtype=np.uint8)


def _shifted(video: np.ndarray, offsets: list[int]) -> np.ndarray:
    moved = video.astype(np.int16) + np.array(offsets, dtype=np.int16)[:, None, None, None]
    return moved.astype(np.uint8)


def test_psnr_of_a_constant_offset_by_hand() -> None:
    video = _video()
    expected = 20 * math.log10(255 / 5)
    assert psnr(video, _shifted(video, [5] * 5)) == pytest.approx(expected, abs=1e-12)


def test_psnr_agrees_with_scikit_image() -> None:
    from skimage.metrics import peak_signal_noise_ratio

    a, b = _video(seed=1), _video(seed=2)
    assert psnr(a, b) == pytest.approx(peak_signal_noise_ratio(a, b, data_range=255), abs=1e-9)


def test_psnr_sees_one_changed_value() -> None:
    a = _video()
    b = a.copy()
    b[2, 3, 4, 1] += 1
    assert psnr(a, b) == pytest.approx(10 * math.log10(255**2 * a.size), abs=1e-9)


def test_psnr_does_not_wrap_around() -> None:
    black, white = np.zeros((1, 12, 12, 3), np.uint8), np.full((1, 12, 12, 3), 255, np.uint8)
    assert psnr(black, white) == pytest.approx(0.0)


def test_ssim_agrees_with_scikit_image_in_double_precision() -> None:
    from skimage.metrics import structural_similarity

    a = _video(seed=3)[0]
    b = _shifted(_video(seed=3), [9] * 5)[0]
    b[5:9, 5:9] = 0
    expected = structural_similarity(
        a, b, channel_axis=-1, data_range=255, gaussian_weights=True, sigma=1.5,
        use_sample_covariance=False,
    )  # fmt: skip
    assert ssim(a, b) == pytest.approx(expected, abs=1e-6)


def test_ssim_of_flat_frames_by_hand() -> None:
    # without variance SSIM is its luminance term: (2ab + C1) / (a² + b² + C1), C1 = (0.01 · 255)².
    a, b = np.full((16, 16, 3), 100, np.uint8), np.full((16, 16, 3), 150, np.uint8)
    constant = 2.55**2
    expected = (2 * 100 * 150 + constant) / (100**2 + 150**2 + constant)
    assert ssim(a, b) == pytest.approx(expected, abs=1e-4)


def test_flicker_sees_what_psnr_hides() -> None:
    video = _video(frames=8)
    steady = _shifted(video, [4] * 8)
    flickering = _shifted(video, [4, -4] * 4)
    assert psnr(video, steady) == pytest.approx(psnr(video, flickering))
    assert flicker(video, steady) is None
    # every frame-to-frame change is off by 8.
    assert flicker(video, flickering) == pytest.approx(20 * math.log10(255 / 8))


def test_flicker_is_the_psnr_of_differences() -> None:
    a, b = _video(seed=4), _video(seed=5)
    da, db = np.diff(a.astype(float), axis=0), np.diff(b.astype(float), axis=0)
    expected = 10 * math.log10(255**2 / np.mean((da - db) ** 2))
    assert flicker(a, b) == pytest.approx(expected, abs=1e-9)


def test_flicker_of_a_single_frame_has_no_value() -> None:
    assert flicker(_video(frames=1), _video(frames=1, seed=9)) is None


def test_temporal_flickering_is_the_mean_absolute_difference_of_frames() -> None:
    video = _video(frames=6, seed=7)
    difference = np.abs(np.diff(video.astype(float), axis=0)).mean()
    assert temporal_flickering(video) == pytest.approx((255 - difference) / 255, abs=1e-9)
    still = np.repeat(video[:1], 4, axis=0)
    assert temporal_flickering(still) == 1.0
    assert temporal_flickering(video[:1]) is None


def test_smoothness_is_full_in_even_motion_and_less_in_jitter() -> None:
    ramp = np.broadcast_to(np.arange(40, 49, 2)[:, None, None, None], (5, 12, 12, 3))
    even = ramp.astype(np.uint8)
    assert motion_smoothness(even) == 1.0
    # every second frame off by 10 from the mean of its neighbours, which are not looked at.
    jitter = _shifted(even, [0, 10, 0, 10, 0])
    assert motion_smoothness(jitter) == pytest.approx(1 - 10 / 255)
    assert motion_smoothness(even[:2]) is None
    extremes = np.zeros((3, 12, 12, 3), np.uint8)
    extremes[1] = 255
    assert motion_smoothness(extremes) == pytest.approx(0)


def test_both_sides_are_looked_at_by_themselves() -> None:
    video = _video(frames=5)
    still = np.repeat(video[:1], 5, axis=0)
    quality = compare_videos(still, _shifted(still, [0, 9, 0, 9, 0]))
    for dense, sparse in (quality.flickering, quality.smoothness):
        assert dense == 1.0
        assert sparse == pytest.approx(1 - 9 / 255)


@pytest.mark.parametrize("measure", [temporal_flickering, motion_smoothness])
def test_measures_of_one_video_want_8_bit_videos(measure: Callable[[Any], object]) -> None:
    with pytest.raises(OptionError, match="8-bit"):
        measure(_video().astype(np.float32))
    with pytest.raises(OptionError, match="T, H, W, 3"):
        measure(_video()[0])


def test_identical_videos_have_no_psnr_and_say_so() -> None:
    quality = compare_videos(_video(), _video())
    assert quality.identical
    assert quality.psnr is None
    assert quality.flicker is None
    assert quality.ssim == 1.0
    assert all(frame.identical and frame.psnr is None for frame in quality.frames)


def test_one_exact_frame_is_marked_and_the_video_still_has_a_psnr() -> None:
    video = _video(frames=3)
    quality = compare_videos(video, _shifted(video, [0, 3, 3]))
    assert not quality.identical
    assert [frame.identical for frame in quality.frames] == [True, False, False]
    # pooled over frames: a third of the squared error is missing.
    assert quality.psnr == pytest.approx(10 * math.log10(255**2 / (9 * 2 / 3)))
    assert quality.frames[0].ssim == 1.0
    assert quality.frames[0].psnr is None


def test_ssim_of_a_video_is_the_mean_over_its_frames() -> None:
    a, b = _video(seed=6), _video(seed=7)
    expected = np.mean([ssim(x, y) for x, y in zip(a, b, strict=True)])
    assert compare_videos(a, b).ssim == pytest.approx(expected)


def test_a_pool_changes_nothing() -> None:
    a, b = _video(seed=6), _video(seed=7)
    with ThreadPoolExecutor(2) as pool:
        assert compare_videos(a, b, pool=pool) == compare_videos(a, b)


def test_ssim_every_leaves_the_other_frames_unmeasured() -> None:
    quality = compare_videos(_video(seed=6), _video(seed=7), ssim_every=2)
    assert [frame.ssim is None for frame in quality.frames] == [False, True, False, True, False]
    assert all(frame.psnr is not None for frame in quality.frames)


def test_spread_is_the_sample_deviation_and_leaves_out_none() -> None:
    result = spread_of([1.0, None, 3.0])
    assert (result.mean, result.count) == (2.0, 2)
    assert result.std == pytest.approx(math.sqrt(2))
    assert spread_of([4.0]).std is None
    assert spread_of([None]).mean is None


def test_amplified_difference_clips() -> None:
    a, b = np.full((1, 2, 2, 3), 10, np.uint8), np.full((1, 2, 2, 3), 12, np.uint8)
    assert (amplified_difference(a, b) == 8).all()
    assert (amplified_difference(a, b + np.uint8(200)) == 255).all()


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (_video().astype(np.float32), _video(), "8-bit"),
        (_video(frames=4), _video(frames=5), "one shape"),
        (_video()[0], _video()[0], r"\[T, H, W, 3\]"),
        (_video()[:0], _video()[:0], "nothing to compare"),
    ],
)
def test_wrong_arrays_are_named(a: np.ndarray, b: np.ndarray, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        compare_videos(a, b)


def test_frames_too_small_for_the_window_are_named() -> None:
    with pytest.raises(OptionError, match="11x11"):
        ssim(_video(height=10)[0], _video(height=10, seed=1)[0])


def test_an_amplified_difference_stays_white_whatever_the_gain() -> None:
    black, grey = np.zeros((1, 2, 2, 3), np.uint8), np.full((1, 2, 2, 3), 200, np.uint8)
    for gain in (4, 200, 1000):
        assert (amplified_difference(black, grey, gain) == 255).all()
        assert (amplified_difference(grey, black, gain) == 255).all()
