"""SALE: halve tau of each head until its error is under a bound (section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from vidsparse.calibration.base import Calibrator, Pass, check_count, check_positive
from vidsparse.calibration.sweep import Sweep, as_multiplied, keep_text, masked_errors
from vidsparse.calibration.target import Dial
from vidsparse.methods import Sale
from vidsparse.methods.base import check_share, option
from vidsparse.methods.sale import relative_scores
from vidsparse.site import CallSite

HALVINGS: Final = 16
"""Most halvings of a head: 0.008 / 2^16 keeps scores of a ten-millionth of the neighbourhood's."""


@dataclass(kw_only=True)
class SaleCalibrator(Calibrator):
    """The largest of tau_0, tau_0 / 2, .. whose error was under the bound in every call seen.

    The paper goes on halving from call to call. Here every call tries all of them with one estimate
    of the scores, which has the same result. The paper's error is |O - O'|_1 / N, with a bound of
    0.4 for one model and 2.0 for another, since it grows with the values; here it is divided by
    |O|_1 / N, so that one bound means the same everywhere. Where the method multiplies q and k in
    8 bits, what that costs is part of the error. With a target the bound is moved until whole
    videos are as wanted.

    Raises:
        OptionError: a number is out of range.
    """

    calibrates = Sale
    samples: ClassVar[int] = 5
    bound = "error"

    error: float = option(
        0.05, flag="--error", metavar="E", help="bound on the relative L1 error of a head"
    )
    tau0: float = option(
        0.008, flag="--tau0", metavar="T", help="threshold that halving starts from"
    )
    steps: int = option(
        5, flag="--sample-steps", metavar="N", help="denoising steps that are looked at",
        convert=int,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("error", self.error)
        check_share("tau0", self.tau0)
        check_count("sample_steps", self.steps)
        self._taus = self.tau0 * 0.5 ** torch.arange(HALVINGS + 1)
        self._sweep = Sweep.of(self.extent, HALVINGS + 1)

    @property
    def looks(self) -> Sequence[Pass]:
        """One pass over a few steps of dense runs."""
        return [Pass(title="tau", steps=self.extent.spread(self.steps))]

    @property
    def dial(self) -> Dial:
        """The bound on the error."""
        return Dial(
            name="bound", start=self.error, least=1e-3, most=1.0, scale="logarithm", gain=-8.7
        )

    def observe(self, number: int, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
        """Measure every threshold: one estimate serves all of them."""
        assert isinstance(self.method, Sale)
        tile, local = self.method.tile, self.method.local
        scores = relative_scores(q, k, tile, local, self.method.sink_from(site))
        masks = scores >= self._taus.to(q.device).log().view(-1, 1, 1, 1, 1)
        masks, rounded = keep_text(masks, tile, site), as_multiplied(self.method, q, k)
        self._sweep.add(site, *masked_errors(masks, tile, q, k, v, rounded))

    def known(self) -> dict[str, Tensor]:
        """What the sweep has measured so far."""
        return self._sweep.state("sweep")

    def recall(self, state: dict[str, Tensor]) -> None:
        """Restore the sweep."""
        self._sweep.restore("sweep", state)

    def found(self, number: float | None) -> dict[str, Tensor]:
        """Tau, ``[P, L, H]``; heads that were not seen keep the method's own."""
        assert isinstance(self.method, Sale)
        halved = self._taus[self._halvings(number)]
        return {"tau": torch.where(self._was_seen(), halved, self.method.tau)}

    def seen(self) -> dict[str, Any]:
        """Mean density, calls of a head, and how many heads were halved how often."""
        seen, halvings = self._was_seen(), self._halvings(self._bound())
        kept = self._sweep.density.gather(-1, halvings.unsqueeze(-1)).squeeze(-1)
        return {
            "selected": round(kept[seen].mean().item(), 5),
            "calls_per_head": int(self._sweep.calls.max().item()),
            "halvings": [int(n) for n in torch.bincount(halvings[seen]).tolist()],
        }

    def _bound(self) -> float | None:
        return self.search.number if self.searches else None

    def _was_seen(self) -> Tensor:
        return self._sweep.calls.squeeze(-1) > 0

    def _halvings(self, error: float | None) -> Tensor:
        """The first threshold under the bound in every call, else the last, int64 ``[P, L, H]``."""
        over = self._sweep.worst >= (self.error if error is None else error)
        return over.long().cumprod(-1).sum(-1).clamp_max(HALVINGS)
