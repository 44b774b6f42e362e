"""Assemble trained weights into the diffusers folder that the product ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from . import text

FLOW_SHIFT = 3.0
"""Of the training times and of the shipped scheduler."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level tokenizer over ``text.VOCABULARY``: lower case, no punctuation, ``</s>`` last."""
    ids = {text.PAD: text.PAD_ID, text.END: text.END_ID, text.UNKNOWN: text.UNKNOWN_ID}
    ids |= {word: i + len(ids) for i, word in enumerate(text.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=text.UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"[^\w\s]"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {text.END}", special_tokens=[(text.END, text.END_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=text.PAD,
        eos_token=text.END,
        unk_token=text.UNKNOWN,
        model_max_length=512,
        padding_side="right",
    )


def build_scheduler() -> UniPCMultistepScheduler:
    """The scheduler of stock Wan, at the shift of the training times."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=FLOW_SHIFT
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(checkpoints: Path, folder: Path) -> None:
    """Write ``folder`` for ``WanPipeline.from_pretrained`` from the fp32 ``checkpoints``.

    The transformer and the text encoder are stored in bfloat16, the autoencoder in float16, which
    keeps three more bits of its weights.
    """
    pipeline = WanPipeline(
        tokenizer=build_tokenizer(),
        text_encoder=UMT5EncoderModel.from_pretrained(checkpoints / "text_encoder").to(
            torch.bfloat16
        ),
        vae=AutoencoderKLWan.from_pretrained(checkpoints / "vae").to(torch.float16),
        transformer=WanTransformer3DModel.from_pretrained(checkpoints / "transformer").to(
            torch.bfloat16
        ),
        scheduler=build_scheduler(),
    )
    pipeline.save_pretrained(folder)
