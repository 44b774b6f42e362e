"""What ``vidsparse bench attention`` times: shapes, lists and inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from vidsparse.grid import TokenGrid

Tile = tuple[int, int]

KERNEL = "kernel"
WITH_PLAN = "kernel and plan"
WHOLE = "kernel, plan and mask"
PLANNING = "plan and mask"
DENSE = "dense kernel"

SMALL_SHIFT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the bench before it is measured.

    Args:
        counts: what the time and the ratio hold, one of the constants above.
        tile: (M, N), query rows and keys of a tile.
        kept: share of key chunks in a tile's list. For ``PLANNING`` it is what top-p finds, for
            ``DENSE``, which has no lists, 1.
        skew: list lengths are spread evenly over ``kept * (1 - skew)`` to ``kept * (1 + skew)``.
        merge: how tiles form blocks.
        quantize: ``int8`` or ``fp8`` q·k. Rounding counts as part of the kernel's time, or of the
            plan's where one pass rounds and pools.
        implementations: those to time; empty for all that run.
    """

    counts: str
    tile: Tile
    kept: float
    seq_len: int
    heads: int
    head_dim: int = 128
    skew: float = 0.0
    merge: str = "consecutive"
    quantize: str | None = None
    implementations: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the row's numbers are of."""
        name = f"{self.counts}, skew {self.skew:g}" if self.skew else self.counts
        return f"{name}, {self.quantize}" if self.quantize else name


def _suite() -> Iterator[Case]:
    long, longer = (32_768, 16), (75_600, 8)
    for kept, tile in ((0.3, (128, 16)), (0.5, (128, 16)), (0.3, (128, 128))):
        for seq_len, heads in (long, longer):
            yield Case(counts=KERNEL, tile=tile, kept=kept, seq_len=seq_len, heads=heads)
    first = Case(counts=KERNEL, tile=(128, 16), kept=0.3, seq_len=long[0], heads=long[1])
    yield replace(first, tile=(128, 1))
    yield replace(first, counts=WITH_PLAN, tile=(64, 16), merge="xor-window")
    yield replace(first, skew=0.8)
    yield replace(first, seq_len=8_192)
    yield replace(first, seq_len=17_776, heads=48, head_dim=64)
    for kind in ("int8", "fp8"):
        yield replace(
            first,
            counts=WHOLE,
            tile=(128, 64),
            seq_len=longer[0],
            heads=longer[1],
            quantize=kind,
            implementations=("gluon", "triton"),
        )
    yield replace(
        first, counts=PLANNING, tile=(16, 16), seq_len=75_600, heads=40, merge="xor-window"
    )
    for seq_len, heads in ((8_192, 16), long, longer, (118_896, 6)):
        yield Case(counts=DENSE, tile=(128, 128), kept=1.0, seq_len=seq_len, heads=heads)
    yield replace(first, counts=DENSE, tile=(128, 128), kept=1.0, quantize="int8")


SUITE: Final[tuple[Case, ...]] = tuple(
    replace(case, seq_len=case.seq_len - less) for case in _suite() for less in (0, SMALL_SHIFT)
)
"""The standard cases, each also with a length that fills neither blocks nor chunks of 128."""


def random_mask(case: Case, device: torch.device) -> torch.Tensor:
    """Random lists of the case's lengths: bool ``[1, H, Tq, Tk]``.

    Lengths are the same in every head and dealt at random over its query tiles; their mean is
    ``kept`` whatever the skew.
    """
    import torch

    q_tiles, k_tiles = (-(-case.seq_len // size) for size in case.tile)
    spread = torch.linspace(1 - case.skew, 1 + case.skew, q_tiles, device=device)
    count = (spread * case.kept * k_tiles).round().long().clamp(1, k_tiles)
    mask = torch.empty(1, case.heads, q_tiles, k_tiles, dtype=torch.bool, device=device)
    place = torch.arange(k_tiles, device=device)
    for head in mask[0]:
        # by head: random numbers for all of them would be gigabytes.
        dealt = count[torch.randperm(q_tiles, device=device)]
        rank = torch.rand(q_tiles, k_tiles, device=device).argsort(-1)
        head.scatter_(-1, rank, place < dealt.unsqueeze(1))
    return mask


def structured_qk(
    grid: TokenGrid, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k ``[1, H, S, D]`` of ``grid`` in row-major order, with the locality of a real video.

    Random Fourier features of a token's place (Rahimi and Recht 2007): the score of two tokens is a
    Gaussian of their distance, wider in some heads than in others, plus noise. Random normal q and
    k would make a pooled softmax flat and top-p keep nearly everything.
    """
    import torch

    axes = [torch.arange(n, device=device) / n for n in (grid.frames, grid.height, grid.width)]
    place = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).view(-1, 3)
    made = [torch.empty(1, heads, len(place), dim, dtype=dtype, device=device) for _ in "qk"]
    for head in range(heads):
        width = 0.05 * 4 ** (head / max(1, heads - 1))
        waves = torch.randn(3, dim, device=device) / width
        phase = torch.rand(dim, device=device) * (2 * math.pi)
        feature = math.sqrt(2) * torch.cos(place @ waves + phase)
        # scores reach sharpness where two tokens share a place.
        sharpness = 9.0
        gain = math.sqrt(sharpness / math.sqrt(dim))
        for x in made:
            x[0, head] = (gain * (feature + 0.5 * torch.randn_like(feature))).to(dtype)
    return made[0], made[1]
