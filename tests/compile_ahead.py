"""Compile the GPU kernels for GPUs that are not here, and print what each variant needs.

    python tests/compile_ahead.py            # the variants that differ, a minute or two
    python tests/compile_ahead.py 90 --all   # every tile and dtype for one generation

A line holds registers of a thread, bytes of stack (spilled registers), and shared memory of a
block, beside the most that a block of that generation can have. The `gluon` kernel's registers are
those at its start; its line adds how many waits for tensor cores there are (two in each consumer,
more if ptxas serialises the products) and how many exponentials of a thread run beside the second
product (those between the two waits: 64 for 128 keys a step). Exits with 1 if a variant does not
compile or does not fit.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from vidsparse.kernels import (
    gluon_hopper,
    gluon_sale,
    triton_antidiagonal,
    triton_gather,
    triton_mask,
    triton_plan,
    triton_pool,
    triton_quantize,
    triton_rotate,
    triton_sale,
)
from vidsparse.kernels.gates import KEY_GROUP
from vidsparse.kernels.quantize import FORMATS, SMALLEST

# shared memory a block can opt in to, in KiB, by compute capability (CUDA programming guide).
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}

TILES = [(m, n) for m in (16, 32, 64, 128) for n in (1, 8, 16, 32, 64, 128)]
HEAD_DIMS = (64, 96, 128)
DTYPES = ("bf16", "fp16")
EIGHT_BITS = {"int8": "i8", "fp8": "fp8e4nv"}
# gate and 8-bit format of the attention kernel.
EXTRAS = [("relative", None), ("absolute", None), (None, "int8"), ("relative", "fp8")]


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel, for GPUs of compute capability ``cc``.

    ``types`` are the arguments that are not constants; those in ``aligned`` are multiples of 16, as
    the launcher would find, and compile to another kernel than others.
    """

    cc: int
    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: frozenset[str]
    warps: int
    source: type = ASTSource
    stages: int | None = None

    def __str__(self) -> str:
        return f"sm_{self.cc} {self.name}"


@dataclass(frozen=True)
class Usage:
    """What a compiled variant takes; waits and overlap are counted in the Gluon kernel alone."""

    registers: int
    stack: int
    shared: int
    waits: int = 0
    overlapped: int = 0


def variants(
    capabilities: list[int], head_dims: list[int], *, every: bool = False
) -> Iterator[Variant]:
    """The variants whose code differs most, or every tile and dtype."""
    for cc in capabilities:
        kernels = (attention, gluon_attention) if cc == 90 else (attention,)
        for kernel in kernels:
            for head_dim in head_dims:
                tiles = TILES if every else [(16, 1), (16, 16), (128, 128)]
                for dtype in DTYPES if every else ["bf16"]:
                    for tile in tiles:
                        yield kernel(cc, head_dim, tile, dtype)
                yield kernel(cc, head_dim, (32, 8), "fp16", aligned=False)
        # what gathers single tokens reads their numbers otherwise than what loads boxes.
        if cc == 90:
            yield gluon_attention(cc, max(head_dims), (16, 1), "bf16", aligned=False)
            yield from gluon_extras(cc, max(head_dims))
            for head_dim in head_dims:
                yield join_parts(head_dim, "bf16", 8, shifted=False)
            yield join_parts(max(head_dims), "bf16", 2, shifted=True)
        for head_dim in head_dims if every else [max(head_dims)]:
            for gate, quantize in EXTRAS:
                if quantize != "fp8" or cc >= 89:
                    yield attention(cc, head_dim, (128, 64), "bf16", gate=gate, quantize=quantize)
            for kind in ("int8", "fp8") if cc >= 89 else ("int8",):
                yield quantization(cc, head_dim, kind)
            yield quantization(cc, head_dim, "int8", pooled=16)
            yield quantization(cc, head_dim, "int8", pooled=128)
            yield mean(cc, head_dim)
        yield from planning(cc, head_dims, every=every)


def gluon_extras(cc: int, head_dim: int) -> Iterator[Variant]:
    """The Gluon kernel with gates and 8-bit operands, and what attends blocks again."""
    for tile, kind in (((16, 1), None), ((16, 16), None), ((128, 64), "int8")):
        yield gluon_attention(cc, head_dim, tile, "bf16", quantize=kind, second=True)
    for gate, quantize in EXTRAS:
        for tile in ((128, 64),) if gate else ((16, 1), (128, 64)):
            yield gluon_attention(cc, head_dim, tile, "bf16", gate=gate, quantize=quantize)
    yield gluon_attention(
        cc, head_dim, (16, 16), "bf16", gate="relative", gate_rows=128, gate_keys=128
    )
    yield gluon_attention(cc, head_dim, (128, 1), "bf16", gate="absolute", gate_rows=32)


def quantization(cc: int, head_dim: int, kind: str, *, pooled: int = 0) -> Variant:
    """Rounding to 8 bits, smoothed and in another order; ``pooled``: tokens that are averaged."""
    wide = dict.fromkeys(("scale", "subtract", "multiply", "product"), "fp32")
    rows, warps = triton_quantize.block(64, pooled)
    means = _pointers(high="fp16", low="fp16", mean_scale="fp32", similarity="fp32")
    return _variant(
        cc,
        f"quantise D={head_dim} {kind}" + (f" and pool {pooled}" if pooled else ""),
        triton_quantize.quantize_kernel,
        _pointers(x="bf16", out=EIGHT_BITS[kind], order="i64", **wide) | (means if pooled else {}),
        ({} if pooled else dict.fromkeys(means))
        | {
            "N": max(pooled, 1),
            "D": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "RUN": 64,
            "ROWS": rows,
            "TOP": FORMATS[kind][1],
            "SMALLEST": SMALLEST,
            "INTEGER": kind == "int8",
        },
        warps,
        aligned=tuple(f"stride_x{d}" for d in "bhs"),
    )


def mean(cc: int, head_dim: int) -> Variant:
    """The sums of which a mean key is made."""
    return _variant(
        cc,
        f"mean D={head_dim}",
        triton_quantize.sums_kernel,
        _pointers(x="bf16", out="fp32"),
        {
            "D": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "ROWS": triton_quantize.MEAN_ROWS,
            "TOKENS": triton_quantize.MEAN_TOKENS,
        },
        triton_quantize.MEAN_WARPS,
        aligned=tuple(f"stride_x{d}" for d in "bhs"),
    )


def planning(cc: int, head_dims: list[int], *, every: bool = False) -> Iterator[Variant]:
    """The kernels of mask and plan."""
    for head_dim in head_dims:
        for size in (1, 16, 128) if every else (16,):
            yield pool(cc, head_dim, size, reordered=True, judged=False)
        yield scores(cc, head_dim)
        yield rotation(cc, head_dim, halves=False)
    yield rotation(cc, max(head_dims), halves=True)
    yield pool(cc, max(head_dims), 128, reordered=False, judged=True)
    yield scores(cc, max(head_dims), judged=True)
    # the default tile at 75,600 and 17,776 tokens, and the longest row held on chip.
    for columns in (4725, 1111, triton_mask.ROW_COLUMNS) if every else (4725,):
        yield top_p(cc, columns, judged=False)
    yield top_p(cc, 1182, judged=True)
    yield top_p(cc, 591, judged=False, counted=True)
    yield top_p_long(cc)
    for window in (64, 4728) if every else (64,):
        yield group(cc, window)
    yield from lists(cc)
    for head_dim in head_dims:
        for stride in (4, 8, 16, 64) if every else (8,):
            yield antidiagonal(cc, head_dim, stride)
    yield block_sums(cc, 8)
    yield key_factors(cc)
    yield finish(cc)
    for head_dim in head_dims:
        yield least_sums(cc, head_dim, (64, 32))
        for tile in ((64, 32), (16, 16), (128, 128)) if every else ((64, 32),):
            yield sale(cc, head_dim, tile, "fp8e4nv" if cc >= 89 else "fp16")
            if cc == 90:
                yield sale_on_hopper(head_dim, tile)


def _pointers(**dtypes: str) -> dict[str, str]:
    return {f"{name}_ptr": f"*{dtype}" for name, dtype in dtypes.items()}


def _variant(
    cc: int,
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    *,
    floats: tuple[str, ...] = (),
    aligned: tuple[str, ...] = (),
    source: type = ASTSource,
    stages: int | None = None,
) -> Variant:
    """A variant whose other arguments, those that are not constants, are 32-bit integers."""
    types = dict.fromkeys((p.name for p in kernel.params if not p.is_constexpr), "i32")
    types = {n: t for n, t in types.items() if n not in constants}
    types |= pointers | dict.fromkeys(floats, "fp32")
    return Variant(cc, name, kernel, types, constants, frozenset(aligned), warps, source, stages)


def attention(
    cc: int,
    head_dim: int,
    tile: tuple[int, int],
    dtype: str,
    *,
    aligned: bool = True,
    gate: str | None = None,
    quantize: str | None = None,
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
    pointers = _attention_pointers(tile, dtype, aligned) | _pointers(q=operand, k=operand)
    _ask(pointers, constants, quantize, gate, {"kept": "i1"})
    return _variant(
        cc,
        f"triton {_call(head_dim, tile, dtype, aligned)}{_extra(gate, quantize)}",
        triton_gather.gather_attention_kernel,
        pointers,
        constants,
        warps,
        floats=("scale_log2",),
        aligned=("S", "C") if aligned else ("C",),
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
    second: bool = False,
) -> Variant:
    """The Gluon kernel of attention, in bf16 without a gate the first or the second pass."""
    rows, keys = tile
    padded = 64 if head_dim == 64 else 128
    config = gluon_hopper.config(keys, padded, key_bytes=1 if quantize else 2)
    operand = EIGHT_BITS[quantize] if quantize else dtype
    boxes = {
        "q": (min(rows, 64), operand),
        "k": (max(keys, 8), operand),
        "v": (max(keys, 8), dtype),
    }
    descriptors = {}
    for name, (box, kind) in boxes.items():
        columns, layout = gluon_hopper.boxes_layout(padded, 16 if kind == dtype else 8)
        descriptors[f"{name}_desc"] = f"tensordesc<{kind}[1, {box}, {columns}],{layout!r}>"
    pointers = _attention_pointers(tile, dtype, aligned) | _pointers(k=operand, words="i32")
    constants = {
        "D": head_dim,
        "DP": padded,
        "M": rows,
        "N": keys,
        "BN": config.step,
        "Q_RUN": rows,
        "K_RUN": 64,
        "GATE": gate,
        "GATE_ROWS": gate_rows if gate else 128,
        "GATE_KEYS": gate_keys if gate else config.step,
        "STAGES": config.stages,
        "CONSUMER_REGS": config.consumer_registers,
        "PRODUCER_REGS": config.producer_registers,
        "PRODUCER_WARPS": 1 if keys >= 8 else 4,
        "PASS": ("second" if second else "first") if dtype == "bf16" and gate is None else None,
    }
    kept = {"kept": "i32"} if gate == "absolute" else {}
    _ask(pointers, constants, quantize, gate, kept)
    return _variant(
        cc,
        f"gluon {_call(head_dim, tile, dtype, aligned)}{_extra(gate, quantize)}"
        + (f" of {gate_rows}x{gate_keys}" if gate else "")
        + (" again" if second else ""),
        gluon_hopper.gather_attention_kernel,
        descriptors | pointers,
        constants,
        4,
        floats=("scale_log2",),
        aligned=("S", "C") if aligned else ("C",),
        source=GluonASTSource,
    )


def join_parts(head_dim: int, dtype: str, parts: int, *, shifted: bool) -> Variant:
    """What joins the parts of the Gluon kernel's last blocks."""
    padded = 64 if head_dim == 64 else 128
    pointers = _pointers(out=dtype, lse="fp32", q_tiles="i32")
    constants = {
        "D": head_dim,
        "DP": padded,
        "M": 16,
        "MOST": parts,
        "ROWS": 1024 // padded,
    }
    if shifted:
        pointers |= _pointers(shift="fp32")
    else:
        constants["shift_ptr"] = None
    return _variant(
        90,
        f"gluon parts D={head_dim} {dtype}, {parts} of them" + (", shifted" if shifted else ""),
        gluon_hopper.join_parts_kernel,
        pointers,
        constants,
        4,
        floats=("scale",),
        source=GluonASTSource,
    )


def _ask(
    pointers: dict[str, str],
    constants: dict[str, Any],
    quantize: str | None,
    gate: str | None,
    kept: dict[str, str],
) -> None:
    """Add the pointers of 8-bit operands and gates, or None in the place of what is not there."""
    scales = _pointers(q_scale="fp32", k_scale="fp32", shift="fp32")
    gating = _pointers(threshold="fp32", skipped="i32", **kept)
    constants |= dict.fromkeys({**scales, **gating, **_pointers(kept="")})
    for wanted, those in ((quantize, scales), (gate, gating)):
        if wanted:
            pointers |= those
            for name in those:
                del constants[name]


def _extra(gate: str | None, quantize: str | None) -> str:
    return (f" {gate} gate" if gate else "") + (f" {quantize}" if quantize else "")


def _call(head_dim: int, tile: tuple[int, int], dtype: str, aligned: bool) -> str:
    odd = "" if aligned else " odd lengths"
    return f"D={head_dim} {tile[0]}x{tile[1]} {dtype}{odd}"


def _attention_pointers(tile: tuple[int, int], dtype: str, aligned: bool) -> dict[str, str]:
    # numbers of single tokens want 32 bits in long sequences; odd lengths stand for short ones.
    numbers = "i32" if tile[1] == 1 and aligned else "i16"
    return _pointers(
        k=dtype, v=dtype, out=dtype, lse="fp32", q_tiles="i32", kv_count="i32", kv_index=numbers
    )


def pool(cc: int, head_dim: int, size: int, *, reordered: bool, judged: bool) -> Variant:
    """Pooling, with or without the copy in another order."""
    block_d = triton.next_power_of_2(head_dim)
    copies = _pointers(source="i64", out="bf16") if reordered else {}
    similarity = _pointers(similarity="fp32") if judged else {}
    absent = dict.fromkeys(_pointers(source="", out="") if not reordered else {})
    absent |= dict.fromkeys(_pointers(similarity="") if not judged else {})
    return _variant(
        cc,
        f"pool {size} D={head_dim}" + " reordered" * reordered + " judged" * judged,
        triton_pool.pool_kernel,
        _pointers(x="bf16", high="fp16", low="fp16", scale="fp32") | copies | similarity,
        absent
        | {
            "D": head_dim,
            "BLOCK_D": block_d,
            "N": size,
            "BLOCK_T": max(1, triton_pool.STEP_ELEMENTS // block_d),
            "UNROLL": min(size, triton_pool.UNROLL),
            "REORDERED": reordered,
            "POOLED": True,
            "JUDGED": judged,
        },
        triton_pool.WARPS,
        aligned=tuple(f"stride_{x}{d}" for x in "xo" for d in "bhs"),
    )


def rotation(cc: int, head_dim: int, *, halves: bool) -> Variant:
    """Rotary embedding, of angles that stand there twice."""
    pairs = head_dim // 2
    block_p = triton.next_power_of_2(pairs)
    channels = "bf16" if halves else "i32"
    return _variant(
        cc,
        f"rotate D={head_dim}" + " halves" * halves,
        triton_rotate.rotate_kernel,
        _pointers(x=channels, cos="fp32", sin="fp32", out=channels),
        {
            "P": pairs,
            "BLOCK_P": block_p,
            "BLOCK_H": triton_rotate.STEP_PAIRS // block_p,
            # LTX-2 has angles of each head.
            "SHARED": not halves,
            "HALVES": halves,
            "BF16": True,
        },
        triton_rotate.WARPS,
        aligned=tuple(f"stride_x{d}" for d in "bsh"),
    )


def scores(cc: int, head_dim: int, *, judged: bool = False) -> Variant:
    """The pooled product."""
    similarity = _pointers(k_similarity="fp32")
    halves = ("q_high", "q_low", "k_high", "k_low")
    wide = ("q_scale", "k_scale", "scores")
    rows, columns, stages = triton_mask.score_block(SHARED_KIB[cc] * 1024, head_dim)
    return _variant(
        cc,
        f"scores D={head_dim}" + " judged" * judged,
        triton_mask.scores_kernel,
        _pointers(**dict.fromkeys(halves, "fp16"), **dict.fromkeys(wide, "fp32"))
        | (similarity if judged else {}),
        ({} if judged else dict.fromkeys(similarity))
        | {
            "D": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_Q": rows,
            "BLOCK_K": columns,
            "STEPS": triton_mask.SCORE_STEPS,
            "STAGES": stages,
            "JUDGED": judged,
        },
        triton_mask.SCORE_WARPS,
        floats=("factor", "theta"),
        aligned=("LD",),
    )


def _judge(judged: bool) -> tuple[dict[str, str], dict[str, Any]]:
    names = _pointers(q_similarity="fp32")
    return (names, {}) if judged else ({}, dict.fromkeys(names))


def top_p(cc: int, columns: int, *, judged: bool, counted: bool = False) -> Variant:
    """Top-p, or where columns are counted top-k, of a row held on chip."""
    body, tail = triton_mask.row_pieces(columns)
    present, absent = _judge(judged)
    return _variant(
        cc,
        f"top-{'k' if counted else 'p'} {columns} columns" + " judged" * judged,
        triton_mask.top_p_kernel,
        _pointers(scores="fp32", words="i32", keys="i32") | present,
        absent
        | {
            "N": 16,
            "BLOCK_Q": 128,
            "BODY": body,
            "TAIL": tail,
            "JUDGED": judged,
            "COUNTED": counted,
            "BY_HEAD": False,
        },
        triton_mask.row_warps(body + tail),
        floats=("wanted", "theta"),
        aligned=("LD",),
    )


def top_p_long(cc: int) -> Variant:
    """Top-p of a row read in passes."""
    present, absent = _judge(False)
    return _variant(
        cc,
        "top-p in passes",
        triton_mask.top_p_long_kernel,
        _pointers(scores="fp32", words="i32", keys="i32") | present,
        absent
        | {
            "N": 1,
            "BLOCK_Q": 128,
            "BLOCK": triton_mask.LONG_BLOCK,
            "WAYS": triton_mask.LONG_WAYS,
            "JUDGED": False,
            "COUNTED": False,
            "BY_HEAD": False,
        },
        triton_mask.LONG_WARPS,
        floats=("wanted", "theta"),
        aligned=("LD",),
    )


def antidiagonal(cc: int, head_dim: int, stride: int) -> Variant:
    """XAttention's product of groups, for the default tile."""
    piece = triton_antidiagonal.block_d(head_dim)
    how = triton_antidiagonal.config(
        (cc // 10, cc % 10), SHARED_KIB[cc] * 1024, 128 // stride, piece
    )
    operands = _pointers(q="bf16", k="bf16")
    if how.tma:
        boxes = zip(operands, (how.rows, how.columns), strict=True)
        operands = {name: f"tensordesc<bf16[{rows}, {piece}]>" for name, rows in boxes}
    return _variant(
        cc,
        f"antidiagonal D={head_dim} stride {stride}",
        triton_antidiagonal.antidiagonal_kernel,
        _pointers(part="fp32") | operands,
        triton_antidiagonal.antidiagonal_constants(how, head_dim, stride, 128 // stride, True),
        how.warps,
        floats=("factor",),
        stages=how.stages,
    )


def block_sums(cc: int, stride: int) -> Variant:
    """What query tiles give key tiles, for the default tile."""
    return _variant(
        cc,
        f"block sums of stride {stride}",
        triton_antidiagonal.block_sums_kernel,
        _pointers(part="fp32", room="fp32"),
        {
            "MB": 128 // stride,
            "BLOCK_M": 128 // stride,
            "BLOCK_C": triton_antidiagonal.COLUMNS_AT_ONCE,
        },
        triton_antidiagonal.SUM_WARPS,
        aligned=("LD",),
    )


def least_sums(cc: int, head_dim: int, tile: tuple[int, int]) -> Variant:
    """SALE's thresholds."""
    return _variant(
        cc,
        f"least sums D={head_dim} {tile[0]}x{tile[1]}",
        triton_sale.least_sums_kernel,
        _pointers(q="bf16", k="bf16", q_scale="fp32", shift="fp32", extra="bf16"),
        triton_sale.area_constants(head_dim, tile, False),
        triton_sale.AREA_WARPS,
        floats=("log_tau", "scale"),
    )


def key_factors(cc: int) -> Variant:
    """SALE's factors of keys."""
    return _variant(
        cc,
        "key factors",
        triton_sale.key_factors_kernel,
        _pointers(offset="fp32", scale="fp32", extra="bf16"),
        {"RUN": 32, "EXTRA": triton_sale.EXTRA, "KEYS": triton_sale.FACTOR_KEYS},
        4,
    )


def sale(cc: int, head_dim: int, tile: tuple[int, int], riding: str) -> Variant:
    """SALE's selection pass."""
    how = triton_sale.config((cc // 10, cc % 10), SHARED_KIB[cc] * 1024)
    constants = triton_sale.sale_constants(how, head_dim, tile)
    types = _pointers(q=riding, k=riding, q_extra="bf16", k_extra="bf16")
    if how.tma:
        wide, narrow = constants["BLOCK_D"], constants["EXTRA"]
        boxes = ((how.rows, wide), (how.keys, wide), (how.rows, narrow), (how.keys, narrow))
        types = {
            name: f"tensordesc<{kind[1:]}[{rows}, {columns}]>"
            for (name, kind), (rows, columns) in zip(types.items(), boxes, strict=True)
        }
    return _variant(
        cc,
        f"sale D={head_dim} {tile[0]}x{tile[1]} {riding}",
        triton_sale.sale_kernel,
        _pointers(words="i32") | types,
        constants,
        how.warps,
    )


def sale_on_hopper(head_dim: int, tile: tuple[int, int]) -> Variant:
    """SALE's selection pass for Hopper."""
    padded, extra = triton_sale.block_d(head_dim), triton_sale.EXTRA
    eight_bits, factors = gluon_sale.layouts(padded, extra)
    rows, keys = gluon_sale.ROWS, gluon_sale.KEYS
    descriptors = {
        "q_desc": f"tensordesc<fp8e4nv[{rows}, {padded}],{eight_bits!r}>",
        "k_desc": f"tensordesc<fp8e4nv[{keys}, {padded}],{eight_bits!r}>",
        "q_extra_desc": f"tensordesc<bf16[{rows}, {extra}],{factors!r}>",
        "k_extra_desc": f"tensordesc<bf16[{keys}, {extra}],{factors!r}>",
    }
    constants = {
        "M": tile[0],
        "N": tile[1],
        "STAGES": gluon_sale.STAGES,
        "CONSUMERS": gluon_sale.CONSUMERS,
        "CONSUMER_REGS": gluon_sale.CONSUMER_REGISTERS,
        "PRODUCER_REGS": gluon_sale.PRODUCER_REGISTERS,
    }
    return _variant(
        90,
        f"gluon sale D={head_dim} {tile[0]}x{tile[1]}",
        gluon_sale.sale_kernel,
        descriptors | _pointers(words="i32"),
        constants,
        4,
        source=GluonASTSource,
    )


def finish(cc: int) -> Variant:
    """What SALE keeps anyway, and the count of keys."""
    return _variant(
        cc,
        "finish",
        triton_sale.finish_kernel,
        _pointers(words="i32", keys="i32"),
        {
            "M": 64,
            "N": 32,
            "TILES": triton_sale.FINISHED_TILES,
            "BLOCK_W": triton_sale.FINISHED_WORDS,
        },
        4,
    )


def group(cc: int, window: int) -> Variant:
    """Grouping by XOR distance in windows of the default tile's 148 words."""
    return _variant(
        cc,
        f"group {window}",
        triton_plan.group_kernel,
        _pointers(words="i32", q_tiles="i32"),
        {"R": 8, **triton_plan.group_constants(window, 148)},
        triton_plan.group_warps(window),
    )


def lists(cc: int) -> Iterator[Variant]:
    """Joining, ordering and listing blocks of the default tile's 148 words."""
    tile = {"M": 16, "N": 16, "R": 8, "BLOCK_W": 256}
    yield _variant(
        cc,
        "join",
        triton_plan.join_kernel,
        _pointers(words="i32", q_tiles="i32", joined="i32", count="i32", pairs="i64"),
        tile,
        triton_plan.JOIN_WARPS,
    )
    names = ("q_tiles", "count", "words", "q_tiles_out", "count_out", "words_out")
    yield _variant(
        cc,
        "longest first",
        triton_plan.longest_first_kernel,
        _pointers(**dict.fromkeys(names, "i32")),
        {"R": 8, "BLOCK_G": triton_plan.RANK_BLOCKS, "BLOCK_W": 256},
        triton_plan.ORDER_WARPS,
    )
    yield _variant(
        cc,
        "list",
        triton_plan.list_kernel,
        _pointers(words="i32", index="i16"),
        {"BLOCK_W": triton_plan.LIST_WORDS},
        triton_plan.LIST_WARPS,
        aligned=("C",),
    )


def compile_variant(variant: Variant) -> Usage:
    """Compile for ``variant``'s GPU as the launcher would, and read the cubin's needs."""
    names = variant.kernel.arg_names
    missing = set(names) - set(variant.types) - set(variant.constants)
    assert not missing, f"the kernel has arguments unknown here: {sorted(missing)}"
    divisible = [
        n for n in names if n in variant.types and (n.endswith("_ptr") or n in variant.aligned)
    ]
    source = variant.source(
        fn=variant.kernel,
        signature={n: variant.types.get(n, "constexpr") for n in names},
        constexprs=variant.constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in divisible},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", variant.cc, 32),
        options={"num_warps": variant.warps}
        | ({"num_stages": variant.stages} if variant.stages else {}),
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = _tool("cuobjdump", "--dump-resource-usage", file.name)
        found = re.search(r"REG:(\d+) STACK:(\d+)", text)
        assert found, f"cuobjdump answered {text!r}"
        gluon = variant.source is GluonASTSource
        overlap = _overlap(_tool("nvdisasm", file.name)) if gluon else ()
    return Usage(int(found[1]), int(found[2]), compiled.metadata.shared, *overlap)


def _overlap(code: str) -> tuple[int, int]:
    """Waits for tensor cores, and the fewest exponentials from a first wait to a last one."""
    steps = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)|(MUFU\.EX2)", code)
    waits = [(i, left) for i, (left, _) in enumerate(steps) if left]
    between = [
        sum(1 for _, exponential in steps[a:b] if exponential)
        for (a, left), (b, _) in pairwise(waits)
        if left == "1"
    ]
    return len(waits), min(between, default=0)


def _tool(name: str, *arguments: str) -> str:
    """What one of the tools that Triton's wheel carries prints."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def _capability(text: str) -> int:
    if not text.isdecimal() or int(text) not in SHARED_KIB:
        raise argparse.ArgumentTypeError(f"choose from {', '.join(map(str, SHARED_KIB))}")
    return int(text)


def main() -> int:
    """Compile and print; the exit status says whether all variants compiled and fit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("capability", type=_capability, nargs="*", help="80, 89, 90 or 100")
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, help="only this one")
    parser.add_argument("--all", action="store_true", help="every tile and dtype")
    arguments = parser.parse_args()
    capabilities = arguments.capability or list(SHARED_KIB)
    head_dims = [arguments.head_dim] if arguments.head_dim else list(HEAD_DIMS)
    failed = 0
    print(f"triton {triton.__version__}")
    for variant in variants(capabilities, head_dims, every=arguments.all):
        limit = SHARED_KIB[variant.cc] * 1024
        try:
            needs = compile_variant(variant)
        except Exception as error:
            failed += 1
            print(f"{variant}: FAILED {type(error).__name__}: {error}", flush=True)
            continue
        verdict = "" if needs.shared <= limit else "  DOES NOT FIT"
        failed += bool(verdict)
        overlap = f", {needs.waits} waits, {needs.overlapped} exponentials overlapped"
        print(
            f"{variant}: {needs.registers} registers, {needs.stack} bytes spilled, "
            f"{needs.shared / 1024:.0f} of {limit // 1024} KiB shared{verdict}"
            + (overlap if needs.waits else ""),
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
