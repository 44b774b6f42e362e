"""An engine, a place and operands for tests that call attention without a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from budget import random_qkv
from torch import Tensor

from vidsparse.engine import AttentionEngine
from vidsparse.grid import TokenGrid
from vidsparse.methods import make_method
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

GRID = TokenGrid(3, 8, 11)


def engine_of(method: str = "fg-attn", *, layers: int = 1, **options: Any) -> AttentionEngine:
    schedule = {
        name: options.pop(name)
        for name in ("dense_steps", "dense_last_steps", "dense_layers", "reuse")
        if name in options
    }
    keep = ("order", "implementation", "check_finite", "dense_fallback")
    own = {name: options.pop(name) for name in keep if name in options}
    return AttentionEngine(
        make_method(method, **options),
        schedule=Schedule(**{"dense_steps": 0, **schedule}),
        layers=layers,
        **own,
    )


def site(step: int = 0, layer: int = 0, grid: TokenGrid = GRID, **rest: Any) -> CallSite:
    return CallSite(layer, step, 1.0 - step / 10, grid, **rest)


def qkv(grid: TokenGrid = GRID, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return random_qkv(grid.tokens, 64, options.pop("dtype", torch.float32), **options)
