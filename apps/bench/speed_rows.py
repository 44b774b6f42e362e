"""The rows of ``vidsparse bench model --speed``: their file and the columns of their table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vidsparse.apps.bench.model_readings import merged_share, projected_step
from vidsparse.apps.bench.model_shapes import model_text
from vidsparse.apps.results.row_file import RowFile
from vidsparse.apps.results.tables import Columns, number


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """One model at one speed: steps of every kind as measured, and the run that they come to.

    Attributes:
        family: name in ``MODEL_SHAPES``.
        shape: width x height x frames.
        tokens: of one attention call, text included; 0 where no call was sparse.
        layers: transformer layers that ran.
        step: what one step is.
        speed: ``exact``, ``high``, ``balanced`` or ``fast``.
        parts: what that is here.
        tile: queries x keys of sparse steps; None without such steps.
        asked: density of sparse steps that was asked for, means not counted; None without them.
        computed: density of the plans that the kernel ran.
        error: of few blocks, dense and sparse at full density, against stock ones.
        warmup: share or number of first steps that stay dense.
        steps: of the run.
        dense_steps: steps with dense attention, refreshes not among them.
        sparse_steps: steps with sparse attention.
        cached_steps: steps left out by the step cache.
        stock_ms: a stock step with the attention that PyTorch chooses.
        cudnn_ms: with cuDNN attention, padding left out; None on a CPU.
        fa4_ms: with FlashAttention-4; None where it is not installed.
        reference_attention_ms: video self-attention in ``cudnn_ms`` (on a CPU in ``stock_ms``).
        reference_linear_ms: matrix products there; None on a CPU.
        dense_ms: a dense step at this speed.
        dense_attention_ms: attention in it; None where it was not told apart.
        linear_ms: matrix products in a dense or sparse step, and what rounds for them; None on a
            CPU.
        sparse_ms: a sparse step.
        kernel_ms: the sparse kernel in it.
        mask_plan_ms: mask, plan and every permutation in it.
        cached_ms: a step that was left out.
        peak_gib_stock: memory of a stock step at its highest; None on a CPU.
        peak_gib: the same of a step at this speed.
        method: of sparse steps; None without such steps.
        refresh: its refreshes as they were asked for; None without.
        refresh_steps: steps that compute everything beside a new plan's and keep the difference.
        refresh_ms: such a step; None without them.
        refresh_attention_ms: attention in it, dense and by the plan.
        refresh_plan_ms: mask, plan, every permutation and the difference.
        halved_steps: steps with sparse attention of one guidance branch, while the step cache left
            the other out; ``sparse_steps`` are those of both.
        halved_ms: such a step.
        halved_kernel_ms: the sparse kernel in it.
        halved_plan_ms: mask, plan and every permutation in it.
        whole_s: seconds of all steps run one after the other, where they were.
        whole_reference_s: the same of stock steps with cuDNN.
        impl: kernel of the sparse steps, and its 8-bit format; None without such steps, and in rows
            of earlier versions, which have it in ``parts``.
    """

    family: str
    shape: str
    tokens: int
    layers: int
    step: str
    speed: str
    parts: str
    tile: str | None
    asked: float | None
    computed: float | None
    error: float
    warmup: float
    steps: int
    dense_steps: int
    sparse_steps: int
    cached_steps: int
    stock_ms: float
    cudnn_ms: float | None
    fa4_ms: float | None
    reference_attention_ms: float
    reference_linear_ms: float | None
    dense_ms: float
    dense_attention_ms: float | None
    linear_ms: float | None
    sparse_ms: float | None
    kernel_ms: float | None
    mask_plan_ms: float | None
    cached_ms: float | None
    peak_gib_stock: float | None
    peak_gib: float | None
    method: str | None = None
    refresh: int | float | None = None
    refresh_steps: int = 0
    refresh_ms: float | None = None
    refresh_attention_ms: float | None = None
    refresh_plan_ms: float | None = None
    halved_steps: int = 0
    halved_ms: float | None = None
    halved_kernel_ms: float | None = None
    halved_plan_ms: float | None = None
    whole_s: float | None = None
    whole_reference_s: float | None = None
    impl: str | None = None

    @property
    def cache(self) -> str:
        """The step cache among ``parts``, with its threshold where that is not its own."""
        found = _CACHE.search(self.parts)
        return found[1] if found else "none"

    @property
    def run_s(self) -> float:
        """Seconds of denoising that the measured steps come to."""
        return (
            self.dense_steps * self.dense_ms
            + self.refresh_steps * (self.refresh_ms or 0.0)
            + self.sparse_steps * (self.sparse_ms or 0.0)
            + self.halved_steps * (self.halved_ms or 0.0)
            + self.cached_steps * (self.cached_ms or 0.0)
        ) / 1e3

    def ratio(self, step_ms: float | None) -> float | None:
        """How many times faster the run is than one of stock steps of ``step_ms``."""
        return None if step_ms is None else self.steps * step_ms / 1e3 / self.run_s

    def ratio_if_selected(self, step_ms: float | None) -> float | None:
        """The same with the density asked for read as a selected one, as in ``ModelRow``.

        Where blocks choose for themselves, as in ``foresight``, nothing is merged.
        """
        if step_ms is None or self.tile is None or self.asked is None:
            return self.ratio(step_ms)
        assert self.sparse_ms is not None
        assert self.kernel_ms is not None
        assert self.computed is not None
        share = merged_share(self.tile, self.asked)
        if share is None:
            return None
        # what the plan has beside the density asked for are means, and stays.
        sparse_ms = projected_step(
            self.sparse_ms,
            self.kernel_ms,
            measured=self.computed,
            computed=share + self.computed - self.asked,
        )
        # a branch of two is half a step.
        more = (sparse_ms - self.sparse_ms) * (self.sparse_steps + self.halved_steps / 2) / 1e3
        return self.steps * step_ms / 1e3 / (self.run_s + more)

    @property
    def whole_error(self) -> float | None:
        """What the projected run is off from the whole one, as a share; None where none was run."""
        return None if self.whole_s is None else self.run_s / self.whole_s - 1

    def shares(self) -> dict[str, float] | None:
        """Seconds of the run by what they went into; None where that was not told apart."""
        if self.linear_ms is None or self.dense_attention_ms is None:
            return None
        kernel = self.dense_steps * self.dense_attention_ms
        kernel += self.refresh_steps * (self.refresh_attention_ms or 0.0)
        kernel += self.sparse_steps * (self.kernel_ms or 0.0)
        kernel += self.halved_steps * (self.halved_kernel_ms or 0.0)
        plan = self.refresh_steps * (self.refresh_plan_ms or 0.0)
        plan += self.sparse_steps * (self.mask_plan_ms or 0.0)
        plan += self.halved_steps * (self.halved_plan_ms or 0.0)
        whole = self.dense_steps + self.refresh_steps + self.sparse_steps
        linear = (whole + self.halved_steps / 2) * self.linear_ms
        parts = {
            "attention": kernel / 1e3,
            "mask, plan, order": plan / 1e3,
            "linear layers": linear / 1e3,
        }
        return {**parts, "rest": self.run_s - sum(parts.values())}

    def reference_shares(self) -> dict[str, float] | None:
        """The same of the stock run with cuDNN."""
        if self.reference_linear_ms is None or self.cudnn_ms is None:
            return None
        parts = {
            "attention": self.steps * self.reference_attention_ms / 1e3,
            "mask, plan, order": 0.0,
            "linear layers": self.steps * self.reference_linear_ms / 1e3,
        }
        return {**parts, "rest": self.steps * self.cudnn_ms / 1e3 - sum(parts.values())}


FORM: Final = "vidsparse-speeds/1"

_CACHE: Final = re.compile(r"step cache ([^,]+)")


def is_speed_file(path: Path) -> bool:
    """Whether ``path`` says that it holds such rows."""
    # the first line of JSON that any file of rows begins with.
    with path.open(encoding="utf-8", errors="replace") as file:
        return f'"{FORM}"' in file.read(200)


def speed_file(path: Path) -> RowFile:
    """The rows of this bench in ``path``, which need not exist.

    Raises:
        OptionError: it exists and holds something else.
    """
    return RowFile(path, FORM, "benchmark of speeds")


DIGITS: Final[Mapping[str, int | None]] = {
    "error": 5,
    "computed": 4,
    **dict.fromkeys(("asked", "warmup", "refresh")),
}
"""Decimals that rows are written with; see ``rounded``."""


def _share(row: SpeedRow, name: str) -> str:
    shares = row.shares()
    return "" if shares is None else f"{shares[name] / row.run_s:.0%}"


COLUMNS: Final[Columns[SpeedRow]] = {
    "model": lambda row: model_text(row.family, row.layers),
    "shape": lambda row: row.shape,
    "speed": lambda row: row.speed if row.method is None else f"{row.speed}, {row.method}",
    "computed": lambda row: number(row.computed),
    "steps dense, refreshes, sparse, left out": lambda row: (
        f"{row.dense_steps}, {row.refresh_steps}, {row.sparse_steps}"
        + (f" + {row.halved_steps} of one branch" if row.halved_steps else "")
        + f", {row.cached_steps}"
    ),
    "stock ms": lambda row: number(row.stock_ms, 0),
    "cuDNN ms": lambda row: number(row.cudnn_ms, 0),
    "FA4 ms": lambda row: number(row.fa4_ms, 0),
    "dense ms": lambda row: number(row.dense_ms, 0),
    "sparse ms": lambda row: number(row.sparse_ms, 0),
    "run s": lambda row: number(row.run_s, 1),
    "attention": lambda row: _share(row, "attention"),
    "mask, plan, order": lambda row: _share(row, "mask, plan, order"),
    "linear": lambda row: _share(row, "linear layers"),
    "rest": lambda row: _share(row, "rest"),
    "GiB stock": lambda row: number(row.peak_gib_stock),
    "GiB": lambda row: number(row.peak_gib),
    "whole run s": lambda row: number(row.whole_s, 1),
    "projected is off": lambda row: "" if row.whole_error is None else f"{row.whole_error:+.1%}",
    "x cuDNN": lambda row: number(row.ratio(row.cudnn_ms)),
    "x FA4": lambda row: number(row.ratio(row.fa4_ms)),
    "x stock": lambda row: number(row.ratio(row.stock_ms)),
    "x cuDNN if selected": lambda row: number(row.ratio_if_selected(row.cudnn_ms)),
    "x stock if selected": lambda row: number(row.ratio_if_selected(row.stock_ms)),
}
"""The table's columns."""
