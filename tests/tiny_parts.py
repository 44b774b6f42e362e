"""Parts that tiny pipelines of several families are built of, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
import transformers
from PIL import Image
from tiny_pipelines import WORDS
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

IMAGE = Image.linear_gradient("L").resize((96, 64)).convert("RGB")
LAST_IMAGE = Image.radial_gradient("L").resize((96, 64)).convert("RGB")


def sharpen(transformer: Any, pattern: str = "attn1") -> Any:
    """Make attention uneven: as initialised no mask could be told from another."""
    with torch.no_grad():
        for name, module in transformer.named_modules():
            if name.endswith(pattern) and hasattr(module, "to_q"):
                # norms undo what a projection is multiplied by; without one, the weights count.
                for part in ("norm_q", "norm_k"):
                    norm = getattr(module, part, None)
                    if getattr(norm, "weight", None) is not None:
                        norm.weight.mul_(3)
                for part in (module.to_q, module.to_k):
                    part.weight.mul_(3)
    return transformer


class Fitting(nn.Linear):
    """Takes what it gets in its weights' format."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


def fitting(model: Any) -> Any:
    """Have the linear layers of ``model`` take any format: some hosts mix them, unfit for fp64."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Fitting
    return model


def unfitted(model: Any) -> Any:
    """Have them be the host's own again, as they are in models of use."""
    for module in model.modules():
        if type(module) is Fitting:
            object.__setattr__(module, "__class__", nn.Linear)
    return model


def word_tokenizer(*, chat_template: str | None = None, **options: Any) -> Any:
    """A fast tokenizer that knows ``WORDS`` and takes any other for one unknown word."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "<|end_header_id|>"]
    vocabulary = {word: place for place, word in enumerate([*special, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=chat_template,
        **{"padding_side": "right", **options},
    )


VOCABULARY = 6 + len(WORDS)


def flow_scheduler(**options: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **options})


def t5_encoder(width: int = 32) -> Any:
    return transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=4 + len(WORDS),
            d_model=width,
            d_kv=8,
            d_ff=37,
            num_heads=4,
            num_layers=1,
            dropout_rate=0.0,
        )
    ).eval()


def ready(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompt_mask(prompts: int, length: int, *counts: int) -> torch.Tensor:
    """Valid tokens first, ``counts`` of them in turn."""
    valid = torch.tensor([counts[i % len(counts)] for i in range(prompts)])
    return (torch.arange(length) < valid[:, None]).float()


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ONE = ("conditional",)
TWO = ("conditional", "unconditional")


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One variant of a family.

    Args:
        build: makes the pipeline.
        call: arguments beside those in ``latents``; a callable is asked for its value, with the
            number of prompts.
        size: frames, height, width in pixels.
        odd: another size, whose token grid has odd sides.
        guided: the guidance argument, or None where the pipeline holds its guidance itself, or
            has none.
        branches: transformer forwards in a step, guided; batched guidance is one.
        attending: branches of attention calls, where one forward has several.
        exact: dense calls are the stock ones bit for bit; otherwise padding is cut, not masked, or
            rotation rounds once where the host does twice.
        batch: the pipeline takes several prompts.
        without: arguments that the pipeline does not take.
    """

    build: Callable[[], Any]
    call: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, int, int] = (9, 64, 64)
    odd: tuple[int, int, int] = (13, 80, 48)
    guided: str | None = "guidance_scale"
    branches: tuple[str, ...] = ONE
    attending: tuple[str, ...] = ()
    exact: bool = True
    batch: bool = True
    without: tuple[str, ...] = ()
