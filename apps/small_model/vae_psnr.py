"""How well does the small model's autoencoder rebuild clips it has never seen?

    python -m vidsparse.apps.small_model.vae_psnr --model FOLDER --device cuda

Whole held-out clips of every training size go through the stock diffusers autoencoder in fp32.
Bar: a mean PSNR of 30 dB at each size.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from .registry import small_model_of
from .vae import clip_psnr, held_out_clips

BAR_DB = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of ``python -m vidsparse.apps.small_model.vae_psnr``; 0 when the bar is met."""
    parser = argparse.ArgumentParser(
        prog="python -m vidsparse.apps.small_model.vae_psnr",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="diffusers folder to judge")
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument("--clips", type=int, default=16, help="clips of each size (default: 16)")
    options = parser.parse_args(arguments)
    model = small_model_of(options.model)
    vae = model.vae_class.from_pretrained(
        options.model, subfolder="vae", torch_dtype=torch.float32
    ).to(options.device)
    met = True
    for size in model.recipe.sizes:
        scores: list[float] = []
        for clip in held_out_clips(
            model.world, size, options.clips, 1, torch.device(options.device)
        ):
            with torch.no_grad():
                rebuilt = vae.decode(vae.encode(clip).latent_dist.mode()).sample
            scores += clip_psnr(rebuilt, clip).tolist()
        mean = sum(scores) / len(scores)
        met &= mean >= BAR_DB
        print(
            f"{size.frames} frames of {size.side}x{size.side}: mean {mean:.2f} dB, lowest "
            f"{min(scores):.2f} dB over {len(scores)} clips (bar {BAR_DB:g} dB)"
        )
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
