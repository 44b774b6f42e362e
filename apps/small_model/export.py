"""Assemble trained weights into the diffusers folder that the product ships."""

from __future__ import annotations

import json
import warnings
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

from . import card, text

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
    """Write the complete ``folder`` for ``WanPipeline.from_pretrained`` from fp32 ``checkpoints``.

    The transformer and the text encoder are stored in bfloat16, but for the small modules that
    diffusers computes in fp32; the autoencoder in float16, which keeps three more bits of its
    weights. The card says what ``card.MEASURED`` beside the checkpoints says.
    """
    transformer = WanTransformer3DModel.from_pretrained(
        checkpoints / "transformer", torch_dtype=torch.bfloat16
    )
    encoder = UMT5EncoderModel.from_pretrained(checkpoints / "text_encoder", dtype=torch.bfloat16)
    vae = AutoencoderKLWan.from_pretrained(checkpoints / "vae", torch_dtype=torch.float16)
    for model in (transformer, vae):
        # diffusers would keep the path that they were loaded from
        model.register_to_config(_name_or_path=card.NAME)
    WanPipeline(
        tokenizer=build_tokenizer(),
        text_encoder=encoder,
        vae=vae,
        transformer=transformer,
        scheduler=build_scheduler(),
    ).save_pretrained(folder)
    _write_json(folder / "vidsparse.json", card.settings())
    readme = card.readme(
        transformer,
        encoder,
        vae,
        shift=FLOW_SHIFT,
        measured=card.read_measured(checkpoints),
    )
    (folder / "README.md").write_text(readme, encoding="utf-8")
    licence = card.license_text()
    if licence is None:
        warnings.warn(
            f"{folder} has no LICENSE, because vidsparse is not installed here. "
            "Hint: install it and export again before you pass the folder on.",
            stacklevel=2,
        )
    else:
        (folder / "LICENSE").write_text(licence, encoding="utf-8")
