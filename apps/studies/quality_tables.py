"""The file of the quality study, and its Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from vidsparse.apps.results.row_file import Row, RowFile
from vidsparse.apps.results.tables import CellText, Columns, markdown
from vidsparse.apps.studies.configurations import DECLARED
from vidsparse.errors import OptionError
from vidsparse.methods import METHODS, SPARSE_METHODS
from vidsparse.methods.studied import Ablation
from vidsparse.metrics import Spread
from vidsparse.pipelines.speed import cache_text
from vidsparse.wording import format_number, format_spread
from vidsparse.work import Work

# of what a row is, which those of all versions tell.
_KEYS: Final = frozenset((
    "study", "size", "frames", "model", "method", "options", "prompts", "steps", "computed",
    "target", "dense_step_share", "psnr_mean", "psnr_std", "ssim_mean", "identical",
))  # fmt: skip


def quality_file(path: Path) -> RowFile:
    """The rows of quality studies in ``path``, which need not exist.

    Raises:
        OptionError: it exists and holds something else, or what this version does not know.
    """
    file = RowFile(path, "vidsparse-quality/1", "quality study", keys=_KEYS)
    for row in file.rows:
        for name, known in (("study", STUDY_COLUMNS), ("method", METHODS)):
            if row[name] not in known:
                raise OptionError(
                    f"{path} has rows of the {name} {row[name]!r}, which this version of vidsparse "
                    "does not know. Hint: use the version that wrote it, or name another file."
                )
    return file


def markdown_tables(rows: Sequence[Row]) -> str:
    """The rows as Markdown, one table for each size and study, those of compiled blocks apart."""
    lines: list[str] = []
    for place in dict.fromkeys(map(_place, rows)):
        size, frames, study, compiled = place
        own = [row for row in rows if _place(row) == place]
        table = markdown(own, STUDY_COLUMNS[study])
        title = f"{size}, {frames} frames: {study}" + (", compiled" if compiled else "")
        lines += [f"### {title}", "", table, ""]
    return "\n".join(lines)


def _place(row: Row) -> tuple[str, int, str, bool]:
    study = row["study"]
    # where a column says it, rows of both kinds stand in one table.
    apart = "compiled" not in STUDY_COLUMNS[study]
    return row["size"], row["frames"], study, apart and bool(row.get("compile"))


def option_text(name: str) -> CellText:
    """The table cell that shows one of a row's options."""
    return lambda row: str(row["options"].get(name, "-"))


def knob_text(row: Row) -> str:
    """The table cell that says how a method selects: its knob, or what stands in its place."""
    cls = SPARSE_METHODS[row["method"]]
    names = [knob.name for knob in cls.knobs] or [name for own in cls.compared for name in own]
    words = ["calibrated"] if row.get("calibrated") else []
    words += [
        f"{name} {row['options'][name]:g}"
        for name in dict.fromkeys(names)
        if row["options"].get(name) is not None
    ]
    return ", ".join(words)


def method_text(row: Row) -> str:
    """The row's method; says so where it ran by the model's own schedule."""
    return f"{row['method']}, model's schedule" if row.get("by_card") else str(row["method"])


def _listed_text(row: Row) -> str:
    """The table cell with the share of chunks or tiles that every block lists."""
    options = row["options"]
    return f"{options.get('share') or options['topk']:g}"


def number_text(name: str, spec: str) -> CellText:
    """The table cell that shows one of a row's numbers."""
    return lambda row: format_number(row.get(name), spec)


def total_of(row: Row) -> float | None:
    """The share of all query-key pairs that a row's runs computed, dense steps and layers included.

    New rows store it. Rows of earlier versions have what it follows from exactly, since all calls
    of a video are equally large: the share of dense steps, the dense layers at both ends, and the
    mean share computed in the sparse calls. None where the layers of the row's model are not known
    here.
    """
    if row.get("total") is not None:
        return float(row["total"])
    if row["computed"] is None:
        return None
    ends = row["options"].get("dense_ends", 0)
    layers = _layers(row["model"]) if ends else 1
    if layers is None:
        return None
    return Work.of_schedule(
        dense_steps=row["dense_step_share"],
        dense_layers=min(1.0, 2 * ends / layers),
        computed=row["computed"],
    ).total


@cache
def _layers(model: str) -> int | None:
    """The layers of a bundled model's transformer; other models may not be at hand."""
    from vidsparse.pipelines.models import MODELS, resolve_model

    if model not in MODELS:
        return None
    (transformer,) = resolve_model(model).transformers
    return int(transformer["num_layers"])


QUALITY_COLUMNS: Final[Columns[Row]] = {
    "total": lambda row: format_number(total_of(row), ".3f"),
    "selected": number_text("selected", ".3f"),
    "computed": number_text("computed", ".3f"),
    "PSNR dB": lambda row: format_spread(
        Spread(mean=row["psnr_mean"], std=row["psnr_std"], count=row["prompts"]),
        ".2f",
        identical=row["identical"],
    ),
    "SSIM": number_text("ssim_mean", ".4f"),
}
"""What every row has: the whole run's share computed, the sparse calls' densities, and distance to
dense."""

_METHOD_COLUMNS: Final[Columns[Row]] = {
    "method": lambda row: str(row["method"]),
    "tile": option_text("tile"),
    "set to": knob_text,
    "order": option_text("order"),
    **QUALITY_COLUMNS,
}

ORDER_COLUMNS: Final[Columns[Row]] = {
    "Sim-q": number_text("sim_q", ".3f"),
    "Sim-k": number_text("sim_k", ".3f"),
    "L1": number_text("l1", ".4f"),
    "sparsity": number_text("sparsity", ".3f"),
    **QUALITY_COLUMNS,
}
"""What rows of token orders have, as SpargeAttn's tables 4 and 9."""


def _declared_columns(ablation: Ablation) -> Columns[Row]:
    columns: dict[str, CellText] = {
        # a name that is python's own too, such as lambda_, ends in a bar there.
        name.rstrip("_"): option_text(name)
        for name in ablation.columns
    }
    if ablation.knobs:
        columns["by"] = knob_text
    if ablation.sparsity:
        # of all products, q·k and p·v, as the papers count.
        columns["sparsity"] = lambda row: format_number(1 - row["computed"], ".3f")
    return {**columns, **QUALITY_COLUMNS}


_REFRESH_COLUMNS: Final[Columns[Row]] = {
    "method": lambda row: str(row["method"]),
    "listed": _listed_text,
    "dense steps": option_text("dense_steps"),
    "refreshes": option_text("refresh"),
    "order": option_text("order"),
    **QUALITY_COLUMNS,
    "worst dB": number_text("psnr_worst", ".2f"),
}

STUDY_COLUMNS: Final[Mapping[str, Columns[Row]]] = {
    "tiles": {"tile": option_text("tile"), "top_p": option_text("top_p"), **QUALITY_COLUMNS},
    "merging": {
        "tile": option_text("tile"),
        "top_p": option_text("top_p"),
        "merge": option_text("merge"),
        **QUALITY_COLUMNS,
    },
    "orders": {
        "method": lambda row: str(row["method"]),
        "order": option_text("order"),
        "top_p": option_text("top_p"),
        **ORDER_COLUMNS,
    },
    "equal": _METHOD_COLUMNS,
    "defaults": {
        "top_p": option_text("top_p"),
        "reuse": option_text("reuse"),
        "dense_ends": option_text("dense_ends"),
        "order": option_text("order"),
        **QUALITY_COLUMNS,
    },
    "curves": _METHOD_COLUMNS,
    "refreshes": _REFRESH_COLUMNS,
    "plans": {
        "method": lambda row: str(row["method"]),
        "plans": option_text("plans"),
        "means": option_text("means"),
        **_REFRESH_COLUMNS,
    },
    "precision": {
        "method": lambda row: str(row["method"]),
        "tile": option_text("tile"),
        "set to": knob_text,
        "q·k in 8 bits": option_text("quantize"),
        **QUALITY_COLUMNS,
        "worst dB": number_text("psnr_worst", ".2f"),
    },
    "dense-steps": _REFRESH_COLUMNS,
    "block-rows": {"tile": option_text("tile"), **_REFRESH_COLUMNS},
    "text-rows": {
        "tile": option_text("tile"),
        "text rows": option_text("text_rows"),
        **_REFRESH_COLUMNS,
    },
    "fading": {
        "tile": option_text("tile"),
        "fading": option_text("fading"),
        "reach": lambda row: str(row["options"]["reach"] or "auto"),
        **_REFRESH_COLUMNS,
    },
    "guidance": {
        "tile": option_text("tile"),
        "slope": option_text("slope"),
        "unconditional every": option_text("unconditional_every"),
        **_REFRESH_COLUMNS,
    },
    "bundles": {
        "steps": lambda row: str(row["steps"]),
        "tile": option_text("tile"),
        **_REFRESH_COLUMNS,
    },
    "few-steps": {"steps": lambda row: str(row["steps"]), **_REFRESH_COLUMNS},
    "seconds": {
        "method": method_text,
        "set to": lambda row: "-" if row["method"] == "dense" else knob_text(row),
        "s a video": number_text("video_seconds", ".2f"),
        "times stock": number_text("speedup", ".2f"),
        **QUALITY_COLUMNS,
        "worst dB": number_text("psnr_worst", ".2f"),
        "flicker dB": number_text("flicker_mean", ".2f"),
    },
    "speeds": {
        "speed": lambda row: str(row["speed"]),
        "method": lambda row: str(row["method"]),
        "compiled": lambda row: "yes" if row["compile"] else "no",
        "linear layers": lambda row: str(row["linear"]),
        "step cache": lambda row: cache_text(row["cache"], row.get("cache_threshold")),
        "dense steps": option_text("dense_steps"),
        "refreshes": option_text("refresh"),
        "s a video": number_text("video_seconds", ".2f"),
        "times stock": number_text("speedup", ".2f"),
        **QUALITY_COLUMNS,
        "worst dB": number_text("psnr_worst", ".2f"),
    },
    "promises": {
        "method": lambda row: str(row["method"]),
        "made for": lambda row: f"{row['promise']:g} dB",
        "own prompts": lambda row: str(row["promised"]["prompts"]),
        "PSNR there": lambda row: format_number(row["promised"]["psnr"], ".2f"),
        "total there": lambda row: format_number(row["promised"]["total"], ".3f"),
        "calibrated in s": number_text("calibration_seconds", ".0f"),
        **QUALITY_COLUMNS,
        "worst dB": number_text("psnr_worst", ".2f"),
    },
    "calibration": _METHOD_COLUMNS,
    **{name: _declared_columns(ablation) for name, (_, ablation) in DECLARED.items()},
}
"""The columns of each study's table, by its name."""
