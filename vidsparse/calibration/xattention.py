"""XAttention: minimum thresholds by dynamic programming over all heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from vidsparse.calibration.base import Calibrator, Pass, check_count, check_positive
from vidsparse.calibration.sweep import Sweep, keep_text, masked_errors
from vidsparse.errors import OptionError
from vidsparse.masks import top_p_mask
from vidsparse.methods import XAttention
from vidsparse.methods.base import check_share, option
from vidsparse.methods.xattention import block_sums
from vidsparse.site import CallSite

SHRINK: Final = 0.9
"""What an adjustment multiplies a threshold with."""


def best_adjustments(performance: Tensor, least: float) -> Tensor:
    """How often to lower the threshold of every head, int64 ``[H]``.

    ``performance`` ``[H, M + 1]`` is P(h, m), what head h is worth after m adjustments. With
    D[h][m] the best sum over the first h heads of exactly m adjustments in all,

        D[h][m] = max over j of D[h - 1][m - j] + P(h, j),

    the answer is the best way to make the largest m whose D[H][m] is at least ``least``. (The paper
    prints D[h][m] = max(D[h - 1][m], P(h, m)), in which no head's adjustments add to another's.)
    """
    heads, choices = performance.shape
    best = torch.zeros(1, dtype=torch.float64)
    taken = []
    for worth in performance.double():
        length = len(best) + choices - 1
        # row j: the best of the heads before with j adjustments fewer, and this head's j-th.
        rows = torch.full((choices, length), -torch.inf, dtype=torch.float64)
        for j in range(choices):
            rows[j, j : j + len(best)] = best + worth[j]
        best, choice = rows.max(0)
        taken.append(choice)
    enough = (best >= least).nonzero()
    total = int(enough.max()) if len(enough) else 0
    answer = torch.zeros(heads, dtype=torch.int64)
    for head in range(heads - 1, -1, -1):
        answer[head] = taken[head][total]
        total -= int(answer[head])
    return answer


@dataclass(kw_only=True)
class XAttentionCalibrator(Calibrator):
    """A threshold for every head, lowered where that costs least.

    t_h(m) = 0.9 t_h(m - 1) from the method's tau. The paper leaves P(h, m) open: here it is the
    negative mean relative L1 error of head h after m adjustments, no head is lowered to a mean
    error above ``error``, and adjustments go on while that of all heads stays under it. (Without
    the bound of each head the sum lets a few go wrong for the sake of the others.)

    Raises:
        OptionError: a number out of range, or a method that does not select by tau.
    """

    samples: ClassVar[int] = 5

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
        check_positive("error", self.error)
        check_count("adjustments", self.adjustments)
        check_count("sample_steps", self.steps)
        if self._method.tau is None:
            raise OptionError(
                "xattention is calibrated where it selects by tau. Hint: leave --topk and --blocks "
                "out."
            )
        check_share("tau", self._method.tau)
        self._taus = self._method.tau * SHRINK ** torch.arange(self.adjustments + 1)
        self._sweep = Sweep.of(self.extent, self.adjustments + 1)
        self._made = self.extent.table()

    @property
    def _method(self) -> XAttention:
        assert isinstance(self.method, XAttention)
        return self.method

    @property
    def passes(self) -> Sequence[Pass]:
        """One."""
        return [Pass(title="errors of all thresholds", steps=self.extent.spread(self.steps))]

    def observe(self, number: int, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
        """Measure every threshold."""
        method = self._method
        sums = block_sums(q, k, method.tile, method.stride, method.pattern)
        masks = top_p_mask(sums, self._taus.to(q.device).view(-1, 1, 1, 1, 1))
        masks = keep_text(masks, method.tile, site)
        self._sweep.add(site, *masked_errors(masks, method.tile, q, k, v))

    def finish(self, number: int) -> None:
        """Share the adjustments out."""
        seen = self._sweep.calls.flatten() > 0
        errors = self._sweep.mean.flatten(0, 2)[seen]
        worth = -errors
        # a head that begins above the bound stays as it is.
        worth[:, 1:] = worth[:, 1:].masked_fill(errors[:, 1:] > self.error, -torch.inf)
        made = self._made.view(-1)
        made[seen] = best_adjustments(worth, -self.error * len(errors)).float()

    def state(self) -> dict[str, Tensor]:
        """The sweep and what came of it."""
        return {**self._sweep.state("sweep"), "made": self._made}

    def restore(self, state: dict[str, Tensor]) -> None:
        """The sweep of a ``state()``."""
        self._sweep.restore("sweep", state)
        self._made = state["made"].clone()

    def tables(self) -> dict[str, Tensor]:
        """Tau, ``[P, L, H]``."""
        return {"tau": self._taus[self._made.long()].float()}

    def measured(self) -> dict[str, Any]:
        """Density and error before and after."""
        at = self._made.long().unsqueeze(-1)
        seen = self._sweep.calls.squeeze(-1) > 0
        before = (self._sweep.density[..., 0], self._sweep.mean[..., 0])
        after = (self._sweep.density.gather(-1, at), self._sweep.mean.gather(-1, at))
        names = ("selected_before", "error_before", "selected", "error")
        values = (*before, *(table.squeeze(-1) for table in after))
        means = {n: round(x[seen].mean().item(), 5) for n, x in zip(names, values, strict=True)}
        return {**means, "calls_per_head": int(self._sweep.calls.max().item())}
