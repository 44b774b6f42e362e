"""Orders of the video tokens: which tokens become neighbours before tiles are cut.

A tile of M consecutive tokens stands for its mean query or key, so the order decides how alike
the tokens of a tile are. SpargeAttn (section 3.7, tables 4 and 9) walks the grid on a
three-dimensional Hilbert curve; its other orders are kept for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidsparse.errors import OptionError
from vidsparse.grid import TokenGrid
from vidsparse.kernels.hardware import triton_reason


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """A permutation of a token sequence and its inverse, both ``[S]`` int64 on one device.

    ``x[permutation]`` is in the new order, ``y[inverse]`` is back in the old one. Video tokens
    come first; text tokens always stand last, in their own order.
    """

    permutation: Tensor
    inverse: Tensor

    def apply(self, x: Tensor, *, by_kernel: bool | None = None) -> Tensor:
        """Put ``x`` ``[B, H, S, D]`` into this order (a contiguous copy).

        ``by_kernel`` says whether one of Triton's kernels moves the tokens; None: if it can.
        """
        if can_move(x) if by_kernel is None else by_kernel:
            from vidsparse.kernels.tokens.pool import reorder

            return reorder(x, self.permutation)
        return x.index_select(2, self.permutation)

    def undo(
        self, y: Tensor, like: Tensor | None = None, *, by_kernel: bool | None = None
    ) -> Tensor:
        """Bring ``y`` ``[B, H, S, D]`` back into the pipeline's order.

        Returns a contiguous copy. If a kernel writes it, it is laid out like ``like``, so that the
        pipeline need not copy once more. ``by_kernel`` is as in ``apply``.
        """
        if can_move(y) if by_kernel is None else by_kernel:
            from vidsparse.kernels.tokens.pool import reorder

            if like is None or like.stride(-1) != 1:
                return reorder(y, self.inverse)
            return reorder(y, self.inverse, torch.empty_like(like, dtype=y.dtype))
        return y.index_select(2, self.inverse)


def can_move(x: Tensor) -> bool:
    """Whether Triton's kernels may pass over the tokens of ``x`` ``[B, H, S, D]``."""
    return x.ndim == 4 and not wants_gradient(x) and triton_reason(x.device) is None


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether results of ``tensors`` may be asked for a gradient, which kernels do not have."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _coordinates(grid: TokenGrid) -> NDArray[np.int64]:
    """The (t, y, x) of every video token in the pipeline's order, ``[video, 3]``."""
    axes = np.indices((grid.frames, grid.height, grid.width), dtype=np.int64)
    return axes.reshape(3, -1).T


def _hilbert(grid: TokenGrid) -> NDArray[np.int64]:
    from hilbertcurve.hilbertcurve import HilbertCurve

    # the curve fills a cube whose side is a power of two; the grid is the part of it that exists,
    # and sorting by distance along the curve keeps that part's order.
    bits = max(1, (max(grid.frames, grid.height, grid.width) - 1).bit_length())
    curve = HilbertCurve(bits, 3)
    distances = curve.distances_from_points(_coordinates(grid).tolist())
    return np.argsort(np.asarray(distances, dtype=np.int64), kind="stable")


def _rowmajor(grid: TokenGrid) -> NDArray[np.int64]:
    return np.arange(grid.video, dtype=np.int64)


def _columnmajor(grid: TokenGrid) -> NDArray[np.int64]:
    t, y, x = _coordinates(grid).T
    return np.lexsort((y, x, t))


def _timemajor(grid: TokenGrid) -> NDArray[np.int64]:
    t, y, x = _coordinates(grid).T
    return np.lexsort((t, x, y))


def _random(grid: TokenGrid) -> NDArray[np.int64]:
    # fixed seed: the order belongs to the grid, so that reruns and cached plans agree.
    return np.random.default_rng(0).permutation(grid.video)


_BUILDERS: Final[dict[str, Callable[[TokenGrid], NDArray[np.int64]]]] = {
    "hilbert": _hilbert,
    "rowmajor": _rowmajor,
    "columnmajor": _columnmajor,
    "timemajor": _timemajor,
    "random": _random,
}

ORDERS: Final[tuple[str, ...]] = tuple(_BUILDERS)
"""Names of the token orders, the default first."""


def check_order(name: str) -> None:
    """Raise an ``OptionError`` unless ``name`` is one of ``ORDERS``."""
    if name not in ORDERS:
        raise OptionError(f"unknown token order {name!r}. Hint: choose from {', '.join(ORDERS)}.")


@lru_cache(maxsize=64)
def _video_order(name: str, frames: int, height: int, width: int) -> NDArray[np.int64]:
    # apart from the text: the curve takes seconds at 100,000 tokens, and prompts differ in length.
    return _BUILDERS[name](TokenGrid(frames, height, width))


@lru_cache(maxsize=64)
def token_order(name: str, grid: TokenGrid, device: torch.device | str = "cpu") -> TokenOrder:
    """The named order of ``grid``'s tokens on ``device`` (cached by all three).

    ``hilbert`` walks the grid on a space-filling curve; ``rowmajor`` is the pipeline's own T, H, W
    order with W fastest; ``columnmajor`` has H fastest; ``timemajor`` has T fastest; ``random`` is
    a fixed shuffle.

    Raises:
        OptionError: ``name`` is not in ``ORDERS``.
    """
    check_order(name)
    video = _video_order(name, grid.frames, grid.height, grid.width)
    front = np.arange(grid.before, dtype=np.int64)
    back = np.arange(grid.before + grid.video, grid.tokens, dtype=np.int64)
    permutation = np.concatenate([video + grid.before, front, back])
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(grid.tokens, dtype=np.int64)
    # the cache outlives the caller's inference mode, and tensors made in one cannot serve autograd.
    with torch.inference_mode(False):
        return TokenOrder(
            torch.from_numpy(permutation).to(device), torch.from_numpy(inverse).to(device)
        )
