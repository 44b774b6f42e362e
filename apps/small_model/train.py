"""Train the small model from nothing and export it: one command, about 25 minutes on one GPU.

    python -m vidsparse.apps.small_model.train --out runs/shapes

Phases, each with its own wall-clock budget: the autoencoder; the latents of freshly drawn clips
with their captions; the Wan transformer together with its text encoder by flow matching; the
export to a diffusers folder. Every phase leaves safetensors under ``OUT/checkpoints`` about once a
minute, and ``--start`` continues from the phase named.
"""

from __future__ import annotations

import argparse
import copy
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, ModelMixin, WanTransformer3DModel
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import UMT5Config, UMT5EncoderModel

from . import text
from .export import export
from .muon import Muon
from .vae import (
    CLIP_SIZES,
    CROPS,
    Average,
    ClipSize,
    Crop,
    Log,
    build_vae,
    channels_last,
    encode,
    held_out_psnr,
    schedule,
    train_vae,
)
from .world import render, sample_scene

PROMPT_TOKENS = 512
"""``WanPipeline`` pads text embeddings with zeros to this length."""
FLOW_SHIFT = 3.0
UNCONDITIONAL_SHARE = 0.1
CAPTIONS_PER_CLIP = 4


def build_transformer() -> WanTransformer3DModel:
    """The Wan transformer at 8.6 M parameters: 8 layers, 4 heads of 64."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=64,
        in_channels=16,
        out_channels=16,
        text_dim=256,
        freq_dim=256,
        ffn_dim=896,
        num_layers=8,
    )


def build_text_encoder() -> UMT5EncoderModel:
    """A UMT5 encoder of two layers over the words of ``text.VOCABULARY``."""
    config = UMT5Config(
        vocab_size=text.VOCABULARY_SIZE,
        d_model=256,
        d_kv=32,
        num_heads=8,
        d_ff=512,
        num_layers=2,
        dropout_rate=0.0,
        pad_token_id=text.PAD_ID,
        eos_token_id=text.END_ID,
    )
    return UMT5EncoderModel(config)


def hidden_matrices(
    transformer: WanTransformer3DModel, encoder: UMT5EncoderModel
) -> list[torch.Tensor]:
    """The weights that Muon updates: the projections inside the blocks of both models."""
    return [
        module.weight
        for model in (transformer, encoder)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "block" in name
    ]


def embed_prompts(encoder: UMT5EncoderModel, ids: torch.Tensor) -> torch.Tensor:
    """Embeddings [B, 512, 256] of padded ids [B, L], zero beyond each prompt as in the pipeline."""
    mask = (ids != text.PAD_ID).long()
    hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    hidden = hidden * mask.unsqueeze(-1)
    return nn.functional.pad(hidden, (0, 0, 0, PROMPT_TOKENS - ids.shape[1]))


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Training clips of one size: raw latents [N, 16, t, h, w] and captions [N, C, L] as ids."""

    values: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class LatentPlan:
    """How many clips of one size a cycle draws, in batches that fit on the device."""

    size: ClipSize
    batch: int
    batches: int


# of the two sizes that the model is made for, 70 % small clips and 30 % large ones. Quarter-size
# clips cost almost nothing and only serve the first minutes of training.
LATENT_PLANS: tuple[LatentPlan, ...] = (
    LatentPlan(size=ClipSize(frames=33, side=128), batch=56, batches=1),
    LatentPlan(size=CLIP_SIZES[0], batch=28, batches=2),
    LatentPlan(size=CLIP_SIZES[1], batch=8, batches=3),
)


@torch.no_grad()
def draw_latents(
    vae: AutoencoderKLWan,
    *,
    seconds: float,
    device: torch.device,
    seed: int,
    log: Log,
    plans: tuple[LatentPlan, ...] = LATENT_PLANS,
) -> list[Latents]:
    """Render, caption and encode clips for a wall-clock time; one entry for each plan."""
    rng = random.Random(seed)
    vae = channels_last(vae.to(device).eval())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    values: list[list[torch.Tensor]] = [[] for _ in plans]
    ids: list[list[list[list[int]]]] = [[] for _ in plans]
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        for plan, stored, captions in zip(plans, values, ids, strict=True):
            for _ in range(plan.batches):
                scenes = [sample_scene(rng) for _ in range(plan.batch)]
                clip = render(scenes, plan.size.frames, plan.size.side, plan.size.side, device)
                clip = clip.to(dtype).contiguous(memory_format=torch.channels_last_3d)
                mean, log_variance = encode(vae, clip)
                # a sample, not the mean: a channel the picture does not need stays plain noise
                # instead of being scaled up to unit variance
                noise = torch.randn_like(mean)
                stored.append((mean + noise * torch.exp(0.5 * log_variance)).contiguous())
                captions += [
                    [text.training_ids(scene, rng) for _ in range(CAPTIONS_PER_CLIP)]
                    for scene in scenes
                ]
    drawn = [
        Latents(values=torch.cat(stored), ids=torch.tensor(captions, device=device))
        for stored, captions in zip(values, ids, strict=True)
    ]
    for latents in drawn:
        log(f"latents {tuple(latents.values.shape)}")
    return drawn


def normalise(vae: AutoencoderKLWan, drawn: list[Latents]) -> None:
    """Write the latents' mean and deviation to the autoencoder's config; scale them in place."""
    moments = []
    for latents in drawn:
        flat = [chunk.float() for chunk in torch.split(latents.values, 64)]
        mean = torch.stack([c.mean((2, 3, 4)).sum(0) for c in flat]).sum(0) / len(latents.values)
        square = torch.stack([c.square().mean((2, 3, 4)).sum(0) for c in flat]).sum(0)
        moments.append((mean, square / len(latents.values)))
    mean = torch.stack([m for m, _ in moments]).mean(0)
    deviation = (torch.stack([s for _, s in moments]).mean(0) - mean.square()).sqrt()
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())
    for latents in drawn:
        shape = (1, -1, 1, 1, 1)
        latents.values.sub_(mean.view(shape)).div_(deviation.view(shape))


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Which latents a training step takes, how many, and in what share of the steps.

    The plan is active from ``begins`` to ``ends``, shares of the training time.
    """

    source: int
    batch: int
    share: float
    begins: float = 0.0
    ends: float = 1.0


# what words mean and how things move is learnt from quarter-size clips, where a step is cheap and
# attention is short; then the real sizes, the large one for the second half
STEP_PLANS: tuple[StepPlan, ...] = (
    StepPlan(source=0, batch=128, share=1.0, ends=0.24),
    StepPlan(source=1, batch=32, share=0.6, begins=0.24),
    StepPlan(source=2, batch=10, share=0.4, begins=0.58),
)


def train_transformer(
    transformer: WanTransformer3DModel,
    encoder: UMT5EncoderModel,
    drawn: list[Latents],
    *,
    seconds: float,
    device: torch.device,
    seed: int,
    log: Log,
    save: Callable[[], None],
    plans: tuple[StepPlan, ...] = STEP_PLANS,
    learning_rate: float,
    muon_rate: float,
) -> float:
    """Flow matching for a wall-clock time; returns the running loss, averaged weights in place.

    ``learning_rate`` is AdamW's, for embeddings, norms, first and last layers; ``muon_rate`` is for
    the matrices inside the blocks. Both warm up and fall together.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    transformer.to(device).train()
    encoder.to(device).train()
    cuda = device.type == "cuda"
    if cuda:
        transformer.compile_repeated_blocks(dynamic=False)
    parameters = [*transformer.parameters(), *encoder.parameters()]
    count = sum(p.numel() for p in transformer.parameters()) / 1e6
    log(f"transformer: {count:.2f} M parameters, {len(parameters)} tensors with its encoder")
    hidden = hidden_matrices(transformer, encoder)
    chosen = {id(p) for p in hidden}
    muon = Muon(hidden, weight_decay=0.01)
    optimizer = torch.optim.AdamW(
        [p for p in parameters if id(p) not in chosen],
        lr=learning_rate,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        fused=cuda,
    )
    average = Average(parameters, 0.999)
    # cuDNN's attention is the fastest on recent GPUs, forwards and backwards
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    attention = (lambda: sdpa_kernel(kernels, set_priority=True)) if cuda else nullcontext
    blank = torch.zeros(text.CAPTION_TOKENS, dtype=torch.long, device=device)
    blank[0] = text.END_ID
    start = saved = time.monotonic()
    running: list[torch.Tensor | None] = [None] * len(drawn)
    step = 0
    while (progress := (time.monotonic() - start) / seconds) < 1:
        ready = [p for p in plans if p.begins <= progress < p.ends]
        plan = rng.choices(ready, [p.share for p in ready])[0]
        source = drawn[plan.source]
        factor = schedule(progress, step, 300)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * factor
        pick = torch.randint(0, len(source.values), (plan.batch,), device=device)
        clean = source.values[pick].float()
        variant = torch.randint(0, CAPTIONS_PER_CLIP, (plan.batch,), device=device)
        dropped = torch.rand(plan.batch, 1, device=device) < UNCONDITIONAL_SHARE
        ids = torch.where(dropped, blank, source.ids[pick, variant])
        noise = torch.randn_like(clean)
        # stratified times: every part of the schedule in every batch, at the sampler's own shift
        u = torch.rand(plan.batch, device=device) + torch.arange(plan.batch, device=device)
        u = u / plan.batch
        sigma = FLOW_SHIFT * u / (1 + (FLOW_SHIFT - 1) * u)
        s = sigma.view(-1, 1, 1, 1, 1)
        noisy = torch.lerp(clean, noise, s)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda), attention():
            predicted = transformer(
                hidden_states=noisy.to(torch.bfloat16) if cuda else noisy,
                timestep=sigma * 1000,
                encoder_hidden_states=embed_prompts(encoder, ids),
                return_dict=False,
            )[0]
            loss = (predicted.float() - (noise - clean)).square().mean()
            loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        muon.step(muon_rate * factor)
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        average.update()
        step += 1
        seen, before = loss.detach(), running[plan.source]
        running[plan.source] = seen if before is None else torch.lerp(before, seen, 0.02)
        if step % 250 == 0 or step == 10:
            losses = ", ".join("-" if r is None else f"{r.item():.4f}" for r in running)
            speed = step / (time.monotonic() - start)
            log(f"transformer step {step} loss {losses} {speed:.1f} it/s")
        if time.monotonic() - saved > 60:
            saved = time.monotonic()
            average.swap()
            save()
            average.swap()
    average.swap()
    transformer.eval()
    encoder.eval()
    save()
    final = [r.item() for r in running if r is not None]
    log(f"transformer: {step} steps, loss {', '.join(f'{loss:.4f}' for loss in final)}")
    return sum(final) / len(final)


def save_checkpoint(model: ModelMixin | UMT5EncoderModel, folder: Path) -> None:
    """Save weights as fp32 safetensors; an older checkpoint stays until this one is whole."""
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    # safetensors wants the plain memory layout
    plain = copy.deepcopy(model).to("cpu").to(memory_format=torch.contiguous_format)
    plain.save_pretrained(fresh)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a training run does, in minutes of wall clock, and how large its parts are."""

    vae_minutes: float = 4.2
    latent_minutes: float = 1.3
    transformer_minutes: float = 17.3
    crops: tuple[Crop, ...] = CROPS
    sizes: tuple[ClipSize, ...] = CLIP_SIZES
    pool_clips: tuple[int, ...] = (1024, 320)
    latent_plans: tuple[LatentPlan, ...] = LATENT_PLANS
    step_plans: tuple[StepPlan, ...] = STEP_PLANS
    check_clips: int = 8
    learning_rate: float = 1.2e-3
    muon_rate: float = 3e-3


# a few seconds on one CPU core: proves that every phase runs, learns nothing
_TINY_SIZE = ClipSize(frames=9, side=32)
TINY = Settings(
    vae_minutes=0.02,
    latent_minutes=0.005,
    transformer_minutes=0.05,
    crops=(Crop(frames=5, side=16, batch=2, share=1.0),),
    sizes=(_TINY_SIZE,),
    pool_clips=(8,),
    latent_plans=(LatentPlan(size=_TINY_SIZE, batch=4, batches=1),),
    step_plans=(StepPlan(source=0, batch=4, share=1.0),),
    check_clips=1,
)


def train(
    out: Path, *, settings: Settings, device: torch.device, seed: int, start: str, log: Log
) -> None:
    """Run the phases from ``start`` on; checkpoints go to ``out/checkpoints``."""
    checkpoints = out / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    # a full search for each convolution and shape takes longer than it saves
    torch.backends.cudnn.benchmark_limit = 4
    torch.manual_seed(seed)
    if start == "vae":
        vae = build_vae()
        train_vae(
            vae,
            seconds=60 * settings.vae_minutes,
            device=device,
            seed=seed,
            log=log,
            save=lambda: save_checkpoint(vae, checkpoints / "vae"),
            crops=settings.crops,
            sizes=settings.sizes,
            pool_clips=settings.pool_clips,
        )
    else:
        vae = AutoencoderKLWan.from_pretrained(checkpoints / "vae").to(device)
    for size in settings.sizes:
        scores = held_out_psnr(vae, size, settings.check_clips, device)
        log(
            f"vae held out {size.frames}x{size.side}x{size.side}: mean "
            f"{sum(scores) / len(scores):.2f} dB, lowest {min(scores):.2f} dB"
        )
    drawn = draw_latents(
        vae,
        seconds=60 * settings.latent_minutes,
        device=device,
        seed=seed + 1,
        log=log,
        plans=settings.latent_plans,
    )
    normalise(vae, drawn)
    save_checkpoint(vae, checkpoints / "vae")
    if start == "transformer":
        transformer = WanTransformer3DModel.from_pretrained(checkpoints / "transformer")
        encoder = UMT5EncoderModel.from_pretrained(checkpoints / "text_encoder")
    else:
        transformer, encoder = build_transformer(), build_text_encoder()

    def save() -> None:
        save_checkpoint(transformer, checkpoints / "transformer")
        save_checkpoint(encoder, checkpoints / "text_encoder")

    train_transformer(
        transformer,
        encoder,
        drawn,
        seconds=60 * settings.transformer_minutes,
        device=device,
        seed=seed + 2,
        log=log,
        save=save,
        plans=settings.step_plans,
        learning_rate=settings.learning_rate,
        muon_rate=settings.muon_rate,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of ``python -m vidsparse.apps.small_model.train``."""
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m vidsparse.apps.small_model.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and model")
    parser.add_argument("--device", default="cuda", help="torch device (default: cuda)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-minutes", type=float, default=defaults.vae_minutes)
    parser.add_argument("--latent-minutes", type=float, default=defaults.latent_minutes)
    parser.add_argument("--transformer-minutes", type=float, default=defaults.transformer_minutes)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--muon-rate", type=float, default=defaults.muon_rate)
    parser.add_argument(
        "--start",
        choices=("vae", "latents", "transformer", "export"),
        default="vae",
        help="phase to start at, from the checkpoints under OUT (default: vae); "
        "'latents' begins the transformer anew, 'transformer' trains the saved one further",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="every phase for a few seconds, to see that it runs"
    )
    options = parser.parse_args(arguments)
    begun = time.monotonic()

    def log(line: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {line}", flush=True)

    settings = TINY
    if not options.tiny:
        settings = Settings(
            vae_minutes=options.vae_minutes,
            latent_minutes=options.latent_minutes,
            transformer_minutes=options.transformer_minutes,
            learning_rate=options.learning_rate,
            muon_rate=options.muon_rate,
        )
    if options.start != "export":
        train(
            options.out,
            settings=settings,
            device=torch.device(options.device),
            seed=options.seed,
            start=options.start,
            log=log,
        )
    export(options.out / "checkpoints", options.out / "shapes")
    log(f"exported to {options.out / 'shapes'}")


if __name__ == "__main__":
    main()
