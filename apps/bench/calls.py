"""What ``vidsparse bench calls`` runs: whole attention calls of methods, in time and in error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from vidsparse.apps.bench.attention_peers import first_dense_of
from vidsparse.apps.bench.inputs import STRUCTURED, CallInputs, shape_text
from vidsparse.apps.bench.method_cases import method_of
from vidsparse.apps.bench.timing import time_in_turns
from vidsparse.apps.results.row_file import RowFile
from vidsparse.apps.results.tables import Columns, number
from vidsparse.dtypes import dtype_name
from vidsparse.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

CASES: Final[tuple[str, ...]] = (
    *(f"foresight share={share}" for share in (0.05, 0.075, 0.1, 0.15, 0.175, 0.2)),
    *(f"sol-attn tau={tau}" for tau in (0.5, 1.0, 2.0)),
    "foresight share=0.15 means=128",
    "foresight share=0.15 rows=32",
    # as papers have them, and with the means of what is skipped.
    *(f"fg-attn top_p={top_p} means={c}" for top_p in (0.3, 0.5, 0.8) for c in ("none", 64)),
    *(f"spargeattn tau=0.5 means={c}" for c in ("none", 64)),
    *(f"xattention tau=0.5 means={c}" for c in ("none", 128)),
)
"""Methods with the options that differ from their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRow:
    """One method's whole calls against the dense attention of the same run.

    ``ms`` is the median of order, mask, plan, means, kernel and the way back; ``speedup`` is
    ``dense_ms / ms``. ``error`` is relative to dense attention in the L2 norm. ``computed`` counts
    means too, as shares of all query-key pairs. All are means over the calls of ``data``.
    """

    case: str
    seq_len: int
    heads: int
    head_dim: int
    dtype: str
    order: str
    implementation: str
    computed: float
    error: float
    ms: float
    dense_impl: str
    dense_ms: float
    speedup: float
    data: str = STRUCTURED


def measure_calls_of(
    cases: Sequence[str], data: CallInputs, repeats: int, say: Callable[[str], None]
) -> list[CallRow]:
    """Run each case once for its error, then time all in turns with dense attention.

    Raises:
        UnsupportedError: no dense attention runs here, or a case returned NaN or Inf.
        OptionError: a case that is not one.
    """
    from vidsparse.engine import AttentionEngine
    from vidsparse.schedule import Schedule

    # all are read before the first is measured.
    methods = {case: method_of(case) for case in cases}
    dense = first_dense_of([(one.q, one.k, one.v) for one in data.calls], say)
    exact = [one.call().float() for one in dense]
    layers = 1 + max(one.site.layer for one in data.calls)

    def call(engine: AttentionEngine) -> list[torch.Tensor]:
        outputs = []
        for one in data.calls:
            # a trace is of one run; here it would only grow, and plans would be kept.
            engine.begin_run(one.site.step + 1)
            outputs.append(engine.attend(one.q, one.k, one.v, one.site))
        return outputs

    calls: dict[str, Callable[[], Any]] = {
        f"dense {dense[0].name}": lambda: [one.call() for one in dense]
    }
    found: dict[str, tuple[str, float, float]] = {}
    for case, method in methods.items():
        engine = AttentionEngine(method, schedule=Schedule(dense_steps=0), layers=layers)
        errors, computed = [], []
        for one, right in zip(data.calls, exact, strict=True):
            engine.begin_run(one.site.step + 1)
            out = engine.attend(one.q, one.k, one.v, one.site).float()
            errors.append(((out - right).norm() / right.norm()).item())
            cell = engine.trace.cells[-1]
            assert cell.computed is not None
            computed.append(cell.computed.mean().item())
        error = fmean(errors)
        if not error < float("inf"):
            raise UnsupportedError(f"{case} returned NaN or Inf; no time is reported for it")
        found[case] = cell.implementation, fmean(computed), error
        calls[case] = partial(call, engine)
        say(f"  {case}: error {error:.4f}")
    timed = time_in_turns(calls, data.calls[0].q.device, repeats)
    ms = {name: value / len(data.calls) for name, value in timed.items()}
    dense_ms = ms[f"dense {dense[0].name}"]
    tokens, heads, channels = data.shape
    return [
        CallRow(
            case=case,
            seq_len=tokens,
            heads=heads,
            head_dim=channels,
            dtype=dtype_name(data.dtype),
            order="hilbert",
            implementation=implementation,
            computed=computed,
            error=error,
            ms=ms[case],
            dense_impl=dense[0].name,
            dense_ms=dense_ms,
            speedup=dense_ms / ms[case],
            data=data.name,
        )
        for case, (implementation, computed, error) in found.items()
    ]


def calls_file(path: Path) -> RowFile:
    """The rows of this bench in ``path``, which need not exist.

    Raises:
        OptionError: it exists and holds something else.
    """
    return RowFile(path, "vidsparse-calls/1", "benchmark of calls")


COLUMNS: Final[Columns[CallRow]] = {
    "case": lambda row: row.case,
    "tokens x heads x dim": lambda row: shape_text(row.seq_len, row.heads, row.head_dim, row.data),
    "computed": lambda row: number(row.computed, 3),
    "error": lambda row: number(row.error, 4),
    "ms": lambda row: number(row.ms),
    "dense ms": lambda row: f"{row.dense_ms:.1f} ({row.dense_impl})",
    "of dense": lambda row: f"{row.speedup:.2f}x",
}
"""The table's columns."""
