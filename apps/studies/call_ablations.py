"""Ablations on single attention calls, where a video would hide what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vidsparse.apps.studies.call_meters import DensityMeter, ErrorMeter, Meter, recall_rows
from vidsparse.order import ORDERS

if TYPE_CHECKING:
    from vidsparse.apps.results.row_file import Row, RowFile
    from vidsparse.apps.studies.quality_study import QualityStudy
    from vidsparse.apps.terminal.console import Terminal
    from vidsparse.calls import RecordedCall

# SpargeAttn's Table 10 looks at the cases whose L1 the judge changes by more than this.
FILTER_L1: Final = 0.05

# a threshold at which the small model keeps about a third of the pairs.
HIGHER_TAU: Final = 0.02

LENGTHS: Final[Mapping[str, tuple[int, ...]]] = {
    "cuda": (8_192, 16_384, 32_768, 65_536, 131_072),
    "cpu": (2_048, 4_096, 8_192, 16_384),
}
"""Sequence lengths by device; the GPU's are the paper's."""


def judge_rows(calls: Sequence[RecordedCall]) -> Iterator[dict[str, Any]]:
    """SpargeAttn with and without its judge of self-similarity, for each token order (Table 10).

    A head of a call is what the paper calls a case. ``filtered`` means over those whose L1 the
    judge changes by more than ``FILTER_L1``; None where there are none.
    """
    import torch

    from vidsparse.calls import relative_l1, run_call
    from vidsparse.methods import SpargeAttn

    methods = {"with": SpargeAttn(), "without": SpargeAttn(theta=-1)}
    for order in ORDERS:
        l1, sparsity = {}, {}
        for name, method in methods.items():
            runs = [run_call(call, method, order) for call in calls]
            l1[name] = torch.cat([relative_l1(out, dense).flatten() for out, dense, _ in runs])
            selected = [cell.selected.flatten() for *_, cell in runs if cell.selected is not None]
            sparsity[name] = 1 - torch.cat(selected)
        telling = (l1["with"] - l1["without"]).abs() > FILTER_L1
        row: dict[str, Any] = {
            "case": order,
            "heads": telling.numel(),
            "filtered": int(telling.sum()),
        }
        for name in methods:
            row[f"l1_{name}"] = l1[name].mean().item()
            row[f"sparsity_{name}"] = sparsity[name].mean().item()
            some = bool(telling.any())
            row[f"l1_filtered_{name}"] = l1[name][telling].mean().item() if some else None
            row[f"sparsity_filtered_{name}"] = (
                sparsity[name][telling].mean().item() if some else None
            )
        yield row


def length_rows(device: str) -> Iterator[dict[str, Any]]:
    """SpargeAttn's mask against dense attention, over the length of the sequence (Table 3)."""
    import torch

    from vidsparse.apps.bench.inputs import structured
    from vidsparse.apps.bench.masks import measure_masks
    from vidsparse.methods import SpargeAttn

    where = torch.device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    for seq_len in LENGTHS[where.type]:
        data = structured(seq_len, 8, 128, dtype, where)
        rows = measure_masks((SpargeAttn.name,), data, 3, _ignore)
        row = next(row for row in rows if not row.options)
        yield {
            "case": str(seq_len),
            "mask_ms": row.mask_ms,
            "dense_ms": row.dense_ms,
            "dense_impl": row.dense_impl,
            "share": row.share,
            "selected": row.selected,
        }


def _ignore(text: str) -> None:
    """Nobody needs to know which dense attention is absent."""


def held_out_rows(study: QualityStudy) -> Iterator[dict[str, Any]]:
    """Errors on held-out prompts, with the paper's numbers and with calibrated ones."""
    from vidsparse.calibration import CALIBRATORS
    from vidsparse.methods import SparseMethod, make_method

    meters = []
    for name, calibrator in CALIBRATORS.items():
        if calibrator.bound is None:
            continue
        preset = study.presets.of(name)
        plain = make_method(name, **calibrator.calibrates.as_published)
        assert isinstance(plain, SparseMethod)
        for words, method in (("one number", plain), ("calibrated", preset.make_method())):
            meters.append(
                ErrorMeter(
                    case=f"{name}, {words}",
                    method=method,
                    order=study.order,
                    bound=preset.measured["settings"][calibrator.bound],
                )
            )
    yield from _watched(study, meters)


def density_rows(study: QualityStudy) -> Iterator[dict[str, Any]]:
    """BSFA's predicted and measured density on held-out prompts, for every fraction stored."""
    from vidsparse.methods import Bsfa

    preset = study.presets.of(Bsfa.name)
    yield from _watched(
        study,
        [
            DensityMeter(
                method=preset.make_method(keep=float(keep)), order=study.order, predicted=predicted
            )
            for keep, predicted in preset.measured["predicted_density"].items()
        ],
    )


def sale_recall_rows(study: QualityStudy) -> Iterator[dict[str, Any]]:
    """SALE's recall (Table 5) at the paper's threshold, at calibrated ones, and at a higher one."""
    from vidsparse.methods import Sale

    thresholds = {f"tau {tau:g}": Sale(tau=tau) for tau in (Sale().tau, HIGHER_TAU)}
    calibrated = {"calibrated": study.presets.of(Sale.name).make_method()}
    yield from recall_rows(study.calls.recorded, {**thresholds, **calibrated}, study.order)


def _watched(study: QualityStudy, meters: Sequence[Meter]) -> Iterator[dict[str, Any]]:
    def see(call: RecordedCall) -> None:
        for meter in meters:
            meter.see(call)

    study.calls.watch(see)
    yield from (meter.row() for meter in meters)


class Calls(Enum):
    """The calls that an ablation looks at."""

    RECORDED = auto()
    """Of a few of the study's prompts."""
    WATCHED = auto()
    """Of all of them."""
    MADE_UP = auto()
    """Of no model: they belong to the device alone."""


@dataclass(frozen=True, slots=True)
class CallAblation:
    """Rows about attention calls; each has a ``case`` that tells it from the others."""

    calls: Calls
    rows: Callable[[QualityStudy], Iterator[dict[str, Any]]]


CALL_ABLATIONS: Final[Mapping[str, CallAblation]] = {
    "judge-l1": CallAblation(Calls.RECORDED, lambda study: judge_rows(study.calls.recorded)),
    "sale-recall": CallAblation(Calls.RECORDED, sale_recall_rows),
    "held-out": CallAblation(Calls.WATCHED, held_out_rows),
    "bsfa-density": CallAblation(Calls.WATCHED, density_rows),
    "lengths": CallAblation(Calls.MADE_UP, lambda study: length_rows(study.device)),
}
"""By name."""


def measure_ablation(
    terminal: Terminal, study: QualityStudy, name: str, file: RowFile, *, overwrite: bool
) -> None:
    """Put the rows of the ablation ``name`` into ``file``, which is held, unless it has them.

    Raises:
        OptionError: a preset that it needs cannot be used, or the file has rows of something else.
        OutputError: the file cannot be written.
    """
    ablation = CALL_ABLATIONS[name]
    study.check(file, calls=True)
    where: dict[str, Any] = {"ablation": name}
    if ablation.calls is not Calls.MADE_UP:
        where |= study.conditions()
    if ablation.calls is Calls.RECORDED:
        where["prompts"] = study.recorded_prompts

    def same(row: Row, case: str | None = None) -> bool:
        there = all(row.get(key) == value for key, value in where.items())
        return there and case in (None, row["case"])

    if file.find(same) is not None and not overwrite:
        terminal.say(f"{name} is there already.")
        return
    study.head(file)
    # all or none: a part would be taken for the whole by the next run.
    for row in list(ablation.rows(study)):
        file.put({**where, "commit": study.commit, **row}, partial(same, case=row["case"]))
        terminal.say(f"{name}: {row['case']}")
