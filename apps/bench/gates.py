"""What gates cost and save: one kernel on the same lists, with its gate and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vidsparse.apps.bench.attention_cases import structured_qk
from vidsparse.apps.bench.exactness import error_budget, sampled_errors
from vidsparse.apps.bench.inputs import GRIDS
from vidsparse.apps.bench.method_cases import method_of
from vidsparse.apps.bench.timing import time_in_turns
from vidsparse.apps.results.row_file import RowFile
from vidsparse.apps.results.tables import Columns, number
from vidsparse.dtypes import dtype_name
from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.methods import SparseMethod

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vidsparse.kernels.attention.gates import Gate
    from vidsparse.order import TokenOrder
    from vidsparse.site import CallSite

CASES: Final[tuple[str, ...]] = (
    # one lambda for all heads, which skips next to nothing: what comparing costs.
    "spargeattn tau=0.5 lambda_=-6 quantize=none",
    *(f"spargeattn quantize={kind}" for kind in ("none", "int8")),
    "spargeattn quantize=none gate_rows=128",
    *(f"bsfa keep={keep}" for keep in (0.1, 0.3, 0.5, 0.7)),
)
"""Methods with the options that differ from their defaults; what has no gate yet is calibrated."""

CALIBRATED_ON: Final = 2
"""Calls that numbers are found on, of the same kind as those that are timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """One gate on the lists of its method; times are medians of the kernel alone.

    ``computed`` is the listed share of all query-key pairs, ``skipped`` the share of all pairs
    whose product with V the gate left out. ``error`` is relative to fp64 under the same gate over
    sampled blocks; ``moved`` is how far the gate takes the output from that without,
    ||gated - ungated|| / ||ungated||.
    """

    case: str
    calibrated: bool
    gate: str
    seq_len: int
    heads: int
    head_dim: int
    dtype: str
    implementation: str
    computed: float
    skipped: float
    error: float
    moved: float
    gated_ms: float
    ungated_ms: float
    ratio: float


@dataclass(frozen=True, slots=True)
class _Inputs:
    """q, k, v ``[1, H, S, D]`` in token order, and others like them to calibrate on."""

    tokens: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def site(self) -> CallSite:
        from vidsparse.grid import TokenGrid
        from vidsparse.site import CallSite

        return CallSite(0, 0, 0.0, TokenGrid(*GRIDS.get(self.tokens, (1, 1, self.tokens))))

    @property
    def order(self) -> TokenOrder:
        """That of the tensors as they are drawn: nothing is left to do."""
        from vidsparse.order import token_order

        return token_order("rowmajor", self.site.grid, self.device)

    def draw(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        from vidsparse.order import token_order

        torch.manual_seed(seed)
        grid = self.site.grid
        order = token_order("hilbert", grid, self.device)
        made = (self.heads, self.dim, self.dtype, self.device)
        # values that go with a token's place, too.
        (q, k), (_, v) = structured_qk(grid, *made), structured_qk(grid, *made)
        q, k, v = (order.apply(x) for x in (q, k, v))
        return q, k, v


def measure_gates(
    cases: Sequence[str],
    seq_len: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    implementation: str,
    say: Callable[[str], None],
) -> Iterator[GateRow]:
    """Check each case against the definition, then time its kernel with and without the gate.

    Raises:
        OptionError: a case that is not one, or whose method has no gate.
        UnsupportedError: the implementation cannot run here, or an output is not right.
    """
    # all are read before the first is measured.
    methods = {case: method_of(case) for case in cases}
    for method in methods.values():
        if type(method).gate is SparseMethod.gate:
            raise OptionError(f"{method.name} has no gate. Hint: spargeattn or bsfa.")
    inputs = _Inputs(seq_len, heads, head_dim, dtype, device)
    q, k, v = inputs.draw(0)
    for case, method in methods.items():
        if method.needs_numbers or method.gate_keys is None:
            say(f"  {case}: calibrating on {CALIBRATED_ON} other calls")
            method = _calibrated(method, inputs)
        if method.gate_keys is None:
            say(f"  without {case}: calibration found no gate that skips anything in its bounds")
            continue
        yield _measured(case, method, q, k, v, inputs, repeats, implementation)


def _calibrated(method: SparseMethod, inputs: _Inputs) -> SparseMethod:
    """The method with numbers found on calls that are not the one to be timed."""
    import torch

    from vidsparse.calibration import CALIBRATORS, Extent
    from vidsparse.methods import Numbers

    extent = Extent(parts=1, layers=1, heads=inputs.heads, window=range(1))
    calibrator = CALIBRATORS[method.name](method=method, extent=extent)
    with torch.inference_mode():
        for place in range(len(calibrator.passes)):
            for seed in range(1, 1 + CALIBRATED_ON):
                calibrator.observe(place, *inputs.draw(seed), inputs.site)
            calibrator.finish(place)
    grid = inputs.site.grid
    found = Numbers(calibrator.tables(), (grid.frames, grid.height, grid.width))
    made = method.with_numbers(found)
    made.check_numbers()
    return made


def _measured(
    case: str,
    method: SparseMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: _Inputs,
    repeats: int,
    implementation: str,
) -> GateRow:
    import torch

    from vidsparse.kernels import sparse_attention
    from vidsparse.kernels.tokens.quantize import quantize_qk
    from vidsparse.planning import order_and_plan
    from vidsparse.route import find_route

    site, tokens = inputs.site, inputs.tokens
    route = find_route(method, q, k, v, implementation=implementation)
    made = order_and_plan(method, q, k, site, inputs.order, route, v)
    plan = made.plan
    kv_index = plan.list_keys(by_kernel=route.lists)
    gate = method.gate(q, site, plan, kv_index)
    assert gate is not None
    rounded = made.quantized
    if rounded is None and route.quantize is not None:
        rounded = quantize_qk(q, k, route.quantize, q_run=plan.tile[0])
    skipped = torch.empty_like(plan.kv_count)

    def call(gate: Gate | None = None, skipped: Tensor | None = None) -> Tensor:
        return sparse_attention(
            q,
            k,
            v,
            plan.q_tiles,
            plan.kv_count,
            kv_index,
            tile=plan.tile,
            implementation=route.implementation,
            chosen=True,
            gate=gate,
            quantize=rounded,
            skipped=skipped,
            validate=False,
        )[0]

    out = call(gate, skipped)
    # what the kernel multiplies: a gate decides on rounded scores where they are rounded.
    seen = (q, k) if rounded is None else rounded.dequantized(torch.float32)
    error, stock_error = sampled_errors(*seen, v, plan, out, gate=gate)
    budget = error_budget(stock_error, inputs.dtype, lossy=False)
    if not error <= budget:
        raise UnsupportedError(
            f"{case} is wrong in {route.implementation}: relative error {error:.2e}, budget "
            f"{budget:.2e}; no time is reported for a wrong result"
        )
    plain = call()
    moved = ((out - plain).float().norm() / plain.float().norm()).item()
    ms = time_in_turns(
        {"gated": lambda: call(gate, skipped), "ungated": call}, inputs.device, repeats
    )
    kind = type(gate).__name__.removesuffix("Gate").lower()
    return GateRow(
        case=case,
        calibrated=method.numbers is not None,
        gate=f"{kind} {gate.rows}x{gate.keys}",
        seq_len=tokens,
        heads=inputs.heads,
        head_dim=inputs.dim,
        dtype=dtype_name(inputs.dtype),
        implementation=route.implementation,
        computed=plan.computed.mean().item(),
        skipped=skipped.sum().item() / (inputs.heads * float(tokens) ** 2),
        error=error,
        moved=moved,
        gated_ms=ms["gated"],
        ungated_ms=ms["ungated"],
        ratio=ms["ungated"] / ms["gated"],
    )


def gates_file(path: Path) -> RowFile:
    """The rows of this bench in ``path``, which need not exist.

    Raises:
        OptionError: it exists and holds something else.
    """
    return RowFile(path, "vidsparse-gates/1", "benchmark of gates")


COLUMNS: Final[Columns[GateRow]] = {
    "case": lambda row: f"{row.case}, calibrated" if row.calibrated else row.case,
    "gate": lambda row: row.gate,
    "tokens x heads x dim": lambda row: f"{row.seq_len}x{row.heads}x{row.head_dim}",
    "implementation": lambda row: row.implementation,
    "computed": lambda row: number(row.computed, 3),
    "skipped": lambda row: number(row.skipped, 3),
    "moved": lambda row: f"{row.moved:.1e}",
    "error": lambda row: f"{row.error:.1e}",
    "gated ms": lambda row: number(row.gated_ms),
    "ungated ms": lambda row: number(row.ungated_ms),
    "ratio": lambda row: f"{row.ratio:.2f}x",
}
"""The table's columns."""
