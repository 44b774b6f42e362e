"""``shapes``: the Wan layout. Text reaches the video by cross-attention; flow matching.

``AutoencoderKLWan`` feeds itself chunks of four frames through a cache, which suits long videos
and small memory but launches a kernel per layer and chunk. Its convolutions are causal, so the
same function can be computed on the whole clip at once: ``encode`` and ``decode`` do that with
the very modules of the diffusers model, in whatever precision their input has.

Latents: [B, 16, k + 1, H/8, W/8] of 4k + 1 frames.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanCausalConv3d,
    WanMidBlock,
    WanResample,
    WanResidualBlock,
    WanRMS_norm,
    patchify,
    unpatchify,
)
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn
from transformers import UMT5Config, UMT5EncoderModel

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

PROMPT_TOKENS: Final = 512
"""``WanPipeline`` pads text embeddings with zeros to this length."""

_SMALL, _LARGE = ClipSize(frames=33, side=256), ClipSize(frames=49, side=384)


class Wan(SmallModel):
    """The Wan transformer at 8.6 M parameters and the residual Wan autoencoder at 2.7 M.

    Another model of this layout is a subclass with other numbers.
    """

    heads: ClassVar[int] = 4
    head_dim: ClassVar[int] = 64
    layers: ClassVar[int] = 8
    feed_forward: ClassVar[int] = 896
    text_width: ClassVar[int] = 256
    text_feed_forward: ClassVar[int] = 512
    flow_shift: ClassVar[float] = 3.0
    """Of the training times and of the shipped scheduler."""
    name = "shapes"
    world = SHAPES_WORLD
    card = Card(
        description="A small demonstration model, trained from nothing on procedurally drawn "
        "clips: it draws simple coloured shapes that move, knows the words listed here and "
        "nothing else.",
        steps=20,
        guidance=4.0,
        # several dB more accurate than the Hilbert curve at equal work, on this model
        # (BENCHMARKS.md).
        order="rowmajor",
        # a matter of a CPU's time, which this model is for: at fg-attn's top_p the first and the
        # last layer keep two thirds of their pairs, and such a call takes a CPU longer than a dense
        # one. the default method has no dense layers (schedules, below). papers' methods keep what
        # their rows were measured with, on a GPU too, although dense ends lose 2 to 4 dB at equal
        # pairs (docs/reasons.md).
        dense_layers=1,
        dense_last_layers=1,
        reuse=2,
        method_options={
            "fg-attn": {"top_p": 0.8},
            # a list for every 32 rows is worth 1.7 dB at 2,304 tokens (docs/experiments.md).
            "foresight": {"share": 0.08, "tile": "32x16", "slope": 0.5},
            "sol-attn": {"tau": 1.0},
        },
        # what the rows of "refreshes", "plans", "block-rows" and "guidance" were measured with.
        schedules={
            "foresight": {
                "dense_steps": 0.15,
                "dense_layers": 0,
                "dense_last_layers": 0,
                "reuse": 1,
                "refresh": 0.2,
            }
        },
        method="foresight",
        speeds={
            "high": {"psnr": 43.4, "prompts": 24, "linear": "bf16", "cache": "guidance"},
            "balanced": {
                "psnr": 38.7,
                "prompts": 24,
                "linear": "bf16",
                "cache": "guidance",
                "method_options": {"unconditional_every": 10},
                "schedule": {"refresh": 0.15},
            },
            # where its steps alternate, taylorseer is far off (docs/speed.md).
            "fast": {
                "psnr": 36.7,
                "prompts": 24,
                "linear": "bf16",
                "cache": "guidance",
                "cache_threshold": 3,
                "method_options": {"unconditional_every": 10},
                "schedule": {"refresh": 0.1},
            },
        },
    )
    recipe = Recipe(
        vae_minutes=4.2,
        latent_minutes=1.3,
        transformer_minutes=17.3,
        # short crops teach detail fast, long ones the steady state of the causal convolutions
        crops=(
            Crop(frames=9, side=128, batch=48, share=0.5),
            Crop(frames=17, side=192, batch=12, share=0.3),
            Crop(frames=33, side=256, batch=4, share=0.2),
        ),
        sizes=(_SMALL, _LARGE),
        pool_clips=(1024, 320),
        # of the two sizes that the model is made for, 70 % small clips and 30 % large ones.
        # Quarter-size clips cost almost nothing and only serve the first minutes of training.
        latent_plans=(
            LatentPlan(size=ClipSize(frames=33, side=128), batch=56, batches=1),
            LatentPlan(size=_SMALL, batch=28, batches=2),
            LatentPlan(size=_LARGE, batch=8, batches=3),
        ),
        # what words mean and how things move is learnt from quarter-size clips, where a step is
        # cheap and attention is short; then the real sizes, the large one for the second half
        step_plans=(
            StepPlan(source=0, batch=128, share=1.0, ends=0.24),
            StepPlan(source=1, batch=32, share=0.6, begins=0.24),
            StepPlan(source=2, batch=10, share=0.4, begins=0.58),
        ),
    )
    pipeline_class = WanPipeline
    vae_class = AutoencoderKLWan
    transformer_class = WanTransformer3DModel
    encoder_class = UMT5EncoderModel
    block_class = WanTransformerBlock
    vae_fp32 = True

    def build_vae(self) -> AutoencoderKLWan:
        """The residual Wan autoencoder with patch 2: 2.7 M parameters, 8x8x4 compression."""
        return AutoencoderKLWan(
            base_dim=32,
            decoder_base_dim=32,
            z_dim=16,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[True, True],
            is_residual=True,
            patch_size=2,
            in_channels=12,
            out_channels=12,
            scale_factor_spatial=8,
            latents_mean=[0.0] * 16,
            latents_std=[1.0] * 16,
        )

    def build_transformer(self) -> WanTransformer3DModel:
        """The layers and heads of this model, over the autoencoder's 16 channels."""
        return WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=self.heads,
            attention_head_dim=self.head_dim,
            in_channels=16,
            out_channels=16,
            text_dim=self.text_width,
            freq_dim=256,
            ffn_dim=self.feed_forward,
            num_layers=self.layers,
        )

    def build_text_encoder(self) -> UMT5EncoderModel:
        """A UMT5 encoder of two layers."""
        config = UMT5Config(
            vocab_size=len(self.world.vocabulary.ids),
            d_model=self.text_width,
            d_kv=32,
            num_heads=self.text_width // 32,
            d_ff=self.text_feed_forward,
            num_layers=2,
            dropout_rate=0.0,
            pad_token_id=PAD_ID,
            eos_token_id=END_ID,
        )
        return UMT5EncoderModel(config)

    def build_scheduler(self) -> UniPCMultistepScheduler:
        """The scheduler of stock Wan, at the shift of the training times."""
        return UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=self.flow_shift
        )

    def prepare_vae(self, vae: AutoencoderKLWan) -> AutoencoderKLWan:
        """Lay the weights out as the convolutions want them."""
        return channels_last(vae)

    def encode(self, vae: AutoencoderKLWan, clip: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the whole clip at once, not yet normalised."""
        encoder = vae.encoder
        x = _conv(encoder.conv_in, patchify(clip, vae.config.patch_size))
        for block in encoder.down_blocks:
            y = x
            for residual in block.resnets:
                y = _residual(residual, y)
            if block.downsampler is not None:
                y = _downsample(block.downsampler, y)
            x = y + block.avg_shortcut(x)
        x = F.silu(_norm(encoder.norm_out, _middle(encoder.mid_block, x)))
        mean, log_variance = _conv(vae.quant_conv, _conv(encoder.conv_out, x)).chunk(2, dim=1)
        return mean, log_variance.clamp(-30, 20)

    def decode(self, vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
        """The clip of unnormalised latents, at once."""
        decoder = vae.decoder
        x = _conv(decoder.conv_in, _conv(vae.post_quant_conv, latents))
        x = _middle(decoder.mid_block, x)
        for block in decoder.up_blocks:
            y = x
            for residual in block.resnets:
                y = _residual(residual, y)
            if block.upsampler is not None:
                y = _upsample(block.upsampler, y)
            x = y if block.avg_shortcut is None else y + block.avg_shortcut(x, first_chunk=True)
        x = _conv(decoder.conv_out, F.silu(_norm(decoder.norm_out, x)))
        clip: Tensor = unpatchify(x, vae.config.patch_size)
        return clip

    def normalise(
        self, vae: AutoencoderKLWan, mean: Tensor, deviation: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write the moments to the config, where the pipeline reads them."""
        vae.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())
        return mean, deviation

    def moments(self, vae: AutoencoderKLWan) -> tuple[Tensor, Tensor]:
        """What the config says."""
        config = vae.config
        return torch.tensor(config.latents_mean), torch.tensor(config.latents_std)

    def embed(self, encoder: UMT5EncoderModel, ids: Tensor) -> Tensor:
        """Embeddings [B, 512, width], zero beyond each prompt as in the pipeline."""
        mask = (ids != PAD_ID).long()
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        hidden = hidden * mask.unsqueeze(-1)
        return F.pad(hidden, (0, 0, 0, PROMPT_TOKENS - ids.shape[1]))

    def corrupt(self, clean: Tensor, noise: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Straight paths to noise, at the sampler's own shift; the target is the velocity."""
        sigma = self.flow_shift * u / (1 + (self.flow_shift - 1) * u)
        noisy = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1, 1))
        return noisy, sigma * 1000, noise - clean

    def predict(
        self, transformer: WanTransformer3DModel, noisy: Tensor, timestep: Tensor, embedded: Tensor
    ) -> Tensor:
        """One forward."""
        predicted: Tensor = transformer(
            hidden_states=noisy,
            timestep=timestep,
            encoder_hidden_states=embedded,
            return_dict=False,
        )[0]
        return predicted

    def parts(self, transformer: Any, encoder: Any, vae: Any) -> str:
        """The model card's list of parts."""
        net, words, space = transformer.config, encoder.config, vae.config
        return "\n".join(
            (
                f"- Transformer, {millions(transformer)} M parameters: `WanTransformer3DModel`, "
                f"{net.num_layers} layers, {net.num_attention_heads}",
                f"  heads of {net.attention_head_dim}, feed-forward {net.ffn_dim}, patch "
                f"{'x'.join(map(str, net.patch_size))}; stored in bf16.",
                f"- Text encoder, {millions(encoder)} M: `UMT5EncoderModel`, {words.num_layers} "
                f"layers of width {words.d_model},",
                "  trained jointly with the transformer; bf16.",
                f"- Autoencoder, {millions(vae)} M: `AutoencoderKLWan`, residual, patch "
                f"{space.patch_size}, {space.z_dim}",
                "  channels, compression 8x8 in space and 4 in time; float16.",
                "- Tokenizer: one token a word, lower case, punctuation dropped.",
                "- Scheduler: `UniPCMultistepScheduler`, flow prediction, shift "
                f"{self.flow_shift:g}.",
            )
        )

    def tokens(self, transformer: Any, vae: Any, size: ClipSize) -> int:
        """Video tokens of a clip."""
        time, height, width = transformer.config.patch_size
        space = vae.config.scale_factor_spatial
        frames = (size.frames - 1) // vae.config.scale_factor_temporal + 1
        return int(frames // time * (size.side // space // height) * (size.side // space // width))


def _conv(layer: nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    weight = layer.weight.to(x.dtype)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    if isinstance(layer, WanCausalConv3d):
        return F.conv3d(F.pad(x, layer._padding), weight, bias, layer.stride)
    assert isinstance(layer, nn.Conv2d)
    return F.conv2d(x, weight, bias, layer.stride, layer.padding)


def _norm(layer: WanRMS_norm, x: Tensor) -> Tensor:
    # one fused kernel over the channels instead of six; in channels-last memory a view is enough
    last = F.rms_norm(x.movedim(1, -1), (x.shape[1],), layer.gamma.flatten().to(x.dtype), eps=1e-12)
    return last.movedim(-1, 1)


def _residual(block: WanResidualBlock, x: Tensor) -> Tensor:
    shortcut = x if isinstance(block.conv_shortcut, nn.Identity) else _conv(block.conv_shortcut, x)
    y = _conv(block.conv1, F.silu(_norm(block.norm1, x)))
    return shortcut + _conv(block.conv2, F.silu(_norm(block.norm2, y)))


def _per_frame(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def _clips(x: Tensor, batch: int) -> Tensor:
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


def _attention(block: WanAttentionBlock, x: Tensor) -> Tensor:
    frames = _per_frame(x)
    qkv = _conv(block.to_qkv, _norm(block.norm, frames)).flatten(2).transpose(1, 2).unsqueeze(1)
    q, k, v = qkv.chunk(3, dim=-1)
    mixed = F.scaled_dot_product_attention(q, k, v)
    mixed = mixed.squeeze(1).transpose(1, 2).reshape(frames.shape)
    return x + _clips(_conv(block.proj, mixed), x.shape[0])


def _middle(block: WanMidBlock, x: Tensor) -> Tensor:
    x = _residual(block.resnets[0], x)
    for attention, residual in zip(block.attentions, block.resnets[1:], strict=True):
        x = _residual(residual, _attention(attention, x))
    return x


def _downsample(layer: WanResample, x: Tensor) -> Tensor:
    y = F.pad(_per_frame(x), (0, 1, 0, 1))
    y = _clips(_conv(layer.resample[1], y), x.shape[0])
    if layer.mode == "downsample3d":
        # the first frame stands alone; the convolution strides over it and the rest
        y = torch.cat([y[:, :, :1], _conv(layer.time_conv, y)], dim=2)
    return y


def _upsample(layer: WanResample, x: Tensor) -> Tensor:
    if layer.mode == "upsample3d" and x.shape[2] > 1:
        # the first frame stays single, and the later ones never see it here
        doubled = _conv(layer.time_conv, x[:, :, 1:])
        even, odd = doubled.chunk(2, dim=1)
        doubled = torch.stack([even, odd], dim=3).flatten(2, 3)
        x = torch.cat([x[:, :, :1], doubled], dim=2)
    y = F.interpolate(_per_frame(x), scale_factor=2.0, mode="nearest-exact")
    return _clips(_conv(layer.resample[1], y), x.shape[0])


SHAPES: Final = Wan()
