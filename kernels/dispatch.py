"""One signature, several implementations, an explicit choice between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from .attention.checks import check_block, check_operands, check_plan, checked_plan
from .attention.gates import KEY_GROUP, Gate, check_gate
from .attention.means import KeyMeans, check_means, quantize_means
from .attention.reference import reference_attention
from .attention.torch_sdpa import gather_attention
from .hardware import fp8_reason, hopper_reason, triton_reason
from .tokens.formats import QuantizedQK, check_format, check_quantized
from .tokens.quantize import quantize_qk


class Implementation(Protocol):
    """The signature that all implementations share."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_tiles: Tensor,
        kv_count: Tensor,
        kv_index: Tensor,
        *,
        tile: tuple[int, int],
        scale: float,
        gate: Gate | None = None,
        quantized: QuantizedQK | None = None,
        means: KeyMeans | None = None,
        skipped: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output ``[B, H, S, D]`` and log-sum-exp ``[B, H, S]``.

        ``skipped`` comes with a gate only.
        """


_WIDER: Final = {torch.float32: "fp32", torch.float64: "fp64"}


def _triton_attention() -> Implementation:
    # triton is absent off Linux and slow to import; only a CUDA call comes here.
    from .attention.triton_gather import triton_attention

    return triton_attention


def _gluon_attention() -> Implementation:
    from .attention.hopper.launch import gluon_attention

    return gluon_attention


def _triton_reason(
    device: torch.device, dtype: torch.dtype, head_dim: int, gate: Gate | None, quantize: str | None
) -> str | None:
    reason = triton_reason(device)
    if reason is not None:
        return reason
    if dtype not in (torch.float16, torch.bfloat16):
        return f"computes in fp16 or bf16, not in {_WIDER.get(dtype, dtype)}"
    if head_dim not in (64, 96, 128):
        return f"handles head dims 64, 96 and 128, not {head_dim}"
    if quantize == "fp8" and (reason := fp8_reason(device)) is not None:
        return reason
    if gate is not None:
        from .attention.triton_gather import keys_of_a_gate

        if gate.keys > (most := keys_of_a_gate(device)):
            return f"gates at most {most} keys at once on this GPU, not {gate.keys}"
    return None


def _any_reason(
    device: torch.device, dtype: torch.dtype, head_dim: int, gate: Gate | None, quantize: str | None
) -> str | None:
    return None


def _gluon_reason(
    device: torch.device, dtype: torch.dtype, head_dim: int, gate: Gate | None, quantize: str | None
) -> str | None:
    if (reason := _triton_reason(device, dtype, head_dim, None, quantize)) is not None:
        return reason
    return hopper_reason(device, _gluon_trial)


def _gluon_trial() -> Callable[[torch.device], None]:
    from .attention.hopper.launch import try_out

    return try_out


class _Known(NamedTuple):
    """How an implementation is loaded, and what says in words why it cannot run a call."""

    load: Callable[[], Implementation]
    reason: Callable[[torch.device, torch.dtype, int, Gate | None, str | None], str | None]


_KNOWN: Final[dict[str, _Known]] = {
    "gluon": _Known(_gluon_attention, _gluon_reason),
    "triton": _Known(_triton_attention, _triton_reason),
    "torch": _Known(lambda: gather_attention, _any_reason),
    "reference": _Known(lambda: reference_attention, _any_reason),
}

_FASTER_IN_8_BITS: Final = ("gluon", "triton")

# rows of the blocks of those that know no others.
_BLOCKS: Final = {"gluon": 128}

IMPLEMENTATIONS: Final[tuple[str, ...]] = tuple(_KNOWN)
"""Names of the implementations, the fastest first; ``auto`` takes the first that can run."""


def support(
    implementation: str,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    gate: Gate | None = None,
    quantize: str | None = None,
    rows: int | None = None,
) -> str | None:
    """Why ``implementation`` cannot run such a call, or None if it can.

    ``gate``, ``quantize`` and ``rows`` describe the call: its gate, the 8-bit format of q and k,
    and the query rows of a block, or None if any number will do.

    Raises:
        ValueError: no such implementation or 8-bit format.
    """
    if implementation not in _KNOWN:
        raise ValueError(
            f"unknown implementation {implementation!r}. "
            f"Hint: choose from auto, {', '.join(IMPLEMENTATIONS)}."
        )
    if quantize is not None:
        check_format(quantize)
    only = _BLOCKS.get(implementation, rows)
    if rows != only and rows is not None:
        return f"works on blocks of {only} query rows, not of {rows}"
    return _KNOWN[implementation].reason(torch.device(device), dtype, head_dim, gate, quantize)


def choose(
    implementation: str,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    gate: Gate | None = None,
    quantize: str | None = None,
    rows: int | None = None,
) -> str:
    """The implementation that runs such a call: the named one, or the fastest for ``auto``.

    Arguments as in ``support``.

    Raises:
        ValueError: the named one does not exist or cannot run here (it is never replaced by
            another), or there is no such 8-bit format.
    """

    def reason_of(name: str) -> str | None:
        return support(name, device, dtype, head_dim, gate=gate, quantize=quantize, rows=rows)

    if implementation == "auto":
        return next(name for name in IMPLEMENTATIONS if reason_of(name) is None)
    reason = reason_of(implementation)
    if reason is not None:
        raise ValueError(
            f"the {implementation!r} implementation cannot run here: it {reason}. Hint: auto."
        )
    return implementation


def eight_bits_that_pay(
    implementation: str,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    gate: Gate | None = None,
) -> str | None:
    """``int8`` where such a call is faster with q·k in 8 bits, else None.

    That is where the implementation that runs it in full precision has the tensor cores' 8-bit
    products too: a slower one that has them gains nothing by them, and on a CPU they are emulated.
    fp8 is never the answer: its errors are larger at the same rate.

    Raises:
        ValueError: as ``choose``.
    """
    plain = choose(implementation, device, dtype, head_dim, gate=gate)
    # with little to multiply for each score the softmax sets the pace, and scales are in its way.
    if plain not in _FASTER_IN_8_BITS or head_dim <= 64:
        return None
    able = support(plain, device, dtype, head_dim, gate=gate, quantize="int8") is None
    return "int8" if able else None


def gates_that_pay(implementation: str) -> bool:
    """Whether ``implementation`` is to run a gate that its method can do without.

    The GPUs' kernels lose by it: judging scores holds up their softmax for longer than the products
    that are skipped would take (BENCHMARKS, "Gates on an H200"; no other GPU was measured).
    ``torch`` and ``reference`` never save time by a gate, and run it for what it does to the
    output.
    """
    return implementation not in ("gluon", "triton")


def _checked_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    if not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise ValueError(f"scale must be positive and finite, got {scale!r}")
    return scale


def _refuse_gradients(name: str, quantized: bool, q: Tensor, k: Tensor, v: Tensor) -> None:
    # said before the call, because a kernel's output would leave the graph without a word.
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        what = "8-bit attention" if quantized else f"the {name!r} implementation"
        raise ValueError(
            f"{what} has no backward pass, and gradients are asked for. "
            "Hint: torch.no_grad(), or the 'reference' implementation in full precision."
        )


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tiles: Tensor,
    kv_count: Tensor,
    kv_index: Tensor,
    *,
    tile: tuple[int, int],
    scale: float | None = None,
    implementation: str = "auto",
    chosen: bool = False,
    gate: Gate | None = None,
    quantize: str | QuantizedQK | None = None,
    means: KeyMeans | None = None,
    skipped: Tensor | None = None,
    validate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in which each block of query rows sees only its listed key chunks.

    Keys that a block does not list are left out, or with ``means`` approximated: each group of them
    by its mean key and value, in the same softmax.

    Args:
        q: queries ``[B, H, S, D]``.
        k: keys ``[B, H, S, D]``.
        v: values ``[B, H, S, D]``.
        q_tiles: tiles of M query rows that form a block, int32 ``[B, H, G, R]``, R = 128 / M on a
            GPU and 64 / M on a CPU (at least 1); -1 where a block has fewer. No tile may be in two
            blocks, or twice in one.
        kv_count: number of key chunks that the block attends, int32 ``[B, H, G]``.
        kv_index: their numbers, int16 or int32 ``[B, H, G, C]``, rising; only the first
            ``kv_count`` are read.
        tile: (M, N), query rows of a tile and keys of a chunk. Last ones may be short.
        scale: positive factor on q·k, 1/sqrt(D) by default.
        implementation: ``auto`` or one of ``IMPLEMENTATIONS``.
        chosen: ``implementation`` is what ``choose`` returned for just such a call, so it is not
            checked again whether it can run here.
        gate: a ``RelativeGate`` or ``AbsoluteGate``: pieces of scores whose product with V is
            skipped. ``attention/gates.py`` defines the pieces; the implementations agree.
        quantize: ``int8`` or ``fp8``: q·k in 8 bits with a scale for every tile of queries and
            every chunk of keys, or every 64 of them where a chunk has more (``gluon``: always).
            Or what ``quantize_qk`` returned for these q and k. The product with V stays in 16 bits.
            ``gluon`` and ``triton`` are faster for it; the others compute with the rounded
            numbers, in fp32.
        means: mean keys and values of groups of tokens, and for how many tokens each stands in
            each block (``attention/means.py`` has the definition). A gate leaves them alone.
        skipped: int32 ``[B, H, G]``, overwritten with the query-key pairs of every block whose
            product with V the gate skipped (half of a pair's work). Zeros without a gate.
            Contiguous.
        validate: when the values of ``q_tiles``, ``kv_count`` and ``kv_index`` are checked; shapes,
            dtypes and devices always are. None: when these tensors are used for the first time. On
            a CPU that is before the call. On a GPU it is beside the call, and nothing waits: a
            broken plan runs with its numbers brought into range, and a later call raises the error
            (or this one, if the answer is there in time). True: before this call runs, which waits
            for a GPU. False: never; only for a plan that is known to be right and to hold all rows.

    Returns:
        Output ``[B, H, S, D]`` in the dtype of ``q`` and the natural log-sum-exp of the scaled
        scores ``[B, H, S]`` fp32. A row without keys, or in no block, gives zeros and -inf.

    Raises:
        ValueError: the implementation does not exist, cannot run here, or would have to give
            gradients (only ``reference`` does, and not through 8 bits); scale is not positive and
            finite; q, k and v differ in shape, dtype or device, or are empty; the plan, the gate,
            the means, 8-bit operands or ``skipped`` do not fit them; the plan of an earlier call
            was broken.
    """
    check_operands(q, k, v)
    check_plan(q, q_tiles, kv_count, kv_index, tile)
    scale = _checked_scale(scale, q.shape[-1])
    name = implementation
    if not chosen:
        kind = quantize.kind if isinstance(quantize, QuantizedQK) else quantize
        name = choose(implementation, q.device, q.dtype, q.shape[-1], gate=gate, quantize=kind)
    if name in ("gluon", "triton"):
        check_block(q_tiles.shape[3] * tile[0], name)
    if name != "reference" or quantize is not None:
        _refuse_gradients(name, quantize is not None, q, k, v)
    if gate is not None:
        check_gate(gate, q, q_tiles, kv_index, tile[0])
    if means is not None:
        check_means(means, q, kv_count, tile[1])
    if skipped is not None:
        if skipped.shape != kv_count.shape or skipped.dtype != torch.int32:
            raise ValueError(
                f"skipped must be int32 {tuple(kv_count.shape)}, "
                f"got {skipped.dtype} {tuple(skipped.shape)}"
            )
        if skipped.device != q.device or not skipped.is_contiguous():
            raise ValueError(f"skipped must be contiguous, and on {q.device} as q is")
        if gate is None:
            skipped.zero_()
    if isinstance(quantize, QuantizedQK):
        check_quantized(quantize, q)
    plan = checked_plan(q_tiles, kv_count, kv_index, tile, q.shape[2], validate)
    # a kernel keeps scores in fp32 where it says so, whatever the caller's autocast.
    with torch.autocast(q.device.type, enabled=False):
        if isinstance(quantize, QuantizedQK):
            quantized: QuantizedQK | None = quantize
        elif quantize is not None:
            # a run of keys that holds one that is not finite shows in all rows that see any of it:
            # within a chunk those are the rows that saw the key.
            k_run = 64 if name == "gluon" else math.gcd(64, tile[1])
            quantized = quantize_qk(q, k, quantize, q_run=tile[0], k_run=k_run)
        else:
            quantized = None
        if means is not None and quantized is not None:
            means = quantize_means(means, quantized)
        out, lse = _KNOWN[name].load()(
            q,
            k,
            v,
            plan.q_tiles,
            plan.kv_count,
            plan.kv_index,
            tile=tile,
            scale=scale,
            gate=gate,
            quantized=quantized,
            means=means,
            skipped=None if gate is None else skipped,
        )
        return plan.fill(out, lse, tile[0])


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    chosen: bool = False,
    quantize: str | QuantizedQK | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of all queries to all keys by the ``gluon`` kernel, without lists.

    Args:
        q: queries ``[B, H, S, D]``, bf16 or fp16.
        k: keys ``[B, H, S, D]``.
        v: values ``[B, H, S, D]``.
        scale: positive factor on q·k, 1/sqrt(D) by default.
        chosen: the kernel is known to run such a call, so it is not checked again.
        quantize: ``int8`` or ``fp8``: q·k in 8 bits with a scale for every 128 queries and every 64
            keys. Or what ``quantize_qk`` returned for these q and k.

    Returns:
        Output ``[B, H, S, D]`` in the dtype of ``q`` and the natural log-sum-exp of the scaled
        scores ``[B, H, S]`` fp32. Of one sample whose queries lie as pipelines keep them, a token's
        heads beside each other, the output lies so, too.

    Raises:
        ValueError: the kernel cannot run here (``support("gluon", ...)`` says why) or would have to
            give gradients; scale is not positive and finite; q, k and v differ in shape, dtype or
            device, or are empty; 8-bit operands do not fit them.
    """
    check_operands(q, k, v)
    scale = _checked_scale(scale, q.shape[-1])
    if not chosen:
        kind = quantize.kind if isinstance(quantize, QuantizedQK) else quantize
        choose("gluon", q.device, q.dtype, q.shape[-1], quantize=kind)
    _refuse_gradients("gluon", quantize is not None, q, k, v)
    if isinstance(quantize, QuantizedQK):
        check_quantized(quantize, q)
    from .attention.hopper.launch import BLOCK_ROWS, gluon_attention

    with torch.autocast(q.device.type, enabled=False):
        if isinstance(quantize, str):
            quantize = quantize_qk(q, k, quantize, q_run=BLOCK_ROWS, k_run=64)
        return gluon_attention(
            q, k, v, None, None, None, tile=(BLOCK_ROWS, KEY_GROUP), scale=scale, quantized=quantize
        )
