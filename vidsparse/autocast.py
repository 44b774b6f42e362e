"""What autocast makes of the tensors of a call, as it does for stock attention."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three in the dtype that they are attended in; planning and kernels choose their own."""
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = working_dtype(q)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def working_dtype(q: Tensor) -> torch.dtype:
    """The dtype that ``q`` is attended in."""
    kind = q.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
