"""Layers that compute in bf16 inside a model in fp32, for CPUs that have such products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


class Bf16Linear(nn.Linear):
    """A linear layer with weights in bf16, which returns the number format that it is given.

    Made of a layer that is there, by ``to_bf16``. Saved, its weights are ordinary ones in bf16.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The product in the weights' format, bias included, in the format of ``input``."""
        return functional.linear(input.to(self.weight.dtype), self.weight, self.bias).to(
            input.dtype
        )


def can_be_bf16(module: nn.Module) -> bool:
    """Whether ``to_bf16`` takes a module, or has taken it: a linear layer in fp32, and no more.

    A class derived from it, a wrapped ``forward`` or another kind of tensor may do more with the
    weights than multiply.
    """
    if type(module) is not nn.Linear or "forward" in vars(module):
        return isinstance(module, Bf16Linear)
    weight = module.weight.data
    return type(weight) is torch.Tensor and weight.dtype == torch.float32


@torch.no_grad()
def to_bf16(layer: nn.Linear) -> None:
    """Round a layer's weights to bf16, and have it compute in that."""
    # the same module, so that hooks on it and a LoRA around it stay.
    layer.__class__ = Bf16Linear
    layer.to(torch.bfloat16)


@torch.no_grad()
def decoder_to_bf16(vae: Any) -> int:
    """Have the convolutions of a decoder in fp32 compute in bf16; returns how many it has in it.

    Their weights are rounded, and what they are given; what they return is in fp32 again, so that
    norms and sums stay in that. All lies as a CPU's convolutions want it, channels last.
    """
    count = 0
    for module in getattr(vae, "decoder", nn.Module()).modules():
        plain = isinstance(getattr(module, "weight", None), nn.Parameter)
        if not plain or not isinstance(module, (nn.Conv2d, nn.Conv3d)):
            continue
        if module.weight.dtype == torch.float32 and "forward" not in vars(module):
            module.to(torch.bfloat16)
            layout = _layout_of(module)
            module.weight.data = module.weight.data.contiguous(memory_format=layout)
            module.register_forward_pre_hook(_round_arguments)
            module.register_forward_hook(_widen)
        count += module.weight.dtype == torch.bfloat16
    return count


def _layout_of(module: nn.Module) -> torch.memory_format:
    return torch.channels_last_3d if isinstance(module, nn.Conv3d) else torch.channels_last


def _round_arguments(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    # some are given what the call before had, too. Weights may have been put into another format
    # since.
    weight: Any = module.weight
    layout, dtype = _layout_of(module), weight.dtype
    return tuple(
        x.to(dtype, memory_format=layout) if isinstance(x, torch.Tensor) else x for x in args
    )


def _widen(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
    return out.float()
