"""What calibration promised against what it keeps, on attention calls it has not seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vidsparse.calls import RecordedCall
    from vidsparse.methods import SparseMethod


class Meter(Protocol):
    """Looks at attention calls one by one and comes to a row."""

    def see(self, call: RecordedCall) -> None:
        """Take in one call."""
        ...

    def row(self) -> dict[str, Any]:
        """What was found; there was at least one call."""
        ...


@dataclass(kw_only=True)
class ErrorMeter:
    """Relative L1 distances of a method to dense attention, sum|O - O'| / sum|O|.

    Args:
        case: what the row is called.
        method: with calibrated numbers or without.
        order: token order.
        bound: what the errors are compared with.
    """

    case: str
    method: SparseMethod
    order: str
    bound: float
    _calls: list[float] = field(default_factory=list)
    _heads: list[float] = field(default_factory=list)
    _densities: list[tuple[float, float]] = field(default_factory=list)

    def see(self, call: RecordedCall) -> None:
        """Run the call; each video of a batch is a call of its own."""
        from vidsparse.calls import relative_l1, run_call

        sparse, dense, cell = run_call(call, self.method, self.order)
        assert cell.selected is not None
        assert cell.computed is not None
        whole = (sparse - dense).abs().sum((1, 2, 3)) / dense.abs().sum((1, 2, 3))
        self._calls += whole.tolist()
        self._heads += relative_l1(sparse, dense).flatten().tolist()
        self._densities.append((cell.selected.mean().item(), cell.computed.mean().item()))

    def row(self) -> dict[str, Any]:
        """Shares of calls and of their heads under the bound, errors and densities."""
        selected, computed = (_mean(values) for values in zip(*self._densities, strict=True))
        return {
            "case": self.case,
            "bound": self.bound,
            "calls": len(self._calls),
            "calls_under": _mean([error < self.bound for error in self._calls]),
            "heads_under": _mean([error < self.bound for error in self._heads]),
            "l1": _mean(self._calls),
            "l1_worst": max(self._calls),
            "selected": selected,
            "computed": computed,
        }


@dataclass(kw_only=True)
class DensityMeter:
    """The share of products with V that a gate makes, against the one that was predicted.

    Args:
        case: what the row is called.
        method: with calibrated numbers.
        order: token order.
        predicted: what the preset says of this share.
    """

    case: str
    method: SparseMethod
    order: str
    predicted: float
    _kept: list[float] = field(default_factory=list)

    def see(self, call: RecordedCall) -> None:
        """Run the call and count what its gate skips."""
        from vidsparse.calls import run_call

        cell = run_call(call, self.method, self.order)[2]
        assert cell.skipped is not None
        self._kept.append(1 - cell.skipped.mean().item())

    def row(self) -> dict[str, Any]:
        """Both densities, and what lies between them."""
        measured = _mean(self._kept)
        return {
            "case": self.case,
            "calls": len(self._kept),
            "predicted": self.predicted,
            "measured": measured,
            "gap": measured - self.predicted,
        }


def recall_rows(
    calls: Sequence[RecordedCall], thresholds: Mapping[str, SparseMethod], order: str
) -> Iterator[dict[str, Any]]:
    """A selection from 4 bits against one from full precision (SALE's Table 5).

    It is of SALE by nature, and knows its class: no other method estimates every score.

    Recall is the share of the tiles selected in full precision that are selected from 4 bits too.
    The sink and the local area are in both; ``recall_judged`` leaves them out.

    Args:
        calls: of a dense run.
        thresholds: methods by the name of their row.
        order: token order.
    """
    import torch

    from vidsparse.methods import Sale
    from vidsparse.methods.sale import relative_scores
    from vidsparse.order import token_order

    counts = {case: torch.zeros(5, dtype=torch.float64) for case in thresholds}
    for call in calls:
        permutation = token_order(order, call.site.grid, call.q.device)
        q, k = permutation.apply(call.q), permutation.apply(call.k)
        estimates: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        for case, method in thresholds.items():
            assert isinstance(method, Sale)
            area = (method.tile, method.local, method.sink_from(call.site))
            if area not in estimates:
                estimates[area] = (
                    relative_scores(q, k, *area),
                    relative_scores(q, k, *area, rounded=False),
                )
            tau = torch.as_tensor(method.threshold(q, call.site), device=q.device)
            logarithm = tau.log().view(-1, 1, 1)
            rounded, exact = (scores >= logarithm for scores in estimates[area])
            judged = estimates[area][0] < torch.inf
            both = rounded & exact
            sets = (both, exact, both & judged, exact & judged, torch.ones_like(exact))
            counts[case] += torch.stack([some.sum() for some in sets]).double().cpu()
    for case, (both, exact, both_judged, exact_judged, tiles) in counts.items():
        yield {
            "case": case,
            "tokens": calls[0].q.shape[2],
            "recall": (both / exact).item(),
            "recall_judged": (both_judged / exact_judged).item() if exact_judged else None,
            "selected": (exact / tiles).item(),
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
