"""Published transformers with their sizes, built with random weights: what ``bench model`` runs.

Speed does not depend on what the weights are, so nothing is downloaded. Configurations are those of
the published checkpoints (``source`` says where they are written down); everything else, such as
rotary tables and which parts stay in fp32, is made by diffusers itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from vidsparse.errors import OptionError

if TYPE_CHECKING:
    import torch

# audio latents a second of LTX-2: sampling rate / hop length / compression in time.
LTX2_AUDIO_RATE = 16_000 / 160 / 4
LTX2_FPS = 24.0
# tokens of a prompt of two or three sentences, where a family pads the rest.
PROMPT_TOKENS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """The video that a transformer is given: pixels, and the latent they become."""

    width: int
    height: int
    frames: int
    latent_frames: int
    latent_height: int
    latent_width: int


Inputs = Callable[[Any, Any, Latent, Callable[..., "torch.Tensor"]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One published model and the setting it is measured at.

    Args:
        checkpoint: the repository whose transformer has this configuration.
        source: where the configuration is written down.
        pipeline: its diffusers pipeline class.
        transformer: its diffusers transformer class.
        config: arguments of that class; what is absent has diffusers' default.
        blocks: the transformer's lists of blocks, and the argument that says how long each is.
        width: pixels, as published.
        height: pixels.
        frames: video frames.
        frame_factor: frames are ``frame_factor * k + frame_rest``.
        frame_rest: what is left of them.
        latent_factor: latent frames of each ``k``.
        latent_rest: latent frames of what is left.
        size_factor: width and height are multiples of this.
        compression: pixels along a side of one latent pixel.
        computed: density of sparse steps that the standard row is measured at.
        warmup: share of steps that stay dense there.
        tile: tile of FG-Attn there.
        forwards: transformer calls of one denoising step.
        batch: samples in each.
        step: the same in words.
        masked: stock attention runs over padded text with a mask; the dense reference leaves the
            padding out as our adapter does.
        inputs: ``(pipeline, transformer, latent, random tensor) -> arguments`` of one call.
    """

    checkpoint: str
    source: str
    pipeline: str
    transformer: str
    config: Mapping[str, Any]
    blocks: Mapping[str, str]
    width: int
    height: int
    frames: int
    frame_factor: int
    frame_rest: int = 1
    latent_factor: int = 1
    latent_rest: int = 1
    size_factor: int
    compression: int
    computed: float
    warmup: float
    tile: tuple[int, int] = (32, 32)
    forwards: int
    batch: int
    step: str
    masked: bool = False
    inputs: Inputs

    def latent(self, width: int, height: int, frames: int) -> Latent:
        """What a video of this size becomes.

        Raises:
            OptionError: the model makes no such videos.
        """
        if width < 1 or height < 1 or width % self.size_factor or height % self.size_factor:
            raise OptionError(
                f"width and height must be multiples of {self.size_factor}, got {width}x{height}"
            )
        parts, more = divmod(frames - self.frame_rest, self.frame_factor)
        if parts < 0 or more:
            raise OptionError(
                f"frames must be {self.frame_factor}k+{self.frame_rest}, got {frames}. "
                f"Hint: {max(0, parts) * self.frame_factor + self.frame_rest}."
            )
        return Latent(
            width=width,
            height=height,
            frames=frames,
            latent_frames=parts * self.latent_factor + self.latent_rest,
            latent_height=height // self.compression,
            latent_width=width // self.compression,
        )

    def frames_of(self, latent_frames: int) -> int:
        """Video frames that become as many latent frames, or the fewer nearest to them."""
        parts = max(0, (latent_frames - self.latent_rest) // self.latent_factor)
        return parts * self.frame_factor + self.frame_rest

    def full_layers(self) -> int:
        """Transformer layers of the published model."""
        parameters = inspect.signature(self._class(self.transformer).__init__).parameters
        return sum(
            self.config.get(count, parameters[count].default) for count in self.blocks.values()
        )

    def build(self, layers: int | None, dtype: torch.dtype, device: torch.device) -> Any:
        """The transformer with random weights, made on ``device``; fewer ``layers`` if asked for.

        Raises:
            OptionError: more layers than the published model has.
        """
        import torch

        counts = self._layer_counts(layers)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = self._class(self.transformer)(**{**self.config, **counts})
        finally:
            torch.set_default_dtype(before)
        # loading a checkpoint keeps these parts in fp32, which costs time.
        exact = set(model._keep_in_fp32_modules or ())
        for name, parameter in model.named_parameters():
            if exact.intersection(name.split(".")):
                parameter.data = parameter.data.float()
        return model.eval().requires_grad_(False)

    def pipe(self, transformer: Any) -> Any:
        """The pipeline around ``transformer``, without text encoders and autoencoder.

        Its scheduler stands before the first of 50 steps.
        """
        from diffusers import FlowMatchEulerDiscreteScheduler, ModularPipeline

        kind = self._class(self.pipeline)
        scheduler = FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(50)
        parts = {"scheduler": scheduler, "transformer": transformer}
        if issubclass(kind, ModularPipeline):
            # is filled once it is there.
            pipe = kind()
            for name, part in parts.items():
                setattr(pipe, name, part)
            return pipe
        needed = [
            name
            for name, parameter in inspect.signature(kind.__init__).parameters.items()
            if name != "self" and parameter.default is inspect.Parameter.empty
        ]
        return kind(**{**dict.fromkeys(needed), **parts})

    def _layer_counts(self, layers: int | None) -> dict[str, int]:
        if layers is None:
            return {}
        full = self.full_layers()
        if layers > full:
            raise OptionError(f"the model has {full} layers, not {layers}")
        first, *others = self.blocks.values()
        if not others:
            return {first: layers}
        # two kinds of blocks, in their proportion as far as it goes, the first never left out.
        (second,) = others
        share = self.config[first] / full
        count = max(1, round(layers * share))
        return {first: count, second: layers - count}

    @staticmethod
    def _class(name: str) -> Any:
        import diffusers

        from vidsparse.pipelines.quiet import quiet_hosts

        # diffusers imports a class, and torchao with the first, when it is asked for it.
        with quiet_hosts():
            return getattr(diffusers, name)


def _wan(pipe: Any, model: Any, latent: Latent, random: Callable[..., Any]) -> dict[str, Any]:
    return {
        "hidden_states": random(1, model.config.in_channels, *_sides(latent)),
        "timestep": random(1).float() * 0 + 1000,
        "encoder_hidden_states": random(1, 512, model.config.text_dim),
    }


def _hunyuan(pipe: Any, model: Any, latent: Latent, random: Callable[..., Any]) -> dict[str, Any]:
    config = model.config
    text = random(1, 256, config.text_embed_dim)
    return {
        "hidden_states": random(1, config.in_channels, *_sides(latent)),
        "timestep": random(1) * 0 + 1000,
        "encoder_hidden_states": text,
        "encoder_attention_mask": _valid(text, PROMPT_TOKENS).long(),
        "pooled_projections": random(1, config.pooled_projection_dim),
        "guidance": random(1) * 0 + 6000,
    }


def _mochi(pipe: Any, model: Any, latent: Latent, random: Callable[..., Any]) -> dict[str, Any]:
    config = model.config
    text = random(2, config.max_sequence_length, config.text_embed_dim)
    return {
        "hidden_states": random(2, config.in_channels, *_sides(latent)),
        "timestep": random(2) * 0 + 1,
        "encoder_hidden_states": text,
        # the empty prompt has its end token alone.
        "encoder_attention_mask": _valid(text, 1, PROMPT_TOKENS),
    }


def _cogvideox(pipe: Any, model: Any, latent: Latent, random: Callable[..., Any]) -> dict[str, Any]:
    config = model.config
    frames, height, width = _sides(latent)
    video = random(2, frames, config.in_channels, height, width)
    return {
        "hidden_states": video,
        "timestep": (video.new_zeros(2) + 999).long(),
        "encoder_hidden_states": random(2, config.max_text_seq_length, config.text_embed_dim),
        "image_rotary_emb": pipe._prepare_rotary_positional_embeddings(
            latent.height, latent.width, frames, video.device
        ),
    }


def _ltx2(pipe: Any, model: Any, latent: Latent, random: Callable[..., Any]) -> dict[str, Any]:
    config = model.config
    frames, height, width = _sides(latent)
    sounds = round(latent.frames / LTX2_FPS * LTX2_AUDIO_RATE)
    text = random(2, 1024, config.caption_channels)
    timestep = random(2).float() * 0 + 1000
    return {
        "hidden_states": random(2, frames * height * width, config.in_channels),
        "audio_hidden_states": random(2, sounds, config.audio_in_channels),
        "encoder_hidden_states": text,
        "audio_encoder_hidden_states": random(2, 1024, config.caption_channels),
        "timestep": timestep,
        "sigma": timestep,
        # registers of the connector fill what the prompt leaves free: nothing is masked.
        "encoder_attention_mask": _valid(text, 1024, 1024).long(),
        "audio_encoder_attention_mask": _valid(text, 1024, 1024).long(),
        "num_frames": frames,
        "height": height,
        "width": width,
        "fps": LTX2_FPS,
        "audio_num_frames": sounds,
    }


def _minimax(pipe: Any, model: Any, latent: Latent, random: Callable[..., Any]) -> dict[str, Any]:
    import torch
    from diffusers.modular_pipelines.minimax_h3 import before_denoise, modular_pipeline

    config = model.config
    text = random(1, PROMPT_TOKENS, config.text_dim)
    *rows, conditions, references = before_denoise.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.full((PROMPT_TOKENS,), pipe.text_tag),
        *_sides(latent),
        modular_pipeline.audio_latent_num_frames(latent.frames),
        tuple(config.patch_size),
        pipe.audio_channels,
        pipe.audio_tag,
        pipe.video_tag,
    )
    positions, tags, video, sounds, words = (row.to(text.device) for row in rows)
    timestep, places = before_denoise.MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video.cpu(), sounds.cpu(), conditions, references, PROMPT_TOKENS, 0.0, 0.0, 0.0, 0.0
    )
    return {
        "hidden_states": random(1, len(video), model.proj_in.in_features),
        "audio_hidden_states": random(1, len(sounds), config.audio_in_channels),
        "encoder_hidden_states": text,
        "timestep": timestep.to(text.device),
        "timestep_indices": places.to(text.device),
        "token_tags": tags,
        "position_ids": positions,
        "video_indices": video,
        "audio_indices": sounds,
        "text_indices": words,
    }


def _sides(latent: Latent) -> tuple[int, int, int]:
    return latent.latent_frames, latent.latent_height, latent.latent_width


def _valid(text: torch.Tensor, *counts: int) -> torch.Tensor:
    """Which tokens of ``text`` ``[B, L, C]`` are real: the first ``counts`` of each sample."""
    import torch

    place = torch.arange(text.shape[1], device=text.device)
    return place < torch.tensor(counts, device=text.device).unsqueeze(1)


_BATCH_OF_TWO = "one forward of two samples, the guidance branches"

# Densities below are those that FG-Attn's table 1 gives for tiles of 32x32, its best trade of time
# and quality, as far as it has the model.


def _wan_shape(checkpoint: str, heads: int, ffn_dim: int, layers: int) -> ModelShape:
    return ModelShape(
        checkpoint=checkpoint,
        source="diffusers, scripts/convert_wan_to_diffusers.py",
        pipeline="WanPipeline",
        transformer="WanTransformer3DModel",
        config={"num_attention_heads": heads, "ffn_dim": ffn_dim, "num_layers": layers},
        blocks={"blocks": "num_layers"},
        width=1280,
        height=720,
        frames=81,
        frame_factor=4,
        size_factor=16,
        compression=8,
        computed=0.4,
        warmup=0.24,
        forwards=2,
        batch=1,
        step="two forwards, one for each guidance branch",
        inputs=_wan,
    )


MODEL_SHAPES: Final[Mapping[str, ModelShape]] = MappingProxyType(
    {
        "wan-14b": _wan_shape("Wan-AI/Wan2.1-T2V-14B-Diffusers", 40, 13824, 40),
        "wan-1.3b": _wan_shape("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 12, 8960, 30),
        "hunyuanvideo": ModelShape(
            checkpoint="hunyuanvideo-community/HunyuanVideo",
            source="diffusers, scripts/convert_hunyuan_video_to_diffusers.py",
            pipeline="HunyuanVideoPipeline",
            transformer="HunyuanVideoTransformer3DModel",
            config={"num_layers": 20, "num_single_layers": 40, "guidance_embeds": True},
            blocks={
                "transformer_blocks": "num_layers",
                "single_transformer_blocks": "num_single_layers",
            },
            width=1280,
            height=720,
            frames=129,
            frame_factor=4,
            size_factor=16,
            compression=8,
            computed=0.28,
            warmup=0.1,
            forwards=1,
            batch=1,
            step="one forward (distilled guidance)",
            masked=True,
            inputs=_hunyuan,
        ),
        "mochi": ModelShape(
            checkpoint="genmo/mochi-1-preview",
            source="diffusers, scripts/convert_mochi_to_diffusers.py",
            pipeline="MochiPipeline",
            transformer="MochiTransformer3DModel",
            config={"num_layers": 48},
            blocks={"transformer_blocks": "num_layers"},
            width=848,
            height=480,
            frames=163,
            frame_factor=6,
            size_factor=16,
            compression=8,
            computed=0.4,
            warmup=0.2,
            forwards=1,
            batch=2,
            step=_BATCH_OF_TWO,
            inputs=_mochi,
        ),
        "cogvideox-5b": ModelShape(
            checkpoint="THUDM/CogVideoX-5b",
            source="diffusers, scripts/convert_cogvideox_to_diffusers.py",
            pipeline="CogVideoXPipeline",
            transformer="CogVideoXTransformer3DModel",
            config={
                "num_layers": 42,
                "num_attention_heads": 48,
                "use_rotary_positional_embeddings": True,
            },
            blocks={"transformer_blocks": "num_layers"},
            width=720,
            height=480,
            frames=49,
            frame_factor=4,
            size_factor=16,
            compression=8,
            computed=0.45,
            warmup=0.2,
            forwards=1,
            batch=2,
            step=_BATCH_OF_TWO,
            inputs=_cogvideox,
        ),
        "ltx-2": ModelShape(
            checkpoint="Lightricks/LTX-2",
            source="diffusers, scripts/convert_ltx2_to_diffusers.py, version 2.0",
            pipeline="LTX2Pipeline",
            transformer="LTX2VideoTransformer3DModel",
            config={"num_layers": 48, "rope_type": "split"},
            blocks={"transformer_blocks": "num_layers"},
            # FG-Attn's table 1.
            width=1536,
            height=1024,
            frames=121,
            frame_factor=8,
            size_factor=32,
            compression=32,
            computed=0.5,
            warmup=0.24,
            forwards=1,
            batch=2,
            step=_BATCH_OF_TWO,
            inputs=_ltx2,
        ),
        "minimax-h3": ModelShape(
            checkpoint="MiniMaxAI/MiniMax-H3",
            source="diffusers, defaults of MiniMaxH3Transformer3DModel",
            pipeline="MiniMaxH3ModularPipeline",
            transformer="MiniMaxH3Transformer3DModel",
            config={},
            blocks={"transformer_blocks": "num_layers"},
            # the canvas that diffusers says it was released for, and its shortest video.
            width=1344,
            height=768,
            frames=124,
            frame_factor=17,
            frame_rest=5,
            latent_factor=5,
            latent_rest=2,
            size_factor=32,
            compression=16,
            # LTX-2's, which makes sound too: no paper has asked this model.
            computed=0.5,
            warmup=0.24,
            forwards=1,
            batch=1,
            step="one forward (distilled guidance)",
            inputs=_minimax,
        ),
    }
)
"""The models by the name that ``--family`` takes."""


def model_text(family: str, layers: int) -> str:
    """A table's word for a model: its name in ``MODEL_SHAPES``, and its layers if not all."""
    whole = layers == MODEL_SHAPES[family].full_layers()
    return family if whole else f"{family} ({layers} layers)"
