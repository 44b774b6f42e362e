"""SpargeAttn: tau and theta under l1, then lambda under l2, for every head (section 3.6)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from vidsparse.calibration.bands import Band
from vidsparse.calibration.base import Calibrator, Pass, check_count, check_positive
from vidsparse.calibration.sweep import (
    Sweep,
    as_multiplied,
    beside_dense,
    keep_text,
    masked_errors,
)
from vidsparse.calibration.target import Dial
from vidsparse.errors import OptionError
from vidsparse.kernels.attention.gates import RelativeGate, skipped_pieces
from vidsparse.masks import tile_sizes
from vidsparse.methods import Numbers, SpargeAttn
from vidsparse.methods.base import option
from vidsparse.plan import BLOCK_ROWS
from vidsparse.site import CallSite

TAUS: Final = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
THETAS: Final = (-1.0, 0.15, 0.3, 0.45, 0.6)
LAMBDAS: Final = (-0.5, -1.0, -1.5, -2.0, -2.5, -3.0, -4.0, -5.0, -6.0, -8.0, -10.0)

PAIRS: Final = tuple(itertools.product(THETAS, TAUS))
"""Theta and tau of every candidate of the first stage."""

# keys of a piece of the gate.
PIECE: Final = 64


@dataclass(kw_only=True)
class SpargeCalibrator(Calibrator):
    """Finds the sparsest tau and theta with an L1 error below l1, then lambda with one below l2.

    L1 = sum|O - O'| / sum|O| of one head in one call. A head for which no pair of tau and theta is
    good enough keeps everything, and one for which no lambda is has no gate (-inf). Where q·k will
    run in 8 bits, the second stage measures errors with the rounded products.

    With a target l1 is moved until whole videos are as wanted, and there is no gate: its errors
    would have to be measured anew for every l1.

    Raises:
        OptionError: l2 is below l1, a number is out of range, the gate's pieces do not divide the
            tile, or the method has a lambda of its own or selects by ``topk``.
    """

    calibrates = SpargeAttn
    samples: ClassVar[int] = 5
    bound = "l2"

    l1: float = option(
        0.05, flag="--l1", metavar="E", help="largest relative L1 error of the first stage"
    )
    l2: float = option(
        0.06, flag="--l2", metavar="E", help="largest relative L1 error of both stages"
    )
    steps: int = option(
        3, flag="--sample-steps", metavar="N", help="denoising steps that are looked at",
        convert=int,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("l1", self.l1)
        check_positive("l2", self.l2)
        check_count("sample_steps", self.steps)
        if self.l2 < self.l1:
            raise OptionError(
                f"l2 ({self.l2:g}) must not be below l1 ({self.l1:g}): l1 bounds the error of the "
                "first stage and l2 that of both"
            )
        method = self._method
        if method.tau is None:
            raise OptionError(
                "calibration finds tau, and spargeattn does not use tau with topk. "
                "Hint: leave --topk out."
            )
        if method.lambda_ is not None:
            # heads without a table of their own would have this one, which nobody measured.
            raise OptionError(
                "calibration finds lambda, or leaves it out where no head bears one. "
                "Hint: leave --lambda out."
            )
        if method.tile[0] != BLOCK_ROWS or method.tile[1] % PIECE:
            raise OptionError(
                "spargeattn is calibrated with tiles of 128 queries by 64 or 128 keys, got "
                f"{method.tile[0]}x{method.tile[1]}. Hint: 128x64, the paper's."
            )
        self._first = Sweep.of(self.extent, len(PAIRS))
        self._second = Sweep.of(self.extent, len(LAMBDAS))
        self._tau, self._theta = self._pairs(self.l1)

    @property
    def _method(self) -> SpargeAttn:
        assert isinstance(self.method, SpargeAttn)
        return self.method

    @property
    def looks(self) -> Sequence[Pass]:
        """Both stages over the same steps; with a target the first alone."""
        steps = self.extent.spread(self.steps)
        first, second = (Pass(title=title, steps=steps) for title in ("tau and theta", "lambda"))
        return [first] if self.searches else [first, second]

    @property
    def dial(self) -> Dial:
        """l1, the bound of the first stage."""
        return Dial(name="l1", start=self.l1, least=1e-3, most=1.0, scale="logarithm", gain=-8.7)

    def observe(self, number: int, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
        """Measure every candidate of the stage on one call."""
        if number == 0:
            masks = self._masks(q, k, site)
            self._first.add(site, *masked_errors(masks, self._method.tile, q, k, v))
        else:
            self._sweep_lambda(q, k, v, site)

    def conclude(self, number: int) -> None:
        """Choose tau and theta when their stage is over."""
        if number == 0:
            self._tau, self._theta = self._pairs(self.l1)

    def known(self) -> dict[str, Tensor]:
        """What both sweeps measured so far, and the chosen tau and theta."""
        chosen = {"tau": self._tau, "theta": self._theta}
        return {**self._first.state("first"), **self._second.state("second"), **chosen}

    def recall(self, state: dict[str, Tensor]) -> None:
        """Restore both sweeps and the chosen tau and theta."""
        self._first.restore("first", state)
        self._second.restore("second", state)
        self._tau, self._theta = state["tau"].clone(), state["theta"].clone()

    def found(self, number: float | None) -> dict[str, Tensor]:
        """Tau, theta and lambda, ``[P, L, H]``; without lambda if no head has any."""
        if number is not None:
            tau, theta = self._pairs(number)
            return {"tau": tau, "theta": theta}
        lambda_ = self._lambda()
        tables = {"tau": self._tau, "theta": self._theta}
        return {**tables, "lambda_": lambda_} if bool(lambda_.isfinite().any()) else tables

    def seen(self) -> dict[str, Any]:
        """Densities of the chosen numbers over the calls seen, and counts of heads."""
        calls = {"calls_per_head": int(self._first.calls.max().item())}
        if self.searches:
            selected = self._selected(self.search.number)
            return {"selected": round(selected.mean().item(), 5), **calls}
        place = self._lambda_place()
        gated = place < len(LAMBDAS)
        at = place.clamp_max(len(LAMBDAS) - 1).unsqueeze(-1)
        skipped = torch.where(gated, self._second.density.gather(-1, at).squeeze(-1), 0.0)
        selected = self._selected(self.l1)
        return {
            "selected": round(selected.mean().item(), 5),
            "skipped": round(skipped.mean().item(), 5),
            "sparsity": round((1 - selected + skipped / 2).mean().item(), 5),
            **calls,
            "heads_that_keep_all": int((selected > 1 - 1e-6).sum().item()),
            "heads_without_gate": int((~gated).sum().item()),
        }

    def _pairs(self, l1: float) -> tuple[Tensor, Tensor]:
        """The sparsest tau and theta under a bound; what no pair satisfies keeps all."""
        tau, theta = self.extent.table(fill=1.0), self.extent.table(fill=-1.0)
        fits = self._fits(l1)
        best = self._first.density.masked_fill(~fits, torch.inf).argmin(-1)
        some = fits.any(-1)
        for table, place in ((tau, 1), (theta, 0)):
            values = torch.tensor([pair[place] for pair in PAIRS])
            table[some] = values[best][some]
        return tau, theta

    def _selected(self, l1: float) -> Tensor:
        """Mean share of pairs of the pair chosen under a bound, ``[P, L, H]``."""
        density = self._first.density.masked_fill(~self._fits(l1), torch.inf)
        return density.amin(-1).clamp_max(1.0)

    def _fits(self, l1: float) -> Tensor:
        """Which pairs satisfy the bound, of heads that were seen at all."""
        return (self._first.worst < l1) & (self._first.calls > 0)

    def _lambda_place(self) -> Tensor:
        """The first of the rising distances under l2; their number where there is none.

        One that skipped nothing is none: its comparisons would buy nothing.
        """
        fits = (self._second.worst < self.l2) & (self._second.density > 0)
        place = torch.arange(len(LAMBDAS)).expand_as(fits)
        return place.masked_fill(~fits, len(LAMBDAS)).amin(-1)

    def _lambda(self) -> Tensor:
        values = torch.tensor([*LAMBDAS, -torch.inf])
        return values[self._lambda_place()]

    def _masks(self, q: Tensor, k: Tensor, site: CallSite) -> Tensor:
        """What every pair selects, bool ``[C, B, H, Tq, Tk]``."""
        pooled = self._method.pooled(q, k)
        taus = torch.tensor(TAUS, device=q.device).view(-1, 1, 1, 1, 1)
        masks = torch.cat([self._method.choose(pooled, taus, theta) for theta in THETAS])
        return keep_text(masks, self._method.tile, site)

    def _sweep_lambda(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
        method, tokens = self._method, q.shape[2]
        grid = site.grid
        chosen = Numbers(
            {"tau": self._tau, "theta": self._theta}, (grid.frames, grid.height, grid.width)
        )
        masks = keep_text(method.with_numbers(chosen).select(q, k, site), method.tile, site)
        pieces = masks.repeat_interleave(method.tile[1] // PIECE, -1)
        sizes = tile_sizes(tokens, PIECE, q.device)
        pieces = pieces[..., : len(sizes)]
        rounded = as_multiplied(method, q, k, gate=RelativeGate(-1.0))
        errors = q.new_zeros(*q.shape[:2], len(LAMBDAS), dtype=torch.float32)
        skipped = torch.zeros_like(errors)
        tile, scale = (method.tile[0], PIECE), q.shape[-1] ** -0.5
        for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
            one = (q[b, h], k[b, h], v[b, h])
            seen = None if rounded is None else (rounded[0][b, h], rounded[1][b, h])
            size = torch.zeros((), device=q.device)
            for dense, band in beside_dense(*one, seen, *tile, scale):
                size += dense.abs().sum()
                out, count = self._gated(band, pieces[b, h, band.tiles], sizes)
                errors[b, h] += out.sub_(dense).abs_().sum((1, 2, 3))
                skipped[b, h] += count
            errors[b, h] /= size.clamp_min(1e-30)
        self._second.add(site, errors, skipped / float(tokens) ** 2)

    def _gated(self, band: Band, listed: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``[C, n, M, D]`` and pairs skipped ``[C]`` by lambda, from lists ``[n, U]``."""
        n, units, rows, width = band.shares.shape
        # the definition of gates counts along the list: listed pieces first, in their order.
        order = (~listed).byte().argsort(dim=-1, stable=True)
        absent = ~listed.gather(-1, order)
        largest = band.largest.gather(-1, order.unsqueeze(1).expand_as(band.largest))
        largest = largest.masked_fill(absent.unsqueeze(1), -torch.inf)
        lengths = (listed * sizes).sum(-1)
        group = min(self._method.gate_rows, rows)
        groups = rows // group
        back = order.argsort(-1).unsqueeze(1).expand(-1, groups, -1)
        closed = torch.stack(
            [
                skipped_pieces(
                    RelativeGate(lambda_, rows=group, keys=PIECE),
                    largest,
                    lengths,
                    torch.full_like(largest[..., 0], lambda_),
                    band.alive,
                    None,
                ).gather(-1, back)
                & listed.unsqueeze(1)
                for lambda_ in LAMBDAS
            ],
            2,
        )
        alive = band.alive.view(n, groups, group).sum(-1)
        count = ((closed * sizes).sum(-1) * alive.unsqueeze(-1)).sum((0, 1))
        used = (listed[:, None, None] & ~closed).to(band.shares.dtype)
        # [n, groups, U, group * (D + 1)]: a group of rows has the same pieces.
        shares = band.shares.view(n, units, groups, -1).transpose(1, 2)
        sums = (used @ shares).view(n, groups, len(LAMBDAS), group, width)
        values = sums.transpose(1, 2).reshape(n, len(LAMBDAS), rows, width)[..., :-1]
        # what is skipped stays in the sum of weights.
        weights = (band.shares[..., -1:] * listed[:, :, None, None]).sum(1)
        return band.divided(values, weights.unsqueeze(1)).transpose(0, 1), count
