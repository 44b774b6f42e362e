"""What the steps of a recipe cost on the machine at hand, before a run is begun.

Weights are random and latents are noise: times do not depend on either.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from .learner import Latents, Learner
from .model import ClipSize, Crop, LatentPlan, Recipe, SmallModel, StepPlan
from .together import Together
from .vae import Log

_WARM_UP = 2
_SECONDS = 3.0


def _timed(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds of one call after two that warm it up, and the peak of memory in GB."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(_WARM_UP):
        work()
    wait()
    begun, calls = time.monotonic(), 0
    while calls == 0 or time.monotonic() - begun < _SECONDS:
        work()
        wait()
        calls += 1
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return (time.monotonic() - begun) / calls, peak / 1e9


def _time_steps(
    model: SmallModel, recipe: Recipe, device: torch.device, log: Log, plans: list[StepPlan]
) -> None:
    vae = model.build_vae()
    learner = Learner(
        model,
        model.build_transformer(),
        model.build_text_encoder(),
        device=device,
        learning_rate=0.0,
        muon_rate=0.0,
        naming=0.0,
        together=Together(),
    )
    room = model.world.vocabulary.caption_tokens
    for plan in plans:
        size = recipe.latent_plans[plan.source].size
        with torch.no_grad():
            # the shape of a small clip's latents, carried over to the size
            mean, _ = model.encode(vae, torch.zeros(1, 3, 9, 32, 32))
        frames = (size.frames - 1) * (mean.shape[2] - 1) // 8 + 1
        side = size.side * mean.shape[3] // 32
        source = Latents(
            values=torch.randn(plan.batch, mean.shape[1], frames, side, side, device=device),
            ids=torch.ones(plan.batch, 1, room, dtype=torch.long, device=device),
        )
        begun = time.monotonic()
        learner.step(source, plan, 1.0)
        seconds, memory = _timed(lambda s=source, p=plan: learner.step(s, p, 1.0), device)  # type: ignore[misc]
        tokens = learner.tokens(source.values)
        log(
            f"step {size} batch {plan.batch}: {1 / seconds:.2f} it/s, {plan.batch / seconds:.1f} "
            f"clips/s, {plan.batch * tokens / seconds:,.0f} tokens/s of {tokens:,} a clip, "
            f"{memory:.1f} GB, ready after {time.monotonic() - begun:.0f} s"
        )


@torch.no_grad()
def _time_drawing(
    model: SmallModel, device: torch.device, log: Log, plans: list[LatentPlan]
) -> None:
    rng = random.Random(0)
    vae = model.prepare_vae(model.build_vae().to(device).eval())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def draw(size: ClipSize, batch: int) -> torch.Tensor:
        scenes = [model.world.sample(rng) for _ in range(batch)]
        return model.world.render(scenes, size.frames, size.side, size.side, device)

    for plan in plans:
        size, batch = plan.size, plan.batch
        drawing, memory = _timed(lambda s=size, b=batch: draw(s, b), device)  # type: ignore[misc]
        clip = draw(size, batch).to(dtype)
        clip = clip.contiguous(memory_format=torch.channels_last_3d)
        encoding, more = _timed(lambda c=clip: model.encode(vae, c), device)  # type: ignore[misc]
        log(
            f"draw {size} batch {batch}: {batch / drawing:.1f} clips/s drawn, "
            f"{batch / encoding:.1f} clips/s encoded, {max(memory, more):.1f} GB"
        )


def _time_crops(model: SmallModel, device: torch.device, log: Log, crops: list[Crop]) -> None:
    vae = model.prepare_vae(model.build_vae().to(device).train())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def learn(crop: Crop) -> None:
        shape = (crop.batch, 3, crop.frames, crop.side, crop.side)
        clip = torch.zeros(shape, dtype=dtype, device=device)
        mean, _ = model.encode(vae, clip.contiguous(memory_format=torch.channels_last_3d))
        torch.autograd.backward(model.decode(vae, mean).float().square().mean())
        vae.zero_grad()

    for crop in crops:
        seconds, memory = _timed(lambda c=crop: learn(c), device)  # type: ignore[misc]
        log(
            f"crop {crop.frames}x{crop.side}x{crop.side} batch {crop.batch}: {1 / seconds:.2f} "
            f"it/s, {memory:.1f} GB, without the optimizer"
        )


def benchmark(model: SmallModel, recipe: Recipe, device: torch.device, log: Log) -> None:
    """Print clips and tokens a second and memory of everything that ``recipe`` repeats."""
    _time_drawing(model, device, log, list(recipe.latent_plans))
    _time_crops(model, device, log, list(recipe.crops))
    _time_steps(model, recipe, device, log, list(recipe.step_plans))
