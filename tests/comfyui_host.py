"""A stand-in for ComfyUI: its protocol around attention, in few lines and without its program.

Models, patchers and the dictionaries they hand on behave as ComfyUI's do where nodes can see it;
``test_comfyui_program.py`` runs the same nodes in the real one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Attention = Callable[..., Tensor]

HEADS, DIM = 2, 16
VIDEO = (3, 4, 5)
"""Frames, height and width of the stand-in's latents, in tokens."""


class Container:
    """Newer versions hand tensors over in boxes, so that a backend can empty them."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor

    def take(self) -> Tensor:
        assert self.tensor is not None
        tensor, self.tensor = self.tensor, None
        return tensor


def wrap_attn(func: Attention) -> Attention:
    """As ComfyUI 0.38 wraps its attention functions; 0.3.64 does so without boxes."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("preferred_attention", None)
        if isinstance(args[0], Container):
            args = tuple(box.take() for box in args[:3]) + args[3:]
        ours = "_inside_attn_wrapper" not in kwargs
        try:
            if ours:
                kwargs["_inside_attn_wrapper"] = True
                options = kwargs.get("transformer_options")
                if options is not None and "optimized_attention_override" in options:
                    return options["optimized_attention_override"](func, *args, **kwargs)
            return func(*args, **kwargs)
        finally:
            if ours:
                del kwargs["_inside_attn_wrapper"]

    return wrapper


@wrap_attn
def attention_pytorch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """``[B, S, H * D]`` in and out, or ``[B, H, S, D]`` where a reshape is skipped."""
    if not skip_reshape:
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kwargs.get("scale"))
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


class Executor:
    """As ``comfy.patcher_extension.WrapperExecutor``: wrappers around a method, outermost first."""

    def __init__(self, original: Attention, owner: Any, wrappers: list[Attention]) -> None:
        self.original, self.class_obj, self.wrappers = original, owner, wrappers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.wrappers:
            return self.original(*args, **kwargs)
        first, *rest = self.wrappers
        return first(Executor(self.original, self.class_obj, rest), *args, **kwargs)


class Sampling:
    """Flow matching: sigma falls from 1 to 0 with the share of the run that is done."""

    def percent_to_sigma(self, percent: float) -> float:
        return 1.0 - percent

    def timestep(self, sigma: Tensor) -> Tensor:
        return sigma * 1000


class WanModel:
    """Attends to itself and to the text, as ComfyUI's class of that name, once a block.

    ``newer`` names block and grid in the options and boxes the tensors, as versions since 0.3.70.
    """

    patch_size = (1, 2, 2)
    newer = False

    def __init__(self, blocks: int = 2) -> None:
        self.blocks = list(range(blocks))
        self.form: dict[str, Any] = {}

    def tokens(self, x: Tensor) -> int:
        return x[0, 0].numel() // 4

    def __call__(self, x: Tensor, context: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        options = transformer_options
        generator = torch.Generator().manual_seed(0)
        tokens = self.tokens(x)
        hidden = torch.randn(len(x), tokens, HEADS * DIM, generator=generator)
        hidden = hidden + x.flatten(1).mean(1).view(-1, 1, 1)
        if self.newer and x.ndim == 5:
            options["grid_sizes"] = torch.Size((x.shape[2], x.shape[3] // 2, x.shape[4] // 2))
        for block in self.blocks:
            if self.newer:
                options["block_type"], options["block_index"] = "double", block
            q, k, v = (hidden.roll(n, -1) * 3 for n in range(3))
            hidden = hidden + self.attend(q, k, v, options)
            text = context.expand(len(x), -1, -1)
            hidden = hidden + attention_pytorch(
                hidden, text, text, heads=HEADS, transformer_options=options
            )
        self.hidden = hidden
        return x * 0.9 + hidden.mean() * 0.01

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        form = dict(self.form)
        if form.get("skip_reshape"):
            q, k, v = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
        boxed = [Container(x) for x in (q, k, v)] if self.newer else [q, k, v]
        positional = [HEADS] if form.pop("positional", False) else []
        named = {} if positional else {"heads": HEADS}
        out = attention_pytorch(*boxed, *positional, **named, **form, transformer_options=options)
        return out.transpose(1, 2).flatten(2) if form.get("skip_output_reshape") else out


class HunyuanVideo(WanModel):
    """Video and text in one sequence; the text is behind."""

    def tokens(self, x: Tensor) -> int:
        return super().tokens(x) + 7


class MiniMaxH3Model(WanModel):
    """One sequence of text, sound and video, which is last; latents of both are packed into one."""

    video = (6, 8, 10)
    beside = 7 + 9

    def tokens(self, x: Tensor) -> int:
        return math.prod(self.video) + self.beside


class BaseModel:
    """As ``comfy.model_base.BaseModel``: what wrappers of ``apply_model`` are put around."""

    def __init__(self, transformer: Any) -> None:
        self.diffusion_model = transformer
        self.model_sampling = Sampling()

    def apply_model(
        self, x: Any, t: Any, c_crossattn: Any, transformer_options: Any, **kwargs: Any
    ) -> Tensor:
        wrappers = transformer_options.get("wrappers", {}).get("apply_model", {})
        run = Executor(self._apply_model, self, [w for each in wrappers.values() for w in each])
        # by position, as ComfyUI hands them on.
        return run(x, t, c_crossattn, transformer_options, **kwargs)

    def _apply_model(
        self, x: Any, t: Any, c_crossattn: Any, transformer_options: Any, **kwargs: Any
    ) -> Tensor:
        # newer versions copy the options once more.
        out: Tensor = self.diffusion_model(x, c_crossattn, dict(transformer_options))
        return out


class ModelPatcher:
    """As ``comfy.model_patcher.ModelPatcher``, as far as nodes use it."""

    def __init__(self, model: BaseModel) -> None:
        self.model = model
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[str, dict[str, list[Attention]]] = {}
        self.attachments: dict[str, Any] = {}

    def clone(self) -> ModelPatcher:
        other = copy(self)
        other.model_options = {"transformer_options": dict(self.options)}
        other.wrappers = {
            kind: {key: list(each) for key, each in keys.items()}
            for kind, keys in self.wrappers.items()
        }
        other.attachments = dict(self.attachments)
        return other

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = self.model_options["transformer_options"]
        return options

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Attention) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.get(kind, {}).pop(key, None)

    def set_attachments(self, key: str, attachment: Any) -> None:
        self.attachments[key] = attachment


def latent() -> Tensor:
    """Noise ``[1, C, T, H, W]`` of ``VIDEO`` tokens."""
    frames, height, width = VIDEO
    shape = (1, 4, frames, 2 * height, 2 * width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


class Sampler:
    """As ``comfy.samplers.KSAMPLER``: what a node set is in ``extra_options``.

    Its steps are Euler's; with ``middle`` each has a second forward between two sigmas, as those of
    ``dpm_2`` have.
    """

    def __init__(self, *, middle: bool = False, **options: float) -> None:
        self.extra_options, self._middle = options, middle

    def sample(self, forward: Attention, x: Tensor, sigmas: Tensor) -> Tensor:
        churn, steps = self.extra_options.get("s_churn", 0.0), len(sigmas) - 1
        least, most = (self.extra_options.get(name) for name in ("s_tmin", "s_tmax"))
        for sigma, after in itertools.pairwise(sigmas):
            inside = (least or 0.0) <= sigma <= (math.inf if most is None else most)
            raised = sigma * (1 + min(churn / steps, 2**0.5 - 1)) if inside else sigma
            denoised = forward(x, raised)
            if self._middle and after > 0:
                between = (raised * after) ** 0.5
                denoised = forward(denoised + (x - denoised) * (between / raised), between)
            x = denoised + (x - denoised) * (after / raised)
        return x


def sample(
    model: ModelPatcher,
    *,
    steps: int = 5,
    together: bool = True,
    guided: bool = True,
    text: int = 11,
    x: Tensor | None = None,
    worker: str | None = None,
    sigmas: Tensor | None = None,
    sampler: Sampler | None = None,
    **conditions: Any,
) -> Tensor:
    """A run of a sampler with both guidance branches, ``together`` in one batch or apart.

    ``sigmas`` are those of a scheduler, with the end. ``worker`` is the device whose thread runs
    the forwards, where ComfyUI deals them to several.
    """
    sigmas = torch.linspace(1, 0, steps + 1) if sigmas is None else sigmas
    sampler = sampler or Sampler()
    context = torch.randn(1, text, HEADS * DIM, generator=torch.Generator().manual_seed(1))
    branches = ([[1, 0]] if together else [[1], [0]]) if guided else [[0]]

    def run(x: Tensor, sampler: Sampler) -> Tensor:
        def forward(x: Tensor, sigma: Tensor) -> Tensor:
            outs: dict[int, Tensor] = {}
            for kinds in branches:
                # built anew for every forward, as ComfyUI does.
                options = dict(model.options)
                options["wrappers"] = model.wrappers
                options |= {
                    "cond_or_uncond": list(kinds), "sigmas": sigma.view(1), "sample_sigmas": sigmas
                }  # fmt: skip
                if worker is not None:
                    # on its device, as each of a thread's forwards has them.
                    options |= {"multigpu_thread_device": worker, "sample_sigmas": sigmas.clone()}
                out = model.model.apply_model(
                    torch.cat([x] * len(kinds)), sigma.expand(len(kinds)), c_crossattn=context,
                    transformer_options=options, **conditions,
                )  # fmt: skip
                outs |= dict(zip(kinds, out.chunk(len(kinds)), strict=True))
            return outs[0] if len(outs) < 2 else outs[1] + 3 * (outs[0] - outs[1])

        return sampler.sample(forward, x, sigmas)

    wrappers = model.wrappers.get("outer_sample", {})
    outer = Executor(run, model, [w for each in wrappers.values() for w in each])
    result: Tensor = outer(latent() if x is None else x, sampler)
    return result
