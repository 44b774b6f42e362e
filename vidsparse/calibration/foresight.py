"""Foresight: a share for every layer, by what each is worth to whole videos."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from vidsparse.calibration.base import Calibrator, Pass, Video, check_count
from vidsparse.errors import OptionError
from vidsparse.methods import Foresight, Numbers, make_method
from vidsparse.methods.base import option, optional_number

RAISED: Final = 3.0
"""How many times its share a layer gets, to see what it is worth."""

LEAST: Final = 0.02
"""The smallest share of a layer."""

# what a layer is counted with at least, of an equal part: two videos are no proof of nothing.
_FLOOR: Final = 0.1
# the error falls with share^-a; what is found outside comes from noise.
_STEEPNESS: Final = (0.3, 4.0)
_NEAR: Final = 0.3
_TRIES: Final = 4


def allocate(worth: Tensor, steepness: float, mean: float) -> Tensor:
    """Shares of layers whose mean is ``mean`` and whose summed error is least.

    A layer of worth w adds w s^-a to the error at share s, with a the ``steepness``. At the minimum
    one more pair helps alike everywhere, so s goes with w^(1 / (1 + a)), between ``LEAST`` and 1.

    Args:
        worth: a positive number for each layer.
        steepness: a.
        mean: in (0, 1].

    Returns:
        The shares, in the shape of ``worth``.
    """
    if mean >= 1:
        return torch.ones_like(worth)
    form = worth.double() ** (1 / (1 + steepness))
    low, high = 0.0, 1 / float(form.min())
    least = min(LEAST, mean)
    # the mean grows with the factor: halving finds it to the last bit.
    for _ in range(200):
        factor = (low + high) / 2
        shares = (form * factor).clamp(least, 1)
        low, high = (factor, high) if float(shares.mean()) < mean else (low, factor)
    return shares.to(worth.dtype)


@dataclass(kw_only=True)
class ForesightCalibrator(Calibrator):
    """A share of listed chunks for every layer, and, where one is asked for, the video's quality.

    Errors of single calls do not add up to the error of a video, so videos decide: one is made with
    the same share in all layers, one with each layer's raised to three times that, and one with
    all raised. How much the squared error to the dense video falls is what a layer is worth, and
    how steeply it falls with the share is the same for all. ``allocate`` divides the pairs.

    Then whole videos of all prompts are made, and the mean share is moved until their mean PSNR is
    within 0.3 dB of ``target_psnr``. Without a target it stays the method's ``share``, and what
    comes of it is measured. L layers take L + 2 runs of ``probes`` prompts, and one to five of all.

    Raises:
        OptionError: a number out of range.
    """

    calibrates = Foresight
    samples: ClassVar[int] = 8

    target_psnr: float | None = option(
        None, flag="--target-psnr", metavar="DB", convert=optional_number,
        help="mean PSNR to the dense videos that is wanted, in dB, by the smallest share",
    )  # fmt: skip
    probes: int = option(
        2, flag="--probes", metavar="N", convert=int,
        help="prompts that show what each layer is worth",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_count("probes", self.probes)
        wanted = self.target_psnr
        number = isinstance(wanted, (int, float)) and not isinstance(wanted, bool)
        if wanted is not None and not (number and 5 <= wanted <= 60):
            raise OptionError(f"target_psnr must lie between 5 and 60 dB, got {wanted!r}")
        assert isinstance(self.method, Foresight)
        self._share = self.method.share
        self._raised = min(1.0, RAISED * self._share)
        if self._raised <= self._share:
            raise OptionError("a share of 1 leaves nothing to divide. Hint: --share 0.15.")
        layers = self.extent.parts * self.extent.layers
        self._dense: dict[int, Tensor] = {}
        # rows of passes, columns of prompts: log of the mean squared error, and the total share.
        self._errors: list[dict[int, float]] = [{} for _ in range(layers + 2)]
        self._totals: list[dict[int, float]] = [{} for _ in range(layers + 2)]
        self._worth = torch.full((layers,), 1 / layers)
        self._steepness = 1.0
        self._means: list[float] = []

    # ---- passes: 0 is dense, then all layers alike, each layer raised, all raised, then the search

    @property
    def passes(self) -> Sequence[Pass]:
        """The dense videos, one pass for each layer and two for all, and the tries so far."""
        layers = len(self._worth)
        plain = torch.full((layers,), self._share)
        shares = [plain]
        for layer in range(layers):
            shares.append(plain.clone())
            shares[-1][layer] = self._raised
        shares.append(torch.full((layers,), self._raised))
        names = ["all layers alike", *(f"layer {i}" for i in range(layers)), "all raised"]
        found = [Pass(title="dense", method=make_method("dense"))]
        found += [
            Pass(title=name, method=self._with(share), prompts=self.probes)
            for name, share in zip(names, shares, strict=True)
        ]
        found += [
            Pass(title=f"share {mean:.3f}", method=self._with(self._divided(mean)))
            for mean in self._means
        ]
        return found

    def watch(self, number: int, prompt: int, video: Video, total: float) -> None:
        """Keep a dense video, or the error of another to it."""
        frames = torch.from_numpy(video)
        if number == 0:
            self._dense[prompt] = frames
            return
        away = frames.double() - self._dense[prompt].double()
        # videos that are the same are as good as 8 bits can say.
        error = max(float(away.square().mean()), 1e-3)
        self._errors[number - 1][prompt] = math.log(error)
        self._totals[number - 1][prompt] = total

    def finish(self, number: int) -> None:
        """After the last of the fixed passes what layers are worth; then the next try, if any."""
        layers = len(self._worth)
        if number < layers + 2:
            return
        if number == layers + 2:
            self._learn()
            self._try(self._share)
            return
        if self.target_psnr is None or abs(self._missing(-1)) <= _NEAR:
            return
        if len(self._means) <= _TRIES:
            self._try(self._next())

    def _learn(self) -> None:
        """Worth and steepness from the passes with single layers raised."""
        plain, *single, raised = self._errors[: len(self._worth) + 2]
        ratio = self._raised / self._share
        fall = _mean([plain[prompt] - raised[prompt] for prompt in plain])
        low, high = _STEEPNESS
        self._steepness = min(high, max(low, fall / math.log(ratio)))
        left = 1 - ratio**-self._steepness
        worth = torch.tensor(
            [_mean([-math.expm1(one[p] - plain[p]) / left for p in plain]) for one in single]
        )
        self._worth = worth.clamp_min(_FLOOR / len(worth))

    def _try(self, mean: float) -> None:
        self._means.append(mean)
        self._errors.append({})
        self._totals.append({})

    def _psnr(self, number: int) -> float:
        """Mean PSNR of a try, -1 for the last."""
        errors = self._errors[len(self._worth) + 2 :][number]
        return 20 * math.log10(255) - 10 / math.log(10) * _mean([*errors.values()])

    def _missing(self, number: int) -> float:
        assert self.target_psnr is not None
        return self.target_psnr - self._psnr(number)

    def _next(self) -> float:
        """The next mean share: along the last two tries, or as steep as single layers were."""
        slope = 10 * self._steepness / math.log(10)
        if len(self._means) > 1:
            along = math.log(self._means[-1] / self._means[-2])
            gain = self._psnr(-1) - self._psnr(-2)
            if along * gain > 0:
                slope = gain / along
        share = self._means[-1] * math.exp(self._missing(-1) / slope)
        # the model holds nearby only.
        share = min(share, 2.5 * self._means[-1], 1.0)
        return max(share, self._means[-1] / 2.5, LEAST)

    def _divided(self, mean: float) -> Tensor:
        return allocate(self._worth, self._steepness, mean)

    def _table(self, shares: Tensor) -> Tensor:
        table = self.extent.table()
        return table + shares.view(self.extent.parts, self.extent.layers, 1)

    def _with(self, shares: Tensor) -> Foresight:
        assert isinstance(self.method, Foresight)
        # fits any grid: the engine compares, and calibration has one grid only.
        numbers = Numbers({"share": self._table(shares)}, None)
        return replace(self.method, numbers=numbers)

    def _best(self) -> int:
        """The try that is kept: the one nearest to the target."""
        if self.target_psnr is None:
            return len(self._means) - 1
        tries = range(len(self._means))
        return min(tries, key=lambda number: abs(self._missing(number)))

    # ---- what is known ----

    def state(self) -> dict[str, Tensor]:
        """Dense videos, errors, totals, and what was concluded."""
        rows = {"errors": self._errors, "totals": self._totals}
        tables = {name: _to_table(values, len(self._dense)) for name, values in rows.items()}
        videos = {f"dense.{prompt}": video for prompt, video in self._dense.items()}
        return {
            **tables,
            **videos,
            "worth": self._worth,
            "steepness": torch.tensor(self._steepness, dtype=torch.float64),
            "means": torch.tensor(self._means, dtype=torch.float64),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """All of it."""
        self._errors, self._totals = (_from_table(state[name]) for name in ("errors", "totals"))
        self._dense = {
            int(name.removeprefix("dense.")): video
            for name, video in state.items()
            if name.startswith("dense.")
        }
        self._worth = state["worth"]
        self._steepness = float(state["steepness"])
        self._means = state["means"].tolist()

    def tables(self) -> dict[str, Tensor]:
        """The share of every layer, alike for its heads."""
        return {"share": self._table(self._divided(self._means[self._best()]))}

    @property
    def schedule(self) -> bool:
        """The videos were made with it."""
        return True

    def measured(self) -> dict[str, Any]:
        """What was promised, what came of it, and what each layer is worth."""
        best, first = self._best(), len(self._worth) + 2
        errors, totals = self._errors[first + best], self._totals[first + best]
        worst = 20 * math.log10(255) - 10 / math.log(10) * max(errors.values())
        return {
            "psnr": round(self._psnr(best), 2),
            "psnr_worst": round(worst, 2),
            "total": round(_mean([*totals.values()]), 4),
            "share": round(self._means[best], 4),
            "layers": [round(share, 4) for share in self._divided(self._means[best]).tolist()],
            "worth": [round(worth, 4) for worth in self._worth.tolist()],
            "steepness": round(self._steepness, 3),
            "tries": [
                {"share": round(mean, 4), "psnr": round(self._psnr(number), 2)}
                for number, mean in enumerate(self._means)
            ],
        }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _to_table(rows: Sequence[dict[int, float]], prompts: int) -> Tensor:
    table = torch.full((len(rows), prompts), torch.nan, dtype=torch.float64)
    for number, row in enumerate(rows):
        for prompt, value in row.items():
            table[number, prompt] = value
    return table


def _from_table(table: Tensor) -> list[dict[int, float]]:
    return [
        {prompt: value for prompt, value in enumerate(row) if not math.isnan(value)}
        for row in table.tolist()
    ]
