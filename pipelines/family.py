"""The form in which a model family is declared: class names, units, usual settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

DEFAULT_METHOD: Final = "fg-attn"
"""What runs where neither the request nor the model names a method: it needs no calibration."""

TOGETHER: Final = (
    "does not run its unconditional branch in a forward of its own, which is what the cache "
    "guidance leaves out. Hint: leave --cache out."
)
"""Why a family, or a pipeline, cannot have that cache, behind its name."""

SCHEDULED: Final = ("dense_steps", "dense_layers", "dense_last_layers", "reuse", "refresh")
"""The settings that a model may have for each method."""


# options of methods that say how much is kept, of which one alone is given.
_OF_MASS: Final = ("top_p", "tau")
_OF_TILES: Final = ("topk", "blocks")


def beside(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``own`` that may stand beside those that are ``given``.

    A share or a number of tiles takes the place of a share of the mass.
    """
    of_tiles = any(given.get(name) is not None for name in _OF_TILES)
    left_out = (*_OF_MASS, *_OF_TILES) if of_tiles else ()
    return {name: value for name, value in own.items() if name not in left_out}


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
        embedded: whether that scale is an input of the transformer, which learnt its effect, so
            that a step is one forward.
        features: of a token in the transformer; None where its configuration does not tell.
        fps: frames per second of the written video.
        frame_factor: valid frame counts are ``frame_factor * k + frame_rest``.
        frame_rest: see ``frame_factor``.
        size_factor: width and height are multiples of this.
        order: token order that sparse attention cuts its tiles in.
        dense_steps: first steps kept dense (decimal: share rounded up; integer: count).
        dense_layers: first layers kept dense.
        dense_last_layers: last layers kept dense.
        reuse: steps that a plan serves.
        refresh: steps at which sparse layers compute everything and keep what their plan lacks;
            None leaves them to the method.
        method: the method that runs if none is asked for.
        method_options: by method, options that differ from the method's own defaults.
        schedules: by method, settings that are better for it than the ones above: any of
            ``dense_steps``, ``dense_layers``, ``dense_last_layers``, ``reuse`` and ``refresh``.
        speeds: by the name of ``--speed``, what this model's bundles change (``method_options``,
            ``schedule``, ``cache``, ``cache_threshold``) and the quality measured with them:
            ``psnr``, the mean in dB against the dense run, over ``prompts`` prompts, with layers in
            the format ``linear`` if that is not the model's.
        presets: by method, files of calibrated numbers that come with the model.
        on_cpu: ``frames``, ``width`` and ``height`` without a GPU, if those above would take hours
            there.
        source: where these settings of sparse attention come from.
    """

    family: str
    frames: int
    width: int
    height: int
    steps: int
    guidance: float
    embedded: bool = False
    features: int | None = None
    fps: int
    frame_factor: int
    size_factor: int
    frame_rest: int = 1
    order: str = "hilbert"
    dense_steps: int | float
    dense_layers: int | float = 0
    dense_last_layers: int | float = 0
    reuse: int = 1
    refresh: int | float | None = None
    method: str = DEFAULT_METHOD
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    schedules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    speeds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    presets: Mapping[str, str] = field(default_factory=dict)
    on_cpu: Mapping[str, Any] = field(default_factory=dict)
    source: str

    @property
    def one_forward(self) -> bool:
        """Whether a step of this model is one forward, rather than one for each guidance branch."""
        return self.embedded or self.guidance <= 1

    def for_transformer(self, config: Mapping[str, Any]) -> Defaults:
        """These defaults for a transformer of that configuration."""
        heads, each = config.get("num_attention_heads"), config.get("attention_head_dim")
        features = config.get("model_dim")
        if isinstance(heads, int) and isinstance(each, int):
            features = heads * each
        embedded = bool(config.get("guidance_embeds", self.embedded))
        return replace(self, embedded=embedded, features=features)

    def with_method(self, method: str) -> Defaults:
        """These defaults with this model's schedule for ``method``."""
        return replace(self, **self.schedules.get(method, {}))

    def options_beside(self, method: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """This model's options for ``method`` that may stand beside those that are ``given``."""
        return beside(self.method_options.get(method, {}), given)

    def on(self, device: str) -> Defaults:
        """These defaults with the video that the model makes on ``device``."""
        return replace(self, **self.on_cpu) if device == "cpu" else self

    @property
    def few_frames(self) -> int:
        """Frames of the shortest video that has more than one in its latent."""
        return self.frame_factor + self.frame_rest

    def frames_within(self, most: float) -> int:
        """The next valid number of frames at or below ``most``; the least one if there is none."""
        parts = int(most - self.frame_rest) // self.frame_factor
        return max(0, parts) * self.frame_factor + self.frame_rest

    def frame_groups(self, frames: int) -> int:
        """``k`` of a video of so many frames, and one for the rest: its tokens grow with that.

        In families that ``generate`` runs these are the frames of its latent.
        """
        return (frames - self.frame_rest) // self.frame_factor + 1

    def tokens_beyond(self, other: Defaults) -> float:
        """Video tokens of this one's video, as a multiple of the ``other``'s."""

        def volume(own: Defaults) -> int:
            return own.frame_groups(own.frames) * own.width * own.height

        return volume(self) / volume(other)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model family: the diffusers classes it covers, and how its models usually run.

    Args:
        name: as errors and tables print it.
        adapter: the module of this package that attaches to it.
        text_to_video: pipeline classes that make a video from text alone; ``generate`` runs these.
            Empty if diffusers has modular pipelines only.
        image_to_video: classes that make a video from text and its first frame; ``generate`` runs
            these.
        image_twin: the class of ``image_to_video`` that runs with a text-to-video model's weights.
        image_twin_if: entry of ``model_index.json`` that must be true for that, if any.
        last_image: the class of ``image_to_video`` that also takes the last frame.
        keyframes: the class of ``image_to_video`` that also takes frames in between.
        other: further pipeline classes around the same transformer; ``sparsify`` takes these too.
        refused: classes whose attention is of another kind, each with a description of it.
        libraries: modules of diffusers' pipelines that its models take components from.
        vae_fp32: whether its VAE decodes visibly worse in 16 bits.
        vae_tiling: whether decoding a whole video at once takes more memory than denoising it.
        caches: step caches that work with it (``first-block`` if diffusers knows its blocks,
            ``guidance`` if guidance makes two forwards a step).
        sound: whether it makes sound beside the video.
        defaults: settings of a model that has none of its own.
    """

    name: str
    adapter: str
    text_to_video: tuple[str, ...]
    image_to_video: tuple[str, ...] = ()
    image_twin: str | None = None
    image_twin_if: str | None = None
    last_image: str | None = None
    keyframes: str | None = None
    other: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    vae_fp32: bool = False
    vae_tiling: bool = False
    caches: tuple[str, ...] = ("first-block", "taylorseer")
    sound: bool = False
    defaults: Defaults

    @property
    def pipelines(self) -> tuple[str, ...]:
        """Every pipeline class of the family."""
        return self.text_to_video + self.image_to_video + self.other
