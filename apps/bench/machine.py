"""What a measurement rests on: the device, its number format, the hardware and the versions."""

from __future__ import annotations

import gc
import platform
from datetime import date
from typing import TYPE_CHECKING, Any

from vidsparse.dtypes import DTYPES, dtype_name

if TYPE_CHECKING:
    import torch


def device_and_dtype(device: str, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """What ``--device`` and ``--dtype`` mean; bf16 on a GPU and fp32 on a CPU by default.

    Raises:
        OptionError: no such device here, or no such dtype.
    """
    import torch

    from vidsparse.pipelines.placement import check_choice, check_device

    check_choice("dtype", dtype, (None, *DTYPES))
    where = torch.device(check_device(device))
    return where, getattr(torch, DTYPES[dtype or default_dtype(where.type)])


def default_dtype(device: str) -> str:
    """What a kind of device, ``cuda`` or ``cpu``, measures in unless another is asked for."""
    return "bf16" if device == "cuda" else "fp32"


def let_go(device: torch.device) -> None:
    """Give back the memory of a model that nothing holds any more."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_line(device: torch.device, dtype: torch.dtype) -> str:
    """Hardware, version and number format in one line."""
    import torch

    return f"{hardware(device)}; torch {torch.__version__}; {dtype_name(dtype)}"


def hardware(device: torch.device) -> str:
    """The device in words."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions(*others: str) -> dict[str, str]:
    """Versions of what a measurement rests on, as far as installed; ``others`` are packages too."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from vidsparse._version import __version__

    found = {
        "vidsparse": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for name in (
        "triton",
        "flash-attn-4",
        "flashinfer-python",
        "sageattention",
        *others,
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def header(device: torch.device, *packages: str) -> dict[str, Any]:
    """What a file of measurements says of all its rows; ``packages`` are those of ``versions``."""
    return {
        "hardware": hardware(device),
        "versions": versions(*packages),
        "date": date.today().isoformat(),
    }
