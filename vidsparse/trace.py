"""What each attention call did: density, time, implementation. Nothing reads it mid-run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vidsparse.schedule import Action
from vidsparse.work import NOTHING_SELECTED, PARTS, SELECTION_UNKNOWN, SelectionCost, Work


@dataclass(slots=True)
class Cell:
    """One attention call.

    ``pairs`` counts its query-key pairs, batch and heads included. ``selected`` and ``computed``
    are shares of them, ``[B, H]`` (None when dense). ``skipped`` is the share whose product with V
    a gate left out (None without a gate); such a pair counts half in ``computed``. ``seconds`` is
    the time of the whole call: order, mask, plan and kernel. ``made_plan`` says whether the call
    chose its pairs itself, and ``selection`` what that cost (None if it was never measured, or no
    plan was made). ``action`` is ``dense``, ``replan``, ``reuse``, ``refresh`` (all pairs, and
    those of a new plan as well) or ``dense: <why>`` if a sparse call could not be made.
    ``plan_step`` is the step that made the call's plan (None when dense). ``whole`` is the share of
    the pairs that a dense call or a refresh computed beside those of a plan: 1, or less where one
    of the guidance branches in the batch took what another one lacked. ``heads`` are the layer's
    numbers of its heads, if it has a part of them or another order. ``implementation`` made the
    output (in a refresh the sparse one). ``dense_by`` computed all pairs: a kernel's name,
    ``dense`` for the pipeline's own attention, or None.
    """

    step: int
    layer: int
    branch: str
    action: str
    implementation: str
    pairs: int
    selected: Tensor | None = None
    computed: Tensor | None = None
    skipped: Tensor | None = None
    seconds: float | None = None
    made_plan: bool = False
    selection: SelectionCost | None = None
    plan_step: int | None = None
    whole: float = 1.0
    heads: tuple[int, ...] | None = None
    dense_by: str | None = None

    @property
    def sparse(self) -> bool:
        """Whether the call's output is that of a plan."""
        return self.computed is not None and self.action != Action.REFRESH.value

    @property
    def computed_share(self) -> float:
        """Share of the pairs that were computed: 1.0 where dense, usually more in a refresh."""
        planned = 0.0 if self.computed is None else self.computed.mean().item()
        return planned if self.sparse else self.whole + planned

    def count_skipped(self, pairs: Tensor, tokens: int) -> None:
        """Take in what a gate skipped: ``pairs`` of every block ``[B, H, G]``, of ``tokens``²."""
        assert self.computed is not None
        # whole numbers up to the end: fp32 would lose some of 5.7e9 pairs.
        self.skipped = (pairs.sum(-1, dtype=torch.int64).double() / float(tokens) ** 2).float()
        self.computed = self.computed - self.skipped / 2


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A run in a few numbers.

    ``work``: the share of all the run's pairs that was computed, dense steps and layers included,
    and its split; None if there was no call. Speed follows its ``total``. Calls that a step cache
    left out are among the run's, and nothing of them was computed.

    All else is of the calls that were made. The other densities are means over the sparse calls
    only, None if there were none. ``selected``: share of pairs the method chose. ``computed``:
    share the kernel multiplied after merging tiles into blocks of rows; a pair counts half if a
    gate skipped its product with V.
    ``skipped``: share of such pairs, None if no call had a gate. ``dense_step_share``: share of
    steps without any sparse call. ``dense_call_share``: share of calls that were not sparse.
    """

    work: Work | None
    selected: float | None
    computed: float | None
    dense_step_share: float
    dense_call_share: float
    attention_seconds: float
    calls: int
    implementation: str
    notes: tuple[str, ...] = ()
    skipped: float | None = None

    @property
    def sparsity(self) -> float | None:
        """SpargeAttn's sparsity: the share of all products q·k and p·v that were not computed."""
        return None if self.computed is None else 1 - self.computed

    def __str__(self) -> str:
        parts = [str(self.work)] if self.work is not None else []
        if self.selected is None or self.computed is None:
            parts.append("all calls dense")
        else:
            density = f"sparse calls selected {self.selected:.3f}, computed {self.computed:.3f}"
            if self.skipped is not None:
                density += f" ({self.skipped:.3f} without the product with V)"
            parts.append(density)
        parts.append(
            f"{self.dense_step_share:.0%} of steps dense; {self.calls} attention calls "
            f"in {self.attention_seconds:.2f} s by {self.implementation}"
        )
        return "; ".join([*parts, *self.notes])


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly several processes shared the pairs that plans compute.

    Each number is the work of the busiest process divided by the mean, call by call. 1.0 is even; a
    sparse call takes this many times as long as an even one.

    Args:
        processes: how many shared the heads.
        dealt: with the heads as they were dealt.
        in_order: with the heads dealt in their order.
    """

    processes: int
    dealt: float
    in_order: float


@dataclass(slots=True)
class Trace:
    """All calls of one run, in order.

    ``balance`` is set once several processes have joined their traces. ``left_out`` counts the
    pairs of the calls that forwards returned without.
    """

    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    balance: Balance | None = None
    left_out: int = 0
    # of the forward that goes on, the place of its first cell; and the pairs of each layer in the
    # last forward that called it, by transformer and branch.
    _first: int = 0
    _usual: dict[tuple[int, str], dict[int, int]] = field(default_factory=dict)
    _events: list[tuple[Cell, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def timed(self, cell: Cell, device: torch.device) -> Iterator[Cell]:
        """Record ``cell`` with the time of the block; on a GPU by events, without waiting."""
        if device.type == "cuda":
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # the tensors' own device, which need not be the current one.
            start.record(torch.cuda.current_stream(device))
            yield cell
            end.record(torch.cuda.current_stream(device))
            self._events.append((cell, start, end))
        else:
            began = time.perf_counter()
            yield cell
            cell.seconds = time.perf_counter() - began
        self.cells.append(cell)

    def begin_forward(self) -> None:
        """Take in that a forward begins; what one before it did that never returned is dropped."""
        self._first = len(self.cells)

    def end_forward(self, part: int, branch: str) -> None:
        """Take in that a forward of transformer ``part`` for ``branch`` has returned.

        Calls that this branch made before, and not now, are those that a step cache left out: every
        cache has to see a forward before it can stand in for one.
        """
        made: Counter[int] = Counter()
        for cell in self.cells[self._first :]:
            made[cell.layer] += cell.pairs
        usual = self._usual.setdefault((part, branch), {})
        self.left_out += sum(pairs for layer, pairs in usual.items() if layer not in made)
        usual.update(made)

    def resolve(self) -> None:
        """Wait for what is still running, and bring times and densities to the host."""
        for cell, start, end in self._events:
            end.synchronize()
            cell.seconds = start.elapsed_time(end) / 1000
        self._events.clear()
        for cell in self.cells:
            for name in ("selected", "computed", "skipped"):
                if (value := getattr(cell, name)) is not None:
                    setattr(cell, name, value.cpu())

    def summary(self) -> TraceSummary:
        """The run in a few numbers."""
        self.resolve()
        sparse = [c for c in self.cells if c.sparse]
        steps = {c.step for c in self.cells}
        some_sparse = {c.step for c in self.cells if c.sparse or c.whole < 1}
        ours = sorted({c.dense_by for c in self.cells if c.dense_by} - {"dense"})
        used = sorted({c.implementation for c in sparse}) or ours
        fallen = {c.action for c in self.cells if c.action.startswith("dense:")}
        notes = sorted(fallen.union(self.notes))
        if ours:
            notes.append(f"dense calls by the {'+'.join(ours)} kernel")
        return TraceSummary(
            work=self._work(),
            selected=_mean([c.selected for c in sparse]),
            computed=_mean([c.computed for c in sparse]),
            dense_step_share=1 - len(some_sparse) / len(steps) if steps else 1.0,
            dense_call_share=1 - len(sparse) / len(self.cells) if self.cells else 1.0,
            attention_seconds=sum(c.seconds or 0.0 for c in self.cells),
            calls=len(self.cells),
            implementation="+".join(used) or "the pipeline's dense attention",
            notes=tuple(notes),
            skipped=_mean([c.skipped for c in sparse]),
        )

    def step_kinds(self) -> dict[int, str]:
        """The kind of each step: ``sparse`` or ``refresh`` if any call was, else ``dense``.

        A refresh that one branch of guidance makes for both is one.
        """
        kinds = {cell.step: "dense" for cell in self.cells}
        kinds |= {cell.step: "sparse" for cell in self.cells if cell.sparse}
        return kinds | {c.step: c.action for c in self.cells if c.action == Action.REFRESH.value}

    def oldest_plan(self) -> int | None:
        """The greatest age of a plan in use, in steps; None without a plan."""
        ages = [cell.step - cell.plan_step for cell in self.cells if cell.plan_step is not None]
        return max(ages, default=None)

    def _work(self) -> Work | None:
        made = sum(c.pairs for c in self.cells)
        if not made:
            return None
        pairs = made + self.left_out
        # a step of which nothing was meant to be sparse is a dense one.
        whole = (Action.DENSE.value, Action.REFRESH.value)
        sparse_steps = {c.step for c in self.cells if c.action not in whole or c.whole < 1}
        computed = dict.fromkeys(PARTS, 0.0)
        for cell in self.cells:
            if cell.sparse:
                part = "sparse"
            elif cell.action == Action.REFRESH.value:
                part = "refresh"
            elif cell.action != "dense":
                part = "dense_fallback"
            else:
                part = "dense_layers" if cell.step in sparse_steps else "dense_steps"
            computed[part] += cell.computed_share * cell.pairs
        selection, source = self._selection(pairs)
        return Work(
            total=sum(computed.values()) / pairs,
            left_out=self.left_out / pairs,
            selection=selection,
            selection_source=source,
            **{part: count / pairs for part, count in computed.items()},
        )

    def _selection(self, pairs: int) -> tuple[float | None, str]:
        """What all new plans cost, as a share of dense attention over ``pairs``, and its source."""
        # a branch of guidance that goes by the other one's plan chooses nothing, in a refresh too.
        planned = [c for c in self.cells if c.made_plan]
        if not planned:
            return 0.0, NOTHING_SELECTED
        known = [(c.selection, c.pairs) for c in planned if c.selection is not None]
        if len(known) < len(planned):
            return None, SELECTION_UNKNOWN
        share = sum(cost.share * count for cost, count in known) / pairs
        return share, "; ".join(dict.fromkeys(cost.source for cost, _ in known))

    def density_map(self) -> list[list[float | None]]:
        """Computed density, steps x layers: 1.0 where dense, None where nothing was called.

        A refresh is more than dense by what its plan computes, unless one branch of guidance made
        it for both.
        """
        self.resolve()
        if not self.cells:
            return []
        steps = max(c.step for c in self.cells) + 1
        layers = max(c.layer for c in self.cells) + 1
        found: dict[tuple[int, int], list[float]] = {}
        for cell in self.cells:
            found.setdefault((cell.step, cell.layer), []).append(cell.computed_share)
        return [
            [
                sum(values) / len(values) if (values := found.get((step, layer))) else None
                for layer in range(layers)
            ]
            for step in range(steps)
        ]

    def head_density_map(self) -> list[list[list[float] | None]]:
        """Computed density, steps x layers x heads, mean over branches and batch.

        None where a cell was dense or never called.
        """
        self.resolve()
        if not self.cells:
            return []
        steps = max(c.step for c in self.cells) + 1
        layers = max(c.layer for c in self.cells) + 1
        found: dict[tuple[int, int], list[Tensor]] = {}
        for cell in self.cells:
            if cell.sparse and cell.computed is not None:
                found.setdefault((cell.step, cell.layer), []).append(cell.computed.mean(0))
        return [
            [
                torch.stack(shares).mean(0).tolist()
                if (shares := found.get((step, layer)))
                else None
                for layer in range(layers)
            ]
            for step in range(steps)
        ]

    def to_json(self) -> list[dict[str, Any]]:
        """One JSON object per call, densities per head (mean over the batch)."""
        self.resolve()

        def per_head(value: Tensor | None) -> list[float] | None:
            return None if value is None else [round(x, 5) for x in value.mean(0).tolist()]

        return [
            {
                "step": c.step,
                "layer": c.layer,
                "branch": c.branch,
                "action": c.action,
                "implementation": c.implementation,
                "pairs": c.pairs,
                "whole": c.whole,
                "selected": per_head(c.selected),
                "computed": per_head(c.computed),
                "skipped": per_head(c.skipped),
                "seconds": c.seconds,
            }
            for c in self.cells
        ]


def _mean(values: list[Tensor | None]) -> float | None:
    present = [v.mean() for v in values if v is not None]
    return torch.stack(present).mean().item() if present else None
