"""The rows of ``vidsparse bench gpus``: their file and the columns of their table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vidsparse.apps.bench.model_shapes import MODEL_SHAPES, model_text
from vidsparse.apps.results.row_file import RowFile
from vidsparse.apps.results.tables import Columns, number
from vidsparse.schedule import share_or_count


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusRow:
    """Steps of one model on one GPU and on several that make the video together.

    Times are milliseconds of a denoising step, medians of ``repeats`` steps; of several processes
    the slowest one's, after all have met, unless it is said otherwise.

    Attributes:
        family: name in ``MODEL_SHAPES``.
        shape: width x height x frames.
        tokens: of one attention call, text included.
        heads: of an attention layer.
        layers: transformer layers that ran.
        calls: attention calls of a step that a process takes part in.
        step: what one step is.
        linear: format of linear layers.
        compiled: blocks were compiled, on one GPU and on all.
        kind: of ``KINDS``: how heads and tokens are shared, and which densities heads have.
        balance: whether heads are dealt to processes by their work.
        processes: how many there were, each with a GPU of its own.
        ring: how many of them keys and values travel round.
        asked: density of sparse steps; the mean where heads differ.
        computed: density of the plans that the kernels ran.
        impl: kernel of the sparse steps.
        error: of few layers on a short video, against one process; the largest of dense and sparse.
        warmup: share of steps that stay dense.
        steps: of the projected run.
        repeats: steps that each median is of.
        one_dense_ms: a dense step on one GPU.
        one_dense_attention_ms: attention in it.
        one_sparse_ms: a sparse step on one GPU.
        one_kernel_ms: the sparse kernel in it.
        one_mask_plan_ms: mask, plan and every permutation in it.
        dense_ms: a dense step on all.
        dense_attention_ms: attention in it; in a ring with keys on their way.
        sparse_ms: a sparse step on all.
        kernel_ms: the sparse kernel in it, of the process where it took longest.
        kernel_mean_ms: the mean of all processes.
        mask_plan_ms: mask, plan and every permutation in it; in a ring also what is exchanged.
        exchange_ms: what attention exchanges in a sparse step, sent again with nothing else.
        exchange_mb: megabytes (of 10^6) that a process gives to others then, the most of any.
        busiest: planned pairs of the process that has most over the mean of all.
        one_peak_gib: memory of the two kinds of step on one GPU at its highest; None on a CPU.
        peak_gib: the same on all, of the process that needs most.
        tile: queries x keys of sparse steps; None in rows of earlier versions, which have the
            model's own.
    """

    family: str
    shape: str
    tokens: int
    heads: int
    layers: int
    calls: int
    step: str
    linear: str
    compiled: bool
    kind: str
    balance: bool
    processes: int
    ring: int
    asked: float
    computed: float
    impl: str
    error: float
    warmup: float
    steps: int
    repeats: int
    one_dense_ms: float
    one_dense_attention_ms: float
    one_sparse_ms: float
    one_kernel_ms: float
    one_mask_plan_ms: float
    dense_ms: float
    dense_attention_ms: float
    sparse_ms: float
    kernel_ms: float
    kernel_mean_ms: float
    mask_plan_ms: float
    exchange_ms: float
    exchange_mb: float
    busiest: float
    one_peak_gib: float | None
    peak_gib: float | None
    tile: str | None = None

    @property
    def dealt(self) -> str:
        """How dense heads are, and how processes got theirs."""
        densities = "skewed" if self.kind == "skewed" else "even"
        if self.kind == "apart":
            return "even, branches apart"
        if self.ring == self.processes:
            return densities
        return f"{densities}, " + ("dealt by work" if self.balance else "in order")

    @property
    def dense_ratio(self) -> float:
        """How many times faster a dense step is than on one GPU."""
        return self.one_dense_ms / self.dense_ms

    @property
    def sparse_ratio(self) -> float:
        """The same of a sparse step."""
        return self.one_sparse_ms / self.sparse_ms

    @property
    def exchange_share(self) -> float:
        """The exchange as a share of a sparse step; of a ring's, some runs beside the kernel."""
        return self.exchange_ms / self.sparse_ms

    @property
    def one_run_s(self) -> float:
        """Seconds of denoising on one GPU that the measured steps come to."""
        return self._run_s(self.one_dense_ms, self.one_sparse_ms)

    @property
    def run_s(self) -> float:
        """The same on all."""
        return self._run_s(self.dense_ms, self.sparse_ms)

    def _run_s(self, dense_ms: float, sparse_ms: float) -> float:
        first = share_or_count(self.warmup, self.steps, "warmup")
        return (first * dense_ms + (self.steps - first) * sparse_ms) / 1e3


def gpus_file(path: Path) -> RowFile:
    """The rows of this bench in ``path``, which need not exist.

    Raises:
        OptionError: it exists and holds something else.
    """
    return RowFile(path, "vidsparse-gpus/1", "benchmark of several GPUs")


DIGITS: Final[Mapping[str, int | None]] = {
    "error": 9,
    "computed": 4,
    "asked": 4,
    "busiest": 4,
    "exchange_mb": 3,
    "warmup": None,
}
"""Decimals that rows are written with; see ``rounded``."""


def _own_tile(family: str) -> str:
    """The model's, which rows of earlier versions have; nothing where it is no longer known."""
    model = MODEL_SHAPES.get(family)
    return "" if model is None else "x".join(map(str, model.tile))


COLUMNS: Final[Columns[GpusRow]] = {
    "model": lambda row: model_text(row.family, row.layers),
    "shape": lambda row: row.shape,
    "tile": lambda row: row.tile or _own_tile(row.family),
    "linear": lambda row: row.linear,
    "compiled": lambda row: "yes" if row.compiled else "no",
    "GPUs": lambda row: str(row.processes),
    "ring of": lambda row: str(row.ring),
    "heads": lambda row: row.dealt,
    "computed": lambda row: number(row.computed),
    "dense ms, one": lambda row: number(row.one_dense_ms, 0),
    "dense ms, all": lambda row: number(row.dense_ms, 0),
    "x dense": lambda row: number(row.dense_ratio),
    "sparse ms, one": lambda row: number(row.one_sparse_ms, 0),
    "sparse ms, all": lambda row: number(row.sparse_ms, 0),
    "x sparse": lambda row: number(row.sparse_ratio),
    "kernel, slowest over mean": lambda row: number(row.kernel_ms / row.kernel_mean_ms),
    "pairs, most over mean": lambda row: number(row.busiest),
    "mask, plan, order ms": lambda row: number(row.mask_plan_ms, 0),
    "exchange ms": lambda row: number(row.exchange_ms, 1),
    "MB sent": lambda row: number(row.exchange_mb, 0),
    "of the step": lambda row: f"{row.exchange_share:.1%}",
    "GiB, one": lambda row: number(row.one_peak_gib),
    "GiB": lambda row: number(row.peak_gib),
    "run s, one": lambda row: number(row.one_run_s, 1),
    "run s": lambda row: number(row.run_s, 1),
    "x run": lambda row: number(row.one_run_s / row.run_s),
}
"""The table's columns."""
