"""One training step of a transformer and its text encoder, and everything it keeps.

Shapes: latents [B, C, t, h, w]; ids [B, L].
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .model import SmallModel, StepPlan
from .muon import Muon, hidden_matrices
from .together import Together
from .vae import Average
from .words import END_ID

UNCONDITIONAL_SHARE = 0.1
# cuDNN's attention is the fastest on recent GPUs, forwards and backwards
_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Training clips of one size: latents [N, C, t, h, w] and captions [N, variants, L] as ids.

    ``weights`` [N, 1, t, h, w] say how often an error counts in the loss: once where none are.
    """

    values: Tensor
    ids: Tensor
    weights: Tensor | None = None


class Learner:
    """Trains ``transformer`` and ``encoder`` in place; ``average`` holds their moving average.

    ``learning_rate`` is AdamW's, for embeddings, norms, first and last layers; ``muon_rate`` is for
    the matrices inside the blocks. All processes of ``together`` begin with the first's weights.
    """

    def __init__(
        self,
        model: SmallModel,
        transformer: Any,
        encoder: Any,
        *,
        device: torch.device,
        learning_rate: float,
        muon_rate: float,
        together: Together,
    ):
        self._together = together
        self._model, self._device, self._cuda = model, device, device.type == "cuda"
        self._transformer = transformer.to(device).train()
        self._encoder = encoder.to(device).train()
        if self._cuda:
            for module in transformer.modules():
                if isinstance(module, model.block_class):
                    module.compile(dynamic=False)
        self.parameters = [*transformer.parameters(), *encoder.parameters()]
        together.share(self.parameters)
        hidden = hidden_matrices(transformer, encoder)
        chosen = {id(p) for p in hidden}
        self._learning_rate, self._muon_rate = learning_rate, muon_rate
        self._muon = Muon(hidden, weight_decay=0.01)
        self._optimizer = torch.optim.AdamW(
            [p for p in self.parameters if id(p) not in chosen],
            lr=learning_rate,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            fused=self._cuda,
        )
        self.average = Average(self.parameters, 0.999)
        room = model.world.vocabulary.caption_tokens
        self._blank = torch.zeros(room, dtype=torch.long, device=device)
        self._blank[0] = END_ID

    def _attention(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(_KERNELS, set_priority=True) if self._cuda else nullcontext()

    def tokens(self, latents: Tensor) -> int:
        """Video tokens of one clip of ``latents``."""
        patch = self._transformer.config.patch_size
        sides = (1, patch, patch) if isinstance(patch, int) else patch
        return math.prod(n // p for n, p in zip(latents.shape[2:], sides, strict=True))

    def step(self, source: Latents, plan: StepPlan, factor: float) -> Tensor:
        """One update on clips drawn from ``source`` by ``plan``, at ``factor`` of the peak rates.

        Returns:
            The loss, a scalar that has not been waited for.
        """
        device, batch = self._device, plan.batch
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * factor
        pick = torch.randint(0, len(source.values), (batch,), device=device)
        clean = source.values[pick].float()
        variant = torch.randint(0, source.ids.shape[1], (batch,), device=device)
        dropped = torch.rand(batch, 1, device=device) < UNCONDITIONAL_SHARE
        ids = torch.where(dropped, self._blank, source.ids[pick, variant])
        noise = torch.randn_like(clean)
        # stratified times: every part of the schedule in every batch
        u = torch.rand(batch, device=device) + torch.arange(batch, device=device)
        u = u / batch
        u = plan.lean * u / (1 + (plan.lean - 1) * u)
        noisy, timestep, target = self._model.corrupt(clean, noise, u)
        precision = torch.autocast(device.type, torch.bfloat16, enabled=self._cuda)
        with precision, self._attention():
            predicted = self._model.predict(
                self._transformer,
                noisy.to(torch.bfloat16) if self._cuda else noisy,
                timestep,
                self._model.embed(self._encoder, ids),
            )
            error = (predicted.float() - target).square().mean(1, keepdim=True)
            if source.weights is None:
                loss = error.mean()
            else:
                weights = source.weights[pick].float()
                loss = (error * weights).sum() / weights.sum()
            torch.autograd.backward(loss)
        self._together.mean([p.grad for p in self.parameters if p.grad is not None])
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self._muon.step(self._muon_rate * factor)
        self._optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.average.update()
        return loss.detach()
