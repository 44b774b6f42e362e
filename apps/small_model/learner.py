"""One training step of a transformer and its text encoder, and everything it keeps.

Shapes: latents [B, C, t, h, w]; ids [B, L].
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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
    ``kinds`` [N, t, h, w] say which kind of body is where.
    """

    values: Tensor
    ids: Tensor
    weights: Tensor | None = None
    kinds: Tensor | None = None


class _Namer(nn.Module):
    """Tells from what half of a transformer's blocks make of a token which kind of body it shows.

    What is asked for in the middle need not be found out from the picture's errors alone, which
    are small where a body has the wrong outline or stands in two places ("Representation alignment
    for generation", arXiv 2410.06940, asks for the features of a trained encoder; here the world
    itself knows). It learns from zeros, so that it disturbs nothing at first, and is not kept.
    """

    def __init__(self, width: int, kinds: int, block: nn.Module):
        super().__init__()
        self._linear = nn.Linear(width, kinds)
        nn.init.zeros_(self._linear.weight)
        nn.init.zeros_(self._linear.bias)
        self._hidden: Tensor | None = None
        block.register_forward_hook(self._keep)

    def _keep(self, _: nn.Module, __: Any, hidden: Tensor) -> None:
        self._hidden = hidden

    def forward(self, kinds: Tensor, weights: Tensor) -> Tensor:
        """The mean error by ``weights`` [B, t, h, w] of telling ``kinds`` of the same shape."""
        assert self._hidden is not None
        told = self._linear(self._hidden).transpose(1, 2)
        self._hidden = None
        error = F.cross_entropy(told.float(), kinds.flatten(1).long(), reduction="none")
        weights = weights.flatten(1)
        return (error * weights).sum() / weights.sum()


class Learner:
    """Trains ``transformer`` and ``encoder`` in place; ``average`` holds their moving average.

    ``learning_rate`` is AdamW's, for embeddings, norms, first and last layers; ``muon_rate`` is for
    the matrices inside the blocks. ``naming`` is how much it counts that the middle of the
    transformer tells bodies, where latents say which are where; ``misnamed`` is that loss as it was
    at the last step. All processes of ``together`` begin with the first's weights.
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
        naming: float,
        together: Together,
    ):
        self.misnamed: Tensor | None = None
        self._naming = naming
        self._together = together
        self._model, self._device, self._cuda = model, device, device.type == "cuda"
        self._transformer = transformer.to(device).train()
        self._encoder = encoder.to(device).train()
        blocks = [m for m in transformer.modules() if isinstance(m, model.block_class)]
        if self._cuda:
            for block in blocks:
                # not the module: hooks are called outside of what is compiled
                block.forward = torch.compile(block.forward, dynamic=False)
        self._namer: _Namer | None = None
        if naming and model.world.bodies is not None:
            config = transformer.config
            width = config.num_attention_heads * config.attention_head_dim
            middle = blocks[(len(blocks) - 1) // 2]
            self._namer = _Namer(width, model.world.kinds, middle).to(device)
        self.parameters = [
            parameter
            for module in (transformer, encoder, self._namer)
            if module is not None
            for parameter in module.parameters()
        ]
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
        patch = transformer.config.patch_size
        self._patch = (1, patch, patch) if isinstance(patch, int) else tuple(patch)
        room = model.world.vocabulary.caption_tokens
        self._blank = torch.zeros(room, dtype=torch.long, device=device)
        self._blank[0] = END_ID

    def _named(self, source: Latents, pick: Tensor) -> Tensor | None:
        """The loss of telling the bodies of clips that have just been predicted."""
        if self._namer is None or source.kinds is None:
            return None
        places = (slice(None), *(slice(None, None, size) for size in self._patch))
        kinds = source.kinds[pick][places]
        weights = torch.ones_like(kinds, dtype=torch.float32)
        if source.weights is not None:
            weights = source.weights[pick, 0].float()[places]
        loss: Tensor = self._namer(kinds, weights)
        return loss

    def _attention(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(_KERNELS, set_priority=True) if self._cuda else nullcontext()

    def tokens(self, latents: Tensor) -> int:
        """Video tokens of one clip of ``latents``."""
        return math.prod(n // p for n, p in zip(latents.shape[2:], self._patch, strict=True))

    def share(self, plan: StepPlan) -> int:
        """How many clips of a step of ``plan`` are this process's part."""
        return max(1, plan.batch // self._together.size)

    def step(self, source: Latents, plan: StepPlan, factor: float) -> Tensor:
        """One update on clips drawn from ``source`` by ``plan``, at ``factor`` of the peak rates.

        Returns:
            The loss without that of naming, a scalar that has not been waited for.
        """
        device, batch = self._device, self.share(plan)
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
            self.misnamed = self._named(source, pick)
            torch.autograd.backward(
                loss if self.misnamed is None else loss + self._naming * self.misnamed
            )
        self._together.mean([p.grad for p in self.parameters if p.grad is not None])
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self._muon.step(self._muon_rate * factor)
        self._optimizer.step()
        if self.misnamed is not None:
            self.misnamed = self.misnamed.detach()
        for parameter in self.parameters:
            parameter.grad = None
        self.average.update()
        return loss.detach()
