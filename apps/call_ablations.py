"""Ablations on single attention calls of a dense run, where a video would hide what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from vidsparse.order import ORDERS

if TYPE_CHECKING:
    from vidsparse.statistics import RecordedCall

# SpargeAttn's Table 10 looks at the cases whose L1 the judge changes by more than this.
FILTER_L1: Final = 0.05


def judge_rows(calls: Sequence[RecordedCall]) -> Iterator[dict[str, Any]]:
    """SpargeAttn with and without its judge of self-similarity, for each token order (Table 10).

    A head of a call is what the paper calls a case. ``filtered`` means over those whose L1 the
    judge changes by more than ``FILTER_L1``; None where there are none.
    """
    import torch

    from vidsparse.methods import SpargeAttn
    from vidsparse.statistics import relative_l1, run_call

    methods = {"with": SpargeAttn(), "without": SpargeAttn(theta=-1)}
    for order in ORDERS:
        l1, sparsity = {}, {}
        for name, method in methods.items():
            runs = [run_call(call, method, order) for call in calls]
            l1[name] = torch.cat([relative_l1(out, dense).flatten() for out, dense, _ in runs])
            selected = [cell.selected.flatten() for *_, cell in runs if cell.selected is not None]
            sparsity[name] = 1 - torch.cat(selected)
        telling = (l1["with"] - l1["without"]).abs() > FILTER_L1
        row: dict[str, Any] = {
            "case": order,
            "heads": telling.numel(),
            "filtered": int(telling.sum()),
        }
        for name in methods:
            row[f"l1_{name}"] = l1[name].mean().item()
            row[f"sparsity_{name}"] = sparsity[name].mean().item()
            some = bool(telling.any())
            row[f"l1_filtered_{name}"] = l1[name][telling].mean().item() if some else None
            row[f"sparsity_filtered_{name}"] = (
                sparsity[name][telling].mean().item() if some else None
            )
        yield row


CALL_ABLATIONS: Final[
    Mapping[str, Callable[[Sequence[RecordedCall]], Iterator[dict[str, Any]]]]
] = {"judge-l1": judge_rows}
"""By name; each row has a ``case`` that tells it from the others."""
