"""A sweep: one method at several settings, and the error and density of each for every head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vidsparse.calibration.bands import Band, bands
from vidsparse.calibration.base import Extent
from vidsparse.kernels.attention.gates import Gate
from vidsparse.kernels.dispatch import eight_bits_that_pay
from vidsparse.kernels.tokens.quantize import quantize_qk
from vidsparse.masks import tile_sizes
from vidsparse.methods import SparseMethod
from vidsparse.site import CallSite


@dataclass
class Sweep:
    """Running statistics of C candidates, tables ``[P, L, H, C]``.

    Attributes:
        worst: the largest relative L1 distance seen, sum|O - O'| / sum|O|.
        total: the sum of those distances.
        kept: the sum of the shares of query-key pairs selected.
        calls: calls seen, ``[P, L, H, 1]``.
    """

    worst: Tensor
    total: Tensor
    kept: Tensor
    calls: Tensor

    @classmethod
    def of(cls, extent: Extent, candidates: int) -> Sweep:
        """Nothing seen yet."""
        worst, total, kept = (extent.table(candidates) for _ in range(3))
        return cls(worst, total, kept, extent.table(1))

    def add(self, site: CallSite, errors: Tensor, kept: Tensor) -> None:
        """Take in one call: ``errors`` and ``kept`` are ``[B, H, C]``."""
        at = (site.part, site.layer)
        errors, kept = errors.float().cpu(), kept.float().cpu()
        # what is not finite is within no bound, whichever way that is asked.
        errors = errors.nan_to_num(nan=torch.inf)
        self.worst[at] = torch.maximum(self.worst[at], errors.amax(0))
        self.total[at] += errors.sum(0)
        self.kept[at] += kept.sum(0)
        self.calls[at] += errors.shape[0]

    @property
    def mean(self) -> Tensor:
        """Mean error of every candidate."""
        return self.total / self.calls.clamp_min(1)

    @property
    def density(self) -> Tensor:
        """Mean share of pairs selected by every candidate."""
        return self.kept / self.calls.clamp_min(1)

    def state(self, prefix: str) -> dict[str, Tensor]:
        """The tables by name."""
        return {f"{prefix}.{name}": value for name, value in vars(self).items()}

    def restore(self, prefix: str, state: dict[str, Tensor]) -> None:
        """The tables of a ``state``."""
        for name in vars(self):
            setattr(self, name, state[f"{prefix}.{name}"].clone())


def keep_text(masks: Tensor, tile: tuple[int, int], site: CallSite) -> Tensor:
    """Masks ``[..., Tq, Tk]`` with the tiles that hold text kept, as plans keep them."""
    if site.grid.text:
        masks[..., site.grid.video // tile[0] :, :] = True
        masks[..., site.grid.video // tile[1] :] = True
    return masks


def selected_share(masks: Tensor, tile: tuple[int, int], tokens: int) -> Tensor:
    """Share of query-key pairs that ``masks`` ``[..., Tq, Tk]`` hold."""
    rows, keys = (tile_sizes(tokens, size, masks.device).float() for size in tile)
    return ((masks.float() @ keys) * rows).sum(-1) / float(tokens) ** 2


def as_multiplied(
    method: SparseMethod, q: Tensor, k: Tensor, gate: Gate | None = None
) -> tuple[Tensor, Tensor] | None:
    """q and k as the method's products see them, where these are in 8 bits, else None."""
    asked = method.quantize
    kind = None if asked == "none" else asked
    if asked == "auto":
        kind = eight_bits_that_pay("auto", q.device, q.dtype, q.shape[-1], gate=gate)
    if kind is None:
        return None
    # without the mean key, which adds the same to all scores of a row.
    return quantize_qk(q, k, kind, q_run=method.tile[0]).dequantized(torch.float32)


def beside_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: tuple[Tensor, Tensor] | None,
    rows: int,
    keys: int,
    scale: float,
) -> Iterator[tuple[Tensor, Band]]:
    """The bands of one head, each beside its dense output ``[n, M, D]``, which is never rounded.

    ``seen`` are q and k as ``as_multiplied`` gives them, of that head.
    """
    exact = bands(q, k, v, rows, keys, scale)
    if seen is None:
        yield from ((band.dense(), band) for band in exact)
    else:
        rounded = bands(*seen, v, rows, keys, scale)
        yield from ((one.dense(), band) for one, band in zip(exact, rounded, strict=True))


def masked_errors(
    masks: Tensor,
    tile: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rounded: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """What ``masks`` ``[C, B, H, Tq, Tk]`` would do to one call, ``[B, H, S, D]`` each.

    Relative L1 distances to dense attention, sum|O - O'| / sum|O|, and shares of pairs kept, both
    fp32 ``[B, H, C]``. With ``rounded``, q and k as ``as_multiplied`` gives them, what rounding
    costs is part of the distance. Tiles are not merged into blocks of rows here, which only adds
    keys.
    """
    tokens = q.shape[2]
    errors = q.new_zeros(*q.shape[:2], len(masks), dtype=torch.float32)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            one = (q[b, h], k[b, h], v[b, h])
            seen = None if rounded is None else (rounded[0][b, h], rounded[1][b, h])
            size = torch.zeros((), device=q.device)
            for dense, band in beside_dense(*one, seen, *tile, q.shape[-1] ** -0.5):
                sparse = band.outputs(masks[:, b, h, band.tiles])
                errors[b, h] += sparse.sub_(dense).abs_().sum((1, 2, 3))
                size += dense.abs().sum()
            errors[b, h] /= size.clamp_min(1e-30)
    return errors, selected_share(masks, tile, tokens).permute(1, 2, 0)
