"""The video autoencoder: its shape, a fast forward for training, training, and its fidelity.

``AutoencoderKLWan`` feeds itself chunks of four frames through a cache, which suits long videos
and small memory but launches a kernel per layer and chunk. Its convolutions are causal, so the
same function can be computed on the whole clip at once: ``encode`` and ``decode`` do that with
the very modules of the diffusers model, in whatever precision their input has.

Shapes: clips [B, 3, T, H, W] in [-1, 1] with T = 4k + 1; latents [B, 16, k + 1, H/8, W/8].
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
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
from torch import nn

from .world import centres, render, sample_scene

Log = Callable[[str], None]


def build_vae() -> AutoencoderKLWan:
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


def _conv(layer: nn.Conv2d | nn.Conv3d, x: torch.Tensor) -> torch.Tensor:
    weight = layer.weight.to(x.dtype)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    if isinstance(layer, WanCausalConv3d):
        return F.conv3d(F.pad(x, layer._padding), weight, bias, layer.stride)
    assert isinstance(layer, nn.Conv2d)
    return F.conv2d(x, weight, bias, layer.stride, layer.padding)


def _norm(layer: WanRMS_norm, x: torch.Tensor) -> torch.Tensor:
    # one fused kernel over the channels instead of six; in channels-last memory a view is enough
    last = F.rms_norm(x.movedim(1, -1), (x.shape[1],), layer.gamma.flatten().to(x.dtype), eps=1e-12)
    return last.movedim(-1, 1)


def _residual(block: WanResidualBlock, x: torch.Tensor) -> torch.Tensor:
    shortcut = x if isinstance(block.conv_shortcut, nn.Identity) else _conv(block.conv_shortcut, x)
    y = _conv(block.conv1, F.silu(_norm(block.norm1, x)))
    return shortcut + _conv(block.conv2, F.silu(_norm(block.norm2, y)))


def _per_frame(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def _clips(x: torch.Tensor, batch: int) -> torch.Tensor:
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


def _attention(block: WanAttentionBlock, x: torch.Tensor) -> torch.Tensor:
    frames = _per_frame(x)
    qkv = _conv(block.to_qkv, _norm(block.norm, frames)).flatten(2).transpose(1, 2).unsqueeze(1)
    q, k, v = qkv.chunk(3, dim=-1)
    mixed = F.scaled_dot_product_attention(q, k, v)
    mixed = mixed.squeeze(1).transpose(1, 2).reshape(frames.shape)
    return x + _clips(_conv(block.proj, mixed), x.shape[0])


def _middle(block: WanMidBlock, x: torch.Tensor) -> torch.Tensor:
    x = _residual(block.resnets[0], x)
    for attention, residual in zip(block.attentions, block.resnets[1:], strict=True):
        x = _residual(residual, _attention(attention, x))
    return x


def _downsample(layer: WanResample, x: torch.Tensor) -> torch.Tensor:
    y = F.pad(_per_frame(x), (0, 1, 0, 1))
    y = _clips(_conv(layer.resample[1], y), x.shape[0])
    if layer.mode == "downsample3d":
        # the first frame stands alone; the convolution strides over it and the rest
        y = torch.cat([y[:, :, :1], _conv(layer.time_conv, y)], dim=2)
    return y


def _upsample(layer: WanResample, x: torch.Tensor) -> torch.Tensor:
    if layer.mode == "upsample3d" and x.shape[2] > 1:
        # the first frame stays single, and the later ones never see it here
        doubled = _conv(layer.time_conv, x[:, :, 1:])
        even, odd = doubled.chunk(2, dim=1)
        doubled = torch.stack([even, odd], dim=3).flatten(2, 3)
        x = torch.cat([x[:, :, :1], doubled], dim=2)
    y = F.interpolate(_per_frame(x), scale_factor=2.0, mode="nearest-exact")
    return _clips(_conv(layer.resample[1], y), x.shape[0])


def encode(vae: AutoencoderKLWan, clip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log-variance [B, 16, t, h, w] of the latents of a clip, not yet normalised."""
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


def decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Clip [B, 3, T, H, W] of unnormalised latents; unclamped, so that training sees overshoot."""
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
    clip: torch.Tensor = unpatchify(x, vae.config.patch_size)
    return clip


def channels_last(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Lay the weights out as the convolutions want them; the values stay."""
    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            weight = module.weight.data.contiguous(memory_format=torch.channels_last_3d)
            module.weight.data = weight
        elif isinstance(module, nn.Conv2d):
            weight = module.weight.data.contiguous(memory_format=torch.channels_last)
            module.weight.data = weight
    return vae


def psnr(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """PSNR in dB per clip [B] of clips in [-1, 1]."""
    error = (first.float().clamp(-1, 1) - second.float().clamp(-1, 1)).square().flatten(1).mean(1)
    return 10 * torch.log10(4 / error.clamp_min(1e-10))


@dataclass(frozen=True, kw_only=True)
class Crop:
    """One shape of training crop: frames, side in pixels, and how many make a batch."""

    frames: int
    side: int
    batch: int
    share: float


# short crops teach detail fast, long ones the steady state of the causal convolutions
CROPS: tuple[Crop, ...] = (
    Crop(frames=9, side=128, batch=48, share=0.5),
    Crop(frames=17, side=192, batch=12, share=0.3),
    Crop(frames=33, side=256, batch=4, share=0.2),
)


@dataclass(frozen=True, kw_only=True)
class ClipSize:
    """Frames and side in pixels of whole training clips."""

    frames: int
    side: int


CLIP_SIZES: tuple[ClipSize, ClipSize] = (
    ClipSize(frames=33, side=256),
    ClipSize(frames=49, side=384),
)
"""The sizes that the model is made for."""


class ClipPool:
    """Rendered clips of one size, kept as bytes on the device and replaced a few at a time."""

    def __init__(self, size: ClipSize, count: int, rng: random.Random, device: torch.device):
        self.size, self._rng, self._device = size, rng, device
        shape = (count, 3, size.frames, size.side, size.side)
        self._clips = torch.empty(shape, dtype=torch.uint8, device=device)
        self._centres: list[list[list[tuple[float, float]]]] = [[] for _ in range(count)]
        self._next = 0
        for _ in range(0, count, 8):
            self.replace(8)

    def replace(self, count: int) -> None:
        """Render ``count`` fresh clips over the oldest ones."""
        scenes = [sample_scene(self._rng) for _ in range(count)]
        fresh = render(scenes, self.size.frames, self.size.side, self.size.side, self._device)
        fresh = fresh.add_(1).mul_(127.5).round_().to(torch.uint8)
        for scene, clip in zip(scenes, fresh, strict=True):
            self._clips[self._next] = clip
            self._centres[self._next] = centres(scene, self.size.frames).tolist()
            self._next = (self._next + 1) % len(self._centres)

    def crops(self, crop: Crop) -> torch.Tensor:
        """A batch of crops [B, 3, T, H, W] in [-1, 1], two thirds of them around a body."""
        picked = []
        room = self.size.side - crop.side
        for _ in range(crop.batch):
            i = self._rng.randrange(len(self._centres))
            first = self._rng.randrange(self.size.frames - crop.frames + 1)
            top, left = self._rng.randint(0, room), self._rng.randint(0, room)
            if self._rng.random() < 0.67:
                places = self._rng.choice(self._centres[i])
                x, y = places[first + crop.frames // 2]
                slack = 0.3 * crop.side
                left = round(x * self.size.side - crop.side / 2 + self._rng.uniform(-slack, slack))
                top = round(y * self.size.side - crop.side / 2 + self._rng.uniform(-slack, slack))
                left, top = min(max(left, 0), room), min(max(top, 0), room)
            picked.append(
                self._clips[
                    i,
                    :,
                    first : first + crop.frames,
                    top : top + crop.side,
                    left : left + crop.side,
                ]
            )
        return torch.stack(picked).float().div_(127.5).sub_(1)


def schedule(progress: float, step: int, warmup: int) -> float:
    """Linear warm-up by steps, then half a cosine by time, as a share of the peak rate."""
    return min(1.0, (step + 1) / warmup) * (0.5 * (1 + math.cos(math.pi * progress)) + 0.005)


class Average:
    """Exponential moving average of parameters, in fp32, with a ramped-up horizon."""

    def __init__(self, parameters: list[nn.Parameter], horizon: float):
        self._live, self._keep, self._steps = parameters, horizon, 0
        self.values = [p.detach().float().clone() for p in parameters]

    def update(self) -> None:
        """Take the live parameters in."""
        self._steps += 1
        keep = min(self._keep, 1 - 1 / (1 + self._steps / 10))
        torch._foreach_lerp_(self.values, [p.detach() for p in self._live], 1 - keep)

    def swap(self) -> None:
        """Exchange averaged and live values; call again to undo."""
        with torch.no_grad():
            for p, value in zip(self._live, self.values, strict=True):
                kept = p.detach().clone()
                p.copy_(value)
                value.copy_(kept)


def train_vae(
    vae: AutoencoderKLWan,
    *,
    seconds: float,
    device: torch.device,
    seed: int,
    log: Log,
    save: Callable[[], None],
    crops: tuple[Crop, ...] = CROPS,
    sizes: tuple[ClipSize, ...] = CLIP_SIZES,
    pool_clips: tuple[int, ...] = (1024, 320),
    learning_rate: float = 2e-3,
    divergence_weight: float = 3e-4,
) -> None:
    """Train for a wall-clock time; averaged weights are in place at the end and at each save."""
    rng = random.Random(seed)
    vae = channels_last(vae.to(device).train())
    pools = [ClipPool(s, n, rng, device) for s, n in zip(sizes, pool_clips, strict=True)]
    log(f"vae: {sum(p.numel() for p in vae.parameters()) / 1e6:.2f} M parameters, pools ready")
    parameters = list(vae.parameters())
    optimizer = torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=(0.9, 0.99),
        weight_decay=1e-4,
        fused=device.type == "cuda",
    )
    average = Average(parameters, 0.998)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    start = saved = time.monotonic()
    running: torch.Tensor | None = None
    step = 0
    while (progress := (time.monotonic() - start) / seconds) < 1:
        crop = rng.choices(crops, [c.share for c in crops])[0]
        clip = rng.choice(pools).crops(crop)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * schedule(progress, step, 200)
        mean, log_variance = encode(
            vae, clip.to(dtype).contiguous(memory_format=torch.channels_last_3d)
        )
        mean, log_variance = mean.float(), log_variance.float()
        latents = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        rebuilt = decode(vae, latents.to(dtype)).float()
        error = rebuilt - clip
        squared = error.square().mean()
        # the divergence keeps the latents in scale and free of detail that the picture does not
        # need, which the transformer would have to learn; at this weight it costs little sharpness
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        loss = error.abs().mean() + 4 * squared + divergence_weight * divergence
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update()
        step += 1
        seen = squared.detach()
        running = seen if running is None else torch.lerp(running, seen, 0.02)
        if step % 25 == 0:
            pool = pools[(step // 25) % len(pools)]
            pool.replace(8)
        if step % 250 == 0 or step == 10:
            log(
                f"vae step {step} psnr {10 * math.log10(4 / running.item()):.2f} "
                f"kl {divergence.item():.2f} {step / (time.monotonic() - start):.1f} it/s"
            )
        if time.monotonic() - saved > 60:
            saved = time.monotonic()
            average.swap()
            save()
            average.swap()
    average.swap()
    vae.eval()
    save()
    log(f"vae: {step} steps")


def held_out_clips(
    size: ClipSize, count: int, batch: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Batches [B, 3, T, H, W] of ``count`` whole clips, from a seed that training never uses."""
    rng = random.Random(0x5EED)
    for first in range(0, count, batch):
        scenes = [sample_scene(rng) for _ in range(min(batch, count - first))]
        yield render(scenes, size.frames, size.side, size.side, device)


@torch.no_grad()
def held_out_psnr(
    vae: AutoencoderKLWan, size: ClipSize, count: int, device: torch.device
) -> list[float]:
    """PSNR in dB of each of ``count`` whole held-out clips, in fp32."""
    scores: list[float] = []
    for clip in held_out_clips(size, count, 2, device):
        mean, _ = encode(vae, clip)
        scores += psnr(decode(vae, mean), clip).tolist()
    return scores
