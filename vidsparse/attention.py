"""Sparse attention over one set of tensors, without a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vidsparse.engine import AttentionEngine
from vidsparse.errors import OptionError
from vidsparse.grid import TokenGrid
from vidsparse.kernels.attention.checks import check_operands
from vidsparse.methods import Method, make_method
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: TokenGrid,
    method: str | Method = "fg-attn",
    *,
    order: str = "hilbert",
    implementation: str = "auto",
    **options: Any,
) -> Tensor:
    """Sparse attention of one q, k and v, without a pipeline.

    Args:
        q: queries ``[B, H, S, D]``, in the order of ``grid``: T, H, W with W fastest, and text
            before or after the video as the grid says.
        k: keys, likewise.
        v: values, likewise.
        grid: what the S tokens are.
        method: a name from ``vidsparse.METHODS``, or a method object.
        order: a name from ``vidsparse.ORDERS``: how video tokens are ordered before tiles are cut.
        implementation: ``auto`` or one of ``vidsparse.kernels.IMPLEMENTATIONS``.
        **options: the method's own, such as ``top_p=0.9, tile=(16, 16)``.

    Returns:
        The output ``[B, H, S, D]`` in the dtype and the token order of ``q``.

    Raises:
        OptionError: an option is unknown or has a value that is not valid; q, k and v differ in
            shape, dtype or device, or are empty; the grid does not have S tokens.
        UnsupportedError: the implementation asked for cannot run on these tensors.
    """
    try:
        cast = isinstance(q, Tensor) and torch.is_autocast_enabled(q.device.type)
        check_operands(q, k, v, cast=cast)
    except ValueError as error:
        raise OptionError(str(error)) from None
    if not isinstance(grid, TokenGrid):
        raise OptionError(f"grid must be a TokenGrid, got {type(grid).__name__}.")
    if grid.tokens != q.shape[2]:
        raise OptionError(
            f"q has {q.shape[2]} tokens, and a grid of {grid.frames}x{grid.height}x{grid.width} "
            f"with {grid.text} text tokens has {grid.tokens}. Hint: give the grid of this sequence."
        )
    if isinstance(method, str):
        method = make_method(method, **options)
    elif options and isinstance(method, Method):
        raise OptionError(
            f"options ({', '.join(sorted(options))}) were given together with a method object. "
            "Hint: give them when making that object."
        )
    engine = AttentionEngine(
        method,
        schedule=Schedule(dense_steps=0),
        order=order,
        layers=1,
        implementation=implementation,
    )
    return engine.attend(q, k, v, CallSite(0, 0, 0.0, grid))
