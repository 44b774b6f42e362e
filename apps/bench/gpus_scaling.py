"""What the cost model says of rows that it was not fitted on, of more GPUs and of longer clips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vidsparse.apps.bench.gpus_cost import CostModel, Hosts, Key, Parts, fits, key_of
from vidsparse.apps.bench.gpus_rows import GpusRow
from vidsparse.apps.bench.model_shapes import MODEL_SHAPES
from vidsparse.apps.results.tables import Columns, number
from vidsparse.pipelines.families import FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """A video on some GPUs: as the model says, and as measured where it was.

    Attributes:
        family: name in ``MODEL_SHAPES``.
        shape: width x height x frames.
        linear: format of linear layers.
        compiled: blocks were compiled.
        heads: how dense heads are, and how processes got theirs.
        gpus: how many, or machines x GPUs of each.
        ring: how many of them keys and values travel round.
        dense: a dense step by the model.
        sparse: a sparse step.
        run_s: seconds of denoising that they come to.
        one_run_s: the same on one GPU.
        fitted: the model was fitted on it.
        measured_dense_ms: a dense step as measured, None where it was not.
        measured_sparse_ms: the same of a sparse step.
    """

    family: str
    shape: str
    linear: str
    compiled: bool
    heads: str
    gpus: str
    ring: int
    dense: Parts
    sparse: Parts
    run_s: float
    one_run_s: float
    fitted: bool = False
    measured_dense_ms: float | None = None
    measured_sparse_ms: float | None = None

    @property
    def dense_error(self) -> float | None:
        """What the model is off by, as a share of what was measured."""
        return _off(self.dense.ms, self.measured_dense_ms)

    @property
    def sparse_error(self) -> float | None:
        """The same of a sparse step."""
        return _off(self.sparse.ms, self.measured_sparse_ms)


def _off(said: float, measured: float | None) -> float | None:
    return None if measured is None else said / measured - 1


def scaling_rows(
    model: CostModel,
    rows: Sequence[GpusRow],
    most: int,
    asked: Sequence[Hosts],
    *,
    seconds: float | None = None,
    between: float | None = None,
) -> Iterator[ScalingRow]:
    """Of every video: what was measured beside what the model says, then what it says of ``asked``.

    Args:
        model: fitted on ``rows`` of at most ``most`` GPUs.
        rows: of ``vidsparse bench gpus``.
        most: GPUs of the rows that it was fitted on.
        asked: GPUs to predict.
        seconds: also predict clips of this length.
        between: GB/s that a GPU gives to another machine.

    Raises:
        OptionError: several machines are asked for without ``between``.
    """
    for key, cost in model.videos.items():
        shape = cost.row.shape
        measured = [row for row in rows if fits(row) and key_of(row) == key]
        for row in measured:
            said = _said(model, key, Hosts(1, row.processes), shape, 1.0, None)
            yield replace(
                said,
                fitted=row.processes <= most,
                measured_dense_ms=row.dense_ms,
                measured_sparse_ms=row.sparse_ms,
            )
        counts = {row.processes for row in measured}
        for hosts in asked:
            if hosts.count > 1 or hosts.each not in counts:
                yield _said(model, key, hosts, shape, 1.0, between)
        if seconds is not None:
            shape, stretch = clip_of(cost.row, seconds)
            for hosts in (Hosts(1, 1), *asked):
                yield _said(model, key, hosts, shape, stretch, between)


def _said(
    model: CostModel, key: Key, hosts: Hosts, shape: str, stretch: float, between: float | None
) -> ScalingRow:
    row = model.videos[key].row
    found = model.predicted(key, hosts, stretch=stretch, between=between)
    return ScalingRow(
        family=row.family,
        shape=shape,
        linear=row.linear,
        compiled=row.compiled,
        heads=row.dealt,
        gpus=str(hosts),
        ring=found.ring,
        dense=found.dense,
        sparse=found.sparse,
        run_s=found.run_s,
        one_run_s=model.predicted(key, Hosts(1, 1), stretch=stretch).run_s,
    )


def clip_of(row: GpusRow, seconds: float) -> tuple[str, float]:
    """The shape of a clip of about ``seconds`` at the family's rate, and its tokens over a row's.

    Text is counted as if it grew with the video.
    """
    shape = MODEL_SHAPES[row.family]
    (rate,) = {each.defaults.fps for each in FAMILIES if shape.pipeline in each.pipelines}
    parts = max(0, round((seconds * rate - shape.frame_rest) / shape.frame_factor))
    frames = parts * shape.frame_factor + shape.frame_rest
    width, height, before = map(int, row.shape.split("x"))
    lengths = [shape.latent(width, height, each).latent_frames for each in (frames, before)]
    return f"{width}x{height}x{frames}", lengths[0] / lengths[1]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


COLUMNS: Final[Columns[ScalingRow]] = {
    "model": lambda row: row.family,
    "shape": lambda row: row.shape,
    "linear": lambda row: row.linear,
    "compiled": lambda row: "yes" if row.compiled else "no",
    "heads": lambda row: row.heads,
    "GPUs": lambda row: row.gpus,
    "ring of": lambda row: str(row.ring),
    "": lambda row: (
        "predicted" if row.measured_sparse_ms is None else "fitted" if row.fitted else "held out"
    ),
    "dense ms": lambda row: number(row.dense.ms, 0),
    "measured dense": lambda row: number(row.measured_dense_ms, 0),
    "dense off": lambda row: _share(row.dense_error),
    "sparse ms": lambda row: number(row.sparse.ms, 0),
    "measured sparse": lambda row: number(row.measured_sparse_ms, 0),
    "sparse off": lambda row: _share(row.sparse_error),
    "kernel": lambda row: number(row.sparse.kernel, 0),
    "mask": lambda row: number(row.sparse.mask, 0),
    "exchange": lambda row: number(row.sparse.exchange, 0),
    "rest": lambda row: number(row.sparse.rest, 0),
    "run s": lambda row: number(row.run_s, 1),
    "x of one": lambda row: number(row.one_run_s / row.run_s),
}
"""The table's columns."""
