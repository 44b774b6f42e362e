"""What is known of each model family without loading it: class names, units, usual settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """The settings a model generates with when a request leaves them open, and its units.

    Args:
        family: the family's name, as errors print it.
        frames: video frames.
        width: pixels.
        height: pixels.
        steps: denoising steps.
        guidance: classifier-free guidance scale; 1 or less turns guidance off.
        fps: frames per second of the written video.
        order: token order that sparse attention cuts its tiles in.
        frame_factor: valid frame counts are ``frame_factor * k + 1``.
        size_factor: width and height are multiples of this.
    """

    family: str
    frames: int
    width: int
    height: int
    steps: int
    guidance: float
    fps: int
    order: str
    frame_factor: int
    size_factor: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model family: the diffusers classes it covers, and how its models usually run.

    Args:
        name: as errors and tables print it.
        text_to_video: pipeline classes that make a video from text alone; ``generate`` runs these.
        other: further pipeline classes around the same transformer; ``sparsify`` takes these too.
        defaults: settings of a model that brings none of its own.
    """

    name: str
    text_to_video: tuple[str, ...]
    other: tuple[str, ...]
    defaults: Defaults

    @property
    def pipelines(self) -> tuple[str, ...]:
        """Every pipeline class of the family."""
        return self.text_to_video + self.other


WAN: Final = Family(
    name="Wan",
    text_to_video=("WanPipeline",),
    other=("WanImageToVideoPipeline", "WanVideoToVideoPipeline"),
    # the call defaults of diffusers' WanPipeline, and the frame rate Wan was trained at.
    defaults=Defaults(
        family="Wan",
        frames=81,
        width=832,
        height=480,
        steps=50,
        guidance=5.0,
        fps=16,
        # SpargeAttn (section 3.7) orders video tokens on a Hilbert curve.
        order="hilbert",
        frame_factor=4,
        size_factor=16,
    ),
)

FAMILIES: Final[tuple[Family, ...]] = (WAN,)
"""The supported families."""


def supported_pipelines() -> str:
    """The class names that ``sparsify`` takes, for error messages."""
    return ", ".join(name for family in FAMILIES for name in family.pipelines)
