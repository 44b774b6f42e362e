"""A row of a quality study: what its videos took, and how near they are to dense ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from vidsparse.apps.results.row_file import Row
from vidsparse.apps.runs.comparison import denoising_seconds
from vidsparse.apps.studies.configurations import Configuration
from vidsparse.apps.studies.study_calls import RECORDED_PROMPTS, RECORDED_STEPS
from vidsparse.metrics import Frames, VideoQuality, compare_videos, spread_of
from vidsparse.wording import format_number, format_share, format_spread

if TYPE_CHECKING:
    from vidsparse.pipelines.generate import Generated


def meanings(ssim_every: int, dense_steps: int | float | None) -> dict[str, str]:
    """What the numbers of a row mean, for the file's header."""
    dense = f"{dense_steps:.0%}" if isinstance(dense_steps, float) else str(dense_steps)
    return {
        "psnr": "dB on 8-bit frames before encoding, over all frames of a video; mean and "
        "sample standard deviation over prompts",
        "ssim": f"scikit-image, Gaussian window, on every {ssim_every}. frame",
        "flicker": "PSNR of frame-to-frame differences",
        "flickering": "VBench's temporal flickering of the sparse videos; dense_flickering "
        "of the dense ones",
        "seconds": "of denoising, all prompts, what is compiled on the way included; "
        "dense_seconds of the stock pipeline",
        "batch": "videos that were made at once",
        "video_seconds": "of denoising, median over prompts; dense_video_seconds and "
        "speedup likewise",
        "total": "share of all query-key pairs of a run that were computed, dense steps "
        "and layers included; of calls that a step cache left out nothing was",
        "left_out": "share of those pairs in calls that a step cache left out; in rows with a "
        "cache and without it, total is a share of the calls that were made",
        "densities": f"means over the sparse calls; the first {dense} of all steps "
        "are dense unless a row's options say otherwise",
        "sim_q, sim_k, l1, sparsity": f"SpargeAttn's, over the calls of {RECORDED_STEPS} "
        f"steps, all layers, {RECORDED_PROMPTS} prompts of a dense run",
    }


@dataclass(frozen=True, slots=True)
class DenseVideos:
    """What the rows of a study are compared with: frames, and seconds of denoising, by prompt."""

    frames: Sequence[Frames]
    seconds: Sequence[float]

    @classmethod
    def of(cls, made: Sequence[Generated]) -> DenseVideos:
        """Those that were made."""
        return cls([one.frames for one in made], denoising_seconds(made))


@dataclass(frozen=True, slots=True)
class PendingRow:
    """A row whose videos are made and whose metrics are being computed."""

    configuration: Configuration
    facts: Mapping[str, Any]
    measured: Sequence[Future[VideoQuality]]

    @classmethod
    def begin(
        cls,
        configuration: Configuration,
        own: Mapping[str, Any],
        dense: DenseVideos,
        made: Sequence[Generated],
        pool: ThreadPoolExecutor,
        *,
        ssim_every: int,
    ) -> PendingRow:
        """A row of its ``own`` facts and what ``made`` took; its metrics go to the pool."""
        records = [one.record for one in made]
        seconds = denoising_seconds(made)
        facts = {
            "method": configuration.method,
            "total": spread_of([record["total"] for record in records]).mean,
            "left_out": spread_of([record["work"]["left_out"] for record in records]).mean,
            "selected": spread_of([record["selected"] for record in records]).mean,
            "computed": spread_of([record["computed"] for record in records]).mean,
            "dense_step_share": records[0]["dense_step_share"],
            "seconds": sum(seconds),
            "dense_seconds": sum(dense.seconds),
            "video_seconds": median(seconds),
            "dense_video_seconds": median(dense.seconds),
            "speedup": median(dense.seconds) / median(seconds),
            "implementation": records[0]["implementation"],
            "study": configuration.study,
            "own_order": configuration.order is None,
            "calibrated": configuration.calibrated,
            "by_card": configuration.by_card,
            **own,
        }
        measured = [
            pool.submit(compare_videos, a, one.frames, ssim_every=ssim_every)
            for a, one in zip(dense.frames, made, strict=True)
        ]
        return cls(configuration, facts, measured)

    @property
    def measured_all(self) -> bool:
        """Whether all metrics are there: none is computed still, was given up, or failed."""
        return all(
            future.done() and not future.cancelled() and future.exception() is None
            for future in self.measured
        )

    def finish(self, conditions: Mapping[str, Any], commit: str) -> tuple[Row, str]:
        """The row, and what the terminal says of it; waits for the metrics.

        Args:
            conditions: what every row of the study has in common.
            commit: of the code.
        """
        qualities = [future.result() for future in self.measured]
        psnr = spread_of([each.psnr for each in qualities])
        identical = sum(each.identical for each in qualities)
        ssim = spread_of([each.ssim for each in qualities])
        row = {
            "method": self.facts["method"],
            "options": self.facts["options"],
            "size": conditions["size"],
            "selected": self.facts["selected"],
            "computed": self.facts["computed"],
            "psnr_mean": psnr.mean,
            "psnr_std": psnr.std,
            "ssim_mean": ssim.mean,
            "prompts": len(qualities),
            "commit": commit,
            "psnr_worst": min((q.psnr for q in qualities if q.psnr is not None), default=None),
            "ssim_std": ssim.std,
            "flicker_mean": spread_of([each.flicker for each in qualities]).mean,
            "dense_flickering": spread_of([each.flickering[0] for each in qualities]).mean,
            "flickering": spread_of([each.flickering[1] for each in qualities]).mean,
            "identical": identical,
            **self.facts,
            **conditions,
        }
        distance = format_spread(psnr, ".2f", " dB", identical)
        words = (
            f"{self.configuration}  computed {format_share(row['total'])} of the run, "
            f"{format_share(row['computed'])} of a sparse call (selected "
            f"{format_share(row['selected'])}), PSNR {distance}, "
            f"SSIM {format_number(ssim.mean, '.4f')}, {row['seconds']:.1f} s"
        )
        return row, words
