"""BSFA: mean k-th largest block maximum, for every fraction kept (section 4.2)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.calibration.base import Calibrator, Pass, check_count
from vidsparse.calibration.sweep import selected_share
from vidsparse.calibration.target import Dial
from vidsparse.errors import OptionError
from vidsparse.masks import tile_count
from vidsparse.methods import Bsfa
from vidsparse.methods.base import check_share, option
from vidsparse.methods.bsfa import FRACTION, THRESHOLD, always_kept
from vidsparse.site import CallSite

# scores held at once, in numbers: 256 MB.
SCORES_AT_ONCE = 2**26


def parse_shares(text: str) -> tuple[float, ...]:
    """Read ``"0.1,0.3"``."""
    return tuple(float(part) for part in text.split(","))


def block_maxima(q: Tensor, k: Tensor, tile: tuple[int, int]) -> Tensor:
    """The largest scaled score of every block, fp32 ``[B, H, Tq, Tk]``."""
    tokens, dim = q.shape[2:]
    rows, keys = tile
    columns = k.float().mT
    at_once = max(1, SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * tokens * rows)) * rows
    maxima = []
    for start in range(0, tokens, at_once):
        scores = (q[:, :, start : start + at_once].float() * dim**-0.5) @ columns
        scores = F.pad(scores, (0, -tokens % keys, 0, -scores.shape[2] % rows), value=-torch.inf)
        by_column = torch.unflatten(scores, -1, (-1, keys)).amax(-1)
        maxima.append(torch.unflatten(by_column, 2, (-1, rows)).amax(3))
    return torch.cat(maxima, 2)


def kept_blocks(judged: Tensor, fraction: float) -> Tensor:
    """k of query blocks with ``judged`` blocks each: the fraction of them, rounded, at least 1."""
    return (judged * fraction).round().clamp_min(1).minimum(judged)


@dataclass(kw_only=True)
class BsfaCalibrator(Calibrator):
    """Thresholds of every layer, head, group of steps, fraction and query block.

    The paper averages the k-th largest block maximum over 16 inputs of a language model. A denoiser
    sees each input at many noise levels and in two guidance branches: a group of steps has its own
    thresholds, averaged over all calls seen in it.

    With a target the preset's ``keep`` is the fraction whose videos meet it, without one the
    fraction nearest to the method's.

    Raises:
        OptionError: the fractions are not different shares in (0, 1], or a count is below 1.
    """

    calibrates = Bsfa
    samples: ClassVar[int] = 16

    fractions: tuple[float, ...] = option(
        (0.05, 0.1, 0.2, 0.3, 0.5, 0.7),
        flag="--fractions",
        metavar="F,F,..",
        help="kept shares of the judged blocks to find thresholds for",
        convert=parse_shares,
    )
    groups: int = option(
        4, flag="--groups", metavar="N", help="groups of steps with thresholds of their own",
        convert=int,
    )  # fmt: skip
    per_group: int = option(
        2, flag="--per-group", metavar="N", help="steps of each group that are looked at",
        convert=int,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fractions = tuple(self.fractions)
        if not self.fractions or len(set(self.fractions)) < len(self.fractions):
            raise OptionError(
                "fractions must be one or more different shares in (0, 1]. Hint: 0.1,0.3,0.5."
            )
        for fraction in self.fractions:
            check_share("every fraction", fraction)
        check_count("groups", self.groups)
        check_count("per_group", self.per_group)
        self._sum = torch.zeros(0)
        self._calls = self.extent.table(self._group_count(), 1, 1)
        self._density = torch.zeros(len(self.fractions), dtype=torch.float64)
        self._density_weight = torch.zeros((), dtype=torch.float64)

    @property
    def looks(self) -> Sequence[Pass]:
        """One pass over a few steps of each group."""
        steps = [
            step
            for group in self._windows()
            for step in dataclasses.replace(self.extent, window=group).spread(self.per_group)
        ]
        return [Pass(title="thresholds", steps=tuple(steps))]

    @property
    def dial(self) -> Dial:
        """The share kept, which is one of the fractions."""
        assert isinstance(self.method, Bsfa)
        return Dial(
            name="keep",
            start=self.method.keep,
            least=min(self.fractions),
            most=max(self.fractions),
            scale="logarithm",
            gain=4.0,
            only=self.fractions,
        )

    @property
    def starts(self) -> tuple[int, ...]:
        """The first step of every group but the first."""
        return tuple(group.start for group in self._windows()[1:])

    def observe(self, number: int, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
        """Add the thresholds that would have kept exactly k blocks of each row."""
        assert isinstance(self.method, Bsfa)
        tile, grid = self.method.tile, site.grid
        # query blocks with a video token; text rows are never judged.
        rows = tile_count(grid.video, tile[0])
        always = always_kept(grid, tile, q.device)
        maxima = block_maxima(q, k, tile).masked_fill(always, -torch.inf)[:, :, :rows]
        ordered = maxima.sort(-1, descending=True).values
        judged = (~always[:rows]).sum(-1)
        # an infinite threshold would make the mean one: a row without judged blocks has zero.
        thresholds = []
        for fraction in self.fractions:
            place = (kept_blocks(judged, fraction).long() - 1).clamp_min(0)
            index = place.view(1, 1, -1, 1).expand(*ordered.shape[:3], 1)
            kth = ordered.gather(-1, index).squeeze(-1)
            thresholds.append(kth.masked_fill(judged == 0, 0.0))
        found = torch.stack(thresholds, 2).sum(0).cpu()
        if self._sum.numel() == 0:
            self._sum = self.extent.table(self._group_count(), len(self.fractions), rows)
        at = (site.part, site.layer, slice(None), self._group(site))
        self._sum[at] += found
        self._calls[at] += q.shape[0]
        # a mean over few calls keeps more than it will: each counts as many times as calls went in.
        weight = float(self._calls[at].max())
        self._density += weight * self._kept(maxima, self._sum[at] / self._calls[at], site, always)
        self._density_weight += weight

    def known(self) -> dict[str, Tensor]:
        """The sums and counts so far."""
        return {
            "sum": self._sum,
            "calls": self._calls,
            "density": self._density,
            "density_weight": self._density_weight,
        }

    def recall(self, state: dict[str, Tensor]) -> None:
        """Restore the sums and counts."""
        self._sum, self._calls = state["sum"].clone(), state["calls"].clone()
        self._density = state["density"].clone()
        self._density_weight = state["density_weight"].clone()

    def found(self, number: float | None) -> dict[str, Tensor]:
        """Thresholds ``[P, L, H, groups, fractions, Tq]`` and their fractions."""
        fractions = torch.tensor(self.fractions)
        return {
            # where no call was seen, every block is kept.
            THRESHOLD: torch.where(self._calls > 0, self._sum / self._calls, -torch.inf),
            FRACTION: self.extent.table(len(self.fractions)) + fractions,
        }

    def options(self) -> dict[str, Any]:
        """``keep``, one of the fractions."""
        if self.searches:
            return super().options()
        assert isinstance(self.method, Bsfa)
        keep = self.method.keep
        # of two as near the larger, which errs less.
        return {"keep": min(self.fractions, key=lambda each: (round(abs(each - keep), 9), -each))}

    def options_at(self, number: float) -> dict[str, Any]:
        """``keep``, the fraction."""
        return {"keep": number}

    def seen(self) -> dict[str, Any]:
        """The density of products with V at each fraction, blocks that are always kept included.

        It differs from the fraction. A call's own thresholds keep just the fraction; their mean
        over several calls keeps another share of each, and that share is measured here.
        """
        density = self._density / self._density_weight.clamp_min(1)
        return {
            "predicted_density": {
                f"{fraction:g}": round(value, 5)
                for fraction, value in zip(self.fractions, density.tolist(), strict=True)
            },
        }

    def _kept(self, maxima: Tensor, threshold: Tensor, site: CallSite, always: Tensor) -> Tensor:
        """Share of pairs that thresholds ``[H, fractions, Tq]`` keep, fp64 ``[fractions]``."""
        tile, tokens = self.method.tile, site.grid.tokens
        shares = []
        for of_rows in threshold.to(maxima.device).unbind(1):
            judged = maxima >= of_rows.unsqueeze(-1)
            # rows of text only have no threshold.
            judged = F.pad(judged, (0, 0, 0, always.shape[0] - judged.shape[2]))
            shares.append(selected_share(judged | always, tile, tokens).mean())
        return torch.stack(shares).double().cpu()

    def _group_count(self) -> int:
        return min(self.groups, max(1, len(self.extent.window)))

    def _windows(self) -> list[range]:
        """The steps of each group."""
        window, count = self.extent.window, self._group_count()
        cuts = [window.start + len(window) * i // count for i in range(count + 1)]
        return [range(a, b) for a, b in itertools.pairwise(cuts)]

    def _group(self, site: CallSite) -> int:
        return sum(site.step >= start for start in self.starts)
