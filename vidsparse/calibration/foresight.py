"""Foresight: a share for every head, by what its layer is worth to whole videos."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.attention import attend
from vidsparse.calibration.base import Calibrator, Pass, Video, check_count
from vidsparse.calibration.target import Dial, mean, psnr_of
from vidsparse.errors import OptionError
from vidsparse.methods import Foresight, Numbers
from vidsparse.methods.base import option
from vidsparse.site import CallSite

RAISED: Final = 3.0
"""Multiple of its share that a layer gets, to see what it is worth."""

LEAST: Final = 0.02
"""The smallest share of a head."""

AROUND: Final = (0.5, 1.0, 2.0)
"""Multiples of the common share at which heads are looked at."""

MOST_STEPS: Final = 4
"""Most steps of a video in which layers are looked at one by one."""

# what a layer is counted with at least, of an equal part: a few looks are no proof of nothing.
_FLOOR: Final = 0.1
# the error falls with share^-a; what is found outside comes from noise.
_STEEPNESS: Final = (0.3, 4.0)


def allocate(worth: Tensor, steepness: Tensor, at: float, mean: float) -> Tensor:
    """Shares of heads whose mean is ``mean`` and whose summed error is least.

    A head of worth w and steepness a adds w (s / ``at``)^-a to the error at share s. At the minimum
    one more pair helps alike everywhere: s^(1 + a) goes with a w at^a, between ``LEAST`` and 1.

    Args:
        worth: a positive number for each head.
        steepness: a positive number for each.
        at: the share at which their errors are their worths.
        mean: in (0, 1].

    Returns:
        The shares, in the shape of ``worth``.
    """
    if mean >= 1:
        return torch.ones_like(worth)
    power = steepness.double()
    form = (power * worth.double()).log() + power * math.log(at)
    low, high = -1e3, 1e3
    least = min(LEAST, mean)
    # the mean grows with the factor: halving finds it to the last bit.
    for _ in range(200):
        factor = (low + high) / 2
        shares = ((form + factor) / (1 + power)).exp().clamp(least, 1)
        low, high = (factor, high) if float(shares.mean()) < mean else (low, factor)
    return shares.to(worth.dtype)


LOOKS: Final = ("forwards", "videos", "none")
"""What may show how much each layer is worth."""


def _look(text: str) -> str:
    return text.strip().lower()


@dataclass(kw_only=True)
class ForesightCalibrator(Calibrator):
    """Finds a share of listed chunks for every head; with a target also their mean, to meet it.

    A layer's worth is its error at the share that all layers have at first. ``look`` says how it is
    measured:

    - ``forwards``: a dense video is made, and in a few of its steps the transformer runs again with
      one layer alone sparse. The error of its output is the layer's. L layers take L forwards in
      each of these steps, in all no more than the video has steps (unless L itself is more).
    - ``videos``: whole videos are made: one with the same share in all layers, one for each layer
      with its share raised to three times that, and one with all raised. These are L + 2 runs, in
      which layers act on each other, and two videos are few to tell the layers apart.
    - ``none``: all layers are worth the same.

    Heads of a layer differ more than layers do: some look at a few places, and others everywhere.
    With ``forwards`` the calls of the same steps also run at half the share, at the share and at
    twice the share. The errors of the heads then divide the layer's worth among them, and say how
    steeply errors fall with the share.

    ``allocate`` divides the pairs. The next ``probes`` prompts check this: if their videos are no
    closer to dense than with the same share in all layers, all layers keep the same share.

    Then whole videos are made, and the mean share is moved until they meet the target; for a PSNR
    the first try takes the share that the check's videos suggest. Once the target is met, the same
    is tried with half of the refreshes, and so on while that takes less work. Without a target the
    mean stays the method's ``share``, and the videos' quality is measured. With a single prompt it
    is not: one video says too little of others.

    Raises:
        OptionError: a number is out of range, or ``look`` is unknown.
    """

    calibrates = Foresight
    samples: ClassVar[int] = 8
    divides_layers: ClassVar[bool] = True
    settles_schedule: ClassVar[bool] = True

    look: str = option(
        "forwards", flag="--look", metavar="AT", convert=_look,
        help="what shows how much each layer is worth: forwards (one layer sparse in a step of a "
        "dense video), videos (whole ones, more of a layer), or none (all are alike)",
    )  # fmt: skip
    probes: int = option(
        2, flag="--probes", metavar="N", convert=int,
        help="prompts that show what each layer, and each head, is worth",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("probes", self.probes)
        if self.look not in LOOKS:
            raise OptionError(f"look must be one of {', '.join(LOOKS)}, got {self.look!r}")
        assert isinstance(self.method, Foresight)
        self._share = self.method.share
        self._raised = min(1.0, RAISED * self._share)
        if self._raised <= self._share and self.look != "none":
            raise OptionError(
                "with share 1 every head keeps everything, so there is nothing to calibrate. "
                "Hint: --share 0.15."
            )
        layers = self.extent.parts * self.extent.layers
        # of each head at the shares around, in shares of its calls' outputs.
        self._of_heads = self.extent.table(len(AROUND)).double()
        # of each layer alone, summed over forwards, each of which has a sum of 1.
        self._alone = torch.zeros(self.extent.parts, self.extent.layers, dtype=torch.float64)
        # rows of passes, columns of prompts: log of the mean squared error.
        self._errors: list[dict[int, float]] = [{} for _ in range(layers + 2)]
        # the same with the pairs divided, and of other prompts with one share for all.
        self._checks: list[dict[int, float]] = [{}, {}]
        self._worth = torch.full((layers,), 1 / layers)
        self._steepness = 1.0
        self._start = self._share

    @property
    def searches(self) -> bool:
        """Whether whole videos are made with what it found: of one prompt they would not say much,
        and are made for a target alone."""
        return super().searches or self.extent.prompts > 1

    # ---- its own passes: dense ones; with ``videos`` all layers alike, each layer raised, all
    # raised; then other prompts, divided and alike

    @property
    def looks(self) -> Sequence[Pass]:
        """The dense videos, what shows the layers' worth, and two passes that check it."""
        dense = Pass(title="dense", whole=self.searches)
        sampled = self._sampled() if self.look == "forwards" else ()
        # every step may be a refresh, in which no layer goes by a plan.
        if self.look == "none" or (self.look == "forwards" and not sampled):
            return [dense]
        plain = self._with(self._alike())
        checks = [
            Pass(title=title, method=method, first=self.probes, prompts=2 * self.probes)
            for title, method in (
                ("divided", self._with(self._divided(None))),
                ("all layers alike", plain),
            )
        ]
        if self.look == "forwards":
            alone = Pass(
                title="dense, and each layer alone",
                method=plain,
                steps=sampled,
                forwards=sampled,
                prompts=self.probes,
            )
            return [alone, replace(dense, first=self.probes), *checks]
        titled = {"all layers alike": self._alike()}
        for layer in range(len(self._worth)):
            raised = titled[f"layer {layer}"] = self._alike()
            raised[layer] = self._raised
        titled["all raised"] = torch.full_like(self._worth, self._raised)
        return [
            dense,
            *(
                Pass(title=title, method=self._with(shares), prompts=self.probes)
                for title, shares in titled.items()
            ),
            *checks,
        ]

    def _sampled(self) -> tuple[int, ...]:
        """The steps whose forwards are made again: no more forwards than there are steps."""
        most = max(1, len(self.extent.window) // self.extent.layers)
        return self.extent.spread(min(MOST_STEPS, most), by_plan=True)

    @property
    def dial(self) -> Dial:
        """The mean share of the layers.

        Errors fall with it as they did when all were raised, and in proportion where nobody looked.
        """
        gain = 10 * self._steepness / math.log(10)
        return Dial(
            name="share",
            start=self._start,
            least=min(LEAST, self._share),
            most=1.0,
            scale="logarithm",
            gain=gain,
        )

    @property
    def cheaper(self) -> Sequence[Mapping[str, int]]:
        """Half of the refreshes, half of these, and so on, and none."""
        fewer = []
        left = len(self.extent.refresh_steps)
        while left:
            left //= 2
            fewer.append({"refresh": left})
        return fewer

    def observe(self, number: int, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
        """Keep what each head errs at the shares around the one that all have."""
        if site.branch.startswith("unconditional"):
            return
        assert isinstance(self.method, Foresight)
        # they are in order already, text last.
        grid = replace(site.grid, text_first=False, lead=0)
        dense = F.scaled_dot_product_attention(q, k, v).double()
        whole = float(dense.square().sum())
        for place, factor in enumerate(AROUND):
            method = replace(self.method, share=min(1.0, factor * self._share), numbers=None)
            out = attend(q, k, v, grid, method, order="rowmajor")
            errors = (out.double() - dense).square().sum((0, 2, 3)) / whole
            self._of_heads[site.part, site.layer, :, place] += errors.cpu()

    def compare(self, number: int, part: int, errors: Sequence[float]) -> None:
        """Keep what each layer alone errs, in shares of what all of them do."""
        whole = math.fsum(errors)
        if whole > 0:
            self._alone[part] += torch.tensor(errors, dtype=torch.float64) / whole

    def learn(self, number: int, prompt: int, video: Video, total: float) -> None:
        """Keep a video's error to the dense one."""
        self._rows_of(number)[prompt] = self.search.log_error(prompt, video)

    def _rows_of(self, number: int) -> dict[int, float]:
        checks = len(self.looks) - len(self._checks)
        return self._checks[number - checks] if number >= checks else self._errors[number - 1]

    def conclude(self, number: int) -> None:
        """What layers are worth, and how steeply errors fall; whether to divide by it."""
        if self.look == "none":
            return
        last = len(self.looks) - 1
        if self.look == "forwards" and number == 0:
            of_part = self._alone.sum(1, keepdim=True)
            # steps that were looked at may all be another transformer's.
            seen = torch.where(of_part > 0, self._alone / of_part, 1 / self.extent.layers)
            self._settle(seen.flatten())
        elif self.look == "videos" and number == last - len(self._checks):
            self._weigh()
        if number < last or not self._checks[0]:
            return
        divided, alike = (mean(list(one.values())) for one in self._checks)
        if divided >= alike:
            self._worth = torch.full_like(self._worth, 1 / len(self._worth))
            self._of_heads.zero_()
        target = self.search.target
        if target is not None and target.kind == "psnr":
            missing = target.sought - psnr_of(min(divided, alike))
            self._start = self.dial.number(math.log(self._share) + missing / self.dial.gain)

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
        self._settle(worth)

    def _settle(self, worth: Tensor) -> None:
        """Take what layers are worth, which sums to 1."""
        whole = worth.sum()
        if whole > 0:
            worth = (worth / whole).to(self._worth.dtype)
            self._worth = worth.clamp_min(_FLOOR / len(worth))

    def found(self, number: float | None) -> dict[str, Tensor]:
        """The share of every head."""
        return {"share": self._table(self._divided(number))}

    def seen(self) -> dict[str, Any]:
        """What each layer is worth, alike where that is no better, what it and its heads get; in
        dB, how the prompts of the check came out."""
        if self.look == "none":
            return {}
        number = self.search.number if self.searches else None
        shares = self._divided(number)
        return {
            "layers": [round(share, 4) for share in shares.mean(-1).tolist()],
            "heads": [[round(share, 4) for share in of_layer] for of_layer in shares.tolist()],
            "worth": [round(worth, 4) for worth in self._worth.tolist()],
            "checks": {
                what: [round(psnr_of(error), 2) for error in one.values()]
                for what, one in zip(("divided", "alike"), self._checks, strict=True)
            },
            "steepness": round(self._steepness, 3),
        }

    def known(self) -> dict[str, Tensor]:
        """The errors measured so far, and what was concluded from them."""
        return {
            "of_heads": self._of_heads,
            "alone": self._alone,
            "errors": _to_table(self._errors, self.probes),
            "checks": _to_table(self._checks, 2 * self.probes),
            "worth": self._worth,
            "steepness": torch.tensor(self._steepness, dtype=torch.float64),
            "start": torch.tensor(self._start, dtype=torch.float64),
        }

    def recall(self, state: dict[str, Tensor]) -> None:
        """Restore the errors and conclusions."""
        self._of_heads = state["of_heads"]
        self._alone = state["alone"]
        self._errors = _from_table(state["errors"])
        self._checks = _from_table(state["checks"])
        self._worth = state["worth"]
        self._steepness = float(state["steepness"])
        self._start = float(state["start"])

    def _divided(self, share: float | None) -> Tensor:
        """The share of every head, ``[P * L, H]``, whose mean is ``share``."""
        errors = self._of_heads.flatten(0, 1)
        heads = errors.shape[1]
        least, at, most = errors.unbind(-1)
        of_layer = at.sum(-1, keepdim=True)
        # nobody looked, or there was nothing to see.
        part = torch.where(of_layer > 0, at / of_layer, 1 / heads).clamp_min(_FLOOR / heads)
        worth = self._worth.double().unsqueeze(-1) * part
        low, high = _STEEPNESS
        ratio = math.log(min(1.0, AROUND[-1] * self._share) / (AROUND[0] * self._share))
        fall = ((least / most).log() / ratio).clamp(low, high)
        seen = (least > 0) & (most > 0)
        steepness = torch.where(seen, fall, self._steepness)
        return allocate(worth, steepness, self._share, self._share if share is None else share)

    def _alike(self) -> Tensor:
        return torch.full_like(self._worth, self._share)

    def _table(self, shares: Tensor) -> Tensor:
        """A table of shares of layers ``[P * L]`` or heads ``[P * L, H]``."""
        table = self.extent.table()
        return table + shares.view(self.extent.parts, self.extent.layers, -1)

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
