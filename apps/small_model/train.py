r"""Train a small model from nothing and export it: one command, about 25 minutes on one GPU.

    python -m vidsparse.apps.small_model.train --out runs/shapes

Phases, each with its own wall-clock budget: the autoencoder; the latents of freshly drawn clips
with their captions; the transformer together with its text encoder; the export to a diffusers
folder. Every phase leaves safetensors under ``OUT/checkpoints`` about once a minute, and
``--start`` continues from the phase named, with the weights of these or of an exported model.

``scenes`` takes a session for its autoencoder, whose weights are kept, one for its transformer, and
any number to train that further on clips drawn from another seed:

    python -m vidsparse.apps.small_model.train --model scenes --out runs/scenes \
        --start latents --weights pipelines/models/scenes
    python -m vidsparse.apps.small_model.train --model scenes --out runs/further --seed 1 \
        --start transformer --weights runs/scenes/scenes

Under ``torchrun`` the transformer learns on several GPUs at once (``together``).
"""

from __future__ import annotations

import argparse
import copy
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .benchmark import benchmark
from .export import export
from .learner import Latents, Learner
from .model import ClipSize, Crop, LatentPlan, Recipe, SmallModel, StepPlan
from .registry import SMALL_MODELS
from .together import Together
from .vae import LOG_SECONDS, SAVE_SECONDS, Log, held_out_psnr, schedule, train_vae

CAPTIONS_PER_CLIP = 4
# the share of the picture at which a body has the recipe's weight, and how far others' may differ
_USUAL_BODY = 1 / 40
_LARGEST_FACTOR = 3.0


def _weights(kinds: torch.Tensor, size: Sequence[int], weight: float) -> torch.Tensor:
    """How often errors count in each of the latents [B, 1, t, h, w] of ``size`` (t, h, w).

    ``weight`` in or beside a body of usual size, more where it is smaller, and once where there is
    none. ``kinds`` [B, T, H, W] are those of bodies, 0 for none.
    """
    flat = kinds.flatten(1).long()
    seen = torch.zeros(len(flat), int(flat.max()) + 1, device=flat.device)
    seen.scatter_add_(1, flat, torch.ones_like(flat, dtype=seen.dtype))
    usual = _USUAL_BODY * flat.shape[1]
    counts = weight * (usual / seen.clamp_min(1)).clamp(1 / _LARGEST_FACTOR, _LARGEST_FACTOR)
    counts[:, 0] = 0
    cells = counts.gather(1, flat).view(kinds.shape)[:, None]
    cells = F.adaptive_max_pool3d(cells, tuple(size))
    # the rim is what tells shapes apart, from both of its sides
    return F.max_pool3d(cells, (1, 3, 3), 1, (0, 1, 1)).clamp_min(1)


def _at_latents(kinds: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """What of ``kinds`` [B, T, H, W] is in the middle of each latent of ``size`` (t, h, w)."""
    # the first latent is of one frame, each other of as many as the autoencoder takes together
    group = (kinds.shape[1] - 1) // max(1, size[0] - 1)
    frames = torch.arange(size[0], device=kinds.device) * group - group // 2
    rows, columns = (
        (torch.arange(n, device=kinds.device) * 2 + 1) * length // (2 * n)
        for n, length in zip(size[1:], kinds.shape[2:], strict=True)
    )
    return kinds[:, frames.clamp_min(0)][:, :, rows][:, :, :, columns]


@torch.no_grad()
def draw_latents(
    model: SmallModel,
    vae: Any,
    *,
    seconds: float,
    device: torch.device,
    seed: int,
    log: Log,
    plans: tuple[LatentPlan, ...],
    body_weight: float,
) -> list[Latents]:
    """Render, caption and encode clips for a wall-clock time; one entry for each plan."""
    rng = random.Random(seed)
    vae = model.prepare_vae(vae.to(device).eval())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    values: list[list[torch.Tensor]] = [[] for _ in plans]
    weights: list[list[torch.Tensor]] = [[] for _ in plans]
    kinds: list[list[torch.Tensor]] = [[] for _ in plans]
    ids: list[list[list[list[int]]]] = [[] for _ in plans]
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        for plan, stored, weighed, named, captions in zip(
            plans, values, weights, kinds, ids, strict=True
        ):
            for _ in range(plan.batches):
                scenes = [model.world.sample(rng) for _ in range(plan.batch)]
                side = plan.size.side
                clip = model.world.render(scenes, plan.size.frames, side, side, device, plan.course)
                seen = model.world.bodies(scenes, clip) if model.world.bodies else None
                clip = clip.to(dtype).contiguous(memory_format=torch.channels_last_3d)
                mean, log_variance = model.encode(vae, clip)
                # a sample, not the mean: a channel the picture does not need stays plain noise
                # instead of being scaled up to unit variance
                noise = torch.randn_like(mean)
                stored.append((mean + noise * torch.exp(0.5 * log_variance)).contiguous())
                if seen is not None:
                    if body_weight != 1:
                        weighed.append(_weights(seen, mean.shape[2:], body_weight).to(dtype))
                    named.append(_at_latents(seen, mean.shape[2:]))
                captions += [
                    [model.world.training_ids(scene, rng) for _ in range(CAPTIONS_PER_CLIP)]
                    for scene in scenes
                ]
    drawn = [
        Latents(
            values=torch.cat(stored),
            ids=torch.tensor(captions, device=device),
            weights=torch.cat(weighed) if weighed else None,
            kinds=torch.cat(named) if named else None,
        )
        for stored, weighed, named, captions in zip(values, weights, kinds, ids, strict=True)
    ]
    for latents in drawn:
        log(f"latents {tuple(latents.values.shape)}")
    return drawn


def normalise(
    model: SmallModel, vae: Any, drawn: list[Latents], *, known: bool, together: Together
) -> None:
    """Scale the latents in place by their mean and deviation, which the autoencoder is told.

    Where they are ``known``, its own are taken: a trained transformer has learnt with them.
    """
    if known:
        for latents in drawn:
            device = latents.values.device
            shift, scale = (m.to(device).view(1, -1, 1, 1, 1) for m in model.moments(vae))
            latents.values.sub_(shift).div_(scale)
        return
    moments = []
    for latents in drawn:
        flat = [chunk.float() for chunk in torch.split(latents.values, 64)]
        mean = torch.stack([c.mean((2, 3, 4)).sum(0) for c in flat]).sum(0) / len(latents.values)
        square = torch.stack([c.square().mean((2, 3, 4)).sum(0) for c in flat]).sum(0)
        moments.append((mean, square / len(latents.values)))
    mean, square = (torch.stack(each).mean(0) for each in zip(*moments, strict=True))
    together.mean([mean, square])
    deviation = (square - mean.square()).sqrt()
    shift, scale = (each.view(1, -1, 1, 1, 1) for each in model.normalise(vae, mean, deviation))
    for latents in drawn:
        latents.values.sub_(shift).div_(scale)


def train_transformer(
    model: SmallModel,
    transformer: Any,
    encoder: Any,
    drawn: list[Latents],
    *,
    seconds: float,
    device: torch.device,
    seed: int,
    log: Log,
    save: Callable[[], None],
    plans: tuple[StepPlan, ...],
    learning_rate: float,
    muon_rate: float,
    naming: float,
    together: Together,
) -> float:
    """Train for a wall-clock time; returns the running loss, averaged weights in place.

    ``learning_rate`` is AdamW's, for embeddings, norms, first and last layers; ``muon_rate`` is for
    the matrices inside the blocks. Both warm up and fall together.
    """
    # which plans come next is the same in all processes, clips and noise are their own
    rng = random.Random(seed)
    torch.manual_seed(together.seed(seed))
    learner = Learner(
        model,
        transformer,
        encoder,
        device=device,
        learning_rate=learning_rate,
        muon_rate=muon_rate,
        naming=naming,
        together=together,
    )
    count = sum(p.numel() for p in transformer.parameters()) / 1e6
    log(
        f"transformer: {count:.2f} M parameters, {len(learner.parameters)} tensors with its encoder"
    )
    start = saved = logged = time.monotonic()
    running: list[torch.Tensor | None] = [None] * len(drawn)
    step = logged_step = logged_tokens = 0
    while (progress := together.same((time.monotonic() - start) / seconds)) < 1:
        ready = [p for p in plans if p.begins <= progress < p.ends]
        plan = rng.choices(ready, [p.share for p in ready])[0]
        source = drawn[plan.source]
        seen = learner.step(source, plan, schedule(progress, step, 300))
        step += 1
        logged_tokens += learner.share(plan) * learner.tokens(source.values) * together.size
        before = running[plan.source]
        running[plan.source] = seen if before is None else torch.lerp(before, seen, 0.02)
        if time.monotonic() - logged > LOG_SECONDS:
            losses = ", ".join("-" if r is None else f"{r.item():.4f}" for r in running)
            passed = time.monotonic() - logged
            named = "" if learner.misnamed is None else f" naming {learner.misnamed.item():.4f}"
            log(
                f"transformer step {step} loss {losses}{named} "
                f"{(step - logged_step) / passed:.1f} it/s {logged_tokens / passed:,.0f} tokens/s"
            )
            logged, logged_step, logged_tokens = time.monotonic(), step, 0
        if together.first and time.monotonic() - saved > SAVE_SECONDS:
            saved = time.monotonic()
            learner.average.swap()
            save()
            learner.average.swap()
    learner.average.swap()
    transformer.eval()
    encoder.eval()
    if together.first:
        save()
    final = [r.item() for r in running if r is not None]
    log(f"transformer: {step} steps, loss {', '.join(f'{loss:.4f}' for loss in final)}")
    return sum(final) / len(final)


def save_checkpoint(model: Any, folder: Path) -> None:
    """Save weights as fp32 safetensors; an older checkpoint stays until this one is whole."""
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    # safetensors wants the plain memory layout
    plain = copy.deepcopy(model).to("cpu").to(memory_format=torch.contiguous_format)
    plain.save_pretrained(fresh)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


# a few seconds on one CPU core: proves that every phase runs, learns nothing
_TINY_SIZE = ClipSize(frames=9, side=32)
TINY = Recipe(
    vae_minutes=0.02,
    latent_minutes=0.005,
    transformer_minutes=0.05,
    crops=(Crop(frames=9, side=16, batch=2, share=1.0),),
    sizes=(_TINY_SIZE,),
    pool_clips=(8,),
    latent_plans=(LatentPlan(size=_TINY_SIZE, batch=4, batches=1),),
    step_plans=(StepPlan(source=0, batch=4, share=1.0),),
    check_clips=1,
    body_weight=2.0,
    naming=0.2,
)


def choose_kernels() -> None:
    """Have torch take the fast kernels, in this process."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    # a full search for each convolution and shape takes longer than it saves
    torch.backends.cudnn.benchmark_limit = 4


def train(
    model: SmallModel,
    out: Path,
    *,
    weights: Path,
    recipe: Recipe,
    device: torch.device,
    seed: int,
    start: str,
    log: Log,
    together: Together,
) -> None:
    """Run the phases from ``start`` on ``weights``; checkpoints go to ``out/checkpoints``."""
    checkpoints = out / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    if start == "vae":
        vae = model.build_vae()
        train_vae(
            model,
            vae,
            seconds=60 * recipe.vae_minutes,
            device=device,
            seed=seed,
            log=log,
            save=lambda: save_checkpoint(vae, checkpoints / "vae"),
            crops=recipe.crops,
            sizes=recipe.sizes,
            pool_clips=recipe.pool_clips,
            muon_rate=recipe.vae_muon_rate,
        )
    else:
        vae = model.vae_class.from_pretrained(weights / "vae", torch_dtype=torch.float32).to(device)
    for size in recipe.sizes:
        scores = held_out_psnr(model, vae, size, recipe.check_clips, device)
        log(
            f"vae held out {size}: mean "
            f"{sum(scores) / len(scores):.2f} dB, lowest {min(scores):.2f} dB"
        )
    drawn = draw_latents(
        model,
        vae,
        seconds=60 * recipe.latent_minutes,
        device=device,
        seed=together.seed(seed + 1),
        log=log,
        plans=recipe.latent_plans,
        body_weight=recipe.body_weight,
    )
    normalise(model, vae, drawn, known=start == "transformer", together=together)
    if together.first:
        save_checkpoint(vae, checkpoints / "vae")
    if start == "transformer":
        transformer = model.transformer_class.from_pretrained(
            weights / "transformer", torch_dtype=torch.float32
        )
        encoder = model.encoder_class.from_pretrained(weights / "text_encoder", dtype=torch.float32)
    else:
        transformer, encoder = model.build_transformer(), model.build_text_encoder()

    def save() -> None:
        save_checkpoint(transformer, checkpoints / "transformer")
        save_checkpoint(encoder, checkpoints / "text_encoder")

    train_transformer(
        model,
        transformer,
        encoder,
        drawn,
        seconds=60 * recipe.transformer_minutes,
        device=device,
        seed=seed + 2,
        log=log,
        save=save,
        plans=recipe.step_plans,
        learning_rate=recipe.learning_rate,
        muon_rate=recipe.muon_rate,
        naming=recipe.naming,
        together=together,
    )


_RATES_AND_TIMES = (
    "vae_minutes",
    "latent_minutes",
    "transformer_minutes",
    "learning_rate",
    "muon_rate",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of ``python -m vidsparse.apps.small_model.train``."""
    parser = argparse.ArgumentParser(
        prog="python -m vidsparse.apps.small_model.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        choices=SMALL_MODELS,
        default=next(iter(SMALL_MODELS)),
        help="default: %(default)s",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and model")
    parser.add_argument("--device", default="cuda", help="torch device (default: cuda)")
    parser.add_argument("--seed", type=int, default=0)
    for name in _RATES_AND_TIMES:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=float, help="default: the model's own")
    parser.add_argument(
        "--start",
        choices=("vae", "latents", "transformer", "export"),
        default="vae",
        help="phase to start at, from the checkpoints under OUT (default: vae); "
        "'latents' begins the transformer anew, 'transformer' trains the saved one further",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        help="folder whose parts --start takes: checkpoints or an exported model "
        "(default: OUT/checkpoints)",
    )
    parser.add_argument(
        "--benchmark",
        action="store_true",
        help="train nothing: print clips/s, tokens/s and memory of every kind of step",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="every phase for a few seconds, to see that it runs"
    )
    options = parser.parse_args(arguments)
    begun = time.monotonic()

    together = Together.joined(options.device)

    def log(line: str) -> None:
        if together.first:
            print(f"[{time.monotonic() - begun:6.1f} s] {line}", flush=True)

    model = SMALL_MODELS[options.model]
    given = {name: getattr(options, name) for name in _RATES_AND_TIMES}
    own = model.further if options.start == "transformer" and model.further else model.recipe
    recipe = replace(
        TINY if options.tiny else own,
        **{name: value for name, value in given.items() if value is not None},
    )
    choose_kernels()
    device = together.device(options.device)
    if together.size > 1 and (options.benchmark or options.start in ("vae", "export")):
        parser.error("only the transformer learns in several processes. Hint: --start latents")
    if options.benchmark:
        benchmark(model, recipe, device, log)
        return
    if options.start != "export":
        train(
            model,
            options.out,
            weights=options.weights or options.out / "checkpoints",
            recipe=recipe,
            device=device,
            seed=options.seed,
            start=options.start,
            log=log,
            together=together,
        )
    together.leave()
    if not together.first:
        return
    # what was trained above, or what is only to be written again
    source = options.weights if options.start == "export" else None
    export(model, source or options.out / "checkpoints", options.out / model.name)
    log(f"exported to {options.out / model.name}")


if __name__ == "__main__":
    main()
