"""XAttention: minimum thresholds, what all heads may err together shared out among them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from vidsparse.calibration.base import Calibrator, Pass, check_count, check_positive
from vidsparse.calibration.sweep import Sweep, keep_text, masked_errors
from vidsparse.calibration.target import Dial
from vidsparse.errors import OptionError
from vidsparse.masks import top_p_mask
from vidsparse.methods import XAttention
from vidsparse.methods.base import check_share, option
from vidsparse.methods.xattention import block_sums
from vidsparse.site import CallSite

SHRINK: Final = 0.9
"""Factor by which an adjustment lowers a threshold."""


def best_adjustments(errors: Tensor, densities: Tensor, most: float) -> Tensor:
    """How often to lower the threshold of every head, int64 ``[H]``, to save most density.

    The density that all heads keep together becomes as small as possible while the sum of their
    errors stays within ``most``. Steps along the convex hull of each head's savings and errors are
    taken in the order of saving per error, over all heads; what is left of the bound goes to the
    largest savings that still fit. The answer differs from the best one by at most one step of one
    head.

    The paper's dynamic programme, D[h][m] = max(D[h-1][m], P(h, m)), maximises the number of
    adjustments. But an adjustment of one head saves more pairs than one of another, so the number
    says little about work.

    Args:
        errors: error of each head after 0 to M adjustments, ``[H, M + 1]``; infinite where a head
            must not go.
        densities: share of pairs that the head keeps then, ``[H, M + 1]``.
        most: bound on the sum of the errors. Nothing is adjusted where the start is above it.
    """
    costs, kept = errors.double().tolist(), densities.double().tolist()
    made = [0] * len(costs)
    left = most - math.fsum(of_head[0] for of_head in costs)
    if left < 0:
        return torch.tensor(made)

    def step(head: int, choice: int) -> tuple[float, float]:
        """What moving a head from its present choice saves, and what that costs."""
        now = made[head]
        return kept[head][now] - kept[head][choice], costs[head][choice] - costs[head][now]

    def next_on_hull(head: int) -> tuple[float, int] | None:
        """The choice that saves most by cost from here, and that ratio."""
        found = [
            (math.inf if cost <= 0 else saved / cost, choice)
            for choice in range(len(costs[head]))
            for saved, cost in [step(head, choice)]
            if saved > 0 and cost < math.inf
        ]
        return max(found, default=None)

    queue: list[tuple[float, int, int]] = []

    def push(head: int) -> None:
        following = next_on_hull(head)
        if following is not None:
            ratio, choice = following
            heapq.heappush(queue, (-ratio, head, choice))

    for head in range(len(costs)):
        push(head)
    while queue:
        _, head, choice = heapq.heappop(queue)
        _, cost = step(head, choice)
        if cost <= left:
            made[head], left = choice, left - cost
            push(head)
    while True:
        fitting = [
            (saved, head, choice)
            for head in range(len(costs))
            for choice in range(len(costs[head]))
            for saved, cost in [step(head, choice)]
            if saved > 0 and cost <= left
        ]
        if not fitting:
            return torch.tensor(made)
        _, head, choice = max(fitting)
        left -= step(head, choice)[1]
        made[head] = choice


@dataclass(kw_only=True)
class XAttentionCalibrator(Calibrator):
    """A threshold for every head, lowered where that costs least.

    t_h(m) = 0.9 t_h(m - 1) from the method's tau. The paper leaves P(h, m) open: here it is the
    negative mean relative L1 error of head h after m adjustments. No head is lowered to a mean
    error above ``error``; the mean error over all heads stays under it as well, and of all ways to
    do so the one that saves most density is taken. (Without a bound for each head the mean would
    let a few go wrong for the sake of the others.) With a target the bound is moved until whole
    videos are as wanted.

    Raises:
        OptionError: a number is out of range, or the method does not select by tau.
    """

    calibrates = XAttention
    samples: ClassVar[int] = 5
    bound = "error"

    error: float = option(
        0.05, flag="--error", metavar="E", help="bound on the mean relative L1 error over heads"
    )
    adjustments: int = option(
        20, flag="--adjustments", metavar="M", help="most adjustments of a head", convert=int
    )
    steps: int = option(
        5, flag="--sample-steps", metavar="N", help="denoising steps that are looked at",
        convert=int,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("error", self.error)
        check_count("adjustments", self.adjustments)
        check_count("sample_steps", self.steps)
        if self._method.tau is None:
            raise OptionError(
                "calibration finds tau, and xattention does not use tau with topk or blocks. "
                "Hint: leave --topk and --blocks out."
            )
        check_share("tau", self._method.tau)
        self._taus = self._method.tau * SHRINK ** torch.arange(self.adjustments + 1)
        self._sweep = Sweep.of(self.extent, self.adjustments + 1)

    @property
    def _method(self) -> XAttention:
        assert isinstance(self.method, XAttention)
        return self.method

    @property
    def looks(self) -> Sequence[Pass]:
        """One pass over a few steps of dense runs."""
        return [Pass(title="errors of all thresholds", steps=self.extent.spread(self.steps))]

    @property
    def dial(self) -> Dial:
        """The bound on the error."""
        return Dial(
            name="bound", start=self.error, least=1e-3, most=1.0, scale="logarithm", gain=-8.7
        )

    def observe(self, number: int, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
        """Measure every threshold."""
        method = self._method
        sums = block_sums(q, k, method.tile, method.stride, method.pattern)
        masks = top_p_mask(sums, self._taus.to(q.device).view(-1, 1, 1, 1, 1))
        masks = keep_text(masks, method.tile, site)
        self._sweep.add(site, *masked_errors(masks, method.tile, q, k, v))

    def known(self) -> dict[str, Tensor]:
        """What the sweep has measured so far."""
        return self._sweep.state("sweep")

    def recall(self, state: dict[str, Tensor]) -> None:
        """Restore the sweep."""
        self._sweep.restore("sweep", state)

    def found(self, number: float | None) -> dict[str, Tensor]:
        """Tau, ``[P, L, H]``."""
        return {"tau": self._taus[self._adjusted(number)].float()}

    def seen(self) -> dict[str, Any]:
        """Mean density and error before and after, and calls of a head."""
        at = self._adjusted(self.search.number if self.searches else None).unsqueeze(-1)
        seen = self._sweep.calls.squeeze(-1) > 0
        before = (self._sweep.density[..., 0], self._sweep.mean[..., 0])
        after = (self._sweep.density.gather(-1, at), self._sweep.mean.gather(-1, at))
        names = ("selected_before", "error_before", "selected", "error")
        values = (*before, *(table.squeeze(-1) for table in after))
        means = {n: round(x[seen].mean().item(), 5) for n, x in zip(names, values, strict=True)}
        return {**means, "calls_per_head": int(self._sweep.calls.max().item())}

    def _adjusted(self, error: float | None) -> Tensor:
        """How often each head's threshold is lowered under a bound, int64 ``[P, L, H]``."""
        bound = self.error if error is None else error
        seen = self._sweep.calls.flatten() > 0
        errors = self._sweep.mean.flatten(0, 2)[seen]
        densities = self._sweep.density.flatten(0, 2)[seen]
        # a head that begins above the bound stays as it is.
        errors[:, 1:] = errors[:, 1:].masked_fill(errors[:, 1:] > bound, torch.inf)
        made = torch.zeros(seen.shape, dtype=torch.int64)
        made[seen] = best_adjustments(errors, densities, bound * len(errors))
        return made.view(self._sweep.calls.shape[:-1])
