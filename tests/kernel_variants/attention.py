"""Variants of the kernels of attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
from triton.experimental.gluon._runtime import GluonASTSource

from kernel_variants.base import EIGHT_BITS, SHARED_KIB, Variant, make_variant, pointers_to
from vidsparse.kernels.attention import triton_gather
from vidsparse.kernels.attention.gates import KEY_GROUP
from vidsparse.kernels.attention.hopper import kernel, launch, layouts
from vidsparse.kernels.attention.hopper.arguments import Sizes
from vidsparse.kernels.attention.hopper.parts import join_parts_kernel

# gate and 8-bit format of the attention kernel.
EXTRAS = [("relative", None), ("absolute", None), (None, "int8"), ("relative", "fp8")]
# tile, gate and format where skipped keys stand as means.
MEANS = [
    ((16, 1), None, None),
    ((16, 16), None, None),
    ((128, 64), None, "int8"),
    ((128, 64), "relative", None),
]


def attention(
    cc: int,
    head_dim: int,
    tile: tuple[int, int],
    dtype: str,
    *,
    aligned: bool = True,
    gate: str | None = None,
    quantize: str | None = None,
    means: bool = False,
) -> Variant:
    """The plain Triton kernel of attention."""
    step, warps = triton_gather.step_and_warps((cc // 10, cc % 10), SHARED_KIB[cc] * 1024)
    if gate:
        step, warps = 64, 8
    constants = {
        "D": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "M": tile[0],
        "N": tile[1],
        "BLOCK_M": 128,
        "BLOCK_N": step,
        "KEY_GROUP": KEY_GROUP,
        "STAGES": triton_gather.STAGES,
        "Q_RUN": tile[0],
        "K_RUN": 64,
        "GATE": gate,
        "GATE_ROWS": 64,
        "ANCHORED": gate is None and dtype == "bf16",
    }
    operand = EIGHT_BITS[quantize] if quantize else dtype
    pointers = _attention_pointers(tile, dtype, aligned) | pointers_to(q=operand, k=operand)
    _ask(pointers, constants, quantize, gate, {"kept": "i1"})
    _ask_means(pointers, constants, dtype, operand if quantize else None, means)
    return make_variant(
        cc,
        f"triton {_call(head_dim, tile, dtype, aligned)}{_extra(gate, quantize, means)}",
        triton_gather.gather_attention_kernel,
        pointers,
        constants,
        warps,
        floats=("scale_log2",),
        aligned=("S", "C", "COUNTS") if aligned else ("C", "COUNTS"),
    )


def gluon_attention(
    cc: int,
    head_dim: int,
    tile: tuple[int, int],
    dtype: str,
    *,
    aligned: bool = True,
    gate: str | None = None,
    gate_rows: int = 64,
    gate_keys: int = 64,
    quantize: str | None = None,
    means: bool = False,
    second: bool = False,
    dense: bool = False,
) -> Variant:
    """The Gluon kernel of attention, in bf16 without a gate the first or the second launch.

    ``dense`` is without lists, its output as pipelines lay it out.
    """
    rows, keys = tile
    padded = 64 if head_dim == 64 else 128
    config = launch.tuned_attention(keys, padded, key_bytes=1 if quantize else 2)
    operand = EIGHT_BITS[quantize] if quantize else dtype
    boxes = {
        "q": (min(rows, 64), operand),
        "k": (max(keys, 8), operand),
        "v": (max(keys, 8), dtype),
    }
    if means:
        boxes |= {"k_mean": boxes["k"], "v_mean": boxes["v"]}
    descriptors = {}
    for name, (box, kind) in boxes.items():
        columns, layout = layouts.boxes_layout(padded, 16 if kind == dtype else 8)
        descriptors[f"{name}_desc"] = f"tensordesc<{kind}[1, {box}, {columns}],{layout!r}>"
    pointers = _attention_pointers(tile, dtype, aligned) | pointers_to(k=operand, words="i32")
    sizes = Sizes(
        dim=head_dim,
        padded=padded,
        rows=rows,
        keys=keys,
        step=config.step,
        q_run=rows,
        k_run=64,
        gate=gate,
        gate_rows=gate_rows if gate else 128,
        gate_keys=gate_keys if gate else config.step,
        stages=config.stages,
        consumer_registers=config.consumer_registers,
        producer_registers=config.producer_registers,
        producer_warps=1 if keys >= 8 else 4,
        launch=("second" if second else "first") if dtype == "bf16" and gate is None else None,
        beside=dense,
    )
    constants: dict[str, Any] = {"SIZES": sizes}
    if dense:
        for name in ("q_tiles_ptr", "kv_count_ptr", "kv_index_ptr"):
            del pointers[name]
            constants[name] = None
    kept = {"kept": "i32"} if gate == "absolute" else {}
    _ask(pointers, constants, quantize, gate, kept)
    _ask_means(pointers, constants, dtype, operand if quantize else None, means)
    if not means:
        constants |= {"k_mean_desc": None, "v_mean_desc": None}
    return make_variant(
        cc,
        f"gluon {_call(head_dim, tile, dtype, aligned)}{_extra(gate, quantize, means)}"
        + (f" of {gate_rows}x{gate_keys}" if gate else "")
        + (" again" if second else "")
        + (" dense" if dense else ""),
        kernel.gather_attention_kernel,
        descriptors | pointers,
        constants,
        4,
        floats=("scale_log2",),
        aligned=("S", "C", "COUNTS") if aligned else ("C", "COUNTS"),
        source=GluonASTSource,
    )


def join_parts(head_dim: int, dtype: str, parts: int, *, shifted: bool) -> Variant:
    """What joins the parts of the Gluon kernel's last blocks."""
    padded = 64 if head_dim == 64 else 128
    pointers = pointers_to(out=dtype, lse="fp32", q_tiles="i32")
    constants: dict[str, Any] = {
        "D": head_dim,
        "DP": padded,
        "M": 16,
        "MOST": parts,
        "ROWS": 1024 // padded,
        "BESIDE": shifted,
    }
    if shifted:
        pointers |= pointers_to(shift="fp32")
    else:
        constants["shift_ptr"] = None
    return make_variant(
        90,
        f"gluon parts D={head_dim} {dtype}, {parts} of them"
        + (", shifted, heads beside each other" if shifted else ""),
        join_parts_kernel,
        pointers,
        constants,
        4,
        floats=("scale",),
        source=GluonASTSource,
    )


def gluon_extras(cc: int, head_dim: int) -> Iterator[Variant]:
    """The Gluon kernel with gates and 8-bit operands, and what attends blocks again."""
    for tile, kind in (((16, 1), None), ((16, 16), None), ((128, 64), "int8")):
        yield gluon_attention(cc, head_dim, tile, "bf16", quantize=kind, second=True)
    for kind in (None, "int8"):
        yield gluon_attention(cc, head_dim, (128, 128), "bf16", quantize=kind, dense=True)
    for gate, quantize in EXTRAS:
        for tile in ((128, 64),) if gate else ((16, 1), (128, 64)):
            yield gluon_attention(cc, head_dim, tile, "bf16", gate=gate, quantize=quantize)
    for tile, gate, quantize in MEANS:
        yield gluon_attention(cc, head_dim, tile, "bf16", gate=gate, quantize=quantize, means=True)
    yield gluon_attention(
        cc, head_dim, (16, 16), "bf16", gate="relative", gate_rows=128, gate_keys=128
    )
    yield gluon_attention(cc, head_dim, (128, 1), "bf16", gate="absolute", gate_rows=32)


def _ask(
    pointers: dict[str, str],
    constants: dict[str, Any],
    quantize: str | None,
    gate: str | None,
    kept: dict[str, str],
) -> None:
    """Add the pointers of 8-bit operands and gates, or None in the place of what is not there."""
    scales = pointers_to(q_scale="fp32", k_scale="fp32", shift="fp32")
    gating = pointers_to(threshold="fp32", skipped="i32", **kept)
    constants |= dict.fromkeys({**scales, **gating, **pointers_to(kept="")})
    for wanted, those in ((quantize, scales), (gate, gating)):
        if wanted:
            pointers |= those
            for name in those:
                del constants[name]


def _ask_means(
    pointers: dict[str, str], constants: dict[str, Any], dtype: str, bits: str | None, means: bool
) -> None:
    """Add the pointers of means, the keys of type ``bits`` where it is given, or None for all."""
    wanted = pointers_to(k_mean=bits or dtype, v_mean=dtype, k_mean_scale="fp32", counts="u8")
    if not means:
        constants |= dict.fromkeys(wanted)
        return
    if bits is None:
        constants["k_mean_scale_ptr"] = None
        del wanted["k_mean_scale_ptr"]
    pointers |= wanted


def _extra(gate: str | None, quantize: str | None, means: bool = False) -> str:
    extras = [f"{gate} gate" if gate else "", quantize or "", "means" if means else ""]
    return "".join(f" {extra}" for extra in extras if extra)


def _call(head_dim: int, tile: tuple[int, int], dtype: str, aligned: bool) -> str:
    odd = "" if aligned else " odd lengths"
    return f"D={head_dim} {tile[0]}x{tile[1]} {dtype}{odd}"


def _attention_pointers(tile: tuple[int, int], dtype: str, aligned: bool) -> dict[str, str]:
    # numbers of single tokens want 32 bits in long sequences; odd lengths stand for short ones.
    numbers = "i32" if tile[1] == 1 and aligned else "i16"
    return pointers_to(
        k=dtype, v=dtype, out=dtype, lse="fp32", q_tiles="i32", kv_count="i32", kv_index=numbers
    )
