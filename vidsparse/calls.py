"""What a method does to single attention calls: the columns of SpargeAttn's Tables 4 and 9.

``record_calls`` keeps the q, k and v of chosen calls while a pipeline runs; ``measure_call`` then
asks what another method or token order would have done with them. The same calls for every order:
nothing but the order differs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.engine import AttentionEngine
from vidsparse.masks import self_similarity
from vidsparse.methods import SparseMethod
from vidsparse.order import token_order
from vidsparse.planning import plan_attention, share_with_means
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite
from vidsparse.trace import Cell


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCall:
    """The input of one attention call, ``[B, H, S, D]`` each, in the pipeline's token order."""

    q: Tensor
    k: Tensor
    v: Tensor
    site: CallSite


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStatistics:
    """Means over batch, heads and calls.

    Args:
        sim_q: self-similarity of the query tiles (Sim-q).
        sim_k: self-similarity of the key tiles (Sim-k).
        l1: relative L1 distance to dense attention, ``sum|O - O'| / sum|O|``.
        selected: share of query-key pairs that the method chose.
        computed: share that the kernel multiplied, half of it where a gate skipped the product
            with V; SpargeAttn's sparsity is 1 - computed.
    """

    sim_q: float
    sim_k: float
    l1: float
    selected: float
    computed: float


@contextmanager
def record_calls(
    engine: AttentionEngine,
    *,
    steps: Collection[int],
    layers: Collection[int],
    rows: int,
    branch: str = "conditional",
) -> Iterator[list[RecordedCall]]:
    """Keep the inputs of the calls at ``steps`` and ``layers`` while the block runs.

    Args:
        engine: the engine of a handle; untouched when the block has ended.
        steps: denoising steps to keep, from 0.
        layers: transformer layers to keep, from 0.
        rows: at most this many rows of the batch are kept.
        branch: the guidance branch to keep.
    """
    calls: list[RecordedCall] = []

    def record(q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
        if site.step in steps and site.layer in layers and site.branch == branch:
            kept = (x[:rows].detach().clone() for x in (q, k, v))
            calls.append(RecordedCall(**dict(zip("qkv", kept, strict=True)), site=site))

    before, engine.observer = engine.observer, record
    try:
        yield calls
    finally:
        engine.observer = before


def run_call(
    call: RecordedCall, method: SparseMethod, order: str, implementation: str = "auto"
) -> tuple[Tensor, Tensor, Cell]:
    """Run one call sparse, by ``method`` in ``order``, and dense.

    Returns:
        The sparse and the dense output, fp32 ``[B, H, S, D]``, and the sparse call's trace.

    Raises:
        OptionError: unknown order or implementation.
        UnsupportedError: the implementation cannot run on these tensors.
    """
    engine = AttentionEngine(
        method,
        schedule=Schedule(dense_steps=0),
        order=order,
        layers=call.site.layer + 1,
        implementation=implementation,
    )
    engine.begin_run(call.site.step + 1)
    sparse = engine.attend(call.q, call.k, call.v, call.site).float()
    dense = F.scaled_dot_product_attention(call.q, call.k, call.v).float()
    (cell,) = engine.trace.cells
    return sparse, dense, cell


def relative_l1(sparse: Tensor, dense: Tensor) -> Tensor:
    """``sum|O - O'| / sum|O|`` of each head (SpargeAttn 3.6): ``[B, H, S, D]`` to ``[B, H]``."""
    return (sparse - dense).abs().sum((2, 3)) / dense.abs().sum((2, 3))


def measure_call(
    call: RecordedCall, method: SparseMethod, order: str, implementation: str = "auto"
) -> CallStatistics:
    """What ``method`` in ``order`` does to one call, against dense attention.

    Raises:
        OptionError: unknown order or implementation.
        UnsupportedError: the implementation cannot run on these tensors.
    """
    permutation = token_order(order, call.site.grid, call.q.device)
    q, k = permutation.apply(call.q), permutation.apply(call.k)
    sparse, dense, cell = run_call(call, method, order, implementation)
    assert cell.selected is not None
    assert cell.computed is not None
    return CallStatistics(
        sim_q=self_similarity(q, method.tile[0]).mean().item(),
        sim_k=self_similarity(k, method.tile[1]).mean().item(),
        l1=((sparse - dense).abs().sum() / dense.abs().sum()).item(),
        selected=cell.selected.mean().item(),
        computed=cell.computed.mean().item(),
    )


def measure_calls(
    calls: Sequence[RecordedCall], method: SparseMethod, order: str, implementation: str = "auto"
) -> CallStatistics:
    """The mean of ``measure_call`` over ``calls``; at least one.

    Raises:
        OptionError: unknown order or implementation.
        UnsupportedError: the implementation cannot run on these tensors.
    """
    each = [measure_call(call, method, order, implementation) for call in calls]
    return CallStatistics(
        **{
            name: math.fsum(getattr(one, name) for one in each) / len(each)
            for name in CallStatistics.__slots__
        }
    )


def mean_densities(
    calls: Sequence[RecordedCall], method: SparseMethod, order: str
) -> dict[str, float]:
    """``selected`` and ``computed`` of ``method``, means over ``calls``, at least one.

    Plans only: no attention is run.

    What a gate would skip is not known then and counts as computed.

    Raises:
        OptionError: unknown order.
    """
    plans = []
    for call in calls:
        permutation = token_order(order, call.site.grid, call.q.device)
        plans.append(
            plan_attention(
                method,
                permutation.apply(call.q),
                permutation.apply(call.k),
                call.site,
                v=permutation.apply(call.v),
            )
        )
    return {
        "selected": torch.stack([plan.selected for plan in plans]).double().mean().item(),
        "computed": torch.stack([share_with_means(plan, method.means) for plan in plans])
        .double()
        .mean()
        .item(),
    }
