"""A comparison of dense and sparse videos as a value, and its JSON and Markdown forms.

``report.json`` holds, under ``"format": "vidsparse-report/1"``:

- ``summary``: for ``psnr``, ``ssim`` and ``flicker`` the mean, sample standard deviation and count
  over prompts; ``worst``, the least PSNR and its prompt; ``total``, the share of all query-key
  pairs that the sparse side computed, and its split ``work``; both densities of the sparse calls;
  the share of dense steps; seconds of both sides; ``stages``, where the parts were switched on one
  after the other. Reports of versions before 0.2 have neither ``total`` nor ``work``.
- ``prompts``: per prompt the same measures, one entry per frame, and both runs' records; where
  both sides were made several times, ``turns``, and the records are those of the first.
- ``density_map``: computed density by denoising step (row) and transformer layer (column), mean
  over prompts; 1.0 is a dense call, null one that never happened.
- ``settings``, ``environment``, ``conventions``, ``notes``, ``created``.

There is no Infinity and no NaN in it. Where two frames or videos do not differ at all, the entry
reads ``"psnr": null, "identical": true``; such videos are left out of the PSNR's mean, and
``summary.identical`` counts them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vidsparse.files import finite_json
from vidsparse.markdown import markdown_table
from vidsparse.metrics import SSIM_WINDOW, Sides, Spread, VideoQuality, spread_of
from vidsparse.speedup import FEWEST, SHORT, SHORT_ON_GPU, Speedup, TimedPair, shortest_of
from vidsparse.wording import (
    format_number,
    format_psnr,
    format_seconds,
    format_share,
    format_sides,
    format_spread,
    format_total,
)
from vidsparse.work import Work

FORMAT = "vidsparse-report/1"

CONVENTIONS: Mapping[str, str] = {
    "frames": "8-bit, as decoded by the model and before video encoding",
    "psnr": "dB, data range 255; a video's is that of its squared error over all frames; null "
    "where identical is true",
    "ssim": f"scikit-image, {SSIM_WINDOW}, data range 255, mean over colour channels and frames",
    "promise": "what the preset's calibration measured, on prompts of its own; null without one",
    "flicker": "PSNR in dB between the frame-to-frame differences of the two videos; null where "
    "these are identical or there is one frame; well below psnr means added flicker",
    "flickering": "VBench's temporal flickering of both sides: 1 less the mean absolute difference "
    "of consecutive frames over 255; counts motion too, so only the two beside each other tell",
    "smoothness": "of both sides: 1 less the mean absolute difference of every second frame to the "
    "mean of its neighbours over 255; VBench's motion smoothness without its network",
    "worst": "the least PSNR and the number of its prompt, since a mean hides one that failed; "
    "null where all are identical",
    "std": "sample standard deviation over prompts; null for fewer than two",
    "total": "share of the query-key pairs of all video self-attention calls of a run that were "
    "computed: dense steps and dense layers count in full, sparse calls by their computed share, "
    "calls that a step cache left out as nothing computed; speed follows this one",
    "work": "where those pairs were computed: dense_steps, dense_layers, dense_fallback, refresh "
    "(all pairs, and a plan's beside them) and sparse add up to total; left_out are pairs of calls "
    "that a step cache left out (a work without it is a share of the calls that were made); "
    "selection is what choosing them cost beside that, as a share of the run's dense attention, "
    "null where not measured",
    "selected": "share of tiles that the method chose, over the sparse calls only",
    "computed": "share of query-key pairs that the kernel multiplied, over the sparse calls only",
    "stages": "runs of the same seeds with the parts of the sparse side switched on one after the "
    "other, each against the dense side; the last is the sparse side; empty unless asked for",
    "turns": "seconds of denoising of both sides, a pair for each time that they were made, where "
    "they were made several times in turns; seconds of denoising are then their means",
    "speedup": "denoising seconds of all dense runs over those of all sparse runs, with the range "
    f"over pairs; null unless at least {FEWEST} pairs were timed, dense and sparse in turns on "
    f"one machine, with {SHORT:g} s or more a run, on a GPU {SHORT_ON_GPU:g} s",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What one video cost, dense or sparse.

    Args:
        seconds: seconds by phase, at least ``denoise`` and ``total``; in a batch, this video's
            share of them.
        selected: share of tiles chosen over the sparse calls, None for a dense run.
        computed: share of query-key pairs multiplied over the sparse calls, None for a dense run.
        dense_step_share: share of the denoising steps that ran dense.
        implementation: what ran the attention.
        record: everything else that is known about the run, JSON-able.
        work: share of all query-key pairs computed, and its split; None for a record of a version
            that did not count them.
    """

    seconds: Mapping[str, float | None]
    selected: float | None
    computed: float | None
    dense_step_share: float | None
    implementation: str
    record: Mapping[str, Any]
    work: Work | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One prompt's run with one more part switched on than in the run before.

    Args:
        name: the part that was switched on, in words.
        psnr: in dB against the dense video, None where nothing differs.
        ssim: against the dense video.
        seconds: of denoising; in a batch, this video's share of them.
        total: share of the run's query-key pairs that were computed, None where unknown.
    """

    name: str
    psnr: float | None
    ssim: float
    seconds: float | None
    total: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMeans:
    """A ``Stage`` over all prompts.

    Args:
        name: the part that was switched on, in words.
        psnr: in dB, over the prompts whose videos differ from the dense ones.
        identical: prompts whose videos do not differ.
        worst: the least of the PSNRs, None where all videos are identical.
        ssim: over the prompts.
        seconds: mean of denoising.
        total: mean share of the run's query-key pairs that were computed.
        speedup: against the dense side, if enough pairs of runs were timed.
    """

    name: str
    psnr: Spread
    identical: int
    worst: float | None
    ssim: Spread
    seconds: float | None
    total: float | None
    speedup: Speedup


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptComparison:
    """One prompt's dense and sparse videos, measured.

    Args:
        number: the prompt's place in its file, from 1.
        prompt: its text.
        seed: the seed of both videos.
        quality: the sparse video against the dense one.
        dense: facts of the dense run.
        sparse: facts of the sparse run.
        kept: when the dense run was made, in words, if it was kept from an earlier job; None if it
            ran for this one.
        stages: runs with the sparse side's parts switched on one after the other, the last with all
            of them; empty unless asked for.
        turns: where both sides were made several times in turns, the seconds of denoising of the
            dense and of the sparse run of each turn, in a batch this video's share of them; those
            in ``dense`` and ``sparse`` are then their means. Else empty.
    """

    number: int
    prompt: str
    seed: int
    quality: VideoQuality
    dense: RunFacts
    sparse: RunFacts
    kept: str | None = None
    stages: Sequence[Stage] = ()
    turns: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """The quality that a preset was calibrated to.

    Args:
        psnr: mean over the calibration's prompts, in dB.
        std: sample standard deviation over them, None where it is not known or there was one.
        total: share of the run's query-key pairs that were computed there.
        prompts: how many they were.
        steps: denoising steps of each video there; with another number the quality differs.
    """

    psnr: float
    std: float | None
    total: float
    prompts: int
    steps: int

    def __str__(self) -> str:
        over = "one prompt" if self.prompts == 1 else f"{self.prompts} prompts"
        spread = "" if self.std is None else f" ± {self.std:.2f}"
        how = f"{self.psnr:.2f}{spread} dB with {self.total:.1%} computed"
        return f"{how}, over {over} of its calibration in {self.steps} steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Dense against sparse over several prompts.

    Args:
        settings: the options that both sides share and the sparse side's own, resolved.
        environment: versions and device.
        comparisons: one entry per prompt, in the file's order; at least one.
        density_map: computed density ``[steps][layers]``, None where no call was made.
        notes: sentences a reader needs to judge the numbers.
        created: ISO 8601 time.
        promise: the quality that the preset in use was calibrated to, or None.
    """

    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    comparisons: Sequence[PromptComparison]
    density_map: Sequence[Sequence[float | None]]
    notes: Sequence[str]
    created: str
    promise: Promise | None = None

    @property
    def psnr(self) -> Spread:
        """PSNR in dB over the prompts whose videos differ."""
        return spread_of([each.quality.psnr for each in self.comparisons])

    @property
    def worst(self) -> tuple[float, int] | None:
        """The least PSNR in dB and the number of its prompt; None where no video differs."""
        known = [
            (each.quality.psnr, each.number)
            for each in self.comparisons
            if each.quality.psnr is not None
        ]
        return min(known, default=None)

    @property
    def ssim(self) -> Spread:
        """SSIM over the prompts."""
        return spread_of([each.quality.ssim for each in self.comparisons])

    @property
    def flicker(self) -> Spread:
        """Flicker measure in dB over the prompts where it has a value."""
        return spread_of([each.quality.flicker for each in self.comparisons])

    def steadiness(self, measure: str) -> Sides:
        """Mean of ``flickering`` or ``smoothness`` over the prompts, dense and sparse."""
        pairs: list[Sides] = [getattr(each.quality, measure) for each in self.comparisons]
        return spread_of([a for a, _ in pairs]).mean, spread_of([b for _, b in pairs]).mean

    @property
    def identical(self) -> int:
        """Prompts whose two videos do not differ in a single value."""
        return sum(each.quality.identical for each in self.comparisons)

    @property
    def work(self) -> Work | None:
        """Mean work of the sparse side over prompts; None if it is unknown for any of them."""
        works = [each.sparse.work for each in self.comparisons]
        known = [work for work in works if work is not None]
        return Work.mean(known) if len(known) == len(works) else None

    @property
    def selected(self) -> float | None:
        """Mean selected density over prompts."""
        return spread_of([each.sparse.selected for each in self.comparisons]).mean

    @property
    def computed(self) -> float | None:
        """Mean computed density over prompts."""
        return spread_of([each.sparse.computed for each in self.comparisons]).mean

    @property
    def dense_step_share(self) -> float | None:
        """Mean share of the sparse side's steps that ran dense."""
        return spread_of([each.sparse.dense_step_share for each in self.comparisons]).mean

    def seconds(self, side: str, phase: str) -> float | None:
        """Mean seconds per video of ``side`` ("dense" or "sparse") in ``phase``."""
        runs: list[RunFacts] = [getattr(each, side) for each in self.comparisons]
        return spread_of([run.seconds.get(phase) for run in runs]).mean

    @property
    def speedup(self) -> Speedup:
        """How much faster the sparse side denoised, if enough pairs of runs were timed.

        The prompts of a batch run at once and are one pair, in each turn.
        """
        seconds = [each.sparse.seconds.get("denoise") for each in self.comparisons]
        return self._speedup(seconds, turns=True)

    @property
    def stages(self) -> list[StageMeans]:
        """Quality and time as the parts of the sparse side are switched on one after the other."""
        columns = list(zip(*(each.stages for each in self.comparisons), strict=True))
        return [
            StageMeans(
                name=column[0].name,
                psnr=spread_of([each.psnr for each in column]),
                identical=sum(each.psnr is None for each in column),
                worst=min((each.psnr for each in column if each.psnr is not None), default=None),
                ssim=spread_of([each.ssim for each in column]),
                seconds=spread_of([each.seconds for each in column]).mean,
                total=spread_of([each.total for each in column]).mean,
                # the last is the sparse side, which ran in every turn; those before it ran once.
                speedup=self._speedup(
                    [each.seconds for each in column], turns=column is columns[-1]
                ),
            )
            for column in columns
        ]

    def _speedup(self, seconds: Sequence[float | None], *, turns: bool = False) -> Speedup:
        """Speedup over the dense side of runs that took ``seconds``, one entry a prompt.

        With ``turns`` every turn of a prompt that has some is a pair.
        """
        pairs, at = [], 0
        while at < len(self.comparisons):
            each = self.comparisons[at]
            batch = int(each.sparse.record.get("batch", 1))
            once = [(each.dense.seconds.get("denoise"), seconds[at])]
            for dense, other in (turns and each.turns) or once:
                pairs.append(
                    TimedPair(
                        dense=None if dense is None else dense * batch,
                        sparse=None if other is None else other * batch,
                        kept=each.kept,
                        machine=_machine(each.sparse.record),
                        shortest=shortest_of(each.sparse.record),
                    )
                )
            at += batch
        return Speedup.of(pairs)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able values; see the module text for the format."""
        phases = sorted({key for each in self.comparisons for key in each.sparse.seconds})
        document = {
            "format": FORMAT,
            "created": self.created,
            "conventions": dict(CONVENTIONS),
            "settings": dict(self.settings),
            "environment": dict(self.environment),
            "notes": list(self.notes),
            "summary": {
                "prompts": len(self.comparisons),
                "identical": self.identical,
                "psnr": asdict(self.psnr),
                "worst": dict(zip(("psnr", "prompt"), self.worst, strict=True))
                if self.worst
                else None,
                "promise": asdict(self.promise) if self.promise else None,
                "ssim": asdict(self.ssim),
                "flicker": asdict(self.flicker),
                **{
                    measure: dict(zip(("dense", "sparse"), self.steadiness(measure), strict=True))
                    for measure in ("flickering", "smoothness")
                },
                "total": self.work.total if self.work else None,
                "work": self.work.to_json() if self.work else None,
                "selected": self.selected,
                "computed": self.computed,
                "dense_step_share": self.dense_step_share,
                "seconds": {
                    side: {phase: self.seconds(side, phase) for phase in phases}
                    for side in ("dense", "sparse")
                },
                "denoise_speedup": self.speedup.ratio,
                "speedup": self.speedup.to_json(),
                "stages": [
                    {**asdict(stage), "speedup": stage.speedup.to_json()} for stage in self.stages
                ],
            },
            "density_map": [list(row) for row in self.density_map],
            "prompts": [_prompt_json(each) for each in self.comparisons],
        }
        finite: dict[str, Any] = finite_json(document)
        return finite

    def to_json_text(self) -> str:
        """``to_json`` as indented text, strict JSON that any parser reads."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """The report as a page of Markdown: summary, one row per prompt, settings, conventions."""
        work = self.work
        seconds = [format_seconds(self.seconds(side, "denoise")) for side in ("dense", "sparse")]
        measures = {
            "PSNR": format_spread(self.psnr, ".2f", " dB", self.identical),
            **({"worst": worst} if (worst := format_worst(self)) else {}),
            **({"promised": str(self.promise)} if self.promise else {}),
            "SSIM": format_spread(self.ssim, ".4f"),
            "flicker: PSNR of frame differences": format_spread(self.flicker, ".2f", " dB"),
            "temporal flickering as in VBench": format_sides(self.steadiness("flickering")),
            "motion smoothness": format_sides(self.steadiness("smoothness")),
            "attention computed, whole run": format_total(work),
            "of that": work.split if work else "-",
            "beside it": work.selection_text if work else "-",
            "density selected / computed, sparse calls": f"{format_share(self.selected)} / "
            f"{format_share(self.computed)}",
            "share of steps that ran dense": format_share(self.dense_step_share),
            "denoising, dense / sparse": " / ".join(seconds),
            "speed, dense over sparse": str(self.speedup),
        }
        lines = ["# Dense against sparse", "", headline(self), ""]
        lines += [markdown_table(("measure", "mean ± std over prompts"), measures.items()), ""]
        if stages := stage_rows(self):
            titles, *rows = stages
            lines += [markdown_table(titles, rows, numbers=titles[1:]), ""]
        lines += [
            markdown_table(
                _PROMPT_COLUMNS,
                map(_prompt_cells, self.comparisons),
                numbers=(name for name in _PROMPT_COLUMNS if name != "prompt"),
            )
        ]
        for title, values in (("Settings", self.settings), ("Environment", self.environment)):
            rows = [(name, plain_text(value)) for name, value in values.items()]
            lines += ["", f"## {title}", "", markdown_table(("name", "value"), rows)]
        lines += ["", "## How to read this", ""]
        lines += [f"- {name}: {text}" for name, text in CONVENTIONS.items()]
        lines += [f"- {note}" for note in self.notes]
        return "\n".join(lines) + "\n"


def mean_density_map(
    maps: Sequence[Sequence[Sequence[float | None]]],
) -> list[list[float | None]]:
    """Average several density maps ``[steps][layers]`` of one shape, leaving out None.

    A cell that is None in every map stays None. Maps of another shape than the first one's are
    left out; no maps give an empty list.
    """
    if not maps:
        return []
    shape = _shape(maps[0])
    stack = np.array(
        [
            [[math.nan if cell is None else cell for cell in row] for row in each]
            for each in maps
            if _shape(each) == shape
        ],
        dtype=np.float64,
    )
    counts = np.sum(~np.isnan(stack), axis=0)
    sums = np.nansum(stack, axis=0)
    return [
        [float(total / count) if count else None for total, count in zip(*rows, strict=True)]
        for rows in zip(sums, counts, strict=True)
    ]


def headline(report: Report) -> str:
    """One sentence with what a reader wants to know first."""
    prompts = len(report.comparisons)
    over = f"{prompts} prompt{'s' if prompts != 1 else ''}"
    if report.identical == prompts:
        quality = f"Over {over} the sparse videos are identical to the dense ones"
    else:
        quality = (
            f"Over {over} the sparse videos differ from the dense ones by "
            f"{format_spread(report.psnr, '.2f', ' dB')} PSNR and "
            f"{format_spread(report.ssim, '.4f')} SSIM"
        )
    parts = [quality]
    if report.work is not None:
        parts.append(f"computing {format_total(report.work)} of attention in the whole run")
    speedup = report.speedup
    if speedup.ratio is not None:
        parts.append(f"denoising {speedup.ratio:.2f} times as fast ({speedup.range})")
    return ", ".join(parts) + "."


def stage_rows(report: Report) -> list[tuple[str, ...]]:
    """A table of a report's stages: titles, the dense side, then a row a part; or nothing."""
    stages = report.stages
    if not stages:
        return []
    dense = (
        "dense",
        "-",
        "-",
        "-",
        "100.0%",
        format_seconds(report.seconds("dense", "denoise")),
        "-",
    )
    return [
        (
            "switched on, one after the other",
            "PSNR dB",
            "worst",
            "SSIM",
            "computed",
            "denoising",
            "speed",
        ),
        dense,
        *(
            (
                stage.name,
                format_spread(stage.psnr, ".2f", identical=stage.identical),
                format_number(stage.worst, ".2f"),
                format_spread(stage.ssim, ".4f"),
                format_share(stage.total),
                format_seconds(stage.seconds),
                format_number(stage.speedup.ratio, ".2f", "x"),
            )
            for stage in stages
        ),
    ]


def format_worst(report: Report) -> str:
    """The least PSNR and its prompt, where there are several to be told apart."""
    if report.worst is None or len(report.comparisons) < 2:
        return ""
    value, number = report.worst
    return f"{value:.2f} dB, prompt {number}"


def plain_text(value: Any) -> str:
    """A setting's value as people read it."""
    value = finite_json(value)
    if value is None or value == "":
        return "-"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)


def _prompt_json(each: PromptComparison) -> dict[str, Any]:
    quality = asdict(each.quality)
    frames = quality.pop("frames")
    return {
        "number": each.number,
        "prompt": each.prompt,
        "seed": each.seed,
        **quality,
        "total": each.sparse.work.total if each.sparse.work else None,
        "work": each.sparse.work.to_json() if each.sparse.work else None,
        "selected": each.sparse.selected,
        "computed": each.sparse.computed,
        "seconds": {"dense": dict(each.dense.seconds), "sparse": dict(each.sparse.seconds)},
        "frames": list(frames),
        "stages": [asdict(stage) for stage in each.stages],
        "turns": [list(turn) for turn in each.turns],
        "dense": dict(each.dense.record),
        "sparse": dict(each.sparse.record),
    }


def _machine(record: Mapping[str, Any]) -> str:
    """What a run was made on and by, as far as its record says; equal for equal ones."""
    facts = [record.get(name) for name in ("device", "versions")]
    return json.dumps(facts, sort_keys=True, default=str)


def _shape(density_map: Sequence[Sequence[float | None]]) -> tuple[int, ...]:
    return tuple(len(row) for row in density_map)


_PROMPT_COLUMNS = (
    "#", "prompt", "PSNR dB", "SSIM", "flicker dB", "computed, whole run", "dense s", "sparse s",
)  # fmt: skip


def _prompt_cells(each: PromptComparison) -> tuple[str, ...]:
    return (
        str(each.number),
        each.prompt,
        format_psnr(each.quality),
        f"{each.quality.ssim:.4f}",
        format_number(each.quality.flicker, ".2f"),
        format_total(each.sparse.work),
        *(format_number(run.seconds.get("denoise"), ".2f") for run in (each.dense, each.sparse)),
    )
