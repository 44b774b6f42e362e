"""Foresight: a share for every layer, by what each is worth to whole videos."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from vidsparse.calibration.base import Calibrator, Pass, Video, check_count
from vidsparse.calibration.target import Dial, mean, psnr_of
from vidsparse.errors import OptionError
from vidsparse.methods import Foresight, Numbers
from vidsparse.methods.base import option

RAISED: Final = 3.0
"""How many times its share a layer gets, to see what it is worth."""

LEAST: Final = 0.02
"""The smallest share of a layer."""

# what a layer is counted with at least, of an equal part: two videos are no proof of nothing.
_FLOOR: Final = 0.1
# the error falls with share^-a; what is found outside comes from noise.
_STEEPNESS: Final = (0.3, 4.0)


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
    how steeply it falls with the share is the same for all. ``allocate`` divides the pairs. The
    next ``probes`` prompts say whether that is so: where their videos are no nearer than with the
    same share in all layers, it stays the same in all.

    Then whole videos are made, and the mean share is moved until they are as wanted; a PSNR that is
    wanted begins at the share that the probes' errors foretell. Where they are as wanted, the same
    is tried with half of the refreshes, and so on while that takes less work. Without a target the
    mean stays the method's ``share``, and what comes of it is measured. L layers take L + 4 runs of
    ``probes`` prompts.

    Raises:
        OptionError: a number out of range.
    """

    calibrates = Foresight
    samples: ClassVar[int] = 8
    divides_layers: ClassVar[bool] = True
    always_tries: ClassVar[bool] = True

    probes: int = option(
        2, flag="--probes", metavar="N", convert=int,
        help="prompts that show what each layer is worth",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("probes", self.probes)
        assert isinstance(self.method, Foresight)
        self._share = self.method.share
        self._raised = min(1.0, RAISED * self._share)
        if self._raised <= self._share:
            raise OptionError("a share of 1 leaves nothing to divide. Hint: --share 0.15.")
        layers = self.extent.parts * self.extent.layers
        # rows of passes, columns of prompts: log of the mean squared error.
        self._errors: list[dict[int, float]] = [{} for _ in range(layers + 2)]
        # the same with the pairs divided, and of the same prompts with one share for all.
        self._checks: list[dict[int, float]] = [{}, {}]
        self._worth = torch.full((layers,), 1 / layers)
        self._steepness = 1.0
        self._start = self._share

    # ---- its own passes: 0 is dense, then all layers alike, each layer raised, all raised; then
    # other prompts, divided and alike

    @property
    def looks(self) -> Sequence[Pass]:
        """The dense videos, a pass for each layer and two for all, and two of the division."""
        layers = len(self._worth)
        plain = torch.full((layers,), self._share)
        shares = [plain]
        for layer in range(layers):
            shares.append(plain.clone())
            shares[-1][layer] = self._raised
        shares.append(torch.full((layers,), self._raised))
        names = ["all layers alike", *(f"layer {i}" for i in range(layers)), "all raised"]
        checks = {"divided": self._divided(None), "all layers alike": plain}
        return [
            Pass(title="dense"),
            *(
                Pass(title=name, method=self._with(share), prompts=self.probes)
                for name, share in zip(names, shares, strict=True)
            ),
            *(
                Pass(
                    title=name,
                    method=self._with(share),
                    first=self.probes,
                    prompts=2 * self.probes,
                )
                for name, share in checks.items()
            ),
        ]

    @property
    def dial(self) -> Dial:
        """The mean share of the layers; errors fall with it as they did when all were raised."""
        gain = 10 * self._steepness / math.log(10)
        return Dial(
            name="share", start=self._start, least=LEAST, most=1.0, scale="logarithm", gain=gain
        )

    @property
    def cheaper(self) -> Sequence[Mapping[str, int]]:
        """Half of the refreshes, half of these, and so on, and none."""
        fewer = []
        left = self.extent.refreshes
        while left:
            left //= 2
            fewer.append({"refresh": left})
        return fewer

    def learn(self, number: int, prompt: int, video: Video, total: float) -> None:
        """Keep a video's error to the dense one."""
        (self._errors + self._checks)[number - 1][prompt] = self.search.log_error(prompt, video)

    def conclude(self, number: int) -> None:
        """What layers are worth, and how steeply errors fall; whether to divide by it."""
        if number == len(self._errors):
            self._weigh()
        if number < len(self._errors) + len(self._checks):
            return
        divided, alike = (list(one.values()) for one in self._checks)
        if divided and mean(divided) >= mean(alike):
            self._worth = torch.full_like(self._worth, 1 / len(self._worth))
        target = self.search.target
        if target is not None and target.kind == "psnr":
            plain = psnr_of(mean(list(self._errors[0].values())))
            self._start = self._foretold(plain, target.value)

    def _weigh(self) -> None:
        plain, *single, raised = self._errors
        ratio = self._raised / self._share
        fall = mean([plain[prompt] - raised[prompt] for prompt in plain])
        low, high = _STEEPNESS
        self._steepness = min(high, max(low, fall / math.log(ratio)))
        left = 1 - ratio**-self._steepness
        worth = torch.tensor(
            [mean([-math.expm1(one[p] - plain[p]) / left for p in plain]) for one in single]
        )
        self._worth = worth.clamp_min(_FLOOR / len(worth))

    def _foretold(self, plain: float, wanted: float) -> float:
        """The mean share for a PSNR, where the same share in all layers has ``plain``."""
        low, high = math.log(LEAST), 0.0
        for _ in range(12):
            share = math.exp((low + high) / 2)
            fallen = (self._divided(share) / self._share) ** -self._steepness
            left = float((self._worth * fallen).sum() / self._worth.sum())
            low, high = (
                ((low + high) / 2, high)
                if plain - 10 * math.log10(left) < wanted
                else (low, (low + high) / 2)
            )
        return math.exp((low + high) / 2)

    def found(self, number: float | None) -> dict[str, Tensor]:
        """The share of every layer, alike for its heads."""
        return {"share": self._table(self._divided(number))}

    def seen(self) -> dict[str, Any]:
        """What each layer is worth, alike where that is no better, and what it gets; in dB, how the
        prompts of the check came out."""
        return {
            "layers": [round(share, 4) for share in self._divided(self.search.number).tolist()],
            "worth": [round(worth, 4) for worth in self._worth.tolist()],
            "checks": {
                what: [round(psnr_of(error), 2) for error in one.values()]
                for what, one in zip(("divided", "alike"), self._checks, strict=True)
            },
            "steepness": round(self._steepness, 3),
        }

    def known(self) -> dict[str, Tensor]:
        """Errors, and what was concluded."""
        return {
            "errors": _to_table(self._errors, self.probes),
            "checks": _to_table(self._checks, 2 * self.probes),
            "worth": self._worth,
            "steepness": torch.tensor(self._steepness, dtype=torch.float64),
            "start": torch.tensor(self._start, dtype=torch.float64),
        }

    def recall(self, state: dict[str, Tensor]) -> None:
        """All of it."""
        self._errors = _from_table(state["errors"])
        self._checks = _from_table(state["checks"])
        self._worth = state["worth"]
        self._steepness = float(state["steepness"])
        self._start = float(state["start"])

    def _divided(self, share: float | None) -> Tensor:
        return allocate(self._worth, self._steepness, self._share if share is None else share)

    def _table(self, shares: Tensor) -> Tensor:
        table = self.extent.table()
        return table + shares.view(self.extent.parts, self.extent.layers, 1)

    def _with(self, shares: Tensor) -> Foresight:
        assert isinstance(self.method, Foresight)
        # fits any grid, as ``made`` does.
        return replace(self.method, numbers=Numbers({"share": self._table(shares)}, None))


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
