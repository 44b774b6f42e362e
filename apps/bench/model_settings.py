"""What ``vidsparse bench model`` measures: models, videos, tiles and formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from vidsparse.apps.bench.model_rows import ModelRow
from vidsparse.apps.bench.model_shapes import MODEL_SHAPES, Latent, ModelShape
from vidsparse.errors import OptionError

EXACT: Final = "none"
"""What stands for no 8-bit format."""

SKEW: Final = 0.5
"""List lengths are from half to one and a half of the mean: heads and rows differ in a real model
too."""

TOP_P: Final = 0.9
"""What the real plan, which is timed, is made with."""

PLAN: Final = f"real mask and plan timed; kernel on random lists, skew {SKEW}"
"""How sparse steps run, for the head of a file."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One sparse forward: the tile (M, N) of FG-Attn, and the 8-bit format of q·k or None."""

    tile: tuple[int, int]
    quantize: str | None

    @property
    def name(self) -> str:
        """The tile as one types it."""
        return f"{self.tile[0]}x{self.tile[1]}"

    def __str__(self) -> str:
        return f"tile {self.name}" + (f", {self.quantize}" if self.quantize else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What to measure of one model.

    Args:
        family: name in ``MODEL_SHAPES``.
        latent: the video.
        layers: transformer layers, or None for all.
        computed: density of the plan that the kernel runs.
        warmup: share of steps that stay dense.
        steps: steps of the projected run.
        implementation: kernel, or ``auto``.
        sparse: tiles (M, N) of FG-Attn and formats of q·k (``EXACT`` for none), one row each.
    """

    family: str
    latent: Latent
    layers: int | None
    computed: float
    warmup: float
    steps: int
    implementation: str
    sparse: tuple[Variant, ...]

    @property
    def model(self) -> ModelShape:
        """The published model."""
        return MODEL_SHAPES[self.family]

    @property
    def shape(self) -> str:
        """Width x height x frames."""
        return f"{self.latent.width}x{self.latent.height}x{self.latent.frames}"

    def covers(self, row: ModelRow, variant: Variant) -> bool:
        """Whether ``row`` is this setting's, in this variant."""
        return (
            (row.family, row.shape, row.asked, row.warmup, row.steps)
            == (self.family, self.shape, self.computed, self.warmup, self.steps)
            and row.tile == variant.name
            and row.layers == (self.layers or self.model.full_layers())
            and row.impl.partition(" ")[2] == (variant.quantize or "")
            and self.implementation in ("auto", row.impl.partition(" ")[0])
        )


def latent_of(family: str, size: tuple[int, int] | None, frames: int | None) -> Latent:
    """What the video of a published model becomes; None is the model's own.

    Args:
        family: name in ``MODEL_SHAPES``.
        size: width and height in pixels.
        frames: video frames.

    Raises:
        OptionError: the model makes no such video.
    """
    model = MODEL_SHAPES[family]
    width, height = size or (model.width, model.height)
    try:
        return model.latent(width, height, frames or model.frames)
    except OptionError as error:
        raise OptionError(f"{family}: {error}") from None


def settings_of(
    families: Sequence[str],
    size: tuple[int, int] | None,
    frames: int | None,
    layers: int | None,
    computed: float | None,
    warmup: float | None,
    tiles: Sequence[tuple[int, int]],
    quantize: Sequence[str],
    **common: Any,
) -> list[Setting]:
    """One setting for each family, checked before anything is built; None is the model's own.

    Args:
        families: names in ``MODEL_SHAPES``.
        size: width and height in pixels.
        frames: video frames.
        layers: transformer layers, or None for all.
        computed: density of the plan that the kernel runs.
        warmup: share of steps that stay dense.
        tiles: of FG-Attn.
        quantize: formats of q·k.
        common: the arguments of ``Setting`` that are the same for all.

    Raises:
        OptionError: a model makes no such video, or has fewer layers.
    """

    settings = []
    for family in families:
        model, latent = MODEL_SHAPES[family], latent_of(family, size, frames)
        if layers is not None and layers > (full := model.full_layers()):
            raise OptionError(f"{family} has {full} layers, not {layers}")
        settings.append(
            Setting(
                family=family,
                latent=latent,
                layers=layers,
                computed=model.computed if computed is None else computed,
                warmup=model.warmup if warmup is None else warmup,
                sparse=tuple(
                    Variant(tile, None if form == EXACT else form)
                    for tile in tiles or (model.tile,)
                    for form in quantize
                ),
                **common,
            )
        )
    return settings
