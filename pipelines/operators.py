"""The operators by which attention calls reach their pipeline's session, compiled or not.

``torch.compile`` does not look inside, so planning, caching and tracing stay ordinary Python. Where
a call comes from (pipeline, transformer, layer) travels as a small CPU tensor: a Python integer
would be a constant of the graph, and every layer would compile anew.

``video_attention`` has no gradient. In a graph that wants one, ``dense_video_attention`` stands in
its place: dense calls have theirs, and any other is refused in the forward.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Attends(Protocol):
    """What the operators need of a session."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, part: int, layer: int, mask: Tensor | None = None
    ) -> Tensor:
        """One attention call, ``[B, S, H, D]``, dense where the host has a mask for it."""

    def attend_dense(
        self, q: Tensor, k: Tensor, v: Tensor, part: int, layer: int
    ) -> tuple[Tensor, Tensor]:
        """The same, refused where it is sparse, and the tokens that take part, int64 ``[B]``."""


SESSIONS: Final[weakref.WeakValueDictionary[int, Attends]] = weakref.WeakValueDictionary()
"""The sessions by their numbers; one lives as long as the processors that point to it."""


# a graph capture would record one plan's kernels and replay them for every step.
@torch.library.custom_op(
    "vidsparse::video_attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def video_attention(
    q: Tensor, k: Tensor, v: Tensor, address: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attention of one call, ``[B, S, H, D]``; ``address`` holds session, transformer, layer."""
    session, part, layer = address.tolist()
    # as a graph was told; what processes have exchanged may lie otherwise.
    return SESSIONS[session].attend(q, k, v, part, layer, mask).contiguous()


@video_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, address: Tensor, mask: Tensor | None = None) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op(
    "vidsparse::dense_video_attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def dense_video_attention(
    q: Tensor, k: Tensor, v: Tensor, address: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of one call that has a gradient, and the tokens that take part, int64 ``[B]``."""
    session, part, layer = address.tolist()
    return SESSIONS[session].attend_dense(q, k, v, part, layer)


@dense_video_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, address: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), torch.empty(q.shape[0], dtype=torch.int64, device="cpu")


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """Of q, k, v; the session may have gone on, or be gone, so it is not asked."""
    *inputs, counts = ctx.saved_tensors
    # padding is neither a query nor a key; a mask lets a graph be traced whatever its length.
    valid = torch.arange(grad.shape[1]) < counts[:, None]
    valid = valid.to(grad.device)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        q, k, v = (x.transpose(1, 2) for x in leaves)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None])
    of_out = (grad * valid[:, :, None, None]).transpose(1, 2)
    return (*torch.autograd.grad(out, leaves, of_out), None)


dense_video_attention.register_autograd(_backward, setup_context=_keep)
