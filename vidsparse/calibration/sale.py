"""SALE: halve tau of each head until its error is under a bound (section 3.3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from vidsparse.calibration.base import Calibrator, Pass, check_count, check_positive
from vidsparse.calibration.sweep import keep_text, masked_errors
from vidsparse.methods import Sale
from vidsparse.methods.base import check_share, option
from vidsparse.site import CallSite

HALVINGS: Final = 16
"""Most halvings of a head: 0.008 / 2^16 keeps what weighs a ten-millionth of the neighbourhood."""


@dataclass(kw_only=True)
class SaleCalibrator(Calibrator):
    """The largest of tau_0, tau_0 / 2, .. whose error was under the bound in every call seen.

    A smaller tau keeps more tiles, so a head that passes one input and is halved by another still
    passes the first, and one look at each is enough. The paper's error is |O - O'|_1 / N, with a
    bound of 0.4 for one model and 2.0 for another, since it grows with the values; here it is
    divided by |O|_1 / N, so that one bound means the same everywhere.

    Raises:
        OptionError: a number out of range.
    """

    samples: ClassVar[int] = 5

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
        check_positive("error", self.error)
        check_share("tau0", self.tau0)
        check_count("sample_steps", self.steps)
        self._halvings = self.extent.table()
        self._kept = self.extent.table()
        self._calls = self.extent.table()

    @property
    def passes(self) -> Sequence[Pass]:
        """One."""
        return [Pass(title="tau", steps=self.extent.spread(self.steps))]

    def observe(self, number: int, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
        """Halve the threshold of every head until this call is under the bound too."""
        for head in range(q.shape[1]):
            at = (site.part, site.layer, head)
            q1, k1, v1 = (x[:, head : head + 1] for x in (q, k, v))
            while True:
                error, kept = self._measured_at(float(self._tau()[at]), q1, k1, v1, site)
                if error < self.error or self._halvings[at] >= HALVINGS:
                    break
                self._halvings[at] += 1
            self._kept[at] += kept
            self._calls[at] += 1

    def finish(self, number: int) -> None:
        """Nothing follows: halving was done on the way."""

    def state(self) -> dict[str, Tensor]:
        """Halvings so far, and densities."""
        return {"halvings": self._halvings, "kept": self._kept, "calls": self._calls}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Halvings and densities of a ``state()``."""
        self._halvings, self._kept = state["halvings"].clone(), state["kept"].clone()
        self._calls = state["calls"].clone()

    def tables(self) -> dict[str, Tensor]:
        """Tau, ``[P, L, H]``; heads that were not seen keep the paper's default."""
        assert isinstance(self.method, Sale)
        return {"tau": torch.where(self._calls > 0, self._tau(), self.method.tau)}

    def measured(self) -> dict[str, Any]:
        """Density and halvings."""
        seen = self._calls > 0
        kept = self._kept[seen] / self._calls[seen]
        return {
            "selected": round(kept.mean().item(), 5),
            "calls_per_head": int(self._calls.max().item()),
            "halvings": [int(n) for n in torch.bincount(self._halvings[seen].long()).tolist()],
        }

    def _tau(self) -> Tensor:
        return self.tau0 * 0.5**self._halvings

    def _measured_at(
        self, tau: float, q: Tensor, k: Tensor, v: Tensor, site: CallSite
    ) -> tuple[float, float]:
        """Largest error over the batch, and mean share kept, of one head at ``tau``."""
        assert isinstance(self.method, Sale)
        method = dataclasses.replace(self.method, tau=tau, numbers=None)
        masks = keep_text(method.select(q, k, site), method.tile, site)
        errors, kept = masked_errors(masks.unsqueeze(0), method.tile, q, k, v)
        return errors.max().item(), kept.mean().item()
