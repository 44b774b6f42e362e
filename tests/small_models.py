"""Folders of small models, how tests load them, and prompts for their tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vidsparse.apps.small_model.model import SmallModel

ROOT = Path(__file__).parents[1]
MEGABYTE = 1_000_000

# what a tokenizer may be given: known words and others, marks, its own special tokens, nothing.
PROMPTS = (
    "a large red ball that moves right on a plain navy background",
    "A Large, RED ball!  (that moves... right) on a plain-navy\tbackground;",
    "a zebra that moves left",
    "a tiny violet donut falling & a big donut's rising, on a grey backdrop?",
    "ein großer roter Ball \N{EN DASH} 大きな赤いボール",
    "café under_score 3 balls",
    "the </s> ball <pad> moves <unk> up",
    "",
    "   ",
    "!?.",
)


def seen_by_the_pipeline(net: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents of an autoencoder as its pipeline denoises them."""
    if "scaling_factor" in net.config:
        return latents * net.config.scaling_factor
    shape = (1, -1, 1, 1, 1)
    mean, deviation = net.config.latents_mean, net.config.latents_std
    return (latents - torch.tensor(mean).view(shape)) / torch.tensor(deviation).view(shape)


# of a folder whose transformer is one file.
FILES = {
    "LICENSE",
    "README.md",
    "model_index.json",
    "vidsparse.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
}


# and of one whose transformer is two, since a file of weights stays below 16 MiB.
SHARDED_FILES = FILES - {"transformer/diffusion_pytorch_model.safetensors"} | {
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
}


def files(folder: Path) -> set[str]:
    """Names of all files below a folder."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def load(model: SmallModel, folder: Path) -> Any:
    """The stock pipeline of a model's folder."""
    pipe = model.pipeline_class.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe
