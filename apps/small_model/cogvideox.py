"""``shapes-joint``: the CogVideoX layout. Text and video attend in one stream, text first.

``AutoencoderKLCogVideoX`` normalises over chunks of eight frames, so its stock forward, chunks and
caches included, is what trains. At a compression of 4x4x4 and a patch of 4x4 a clip has as many
tokens as in the layout of ``shapes``.

Latents: [B, 8, k + 1, H/4, W/4] of 4k + 1 frames, a multiple of 8 and one in all.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXSpatialNorm3D
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.models.normalization import CogVideoXLayerNormZero
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid
from torch import Tensor, nn
from torch.func import functional_call
from transformers import T5Config, T5EncoderModel

from .model import (
    Card,
    ClipSize,
    Crop,
    LatentPlan,
    Recipe,
    SmallModel,
    StepPlan,
    channels_last,
    millions,
)
from .words import END_ID, PAD_ID
from .worlds import SHAPES_WORLD

PROMPT_TOKENS: Final = 226
"""``CogVideoXPipeline`` pads prompts to this length, and padding takes part in attention."""
LATENT_CHANNELS: Final = 8

_CLIP = ClipSize(frames=33, side=256)


class CogVideoX(SmallModel):
    """The CogVideoX transformer at 4.3 M parameters and its autoencoder at 1.2 M."""

    name = "shapes-joint"
    world = SHAPES_WORLD
    card = Card(
        description="A second small demonstration model, of the world that shapes knows, in the "
        "layout of CogVideoX: text and video attend together.",
        steps=25,
        guidance=4.0,
        # what fg-attn and the papers' methods run with, from the "defaults" rows of its study, on a
        # GPU too: a matter of a CPU's time, as in `shapes` (docs/reasons.md). the default method
        # has no dense layers (schedules, below).
        dense_layers=1,
        dense_last_layers=1,
        reuse=2,
        method_options={
            "fg-attn": {"top_p": 0.8},
            "foresight": {
                "share": 0.15,
                "tile": "32x16",
                "text_rows": "sparse",
                "fading": 2.5,
            },
            "sol-attn": {"tau": 1.0},
        },
        # chosen on calibration prompts among eight shares and schedules (docs/experiments.md).
        schedules={
            "foresight": {
                "dense_steps": 0.12,
                "dense_layers": 0,
                "dense_last_layers": 0,
                "reuse": 1,
                "refresh": 0.16,
            }
        },
        method="foresight",
        speeds={
            "high": {"psnr": 42.0, "prompts": 24},
            # two refreshes, and what they keep for four steps: later it is worse than nothing.
            "balanced": {
                "psnr": 38.4,
                "prompts": 24,
                "method_options": {"reach": 4},
                "schedule": {"refresh": 0.08},
            },
            "fast": {
                "psnr": 38.5,
                "prompts": 24,
                "method_options": {"reach": 4},
                "schedule": {"refresh": 0.08},
            },
        },
        limits=(
            "Two objects often mix their shapes and colours.",
            "Moving objects leave faint traces on the background.",
        ),
    )
    recipe = Recipe(
        vae_minutes=3.4,
        latent_minutes=0.8,
        transformer_minutes=10.5,
        vae_muon_rate=3e-3,
        # norms run over whole chunks of whole frames, so that whole frames must be among the crops
        crops=(
            Crop(frames=9, side=128, batch=24, share=0.5),
            Crop(frames=17, side=256, batch=4, share=0.3),
            Crop(frames=33, side=256, batch=4, share=0.2),
        ),
        sizes=(_CLIP,),
        pool_clips=(1024,),
        latent_plans=(
            LatentPlan(size=ClipSize(frames=33, side=128), batch=64, batches=1),
            LatentPlan(size=_CLIP, batch=24, batches=3),
        ),
        # as with shapes: words and motion from quarter-size clips, then the real size
        step_plans=(
            StepPlan(source=0, batch=128, share=1.0, ends=0.25),
            StepPlan(source=1, batch=48, share=1.0, begins=0.25),
        ),
    )
    pipeline_class = CogVideoXPipeline
    vae_class = AutoencoderKLCogVideoX
    transformer_class = CogVideoXTransformer3DModel
    encoder_class = T5EncoderModel
    block_class = CogVideoXBlock
    vae_fp32 = False

    def build_vae(self) -> AutoencoderKLCogVideoX:
        """Three levels instead of CogVideoX's four: compression 4x4 in space, 4 in time."""
        return AutoencoderKLCogVideoX(
            block_out_channels=(16, 32, 48),
            down_block_types=("CogVideoXDownBlock3D",) * 3,
            up_block_types=("CogVideoXUpBlock3D",) * 3,
            latent_channels=LATENT_CHANNELS,
            layers_per_block=1,
            norm_num_groups=8,
            # tiles begin at half of this: never at the size it is made for
            sample_height=1024,
            sample_width=1024,
            # the weights themselves scale the latents, see `normalise`
            scaling_factor=1.0,
        )

    def build_transformer(self) -> CogVideoXTransformer3DModel:
        """7 layers, 3 heads of 64, every block an identity at first."""
        transformer = CogVideoXTransformer3DModel(
            num_attention_heads=3,
            attention_head_dim=64,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            time_embed_dim=64,
            text_embed_dim=128,
            num_layers=7,
            sample_width=_CLIP.side // 4,
            sample_height=_CLIP.side // 4,
            sample_frames=_CLIP.frames,
            patch_size=4,
            max_text_seq_length=PROMPT_TOKENS,
            use_rotary_positional_embeddings=True,
        )
        closed = [m.linear for m in transformer.modules() if isinstance(m, CogVideoXLayerNormZero)]
        for layer in (*closed, transformer.proj_out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        return transformer

    def build_text_encoder(self) -> T5EncoderModel:
        """A T5 encoder of two layers."""
        config = T5Config(
            vocab_size=len(self.world.vocabulary.ids),
            d_model=128,
            d_kv=32,
            num_heads=4,
            d_ff=256,
            num_layers=2,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            pad_token_id=PAD_ID,
            eos_token_id=END_ID,
        )
        return T5EncoderModel(config)

    def build_scheduler(self) -> CogVideoXDDIMScheduler:
        """The scheduler and the noise of CogVideoX-2B."""
        return CogVideoXDDIMScheduler(
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
            clip_sample=False,
        )

    def prepare_vae(self, vae: AutoencoderKLCogVideoX) -> AutoencoderKLCogVideoX:
        """Lay the weights out as the convolutions want them, and let norms modulate cheaply."""
        for module in vae.modules():
            if type(module) is CogVideoXSpatialNorm3D:
                module.__class__ = _SpatialNorm
        return channels_last(vae)

    def encode(self, vae: AutoencoderKLCogVideoX, clip: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance, chunk by chunk as the pipeline's."""
        posterior = _call(vae, "encode", clip)
        return posterior.mean, posterior.logvar

    def decode(self, vae: AutoencoderKLCogVideoX, latents: Tensor) -> Tensor:
        """The clip of latents, chunk by chunk as the pipeline's."""
        clip: Tensor = _call(vae, "decode", latents)
        return clip

    @torch.no_grad()
    def normalise(
        self, vae: AutoencoderKLCogVideoX, mean: Tensor, deviation: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scale every channel inside the weights: the pipeline knows one factor for all.

        The means stay, since padding with zeros would tell a shift from the picture's edge; they
        are small, as the divergence keeps them.
        """
        out = vae.encoder.conv_out.conv
        out.weight[:LATENT_CHANNELS] /= deviation.view(-1, 1, 1, 1, 1)
        out.bias[:LATENT_CHANNELS] /= deviation
        out.bias[LATENT_CHANNELS:] -= 2 * deviation.log()
        norms = [m for m in vae.decoder.modules() if isinstance(m, CogVideoXSpatialNorm3D)]
        readers = [vae.decoder.conv_in, *(conv for m in norms for conv in (m.conv_y, m.conv_b))]
        for reader in readers:
            reader.conv.weight *= deviation.view(1, -1, 1, 1, 1)
        return torch.zeros_like(mean), deviation

    def moments(self, vae: AutoencoderKLCogVideoX) -> tuple[Tensor, Tensor]:
        """Nothing: the weights themselves scale the latents."""
        channels = vae.config.latent_channels
        return torch.zeros(channels), torch.ones(channels)

    def embed(self, encoder: T5EncoderModel, ids: Tensor) -> Tensor:
        """Embeddings [B, 226, 128]; no mask, as in the pipeline."""
        padded = F.pad(ids, (0, PROMPT_TOKENS - ids.shape[1]), value=PAD_ID)
        embedded: Tensor = encoder(padded)[0]
        return embedded

    def corrupt(self, clean: Tensor, noise: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The scheduler's own noise, down to no signal at all; the target is v."""
        kept = _signal(clean.device)
        timestep = (u * len(kept)).long().clamp(max=len(kept) - 1)
        signal = kept[timestep].view(-1, 1, 1, 1, 1)
        rest = (1 - signal.square()).sqrt()
        return signal * clean + rest * noise, timestep, signal * noise - rest * clean

    def predict(
        self,
        transformer: CogVideoXTransformer3DModel,
        noisy: Tensor,
        timestep: Tensor,
        embedded: Tensor,
    ) -> Tensor:
        """One forward with the pipeline's angles; its latents have time before channels."""
        config = transformer.config
        predicted: Tensor = transformer(
            hidden_states=noisy.transpose(1, 2),
            encoder_hidden_states=embedded,
            timestep=timestep,
            image_rotary_emb=rotary_angles(
                *noisy.shape[2:],
                patch=config.patch_size,
                base=(config.sample_height, config.sample_width),
                channels=config.attention_head_dim,
                device=noisy.device,
            ),
            return_dict=False,
        )[0]
        return predicted.transpose(1, 2)

    def parts(self, transformer: Any, encoder: Any, vae: Any) -> str:
        """The model card's list of parts."""
        net, words = transformer.config, encoder.config
        return "\n".join(
            (
                f"- Transformer, {millions(transformer)} M parameters: "
                f"`CogVideoXTransformer3DModel`, {net.num_layers} layers, "
                f"{net.num_attention_heads} heads",
                f"  of {net.attention_head_dim}, patch {net.patch_size}x{net.patch_size}, rotary "
                f"positions; text and video attend together, the",
                f"  {net.max_text_seq_length} text tokens first; stored in bf16.",
                f"- Text encoder, {millions(encoder)} M: `T5EncoderModel`, {words.num_layers} "
                f"layers of width {words.d_model}, trained",
                "  jointly with the transformer; bf16.",
                f"- Autoencoder, {millions(vae)} M: `AutoencoderKLCogVideoX`, "
                f"{vae.config.latent_channels} channels, compression 4x4 in",
                "  space and 4 in time; float16.",
                "- Tokenizer: one token a word, lower case, punctuation dropped.",
                "- Scheduler: `CogVideoXDDIMScheduler`, v-prediction, no signal left at the last "
                "timestep.",
            )
        )

    def tokens(self, transformer: Any, vae: Any, size: ClipSize) -> int:
        """Video tokens of a clip."""
        space = 2 ** (len(vae.config.block_out_channels) - 1) * transformer.config.patch_size
        frames = (size.frames - 1) // vae.config.temporal_compression_ratio + 1
        return int(frames * (size.side // space) ** 2)


class _SpatialNorm(CogVideoXSpatialNorm3D):  # type: ignore[misc]
    """The same function of the same weights, with its 1x1 convolutions before the upsampling."""

    def forward(
        self, f: Tensor, zq: Tensor, conv_cache: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Normalise ``f`` [B, C, T, H, W], modulated by latents ``zq`` of the same frames."""
        convs = (self.conv_y.conv, self.conv_b.conv)
        modulation = F.conv3d(
            zq, torch.cat([c.weight for c in convs]), torch.cat([c.bias for c in convs])
        )
        frames, known = f.shape[2], zq.shape[2]
        # an odd number of frames begins with one that stands alone
        alone = frames % 2
        parts = [modulation[:, :, :alone]]
        if frames > 1:
            times = (frames - alone) // (known - alone)
            parts.append(modulation[:, :, alone:].repeat_interleave(times, 2))
        modulation = torch.cat(parts, 2)[:, :, :, :, None, :, None]
        scale, shift = modulation.chunk(2, 1)
        height, width = zq.shape[3:]
        normed = self.norm_layer(f.contiguous())
        normed = normed.unflatten(4, (width, -1)).unflatten(3, (height, -1))
        return torch.addcmul(shift, normed, scale).flatten(5, 6).flatten(3, 4), {}


class _Method(nn.Module):
    """A method of an autoencoder in the place of a forward, for ``functional_call``."""

    def __init__(self, vae: AutoencoderKLCogVideoX, name: str) -> None:
        super().__init__()
        self.vae, self._name = vae, name

    def forward(self, x: Tensor) -> Any:
        """Call it."""
        return getattr(self.vae, self._name)(x, return_dict=False)[0]


def _call(vae: AutoencoderKLCogVideoX, name: str, x: Tensor) -> Any:
    """``vae.encode`` or ``vae.decode`` in the precision of ``x``; its weights keep their own."""
    weights = {f"vae.{key}": value.to(x.dtype) for key, value in vae.named_parameters()}
    return functional_call(_Method(vae, name), weights, (x,))


@cache
def _signal(device: torch.device) -> Tensor:
    """The share of the picture left at each timestep, [1000]."""
    kept: Tensor = SHAPES_JOINT.build_scheduler().alphas_cumprod
    return kept.sqrt().float().to(device)


@cache
def rotary_angles(
    frames: int,
    height: int,
    width: int,
    *,
    patch: int,
    base: tuple[int, int],
    channels: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, D] for latents of a size, as ``CogVideoXPipeline`` makes them.

    ``base`` is the latents' height and width that positions are counted in: other sizes are
    stretched over it.
    """
    grid = (height // patch, width // patch)
    crop = get_resize_crop_region_for_grid(grid, base[1] // patch, base[0] // patch)
    cosine, sine = get_3d_rotary_pos_embed(
        embed_dim=channels,
        crops_coords=crop,
        grid_size=grid,
        temporal_size=frames,
        device=device,
    )
    return cosine, sine


SHAPES_JOINT: Final = CogVideoX()
