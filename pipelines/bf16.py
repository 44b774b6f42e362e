"""Linear layers that compute in bf16 inside a model in fp32, for CPUs that have such products."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
