"""The rows of ``vidsparse bench model``: their file and the columns of their table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vidsparse.apps.bench.model_readings import merged_share, projected_ratio, projected_step
from vidsparse.apps.bench.model_shapes import model_text
from vidsparse.apps.results.row_file import RowFile
from vidsparse.apps.results.tables import Columns, number


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One model, dense by three kernels and sparse by one; times of one denoising step.

    Attributes:
        family: name in ``MODEL_SHAPES``.
        shape: width x height x frames.
        tokens: of one attention call, text included.
        layers: transformer layers that ran.
        step: what one step is.
        tile: queries x keys.
        asked: density that was asked for.
        computed: density of the plan that the kernel ran.
        warmup: share of steps that stay dense.
        steps: steps of the projected run.
        impl: kernel of the sparse steps, with its 8-bit format.
        dense_ms: stock forwards with cuDNN attention (on a CPU PyTorch's own).
        fa4_ms: the same with FlashAttention-4; None where it is not installed.
        stock_ms: stock forwards with the attention that PyTorch chooses.
        sparse_ms: sparse forwards.
        attention_ms: video self-attention in ``dense_ms``.
        kernel_ms: the sparse kernel in ``sparse_ms``.
        mask_plan_ms: mask, plan and every permutation in ``sparse_ms``.
        peak_gib_dense: peak memory of a step with cuDNN; None on a CPU.
        peak_gib_sparse: the same of a sparse step.
        ratio_cudnn: projected dense run over sparse run, its warm-up by the same dense kernel; None
            on a CPU.
        ratio_fa4: the same against FlashAttention-4.
        ratio_stock: the same against stock.
    """

    family: str
    shape: str
    tokens: int
    layers: int
    step: str
    tile: str
    asked: float
    computed: float
    warmup: float
    steps: int
    impl: str
    dense_ms: float
    fa4_ms: float | None
    stock_ms: float
    sparse_ms: float
    attention_ms: float
    kernel_ms: float
    mask_plan_ms: float
    peak_gib_dense: float | None
    peak_gib_sparse: float | None
    ratio_cudnn: float | None
    ratio_fa4: float | None
    ratio_stock: float

    @property
    def planning_share(self) -> float:
        """Mask, plan and permutation as a share of dense attention."""
        return self.mask_plan_ms / self.attention_ms

    @property
    def computed_if_selected(self) -> float | None:
        """What the density asked for computes if it is read as a selected one."""
        return merged_share(self.tile, self.asked)

    def ratio_if_selected(self, dense: float | None) -> float | None:
        """``dense`` run over sparse run with the density asked for read as a selected one.

        Projected from the measured step. None without a dense step, in milliseconds, or where
        nobody measured what merging such tiles computes.
        """
        computed = self.computed_if_selected
        if dense is None or computed is None:
            return None
        step = projected_step(
            self.sparse_ms, self.kernel_ms, measured=self.computed, computed=computed
        )
        return projected_ratio(dense, step, self.warmup, self.steps)


def model_file(path: Path) -> RowFile:
    """The rows of this bench in ``path``, which need not exist.

    Raises:
        OptionError: it exists and holds something else.
    """
    return RowFile(path, "vidsparse-models/1", "model benchmark")


DIGITS: Final[Mapping[str, int | None]] = {
    **dict.fromkeys(("ratio_cudnn", "ratio_fa4", "ratio_stock"), 4),
    **dict.fromkeys(("asked", "computed", "warmup")),
}
"""Decimals that rows are written with; see ``rounded``."""


COLUMNS: Final[Columns[ModelRow]] = {
    "model": lambda row: model_text(row.family, row.layers),
    "shape": lambda row: row.shape,
    "tokens": lambda row: str(row.tokens),
    "tile": lambda row: row.tile,
    "computed": lambda row: number(row.computed),
    "warm-up": lambda row: f"{row.warmup:g}",
    "implementation": lambda row: row.impl,
    "cuDNN ms": lambda row: number(row.dense_ms, 0),
    "FA4 ms": lambda row: number(row.fa4_ms, 0),
    "stock ms": lambda row: number(row.stock_ms, 0),
    "sparse ms": lambda row: number(row.sparse_ms, 0),
    "mask, plan, order": lambda row: f"{row.planning_share:.1%}",
    "GiB dense": lambda row: number(row.peak_gib_dense),
    "GiB sparse": lambda row: number(row.peak_gib_sparse),
    "x cuDNN": lambda row: number(row.ratio_cudnn),
    "x FA4": lambda row: number(row.ratio_fa4),
    "x stock": lambda row: number(row.ratio_stock),
    "computed if selected": lambda row: number(row.computed_if_selected),
    "x cuDNN if selected": lambda row: number(
        # a CPU has PyTorch's own attention alone.
        None if row.ratio_cudnn is None else row.ratio_if_selected(row.dense_ms)
    ),
    "x FA4 if selected": lambda row: number(row.ratio_if_selected(row.fa4_ms)),
    "x stock if selected": lambda row: number(row.ratio_if_selected(row.stock_ms)),
}
"""The table's columns."""
