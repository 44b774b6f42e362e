"""Names of number formats: as options, rows and pages spell them, and torch's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

DTYPES: Final[Mapping[str, str]] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Names of the number formats, and torch's own."""


def dtype_name(dtype: torch.dtype) -> str:
    """How options, rows and pages spell ``dtype``, as ``bf16``; torch's own name for others."""
    torch_name = str(dtype).removeprefix("torch.")
    return next((name for name, known in DTYPES.items() if known == torch_name), torch_name)
