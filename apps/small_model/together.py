"""Training in several processes, one a GPU, each on clips that it draws itself.

    torchrun --nproc-per-node 2 -m -- vidsparse.apps.small_model.train --start transformer ...

Weights are the same in all of them: each step takes the mean of their gradients. What else must be
the same, which latents a step takes and when the time is over, the first process says.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# seeds of two processes are this far apart
_SEEDS = 1000


@dataclass(frozen=True, kw_only=True)
class Together:
    """The processes that train one model: this one's ``rank`` among ``size``."""

    rank: int = 0
    size: int = 1

    @classmethod
    def joined(cls, device: str) -> Together:
        """With the others that torchrun has started; alone where it has not."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        # numbers that the processor has travel without waiting for the GPU
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        return cls(rank=dist.get_rank(), size=dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this process writes what the training comes to."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """This process's own GPU, where ``name`` is ``cuda``."""
        alone = self.size == 1 or name != "cuda"
        device = torch.device(name if alone else f"cuda:{os.environ['LOCAL_RANK']}")
        if not alone:
            torch.cuda.set_device(device)
        return device

    def seed(self, seed: int) -> int:
        """A seed of this process's own."""
        return seed + _SEEDS * self.rank

    def same(self, value: float) -> float:
        """The first process's ``value``."""
        if self.size == 1:
            return value
        told = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(told, 0)
        return told.item()

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give ``tensors`` the first process's values, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def mean(self, tensors: Sequence[Tensor]) -> None:
        """Give ``tensors``, all of one type, the mean over the processes, in place."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.size
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        torch._foreach_copy_(
            list(tensors), [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]
        )

    def leave(self) -> None:
        """End what was joined."""
        if self.size > 1:
            dist.destroy_process_group()
