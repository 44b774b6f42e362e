"""What a small model declares: its layout in diffusers, how it learns, what its card says.

A subclass of ``SmallModel`` is one architecture: what its parts are made of, and the few places
where training one differs from training another. Everything else (crops, latents, optimizers,
averages, checkpoints, export, checks) is written once, in ``vae``, ``train``, ``export`` and
``card``.

Shapes: clips [B, 3, T, H, W] in [-1, 1]; latents [B, C, t, h, w].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from vidsparse.pipelines.family import DEFAULT_METHOD

from .worlds import World

LICENSE: Final = "Apache-2.0"


@dataclass(frozen=True, kw_only=True)
class ClipSize:
    """Frames and side in pixels of whole training clips."""

    frames: int
    side: int

    def __str__(self) -> str:
        return f"{self.frames}x{self.side}x{self.side}"


@dataclass(frozen=True, kw_only=True)
class Crop:
    """One shape of training crop: frames, side in pixels, and how many make a batch."""

    frames: int
    side: int
    batch: int
    share: float


@dataclass(frozen=True, kw_only=True)
class LatentPlan:
    """How many clips of one size a cycle draws, in batches that fit on the device.

    With a ``course`` of more frames they are the beginning of clips of so many, at their pace.
    """

    size: ClipSize
    batch: int
    batches: int
    course: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Which latents a training step takes, how many, and in what share of the steps.

    Several processes that train together take their parts of ``batch``.
    The plan is active from ``begins`` to ``ends``, shares of the training time. ``lean`` multiplies
    the shift of its times towards noise: the longer a clip, the more of its plan noise hides.
    """

    source: int
    batch: int
    share: float
    begins: float = 0.0
    ends: float = 1.0
    lean: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a training run does, in minutes of wall clock, and how large its parts are.

    Args:
        vae_minutes: for the autoencoder.
        latent_minutes: for drawing and encoding the transformer's clips.
        transformer_minutes: for the transformer and its text encoder.
        crops: what the autoencoder learns from.
        sizes: the sizes that the model is made for.
        pool_clips: clips of each of them that the crops are taken from.
        latent_plans: what is drawn for the transformer.
        step_plans: what its steps take of that.
        check_clips: held-out clips of each size that the autoencoder is checked on.
        learning_rate: AdamW's, for embeddings, norms, first and last layers.
        muon_rate: Muon's, for the matrices inside the blocks.
        vae_muon_rate: the same for the autoencoder, where Muon is to train it.
        body_weight: how often the transformer's loss counts an error where a body is, against once
            elsewhere, in worlds that know where. So much for a body of a fortieth of the picture;
            smaller ones count more and larger ones less, so that each is worth about the same.
        naming: how much a second loss counts beside it: that of telling, in the middle of the
            transformer, which kind of body is where, in the same worlds.
    """

    vae_minutes: float
    latent_minutes: float
    transformer_minutes: float
    crops: tuple[Crop, ...]
    sizes: tuple[ClipSize, ...]
    pool_clips: tuple[int, ...]
    latent_plans: tuple[LatentPlan, ...]
    step_plans: tuple[StepPlan, ...]
    check_clips: int = 8
    learning_rate: float = 1.2e-3
    muon_rate: float = 3e-3
    vae_muon_rate: float | None = None
    body_weight: float = 1.0
    naming: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Card:
    """What commands take where a user gives nothing, and what ``vidsparse.json`` says.

    Args:
        description: one sentence, as ``vidsparse models`` prints it.
        steps: denoising steps.
        guidance: classifier-free guidance scale.
        frames: video frames.
        size: WIDTHxHEIGHT.
        fps: frames per second of the written video.
        on_cpu: frames and WIDTHxHEIGHT where there is no GPU, if the above would take hours there.
        order: token order that sparse attention cuts its tiles in.
        dense_layers: first layers kept dense.
        dense_last_layers: last layers kept dense.
        reuse: steps that a plan serves.
        method_options: options of methods by their names, where they differ from the methods' own.
        method: what runs where no method is asked for.
        schedules: dense steps and the like of methods that are best with others than these.
        speeds: what the bundles of ``--speed`` change, and what was measured with them.
        limits: what else the card admits, a sentence each.
    """

    description: str
    steps: int
    guidance: float
    frames: int = 33
    size: str = "256x256"
    fps: int = 16
    on_cpu: tuple[int, str] | None = None
    order: str = "rowmajor"
    dense_layers: int
    dense_last_layers: int
    reuse: int
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    method: str = DEFAULT_METHOD
    schedules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    speeds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    limits: tuple[str, ...] = ()


class SmallModel(ABC):
    """One small model: classes of diffusers and transformers, and how they are trained."""

    name: ClassVar[str]
    world: ClassVar[World]
    card: ClassVar[Card]
    recipe: ClassVar[Recipe]
    further: ClassVar[Recipe | None] = None
    """What training saved weights further takes instead, where that differs."""
    pipeline_class: ClassVar[Any]
    vae_class: ClassVar[Any]
    transformer_class: ClassVar[Any]
    encoder_class: ClassVar[Any]
    block_class: ClassVar[type[nn.Module]]
    """The transformer's repeated block, compiled once for all of them."""
    vae_fp32: ClassVar[bool]
    """The pipeline decodes in fp32 whatever the transformer's precision."""
    shard_size: ClassVar[str] = "20MB"
    """The largest file of weights in the exported folder."""

    @abstractmethod
    def build_vae(self) -> Any:
        """An autoencoder with random weights."""

    @abstractmethod
    def build_transformer(self) -> Any:
        """A transformer with random weights."""

    @abstractmethod
    def build_text_encoder(self) -> Any:
        """A text encoder with random weights, over the words of its world."""

    @abstractmethod
    def build_scheduler(self) -> Any:
        """The scheduler it ships with, on the noise it was trained on."""

    @abstractmethod
    def prepare_vae(self, vae: Any) -> Any:
        """Make ``vae`` fast to train, in place; its weights keep their values and names."""

    @abstractmethod
    def encode(self, vae: Any, clip: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the latents of ``clip``, computed in the clip's precision."""

    @abstractmethod
    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """The clip of ``latents``, unclamped, so that training sees overshoot."""

    @abstractmethod
    def normalise(self, vae: Any, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        """Tell ``vae`` the moments [C] of its latents, in its config or in its weights.

        Returns:
            What the pipeline takes off these latents and what it divides them by, [C] each.
        """

    @abstractmethod
    def moments(self, vae: Any) -> tuple[Tensor, Tensor]:
        """What the pipeline takes off ``vae``'s latents and divides them by, [C] each."""

    @abstractmethod
    def embed(self, encoder: Any, ids: Tensor) -> Tensor:
        """Text embeddings of padded ids [B, L] at the pipeline's own length."""

    @abstractmethod
    def corrupt(self, clean: Tensor, noise: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Noisy latents, timesteps [B] and target of latents, from even places ``u`` [B]."""

    @abstractmethod
    def predict(
        self, transformer: Any, noisy: Tensor, timestep: Tensor, embedded: Tensor
    ) -> Tensor:
        """What the transformer makes of ``noisy`` [B, C, t, h, w], in the same layout."""

    @abstractmethod
    def parts(self, transformer: Any, encoder: Any, vae: Any) -> str:
        """The model card's list of parts, in Markdown."""

    @abstractmethod
    def tokens(self, transformer: Any, vae: Any, size: ClipSize) -> int:
        """Video tokens of a clip."""


def millions(model: nn.Module) -> str:
    """How many parameters, for a card."""
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}"


def channels_last(model: nn.Module) -> Any:
    """Lay the weights out as the convolutions want them; the values stay."""
    for module in model.modules():
        if isinstance(module, nn.Conv3d):
            weight = module.weight.data.contiguous(memory_format=torch.channels_last_3d)
            module.weight.data = weight
        elif isinstance(module, nn.Conv2d):
            weight = module.weight.data.contiguous(memory_format=torch.channels_last)
            module.weight.data = weight
    return model
