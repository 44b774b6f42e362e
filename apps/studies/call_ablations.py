"""Ablations on single attention calls, where a video would hide what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vidsparse.apps.studies.call_meters import DensityMeter, ErrorMeter, Meter, recall_rows
from vidsparse.methods import SPARSE_METHODS, SparseMethod, make_method
from vidsparse.methods.studied import CallAblation, Settings
from vidsparse.order import ORDERS

if TYPE_CHECKING:
    from vidsparse.apps.results.row_file import Row, RowFile
    from vidsparse.apps.studies.quality_study import QualityStudy
    from vidsparse.apps.terminal.console import Terminal
    from vidsparse.calls import RecordedCall

LENGTHS: Final[Mapping[str, tuple[int, ...]]] = {
    "cuda": (8_192, 16_384, 32_768, 65_536, 131_072),
    "cpu": (2_048, 4_096, 8_192, 16_384),
}
"""Sequence lengths by device; the GPU's are the paper's."""


def difference_rows(
    calls: Sequence[RecordedCall], methods: Mapping[str, SparseMethod], telling: float
) -> Iterator[dict[str, Any]]:
    """What two settings err against dense attention, for each token order.

    A head of a call is what SpargeAttn's paper calls a case. ``filtered`` means over those whose L1
    differs by more than ``telling``; None where there are none.
    """
    import torch

    from vidsparse.calls import relative_l1, run_call

    for order in ORDERS:
        l1, sparsity = {}, {}
        for name, method in methods.items():
            runs = [run_call(call, method, order) for call in calls]
            l1[name] = torch.cat([relative_l1(out, dense).flatten() for out, dense, _ in runs])
            selected = [cell.selected.flatten() for *_, cell in runs if cell.selected is not None]
            sparsity[name] = 1 - torch.cat(selected)
        one, other = l1.values()
        differ = (one - other).abs() > telling
        row: dict[str, Any] = {
            "case": order,
            "heads": differ.numel(),
            "filtered": int(differ.sum()),
        }
        some = bool(differ.any())
        for name in methods:
            row[f"l1_{name}"] = l1[name].mean().item()
            row[f"sparsity_{name}"] = sparsity[name].mean().item()
            row[f"l1_filtered_{name}"] = l1[name][differ].mean().item() if some else None
            row[f"sparsity_filtered_{name}"] = (
                sparsity[name][differ].mean().item() if some else None
            )
        yield row


def length_rows(method: str, device: str) -> Iterator[dict[str, Any]]:
    """A method's mask against dense attention, over the length of the sequence."""
    import torch

    from vidsparse.apps.bench.inputs import structured
    from vidsparse.apps.bench.masks import measure_masks

    where = torch.device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    for seq_len in LENGTHS[where.type]:
        data = structured(seq_len, 8, 128, dtype, where)
        rows = measure_masks((method,), data, 3, _ignore)
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

    meters = []
    for name, calibrator in CALIBRATORS.items():
        if calibrator.bound is None:
            continue
        preset = study.presets.of(name)
        for words, method in (
            ("one number", _made(name, {})),
            ("calibrated", preset.make_method()),
        ):
            meters.append(
                ErrorMeter(
                    case=f"{name}, {words}",
                    method=method,
                    order=study.order,
                    bound=preset.measured["settings"][calibrator.bound],
                )
            )
    yield from _watched(study, meters)


def density_rows(study: QualityStudy, method: str, option: str) -> Iterator[dict[str, Any]]:
    """Predicted and measured density on held-out prompts, for every value of ``option`` stored."""
    preset = study.presets.of(method)
    yield from _watched(
        study,
        [
            DensityMeter(
                case=f"{float(value):g}",
                method=preset.make_method(**{option: float(value)}),
                order=study.order,
                predicted=predicted,
            )
            for value, predicted in preset.measured["predicted_density"].items()
        ],
    )


def _watched(study: QualityStudy, meters: Sequence[Meter]) -> Iterator[dict[str, Any]]:
    def see(call: RecordedCall) -> None:
        for meter in meters:
            meter.see(call)

    study.calls.watch(see)
    yield from (meter.row() for meter in meters)


class Calls(Enum):
    """The calls that a table looks at."""

    RECORDED = auto()
    """Of a few of the study's prompts."""
    WATCHED = auto()
    """Of all of them."""
    MADE_UP = auto()
    """Of no model: they belong to the device alone."""


@dataclass(frozen=True, slots=True)
class CallTable:
    """Rows about attention calls; each has a ``case`` that tells it from the others."""

    calls: Calls
    rows: Callable[[QualityStudy], Iterator[dict[str, Any]]]


def _declared(name: str, ablation: CallAblation) -> CallTable:
    """The table of what the method ``name`` declares."""

    def settings() -> dict[str, SparseMethod]:
        return {case: _made(name, own) for case, own in ablation.settings.items()}

    def recall(study: QualityStudy) -> Iterator[dict[str, Any]]:
        cases = {**settings(), "calibrated": study.presets.of(name).make_method()}
        return recall_rows(study.calls.recorded, cases, study.order)

    match ablation.measured:
        case "difference":
            return CallTable(
                Calls.RECORDED,
                lambda study: difference_rows(study.calls.recorded, settings(), ablation.telling),
            )
        case "recall":
            return CallTable(Calls.RECORDED, recall)
        case "skipped":
            return CallTable(
                Calls.WATCHED, lambda study: density_rows(study, name, ablation.option)
            )
        case "mask":
            return CallTable(Calls.MADE_UP, lambda study: length_rows(name, study.device))


def _made(name: str, own: Settings) -> SparseMethod:
    """A method with options of its own, otherwise as its paper has it."""
    cls = SPARSE_METHODS[name]
    method = make_method(name, **{**cls.as_published, **own})
    assert isinstance(method, SparseMethod)
    return method


CALL_ABLATIONS: Final[Mapping[str, CallTable]] = {
    **{
        ablation.name: _declared(name, ablation)
        for name, cls in SPARSE_METHODS.items()
        for ablation in cls.call_ablations
    },
    # of all methods that are calibrated to an error.
    "held-out": CallTable(Calls.WATCHED, held_out_rows),
}
"""By name: those that methods declare, and one of all of them."""


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
