"""One signature, several implementations, an explicit choice between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor

from .gather_sdpa import gather_attention
from .reference import reference_attention


class Implementation(Protocol):
    """The signature that all implementations share."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_tiles: Tensor,
        kv_count: Tensor,
        kv_index: Tensor,
        *,
        tile: tuple[int, int],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Output ``[B, H, S, D]`` and log-sum-exp ``[B, H, S]``."""


def _triton_attention() -> Implementation:
    # triton is absent off Linux and slow to import; only a CUDA call comes here.
    from .triton_gather import triton_attention

    return triton_attention


def _gluon_attention() -> Implementation:
    from .gluon_hopper import gluon_attention

    return gluon_attention


def triton_reason(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on ``device``, or None if they can."""
    if device.type != "cuda":
        return f"runs on CUDA devices, not on {device.type}"
    if not torch.cuda.is_available():
        return "needs a CUDA device, and PyTorch finds none"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "the triton package is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or newer"
    return None


def _triton_reason(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    reason = triton_reason(device)
    if reason is not None:
        return reason
    if dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 or bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim not in (64, 96, 128):
        return f"handles head dims 64, 96 and 128, not {head_dim}"
    return None


def _gluon_reason(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if (reason := _triton_reason(device, dtype, head_dim)) is not None:
        return reason
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs compute capability 9.0 (Hopper)"
    try:
        import triton.experimental.gluon.language.nvidia.hopper
    except ImportError:
        return "needs triton 3.6 or newer"
    import triton

    if tuple(int(x) for x in triton.__version__.split(".")[:2]) < (3, 6):
        return "needs triton 3.6 or newer"
    return None


def block_rows(device: torch.device | str) -> int:
    """Query rows that the kernels of ``device`` work on together: what a plan should be made for.

    A GPU's tensor cores want 128. On a CPU the 64-row block loses nothing in its products and
    computes less, because fewer tiles share a key list.
    """
    return 64 if torch.device(device).type == "cpu" else 128


def plans_on_device(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether Triton's kernels can pool, select and plan for such q and k."""
    known = dtype in (torch.float16, torch.bfloat16, torch.float32)
    return known and head_dim <= 256 and triton_reason(device) is None


_LOADERS: Final[dict[str, Callable[[], Implementation]]] = {
    "gluon": _gluon_attention,
    "triton": _triton_attention,
    "torch": lambda: gather_attention,
    "reference": lambda: reference_attention,
}
_REASONS: Final[dict[str, Callable[[torch.device, torch.dtype, int], str | None]]] = {
    "gluon": _gluon_reason,
    "triton": _triton_reason,
    "torch": lambda device, dtype, head_dim: None,
    "reference": lambda device, dtype, head_dim: None,
}

IMPLEMENTATIONS: Final[tuple[str, ...]] = tuple(_LOADERS)
"""Names of the implementations, the fastest first; ``auto`` takes the first that can run."""


def support(
    implementation: str, device: torch.device | str, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Why ``implementation`` cannot run such a call, or None if it can.

    Raises:
        ValueError: no such implementation.
    """
    if implementation not in _REASONS:
        raise ValueError(
            f"unknown implementation {implementation!r}. "
            f"Hint: choose from auto, {', '.join(IMPLEMENTATIONS)}."
        )
    return _REASONS[implementation](torch.device(device), dtype, head_dim)


def choose(
    implementation: str, device: torch.device | str, dtype: torch.dtype, head_dim: int
) -> str:
    """The implementation that runs such a call: the named one, or the fastest for ``auto``.

    Raises:
        ValueError: the named one does not exist or cannot run here; it is never replaced quietly.
    """
    if implementation == "auto":
        return next(n for n in IMPLEMENTATIONS if support(n, device, dtype, head_dim) is None)
    reason = support(implementation, device, dtype, head_dim)
    if reason is not None:
        raise ValueError(
            f"the {implementation!r} implementation cannot run here: it {reason}. Hint: auto."
        )
    return implementation


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tiles: Tensor,
    kv_count: Tensor,
    kv_index: Tensor,
    *,
    tile: tuple[int, int],
    scale: float | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention in which each block of query rows sees only its listed key chunks.

    Args:
        q: queries ``[B, H, S, D]``.
        k: keys ``[B, H, S, D]``.
        v: values ``[B, H, S, D]``.
        q_tiles: tiles of M query rows that form a block, int32 ``[B, H, G, R]``, R = 128 / M;
            -1 where a block has fewer. Every tile stands in one block exactly once.
        kv_count: key chunks that the block attends, int32 ``[B, H, G]``.
        kv_index: their numbers, int16 or int32 ``[B, H, G, C]``, rising; only the first
            ``kv_count`` are read.
        tile: (M, N), query rows of a tile and keys of a chunk. Last ones may be short.
        scale: factor on q·k, 1/sqrt(D) by default.
        implementation: ``auto`` or one of ``IMPLEMENTATIONS``.

    Returns:
        Output ``[B, H, S, D]`` in the dtype of ``q`` and the natural log-sum-exp of the scaled
        scores ``[B, H, S]`` fp32. A row without keys gives zeros and -inf.

    Raises:
        ValueError: the implementation does not exist, cannot run here, or would have to give
            gradients (only ``reference`` does).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    name = choose(implementation, q.device, q.dtype, q.shape[-1])
    if (
        name != "reference"
        and torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or v.requires_grad)
    ):
        # said here, because a kernel's output would leave the graph without a word.
        raise ValueError(
            f"the {name!r} implementation has no backward pass, and gradients are asked for. "
            "Hint: torch.no_grad(), or the 'reference' implementation."
        )
    # a kernel keeps scores in fp32 where it says so, whatever the caller's autocast.
    with torch.autocast(q.device.type, enabled=False):
        return _LOADERS[name]()(q, k, v, q_tiles, kv_count, kv_index, tile=tile, scale=scale)
