"""Assemble trained weights into the diffusers folder that the product ships."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from . import card
from .model import SmallModel
from .words import END, END_ID, PAD, UNKNOWN, Vocabulary


def build_tokenizer(vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    """Word-level tokenizer over ``vocabulary``: lower case, no punctuation, ``</s>`` last."""
    tokenizer = Tokenizer(models.WordLevel(dict(vocabulary.ids), unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"[^\w\s]"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, END_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=512,
        padding_side="right",
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(model: SmallModel, checkpoints: Path, folder: Path) -> None:
    """Write the complete ``folder`` for diffusers' ``from_pretrained`` from fp32 ``checkpoints``.

    The transformer and the text encoder are stored in bf16, but for the small modules that
    diffusers computes in fp32; the autoencoder in fp16, which keeps three more bits of its
    weights. The card says what ``card.MEASURED`` beside the checkpoints says.
    """
    transformer = model.transformer_class.from_pretrained(
        checkpoints / "transformer", torch_dtype=torch.bfloat16
    )
    encoder = model.encoder_class.from_pretrained(
        checkpoints / "text_encoder", dtype=torch.bfloat16
    )
    vae = model.vae_class.from_pretrained(checkpoints / "vae", torch_dtype=torch.float16)
    for part in (transformer, vae):
        # diffusers would keep the path that they were loaded from
        part.register_to_config(_name_or_path=model.name)
    pipeline = model.pipeline_class(
        tokenizer=build_tokenizer(model.world.vocabulary),
        text_encoder=encoder,
        vae=vae,
        transformer=transformer,
        scheduler=model.build_scheduler(),
    )
    pipeline.save_pretrained(folder, max_shard_size=model.shard_size)
    # where nobody names a precision, transformers loads what this says and diffusers fp32; not
    # every pipeline casts between the two
    words = folder / "text_encoder" / "config.json"
    _write_json(words, json.loads(words.read_text(encoding="utf-8")) | {"dtype": "float32"})
    _write_json(folder / "vidsparse.json", card.settings(model))
    readme = card.readme(model, transformer, encoder, vae, measured=card.read_measured(checkpoints))
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
