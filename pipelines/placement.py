"""Where a model runs and in which number format: the names, and what this machine has of them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Final

from vidsparse.dtypes import DTYPES
from vidsparse.errors import OptionError, UnsupportedError

OFFLOADS: Final = ("none", "model", "group")
"""Where weights rest: on the device, or on the CPU by whole models or by layers."""

LINEARS: Final = ("none", "fp8", "int8", "bf16")
"""Number formats of the transformers' linear layers; ``none`` leaves them the model's own."""

_FP8_CAPABILITY: Final = (8, 9)
_BF16_FEATURES: Final = ("avx512_bf16", "amx_bf16")


def check_device(device: str | None) -> str:
    """The device to run on: the one asked for, or CUDA where there is any, or the CPU.

    Raises:
        OptionError: no such device here.
    """
    check_device_name(device)
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return "cuda" if count else "cpu"
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        if index >= count:
            found = f"{count} CUDA device{'s' if count != 1 else ''}" if count else "no CUDA device"
            raise OptionError(
                f"device {device} was asked for, but PyTorch finds {found} here. "
                f"Hint: use {'cuda:0' if count else 'cpu'}."
            )
    return device


def check_dtype(dtype: str | None, device: str) -> str:
    """The number format: the one asked for, or bf16 on CUDA and fp32 on the CPU.

    Raises:
        OptionError: unknown, or not usable on ``device``.
    """
    check_choice("dtype", dtype, (None, *DTYPES))
    if dtype == "fp16" and device == "cpu":
        raise OptionError("dtype fp16 does not run on the CPU. Hint: use fp32 or bf16.")
    if dtype is None:
        return "fp32" if device == "cpu" else "bf16"
    return dtype


def check_linear(linear: str, device: str, dtype: str) -> None:
    """Raise unless linear layers can be put into ``linear`` on ``device`` in a model of ``dtype``.

    Raises:
        OptionError: an unknown format, or one that ``dtype`` cannot be put into.
        UnsupportedError: torchao is missing for 8 bits, or the device has no such products.
    """
    check_choice("linear", linear, LINEARS)
    if linear == "none":
        return
    if linear == "bf16":
        reason = linear_bf16_reason(device, dtype)
    else:
        if importlib.util.find_spec("torchao") is None:
            raise UnsupportedError(
                f"linear {linear} needs torchao. Hint: pip install 'vidsparse[linear]'."
            )
        reason = linear_fp8_reason(device, dtype) if linear == "fp8" else None
    if reason is not None:
        wrong = OptionError if reason.startswith("dtype") else UnsupportedError
        raise wrong(f"linear {linear} needs {reason}")


def linear_fp8_reason(device: str, dtype: str) -> str | None:
    """What linear layers in fp8 need and do not have here, None where they can run."""
    gpu = "an NVIDIA GPU of compute capability 8.9 or higher, and"
    if device == "cpu":
        return f"{gpu} this is a CPU. Hint: use int8, or leave --linear out."
    import torch

    has = torch.cuda.get_device_capability(device)
    if has < _FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{gpu} {name} has {has[0]}.{has[1]}. Hint: use int8."
    if dtype != "bf16":
        return f"dtype bf16, got {dtype}. Hint: use --dtype bf16."
    return None


def linear_bf16_reason(device: str, dtype: str) -> str | None:
    """What linear layers in bf16 need and do not have here, None where they can run and gain."""
    cpu = "a CPU with AVX512-BF16 or AMX-BF16"
    if device != "cpu":
        return f"{cpu}, and this is a GPU. Hint: use --dtype bf16, its default."
    if not has_bf16_products():
        return f"{cpu}, and this one has neither. Hint: leave --linear out."
    if dtype != "fp32":
        return f"dtype fp32, got {dtype}. Hint: use --dtype fp32, or leave --linear out."
    return None


def has_bf16_products() -> bool:
    """Whether this CPU multiplies bf16 faster than fp32."""
    import torch

    # older versions of torch do not tell.
    features: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(features.get(name) for name in _BF16_FEATURES)


def check_device_name(device: object) -> None:
    """Raise an ``OptionError`` unless ``device`` reads like a device, or is None."""
    if device is None:
        return
    if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", device):
        raise OptionError(f"unknown device {device!r}. Hint: use cpu, cuda or cuda:N.")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise an ``OptionError`` unless ``value`` is one of ``choices``; ``name`` says of what."""
    if value not in choices:
        names = ", ".join(str(choice) for choice in choices if choice is not None)
        raise OptionError(f"unknown {name} {value!r}. Hint: choose from {names}.")
