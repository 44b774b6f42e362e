"""What runs where in an attention call: decided before it begins, and only read from then on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.kernels.attention.gates import RelativeGate
from vidsparse.kernels.dispatch import (
    IMPLEMENTATIONS,
    choose,
    eight_bits_that_pay,
    gates_that_pay,
    support,
)
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
        gates: the method's gate is asked for. It is not where it would only cost time.
        selection: what selects tiles: kernels that follow the method's ``rule``, kernels of the
            method's own (``words``), or its ``select`` in torch.
        reorders: kernels put tokens into the order and back, and keep and add what a plan lacks;
            they know no gradients.
        lists: a kernel lists the key chunks of a plan.
        block_rows: query rows of a block of the plan.
    """

    implementation: str
    quantize: str | None
    gates: bool
    selection: Selection
    reorders: bool
    lists: bool
    block_rows: int


def lacks_a_kernel(q: Tensor, implementation: str) -> str | None:
    """What is to be said where a GPU's sparse calls run by PyTorch's own operations, else None.

    ``q`` is of the call, in the dtype in which it runs.
    """
    if q.device.type == "cpu" or implementation != "torch":
        return None
    # one that can run such tensors knows no such gate, or no such 8-bit format.
    reason = support("triton", q.device, q.dtype, q.shape[-1]) or (
        "does not run the method's gate or its 8-bit format here"
    )
    hint = " Hint: load the pipeline in bf16." if q.dtype == torch.float32 else ""
    return f"sparse calls run by PyTorch's own operations, which are slower: triton {reason}.{hint}"


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
    takes the place of the method's own 8-bit format, where it is given. A gate that can be done
    without is left out where the implementation is chosen here and loses time by it.

    Raises:
        UnsupportedError: the implementation asked for cannot run on these tensors.
    """
    device, dtype, dim = q.device, q.dtype, q.shape[-1]
    rows, own = block_rows(device), method.block_rows
    keys = method.gate_keys
    gate = None if keys is None else RelativeGate(-1.0, keys=keys)
    try:
        if own is not None and (
            own >= rows
            or (
                implementation != "auto"
                and support(implementation, device, dtype, dim, rows=own) is not None
            )
        ):
            # as many as the device's own at the least, or one was asked for that knows no others.
            own = None
        quantize = quantize or method.quantize
        if quantize == "auto":
            quantize = eight_bits_that_pay(implementation, device, dtype, dim, gate=gate)
        elif quantize == "none":
            quantize = None
        chosen = choose(implementation, device, dtype, dim, gate=gate, quantize=quantize, rows=own)
        gates = not (
            implementation == "auto" and method.can_do_without_gate and not gates_that_pay(chosen)
        )
    except ValueError as error:
        raise UnsupportedError(str(error)) from None
    rows = own or rows
    plans = plans_on_device(device, dtype, dim)
    triton = plans or triton_reason(device) is None
    selection = method.selection(q) if plans else "select"
    if selection == "blocks" and rows != method.tile[0]:
        # the blocks that run are several of its tiles.
        selection = "select"
    return Route(
        implementation=chosen,
        quantize=quantize,
        gates=gates,
        selection=selection,
        reorders=triton and not wants_gradient(q, k, v),
        lists=triton,
        block_rows=rows,
    )


DENSE_TOKENS: Final = 8_192
"""From so many tokens on the ``gluon`` kernel is faster at dense attention than PyTorch's."""

DENSE_KERNELS: Final = ("auto", "stock", "gluon")
"""What dense calls may be asked to run by."""


def dense_by_kernel(q: Tensor, k: Tensor, v: Tensor, asked: str, dtype: torch.dtype) -> bool:
    """Whether the ``gluon`` kernel takes a dense call on ``q``, ``k``, ``v`` ``[B, H, S, D]``.

    ``asked`` is one of ``DENSE_KERNELS``: ``stock`` is the pipeline's own attention, ``auto`` the
    kernel where it can run and is faster. ``dtype`` is what autocast makes of the tensors.

    Raises:
        UnsupportedError: ``gluon`` was asked for and cannot run on these tensors.
    """
    if asked == "stock":
        return False
    reason = support("gluon", q.device, dtype, q.shape[-1])
    if reason is None and wants_gradient(q, k, v):
        reason = "has no backward pass, and gradients are asked for"
    if asked == "gluon" and reason is not None:
        raise UnsupportedError(
            f"the 'gluon' kernel cannot run dense attention here: it {reason}. Hint: auto."
        )
    return reason is None and (asked == "gluon" or q.shape[2] >= DENSE_TOKENS)


def check_dense_kernel(name: str) -> None:
    """Raise an ``OptionError`` unless ``name`` is one of ``DENSE_KERNELS``."""
    if name not in DENSE_KERNELS:
        raise OptionError(
            f"unknown dense kernel {name!r}. Hint: choose from {', '.join(DENSE_KERNELS)}."
        )


def check_implementation(name: str) -> None:
    """Raise an ``OptionError`` unless ``name`` is ``auto`` or one of the implementations."""
    if name not in ("auto", *IMPLEMENTATIONS):
        raise OptionError(
            f"unknown implementation {name!r}. "
            f"Hint: choose from auto, {', '.join(IMPLEMENTATIONS)}."
        )
