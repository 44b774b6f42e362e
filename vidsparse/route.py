"""What runs where in an attention call: decided before it begins, and only read from then on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.kernels.attention.gates import RelativeGate
from vidsparse.kernels.dispatch import IMPLEMENTATIONS, choose, eight_bits_that_pay
from vidsparse.kernels.hardware import block_rows, plans_on_device, triton_reason
from vidsparse.methods import SparseMethod
from vidsparse.methods.base import Selection
from vidsparse.order import wants_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of one sparse call.

    Attributes:
        implementation: the attention kernel.
        quantize: 8-bit format of q·k, or None.
        selection: what selects tiles: kernels that follow the method's ``rule``, kernels of the
            method's own (``words``), or its ``select`` in torch.
        reorders: a kernel puts tokens into the order and back; it knows no gradients.
        lists: a kernel lists the key chunks of a plan.
        block_rows: query rows of a block of the plan.
    """

    implementation: str
    quantize: str | None
    selection: Selection
    reorders: bool
    lists: bool
    block_rows: int


def find_route(
    method: SparseMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    implementation: str = "auto",
    quantize: str | None = None,
) -> Route:
    """The way of a call by ``method`` on ``q``, ``k``, ``v`` ``[B, H, S, D]``.

    Only shapes, dtypes and devices are looked at, and whether gradients are wanted. ``quantize``
    takes the place of the method's own 8-bit format, where it is given.

    Raises:
        UnsupportedError: the implementation asked for cannot run on these tensors.
    """
    device, dtype, dim = q.device, q.dtype, q.shape[-1]
    keys = method.gate_keys
    gate = None if keys is None else RelativeGate(-1.0, keys=keys)
    try:
        quantize = quantize or method.quantize
        if quantize == "auto":
            quantize = eight_bits_that_pay(implementation, device, dtype, dim, gate=gate)
        elif quantize == "none":
            quantize = None
        chosen = choose(implementation, device, dtype, dim, gate=gate, quantize=quantize)
    except ValueError as error:
        raise UnsupportedError(str(error)) from None
    plans = plans_on_device(device, dtype, dim)
    triton = plans or triton_reason(device) is None
    return Route(
        implementation=chosen,
        quantize=quantize,
        selection=method.selection(q) if plans else "select",
        reorders=triton and not wants_gradient(q, k, v),
        lists=triton,
        block_rows=block_rows(device),
    )


def check_implementation(name: str) -> None:
    """Raise an ``OptionError`` unless ``name`` is ``auto`` or one of the implementations."""
    if name not in ("auto", *IMPLEMENTATIONS):
        raise OptionError(
            f"unknown implementation {name!r}. "
            f"Hint: choose from auto, {', '.join(IMPLEMENTATIONS)}."
        )
