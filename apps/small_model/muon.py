"""Muon: momentum, orthogonalised, for the matrices of a network's hidden layers.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the update
scaled to the size of AdamW's as in "Muon is scalable for LLM training" (arXiv 2502.16982), so that
both share a learning rate. The shipped weights were trained with it; no run of the same length with
AdamW alone was made, so what it gains here is not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
ADAMW_UPDATE_SIZE = 0.2


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly, of each of ``[n, rows, columns]``.

    Newton-Schulz iterations bring every singular value near 1; all matrices go at once, because
    one by one the launches would cost more than the arithmetic.
    """
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    flat: Tensor = x if wide else x.mT
    return flat


def hidden_matrices(*models: nn.Module) -> list[Tensor]:
    """The weights that Muon updates: projections and convolutions inside the blocks of models.

    Not those that turn a timestep or latents into the shifts and scales of a norm.
    """
    return [
        module.weight
        for model in models
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d))
        and "block" in name
        and "norm" not in name
    ]


class Muon:
    """Muon over matrices; same-shaped ones are updated together.

    Args:
        parameters: matrices of hidden layers; not embeddings, not the first or last layer. A
            convolution's kernel counts as a row for each output channel.
        weight_decay: decoupled, per unit of learning rate.
    """

    def __init__(self, parameters: Iterable[Tensor], weight_decay: float) -> None:
        shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            shapes[parameter.shape].append(parameter)
        self._groups = list(shapes.values())
        self._momentum = [
            torch.zeros(len(group), *group[0].shape, device=group[0].device)
            for group in self._groups
        ]
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update from the gradients in place."""
        for group, momentum in zip(self._groups, self._momentum, strict=True):
            gradient = torch.stack([p.grad for p in group if p.grad is not None]).float()
            momentum.lerp_(gradient, 1 - MOMENTUM)
            # nesterov: look one step ahead along the momentum.
            rows = gradient.lerp_(momentum, MOMENTUM).flatten(2)
            update = orthogonalise(rows).float().reshape(gradient.shape)
            size = ADAMW_UPDATE_SIZE * max(rows.shape[1:]) ** 0.5
            torch._foreach_mul_(group, 1 - learning_rate * self._weight_decay)
            torch._foreach_add_(group, list((update * (-learning_rate * size)).unbind()))
