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
        adapter: the module of this package that attaches to it.
        text_to_video: pipeline classes that make a video from text alone; ``generate`` runs these.
        image_to_video: those that make one from text and its first frame; ``generate`` runs these.
        other: further pipeline classes around the same transformer; ``sparsify`` takes these too.
        defaults: settings of a model that brings none of its own.
    """

    name: str
    adapter: str
    text_to_video: tuple[str, ...]
    image_to_video: tuple[str, ...] = ()
    other: tuple[str, ...]
    defaults: Defaults

    @property
    def pipelines(self) -> tuple[str, ...]:
        """Every pipeline class of the family."""
        return self.text_to_video + self.image_to_video + self.other


WAN: Final = Family(
    name="Wan",
    adapter="wan",
    text_to_video=("WanPipeline",),
    other=("WanImageToVideoPipeline", "WanVideoToVideoPipeline", "WanVACEPipeline"),
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

HUNYUAN_VIDEO: Final = Family(
    name="HunyuanVideo",
    adapter="hunyuan_video",
    text_to_video=(),
    other=(
        "HunyuanVideoPipeline",
        "HunyuanVideoImageToVideoPipeline",
        "HunyuanSkyreelsImageToVideoPipeline",
    ),
    # the call defaults of diffusers' HunyuanVideoPipeline, and the frame rate of its training.
    defaults=Defaults(
        family="HunyuanVideo",
        frames=129,
        width=1280,
        height=720,
        steps=50,
        guidance=6.0,
        fps=24,
        order="hilbert",
        frame_factor=4,
        size_factor=16,
    ),
)

HUNYUAN_VIDEO_15: Final = Family(
    name="HunyuanVideo 1.5",
    adapter="hunyuan_video15",
    text_to_video=(),
    other=("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
    # the call defaults of diffusers' HunyuanVideo15Pipeline; guidance is that of the checkpoints.
    defaults=Defaults(
        family="HunyuanVideo 1.5",
        frames=121,
        width=848,
        height=480,
        steps=50,
        guidance=6.0,
        fps=24,
        order="hilbert",
        frame_factor=4,
        size_factor=16,
    ),
)

COGVIDEOX: Final = Family(
    name="CogVideoX",
    adapter="cogvideox",
    text_to_video=(),
    other=(
        "CogVideoXPipeline",
        "CogVideoXImageToVideoPipeline",
        "CogVideoXVideoToVideoPipeline",
        "CogVideoXFunControlPipeline",
    ),
    # those of CogVideoX 1.0. its VAE takes latent frames in pairs after the first: 8k+1 frames.
    defaults=Defaults(
        family="CogVideoX",
        frames=49,
        width=720,
        height=480,
        steps=50,
        guidance=6.0,
        fps=8,
        order="hilbert",
        frame_factor=8,
        size_factor=16,
    ),
)

MOCHI: Final = Family(
    name="Mochi",
    adapter="mochi",
    text_to_video=(),
    other=("MochiPipeline",),
    # the call defaults of diffusers' MochiPipeline, at the 5.4 seconds that the model was made for.
    defaults=Defaults(
        family="Mochi",
        frames=163,
        width=848,
        height=480,
        steps=64,
        guidance=4.5,
        fps=30,
        order="hilbert",
        frame_factor=6,
        size_factor=16,
    ),
)

LTX: Final = Family(
    name="LTX-Video",
    adapter="ltx",
    text_to_video=(),
    other=("LTXPipeline", "LTXImageToVideoPipeline"),
    # the call defaults of diffusers' LTXPipeline.
    defaults=Defaults(
        family="LTX-Video",
        frames=161,
        width=704,
        height=512,
        steps=50,
        guidance=3.0,
        fps=25,
        order="hilbert",
        frame_factor=8,
        size_factor=32,
    ),
)

LTX_2: Final = Family(
    name="LTX-2",
    adapter="ltx2",
    text_to_video=(),
    other=("LTX2Pipeline", "LTX2ImageToVideoPipeline"),
    # the call defaults of diffusers' LTX2Pipeline.
    defaults=Defaults(
        family="LTX-2",
        frames=121,
        width=768,
        height=512,
        steps=30,
        guidance=3.0,
        fps=24,
        order="hilbert",
        frame_factor=8,
        size_factor=32,
    ),
)

FAMILIES: Final[tuple[Family, ...]] = (
    WAN,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO_15,
    COGVIDEOX,
    MOCHI,
    LTX,
    LTX_2,
)
"""The supported families."""


def supported_pipelines() -> str:
    """The class names that ``sparsify`` takes, for error messages."""
    return ", ".join(name for family in FAMILIES for name in family.pipelines)
