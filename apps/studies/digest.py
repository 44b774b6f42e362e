"""What the page shows of the studies: their rows in short, in one file that ships with it.

``python -m vidsparse.apps.studies.digest docs/benchmarks/quality-*.json apps/page/studies.json``
makes it anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from vidsparse.apps.results.row_file import Row, hardware_text
from vidsparse.apps.studies.quality_tables import knob_text, method_text, quality_file, total_of
from vidsparse.errors import OptionError
from vidsparse.files import write_text
from vidsparse.methods import SPARSE_METHODS

FORMAT: Final = "vidsparse-studies/1"


_TIMED: Final = "seconds"


def _by_tile(row: Row) -> str:
    return f"{row['method']}, tile {row['options']['tile']}"


def _by_refreshes(row: Row) -> str:
    return f"{row['method']}, {row['options']['refresh'] or 'no'} refreshes"


_LINES: Final[Mapping[str, Callable[[Row], str]]] = {
    _TIMED: method_text,
    "curves": _by_tile,
    "refreshes": _by_refreshes,
    "tiles": _by_tile,
}
"""The studies that the page shows, and the line that a row of each is a point of."""


def digest(paths: Sequence[Path]) -> dict[str, Any]:
    """The document of the studies in ``paths``, the files of ``vidsparse bench quality``.

    Raises:
        OptionError: a file is none of these.
    """
    studies = []
    for path in sorted(paths):
        file = quality_file(path)
        heading, rows = file.header, file.rows
        # a dense run by another kernel is no method's, and identical videos have no PSNR.
        rows = [
            row
            for row in rows
            if row["study"] in _LINES
            and row["method"] in SPARSE_METHODS
            and row["psnr_mean"] is not None
        ]
        for place in dict.fromkeys(map(_place, rows)):
            own = [row for row in rows if _place(row) == place]
            study, model, size, frames, prompts, compiled = place
            studies.append(
                {
                    "study": study,
                    "model": model,
                    "size": size,
                    "frames": frames,
                    "prompts": prompts,
                    "compiled": compiled,
                    # rows of earlier versions do not say it.
                    "batch": own[0].get("batch"),
                    "steps": own[0]["steps"],
                    "file": path.name,
                    "date": heading["date"],
                    "hardware": hardware_text(heading["hardware"]),
                    "dense_seconds": _dense_seconds(own),
                    "lines": _lines(own, _LINES[study]),
                }
            )
    studies.sort(key=lambda one: (list(_LINES).index(one["study"]), one["model"], one["size"]))
    return {"format": FORMAT, "studies": studies}


def _place(row: Row) -> tuple[str, str, str, int, int, bool]:
    own = row["study"], row["model"], row["size"], row["frames"], row["prompts"]
    return *own, bool(row.get("compile"))


def _dense_seconds(rows: Sequence[Row]) -> float | None:
    # others may share their machine: what they took is not what is asked of them.
    timed = [row for row in rows if row["study"] == _TIMED]
    found = [row["dense_video_seconds"] for row in timed if row.get("dense_video_seconds")]
    return round(median(found), 4) if found else None


def _lines(rows: Sequence[Row], label: Callable[[Row], str]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: sorted(
            (_point(row) for row in rows if label(row) == name),
            key=lambda point: (point["total"], point["psnr"]),
        )
        for name in dict.fromkeys(map(label, rows))
    }


def _point(row: Row) -> dict[str, Any]:
    def rounded(name: str, digits: int) -> float | None:
        return None if row.get(name) is None else round(row[name], digits)

    total = total_of(row)
    assert total is not None  # studies are of bundled models, whose layers are known.
    return {
        "set_to": knob_text(row),
        "total": round(total, 4),
        "psnr": rounded("psnr_mean", 2),
        "std": rounded("psnr_std", 2),
        "worst": rounded("psnr_worst", 2),
        "ssim": rounded("ssim_mean", 4),
        "seconds": rounded("video_seconds", 4) if row["study"] == _TIMED else None,
        "speedup": rounded("speedup", 2) if row["study"] == _TIMED else None,
        "settings": _settings(row),
    }


def _settings(row: Row) -> dict[str, Any] | None:
    """The request's fields that make the row's run again; None where a preset is a part of it."""
    from vidsparse.pipelines.request import GenerateRequest

    cls, options = SPARSE_METHODS[row["method"]], row["options"]
    if row.get("calibrated"):
        return None
    width, height = (int(side) for side in row["size"].split("x"))
    ends = options.get("dense_ends", 0)
    # what a row does not name, its version did not have: the method was as its paper has it.
    own = {**cls.as_published, **options}
    settings = {
        "model": row["model"],
        "method": row["method"],
        "method_options": {
            field.name: own[field.name] for field in cls.option_fields() if field.name in own
        },
        "dense_steps": options["dense_steps"],
        "dense_layers": ends,
        "dense_last_layers": ends,
        "reuse": options.get("reuse", 1),
        "refresh": options.get("refresh", 0),
        "order": options["order"],
        "width": width,
        "height": height,
        "frames": row["frames"],
        "steps": row["steps"],
    }
    try:
        GenerateRequest(prompt="", **settings)
    except OptionError:
        # options that this version does not have.
        return None
    return settings


if __name__ == "__main__":
    *sources, target = map(Path, sys.argv[1:])
    write_text(target, json.dumps(digest(sources), indent=1) + "\n")
