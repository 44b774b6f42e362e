"""Training a video autoencoder on crops of drawn clips, and how well it rebuilds unseen ones.

Shapes: clips [B, 3, T, H, W] in [-1, 1] with T = 4k + 1; latents [B, C, k + 1, h, w].
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .model import ClipSize, Crop, SmallModel
from .muon import Muon, hidden_matrices
from .worlds import World

Log = Callable[[str], None]

LOG_SECONDS = 10.0
SAVE_SECONDS = 60.0


def clip_psnr(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """PSNR in dB per clip [B] of clips in [-1, 1]."""
    error = (first.float().clamp(-1, 1) - second.float().clamp(-1, 1)).square().flatten(1).mean(1)
    return 10 * torch.log10(4 / error.clamp_min(1e-10))


class ClipPool:
    """Rendered clips of one size, kept as bytes on the device and replaced a few at a time."""

    def __init__(
        self,
        world: World,
        size: ClipSize,
        count: int,
        rng: random.Random,
        device: torch.device,
    ):
        self.size, self._world, self._rng, self._device = size, world, rng, device
        shape = (count, 3, size.frames, size.side, size.side)
        self._clips = torch.empty(shape, dtype=torch.uint8, device=device)
        self._centres: list[list[list[tuple[float, float]]]] = [[] for _ in range(count)]
        self._next = 0
        for _ in range(0, count, 8):
            self.replace(8)

    def replace(self, count: int) -> None:
        """Render ``count`` fresh clips over the oldest ones."""
        scenes = [self._world.sample(self._rng) for _ in range(count)]
        side = self.size.side
        fresh = self._world.render(scenes, self.size.frames, side, side, self._device)
        fresh = fresh.add_(1).mul_(127.5).round_().to(torch.uint8)
        for scene, clip in zip(scenes, fresh, strict=True):
            self._clips[self._next] = clip
            self._centres[self._next] = self._world.centres(scene, self.size.frames).tolist()
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
    model: SmallModel,
    vae: Any,
    *,
    seconds: float,
    device: torch.device,
    seed: int,
    log: Log,
    save: Callable[[], None],
    crops: tuple[Crop, ...],
    sizes: tuple[ClipSize, ...],
    pool_clips: tuple[int, ...],
    muon_rate: float | None,
    learning_rate: float = 2e-3,
    divergence_weight: float = 3e-4,
) -> None:
    """Train for a wall-clock time; averaged weights are in place at the end and at each save.

    AdamW trains everything, or with a ``muon_rate`` all but the convolutions inside the blocks.
    On a GPU each shape of crop is compiled first, which takes most of a minute and then halves its
    steps: what costs there is norms, activations and padding between the convolutions.
    """
    rng = random.Random(seed)
    vae = model.prepare_vae(vae.to(device).train())
    pools = [
        ClipPool(model.world, s, n, rng, device) for s, n in zip(sizes, pool_clips, strict=True)
    ]
    log(f"vae: {sum(p.numel() for p in vae.parameters()) / 1e6:.2f} M parameters, pools ready")
    parameters = list(vae.parameters())
    hidden = [] if muon_rate is None else hidden_matrices(vae)
    chosen = {id(p) for p in hidden}
    muon = Muon(hidden, weight_decay=0.01)
    optimizer = torch.optim.AdamW(
        [p for p in parameters if id(p) not in chosen],
        lr=learning_rate,
        betas=(0.9, 0.99),
        weight_decay=1e-4,
        fused=device.type == "cuda",
    )
    average = Average(parameters, 0.998)
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32

    def rebuild(clip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = model.encode(vae, clip)
        mean, log_variance = mean.float(), log_variance.float()
        latents = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return model.decode(vae, latents.to(dtype)), mean, log_variance

    whole = torch.compile(rebuild, dynamic=False) if cuda else rebuild
    start = saved = logged = time.monotonic()
    running: torch.Tensor | None = None
    step = 0
    while (progress := (time.monotonic() - start) / seconds) < 1:
        crop = rng.choices(crops, [c.share for c in crops])[0]
        # a larger clip has more to learn from
        clip = rng.choices(pools, [size.side for size in sizes])[0].crops(crop)
        factor = schedule(progress, step, 200)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * factor
        rebuilt, mean, log_variance = whole(
            clip.to(dtype).contiguous(memory_format=torch.channels_last_3d)
        )
        error = rebuilt.float() - clip
        squared = error.square().mean()
        # the divergence keeps the latents in scale and free of detail that the picture does not
        # need, which the transformer would have to learn; at this weight it costs little sharpness
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        loss = error.abs().mean() + 4 * squared + divergence_weight * divergence
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        if muon_rate is not None:
            muon.step(muon_rate * factor)
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        average.update()
        step += 1
        seen = squared.detach()
        running = seen if running is None else torch.lerp(running, seen, 0.02)
        if step % 25 == 0:
            pool = pools[(step // 25) % len(pools)]
            pool.replace(8)
        if time.monotonic() - logged > LOG_SECONDS:
            logged = time.monotonic()
            log(
                f"vae step {step} psnr {10 * math.log10(4 / running.item()):.2f} "
                f"kl {divergence.item():.2f} {step / (time.monotonic() - start):.1f} it/s"
            )
        if time.monotonic() - saved > SAVE_SECONDS:
            saved = time.monotonic()
            average.swap()
            save()
            average.swap()
    average.swap()
    vae.eval()
    save()
    log(f"vae: {step} steps")


def held_out_clips(
    world: World, size: ClipSize, count: int, batch: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Batches [B, 3, T, H, W] of ``count`` whole clips, from a seed that training never uses."""
    rng = random.Random(0x5EED)
    for first in range(0, count, batch):
        scenes = [world.sample(rng) for _ in range(min(batch, count - first))]
        yield world.render(scenes, size.frames, size.side, size.side, device)


@torch.no_grad()
def held_out_psnr(
    model: SmallModel, vae: Any, size: ClipSize, count: int, device: torch.device
) -> list[float]:
    """PSNR in dB of each of ``count`` whole held-out clips, in fp32."""
    scores: list[float] = []
    # one by one, since a long clip in fp32 fills a good part of a GPU
    for clip in held_out_clips(model.world, size, count, 1, device):
        mean, _ = model.encode(vae, clip)
        scores += clip_psnr(model.decode(vae, mean), clip).tolist()
    return scores
