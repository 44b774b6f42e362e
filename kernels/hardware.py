"""What a device can do: which kernels run on it, and how much of it one program can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

KNOWN_TRITON: Final = ("3.6.", "3.7.")
"""What the versions begin with that the Gluon kernels are known to compile with."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts of a device that sizes of kernels depend on.

    Attributes:
        capability: compute capability, (0, 0) without one.
        shared_bytes: shared memory that a program can have.
        multiprocessors: number of multiprocessors.
    """

    capability: tuple[int, int]
    shared_bytes: int
    multiprocessors: int


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of a GPU; for a CPU, on which Triton's interpreter runs, those of a roomy small one."""
    if device.type != "cuda":
        return DeviceFacts((0, 0), 2**20, 4)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        (properties.major, properties.minor),
        int(getattr(properties, "shared_memory_per_block_optin", 48 * 1024)),
        properties.multi_processor_count,
    )


def block_rows(device: torch.device | str) -> int:
    """Query rows of a block, which the kernels of ``device`` work on together.

    Plans should be made for blocks of so many rows.

    A GPU's tensor cores want 128. On a CPU the 64-row block loses nothing in its products and
    computes less, because fewer tiles share a key list.
    """
    return 64 if torch.device(device).type == "cpu" else 128


def triton_reason(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on ``device``, or None if they can."""
    if device.type != "cuda":
        return f"runs on CUDA devices, not on {device.type}"
    if not torch.cuda.is_available():
        return "needs a CUDA device, and PyTorch finds none"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "needs the triton package, which is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or newer"
    return None


def plans_on_device(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether Triton's kernels can pool, select and plan for such q and k."""
    known = dtype in (torch.float16, torch.bfloat16, torch.float32)
    return known and head_dim <= 256 and triton_reason(device) is None


def fp8_reason(device: torch.device) -> str | None:
    """Why a GPU that runs Triton's kernels has no fp8 products, or None if it has."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        return "needs compute capability 8.9 (Ada) or newer for fp8"
    return None


Trial = Callable[[], Callable[[torch.device], None]]
"""Imports a kernel's file and returns a function that runs the kernel once on a device."""


def hopper_reason(device: torch.device, trial: Trial) -> str | None:
    """Why a Gluon kernel cannot run on a GPU that Triton's can run on, or None if it can."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs compute capability 9.0 (Hopper)"
    return gluon_fault(device, trial)


@cache
def gluon_fault(device: torch.device, trial: Trial) -> str | None:
    """Why a Gluon kernel cannot be imported or compiled with the installed Triton, or None.

    Gluon is an experimental part of Triton. With a version that nobody has tried, the kernel is run
    once first: what it lacks then sends calls to the plain kernels, not to an error.
    """
    import triton

    try:
        try_out = trial()
        if not triton.__version__.startswith(KNOWN_TRITON):
            try_out(device)
    except Exception as error:  # a compiler's errors have no common class
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return (
            f"is known to compile with Triton 3.6 and 3.7, and Triton {triton.__version__} "
            f"differs: {last}"
        )
    return None
