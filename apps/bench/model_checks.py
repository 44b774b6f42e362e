"""What a model is held against before its speed means something, and few layers to do it with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from vidsparse.apps.bench.model_settings import Setting
from vidsparse.apps.bench.model_shapes import Latent

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# a kernel is not wrong by the length.
CHECKED_LAYERS: Final = 2
"""Layers that the correctness check runs."""

CHECKED_LATENT_FRAMES: Final = 3
"""Latent frames that it runs."""


def to_check(setting: Setting) -> tuple[int, Latent]:
    """Layers and latent of what is checked before ``setting`` is timed: few, and short."""
    shape, whole = setting.model, setting.latent
    frames = shape.frames_of(min(whole.latent_frames, CHECKED_LATENT_FRAMES))
    latent = shape.latent(whole.width, whole.height, frames)
    return min(CHECKED_LAYERS, setting.layers or CHECKED_LAYERS), latent


def exact_output(model: Any, inputs: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """What a model of ``dtype`` should give: by fp32, or by fp64 where it is in fp32."""
    import torch

    high = torch.float64 if dtype == torch.float32 else torch.float32
    # not the model's own .to(), which warns that some of its parts belong in fp32.
    exact_model = torch.nn.Module.to(copy.deepcopy(model), high)
    out: Tensor = exact_model(**_cast(inputs, high), return_dict=False)[0]
    return out.double()


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Floating-point tensors of ``inputs`` in another dtype."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(convert(one) for one in value)
        floating = hasattr(value, "is_floating_point") and value.is_floating_point()
        return value.to(dtype) if floating else value

    return {name: convert(value) for name, value in inputs.items()}


def refuse_dense_calls(cells: Sequence[Any]) -> None:
    """Raise an ``UnsupportedError`` where a call of a sparse step was dense."""
    from vidsparse.errors import UnsupportedError

    for cell in cells:
        # a guidance branch may go by the plan of the one before it.
        if cell.action not in ("replan", "reuse"):
            raise UnsupportedError(f"an attention call that should be sparse was {cell.action}")
