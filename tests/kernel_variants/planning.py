"""Variants of the kernels that make masks and plans, and put tokens in order and in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
from triton.experimental.gluon._runtime import GluonASTSource

from kernel_variants.base import EIGHT_BITS, SHARED_KIB, Variant, make_variant, pointers_to
from vidsparse.kernels.selection import (
    antidiagonal,
    hopper_sale,
    plan,
    pooled,
    residual,
    sale,
    sale_factors,
    top_p,
    triton_sale,
)
from vidsparse.kernels.tokens import moments, pool, remainder, rotate, triton_quantize
from vidsparse.kernels.tokens.formats import FORMATS, SMALLEST


def quantization(cc: int, head_dim: int, kind: str, *, tile: int = 0) -> Variant:
    """Rounding to 8 bits, smoothed and in another order; ``tile``: tokens that are averaged."""
    wide = dict.fromkeys(("scale", "subtract", "multiply", "product"), "fp32")
    rows, warps = triton_quantize.block(64, tile)
    means = pointers_to(high="fp16", low="fp16", mean_scale="fp32", similarity="fp32")
    return make_variant(
        cc,
        f"quantise D={head_dim} {kind}" + (f" and pool {tile}" if tile else ""),
        triton_quantize.quantize_kernel,
        pointers_to(x="bf16", out=EIGHT_BITS[kind], order="i64", **wide) | (means if tile else {}),
        ({} if tile else dict.fromkeys(means))
        | {
            "N": max(tile, 1),
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


def means(cc: int, head_dim: int) -> Variant:
    """The sums of which a mean key is made."""
    return make_variant(
        cc,
        f"mean D={head_dim}",
        triton_quantize.sums_kernel,
        pointers_to(x="bf16", out="fp32"),
        {
            "D": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "ROWS": triton_quantize.MEAN_ROWS,
            "TOKENS": triton_quantize.MEAN_TOKENS,
        },
        triton_quantize.MEAN_WARPS,
        aligned=tuple(f"stride_x{d}" for d in "bhs"),
    )


def pooling(cc: int, head_dim: int, size: int, *, reordered: bool, judged: bool) -> Variant:
    """Pooling, with or without the copy in another order."""
    block_d = triton.next_power_of_2(head_dim)
    copies = pointers_to(source="i64", out="bf16") if reordered else {}
    similarity = pointers_to(similarity="fp32") if judged else {}
    absent = dict.fromkeys(pointers_to(source="", out="") if not reordered else {})
    absent |= dict.fromkeys(pointers_to(similarity="") if not judged else {})
    return make_variant(
        cc,
        f"pool {size} D={head_dim}" + " reordered" * reordered + " judged" * judged,
        pool.pool_kernel,
        pointers_to(x="bf16", high="fp16", low="fp16", scale="fp32") | copies | similarity,
        absent
        | {
            "D": head_dim,
            "BLOCK_D": block_d,
            "N": size,
            "BLOCK_T": max(1, pool.STEP_ELEMENTS // block_d),
            "UNROLL": min(size, pool.UNROLL),
            "REORDERED": reordered,
            "POOLED": True,
            "JUDGED": judged,
        },
        pool.WARPS,
        aligned=tuple(f"stride_{x}{d}" for x in "xo" for d in "bhs"),
    )


def rotation(cc: int, head_dim: int, *, halves: bool, normed: bool = False) -> Variant:
    """Rotary embedding, of angles that stand there twice, of heads that may be normed before."""
    pairs = head_dim // 2
    block_p = triton.next_power_of_2(pairs)
    channels = "bf16" if halves else "i32"
    return make_variant(
        cc,
        f"rotate D={head_dim}" + " halves" * halves + " normed" * normed,
        rotate.rotate_kernel,
        pointers_to(x=channels, cos="fp32", sin="fp32", out=channels)
        | (pointers_to(weight="bf16") if normed else {}),
        ({} if normed else {"weight_ptr": None})
        | {
            "P": pairs,
            "BLOCK_P": block_p,
            "BLOCK_H": rotate.STEP_PAIRS // block_p,
            # LTX-2 has angles of each head.
            "SHARED": not halves,
            "HALVES": halves,
            "BF16": True,
        },
        rotate.WARPS,
        floats=("eps",),
        aligned=tuple(f"stride_x{d}" for d in "bsh"),
    )


def scores(cc: int, head_dim: int, *, judged: bool = False) -> Variant:
    """The pooled product."""
    similarity = pointers_to(k_similarity="fp32")
    halves = ("q_high", "q_low", "k_high", "k_low")
    wide = ("q_scale", "k_scale", "scores")
    rows, columns, stages = pooled.score_block(SHARED_KIB[cc] * 1024, head_dim)
    return make_variant(
        cc,
        f"scores D={head_dim}" + " judged" * judged,
        pooled.scores_kernel,
        pointers_to(**dict.fromkeys(halves, "fp16"), **dict.fromkeys(wide, "fp32"))
        | (similarity if judged else {}),
        ({} if judged else dict.fromkeys(similarity))
        | {
            "D": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_Q": rows,
            "BLOCK_K": columns,
            "STEPS": pooled.SCORE_STEPS,
            "STAGES": stages,
            "JUDGED": judged,
        },
        pooled.SCORE_WARPS,
        floats=("factor", "theta"),
        aligned=("LD",),
    )


def _judge(judged: bool) -> tuple[dict[str, str], dict[str, Any]]:
    names = pointers_to(q_similarity="fp32")
    return (names, {}) if judged else ({}, dict.fromkeys(names))


def top_p_row(cc: int, columns: int, *, judged: bool, counted: bool = False) -> Variant:
    """Top-p, or where columns are counted top-k, of a row held on chip."""
    body, tail = top_p.row_pieces(columns)
    present, absent = _judge(judged)
    return make_variant(
        cc,
        f"top-{'k' if counted else 'p'} {columns} columns" + " judged" * judged,
        top_p.top_p_kernel,
        pointers_to(scores="fp32", words="i32", keys="i32") | present,
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
        top_p.row_warps(body + tail),
        floats=("wanted", "theta"),
        aligned=("LD",),
    )


def top_p_in_passes(cc: int) -> Variant:
    """Top-p of a row read in passes."""
    present, absent = _judge(False)
    return make_variant(
        cc,
        "top-p in passes",
        top_p.top_p_long_kernel,
        pointers_to(scores="fp32", words="i32", keys="i32") | present,
        absent
        | {
            "N": 1,
            "BLOCK_Q": 128,
            "BLOCK": top_p.LONG_BLOCK,
            "WAYS": top_p.LONG_WAYS,
            "JUDGED": False,
            "COUNTED": False,
            "BY_HEAD": False,
        },
        top_p.LONG_WARPS,
        floats=("wanted", "theta"),
        aligned=("LD",),
    )


def antidiagonals(cc: int, head_dim: int, stride: int) -> Variant:
    """XAttention's product of groups, for the default tile."""
    piece = antidiagonal.block_d(head_dim)
    how = antidiagonal.tuned_antidiagonal(
        (cc // 10, cc % 10), SHARED_KIB[cc] * 1024, 128 // stride, piece
    )
    operands = pointers_to(q="bf16", k="bf16")
    if how.tma:
        boxes = zip(operands, (how.rows, how.columns), strict=True)
        operands = {name: f"tensordesc<bf16[{rows}, {piece}]>" for name, rows in boxes}
    return make_variant(
        cc,
        f"antidiagonal D={head_dim} stride {stride}",
        antidiagonal.antidiagonal_kernel,
        pointers_to(part="fp32") | operands,
        antidiagonal.antidiagonal_constants(how, head_dim, stride, 128 // stride, True),
        how.warps,
        floats=("factor",),
        stages=how.stages,
    )


def block_sums(cc: int, stride: int) -> Variant:
    """What query tiles give key tiles, for the default tile."""
    return make_variant(
        cc,
        f"block sums of stride {stride}",
        antidiagonal.block_sums_kernel,
        pointers_to(part="fp32", room="fp32"),
        {
            "MB": 128 // stride,
            "BLOCK_M": 128 // stride,
            "BLOCK_C": antidiagonal.COLUMNS_AT_ONCE,
        },
        antidiagonal.SUM_WARPS,
        aligned=("LD",),
    )


def least_sums(cc: int, head_dim: int, tile: tuple[int, int]) -> Variant:
    """SALE's thresholds."""
    return make_variant(
        cc,
        f"least sums D={head_dim} {tile[0]}x{tile[1]}",
        sale_factors.least_sums_kernel,
        pointers_to(q="bf16", k="bf16", q_scale="fp32", shift="fp32", extra="bf16"),
        sale_factors.area_constants(head_dim, tile, False),
        sale_factors.AREA_WARPS,
        floats=("log_tau", "scale"),
    )


def key_factors(cc: int) -> Variant:
    """SALE's factors of keys."""
    return make_variant(
        cc,
        "key factors",
        sale_factors.key_factors_kernel,
        pointers_to(offset="fp32", scale="fp32", extra="bf16"),
        {"RUN": 32, "EXTRA": sale_factors.EXTRA, "KEYS": sale_factors.FACTOR_KEYS},
        4,
    )


def sale_pass(cc: int, head_dim: int, tile: tuple[int, int], riding: str) -> Variant:
    """SALE's selection pass."""
    how = triton_sale.tuned_sale((cc // 10, cc % 10), SHARED_KIB[cc] * 1024)
    constants = triton_sale.sale_constants(how, head_dim, tile)
    types = pointers_to(q=riding, k=riding, q_extra="bf16", k_extra="bf16")
    if how.tma:
        wide, narrow = constants["BLOCK_D"], constants["EXTRA"]
        boxes = ((how.rows, wide), (how.keys, wide), (how.rows, narrow), (how.keys, narrow))
        types = {
            name: f"tensordesc<{kind[1:]}[{rows}, {columns}]>"
            for (name, kind), (rows, columns) in zip(types.items(), boxes, strict=True)
        }
    return make_variant(
        cc,
        f"sale D={head_dim} {tile[0]}x{tile[1]} {riding}",
        triton_sale.sale_kernel,
        pointers_to(words="i32") | types,
        constants,
        how.warps,
    )


def sale_on_hopper(head_dim: int, tile: tuple[int, int]) -> Variant:
    """SALE's selection pass for Hopper."""
    padded, extra = sale_factors.block_d(head_dim), sale_factors.EXTRA
    eight_bits, factors = hopper_sale.layouts(padded, extra)
    rows, keys = hopper_sale.ROWS, hopper_sale.KEYS
    descriptors = {
        "q_desc": f"tensordesc<fp8e4nv[{rows}, {padded}],{eight_bits!r}>",
        "k_desc": f"tensordesc<fp8e4nv[{keys}, {padded}],{eight_bits!r}>",
        "q_extra_desc": f"tensordesc<bf16[{rows}, {extra}],{factors!r}>",
        "k_extra_desc": f"tensordesc<bf16[{keys}, {extra}],{factors!r}>",
    }
    constants = {
        "M": tile[0],
        "N": tile[1],
        "STAGES": hopper_sale.STAGES,
        "CONSUMERS": hopper_sale.CONSUMERS,
        "CONSUMER_REGS": hopper_sale.CONSUMER_REGISTERS,
        "PRODUCER_REGS": hopper_sale.PRODUCER_REGISTERS,
    }
    return make_variant(
        90,
        f"gluon sale D={head_dim} {tile[0]}x{tile[1]}",
        hopper_sale.sale_kernel,
        descriptors | pointers_to(words="i32"),
        constants,
        4,
        source=GluonASTSource,
    )


def finishing(cc: int) -> Variant:
    """What SALE keeps anyway, and the count of keys."""
    return make_variant(
        cc,
        "finish",
        sale.finish_kernel,
        pointers_to(words="i32", keys="i32"),
        {
            "M": 64,
            "N": 32,
            "TILES": sale.FINISHED_TILES,
            "BLOCK_W": sale.FINISHED_WORDS,
        },
        4,
    )


def grouping(cc: int, window: int) -> Variant:
    """Grouping by XOR distance in windows of the default tile's 148 words."""
    return make_variant(
        cc,
        f"group {window}",
        plan.group_kernel,
        pointers_to(words="i32", q_tiles="i32"),
        {"R": 8, **plan.group_constants(window, 148)},
        plan.group_warps(window),
    )


def lists(cc: int) -> Iterator[Variant]:
    """Joining, ordering and listing blocks of the default tile's 148 words."""
    tile = {"M": 16, "N": 16, "R": 8, "BLOCK_W": 256}
    yield make_variant(
        cc,
        "join",
        plan.join_kernel,
        pointers_to(words="i32", q_tiles="i32", joined="i32", count="i32", pairs="i64"),
        tile,
        plan.JOIN_WARPS,
    )
    names = ("q_tiles", "count", "words", "q_tiles_out", "count_out", "words_out")
    yield make_variant(
        cc,
        "longest first",
        plan.longest_first_kernel,
        pointers_to(**dict.fromkeys(names, "i32")),
        {"R": 8, "BLOCK_G": plan.RANK_BLOCKS, "BLOCK_W": 256},
        plan.ORDER_WARPS,
    )
    yield make_variant(
        cc,
        "list",
        plan.list_kernel,
        pointers_to(words="i32", index="i16"),
        {"BLOCK_W": plan.LIST_WORDS},
        plan.LIST_WARPS,
        aligned=("C",),
    )
    yield make_variant(
        cc,
        "left out",
        plan.left_out_kernel,
        pointers_to(bits="i32", counts="i8"),
        {"N": 16, "SIZE": 64, "BLOCK_P": plan.COUNT_GROUPS},
        plan.COUNT_WARPS,
        aligned=("COUNTS",),
    )


def measuring(
    cc: int, head_dim: int, *, summed: bool, tile: int = 16, about_zero: bool = False
) -> Variant:
    """Moments of tiles, variances of every channel or their sum, and a copy in another order."""
    block_d = triton.next_power_of_2(head_dim)
    variance = "fp32" if summed else "bf16"
    return make_variant(
        cc,
        f"moments of {tile} D={head_dim}" + " summed" * summed + " about zero" * about_zero,
        moments.moments_kernel,
        pointers_to(x="bf16", source="i64", out="bf16", mean="bf16", variance=variance)
        | (pointers_to(square="fp32") if summed else {}),
        ({} if summed else {"square_ptr": None})
        | {
            "D": head_dim,
            "BLOCK_D": block_d,
            "N": tile,
            "BLOCK_T": max(1, moments.STEP_ELEMENTS // block_d),
            "UNROLL": min(tile, moments.UNROLL),
            "ABOUT_ZERO": about_zero,
        },
        moments.WARPS,
        aligned=tuple(f"stride_x{d}" for d in "bhs"),
    )


def keeping(cc: int, head_dim: int, bits: int) -> Iterator[Variant]:
    """What a sparse call lacks: rounded, and added to a later one's output."""
    width = head_dim * bits // 8
    block_w = triton.next_power_of_2(width)
    values = "i8" if bits == 8 else "u8"
    constants = {
        "D": head_dim,
        "WIDTH": width,
        "BLOCK_W": block_w,
        "BLOCK_S": remainder.STEP_ELEMENTS // block_w,
        "FOUR": bits == 4,
    }
    yield make_variant(
        cc,
        f"round {bits} bits D={head_dim}",
        remainder.round_kernel,
        pointers_to(dense="bf16", sparse="bf16", values=values, scale="bf16"),
        constants,
        remainder.WARPS,
        aligned=tuple(f"stride_{x}{d}" for x in "dpv" for d in "bhs"),
    )
    yield make_variant(
        cc,
        f"add {bits} bits D={head_dim}",
        remainder.add_kernel,
        pointers_to(out="bf16", values=values, scale="bf16"),
        constants,
        remainder.WARPS,
        floats=("factor",),
        aligned=tuple(f"stride_{x}{d}" for x in "ov" for d in "bhs"),
    )


def merging(cc: int, head_dim: int, *, variances: bool) -> Variant:
    """Means of groups of tiles, and variances."""
    of_variances = pointers_to(variance="bf16", out_variance="bf16")
    return make_variant(
        cc,
        f"merge D={head_dim}" + " variances" * variances,
        moments.merge_kernel,
        pointers_to(mean="bf16", out="bf16") | (of_variances if variances else {}),
        ({} if variances else dict.fromkeys(of_variances))
        | {
            "D": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "N": 16,
            "EACH": 4,
            "BLOCK_P": moments.MERGE_GROUPS,
        },
        moments.WARPS,
    )


def residuals(cc: int, head_dim: int) -> Iterator[Variant]:
    """What Foresight ranks chunks by."""
    block_d = triton.next_power_of_2(head_dim)
    sizes = {"D": head_dim, "BLOCK_D": block_d}
    both = pointers_to(q="bf16", q_square="bf16", k="bf16", k_variance="bf16", v="bf16")
    both |= pointers_to(out="bf16", lse="fp32")
    yield make_variant(
        cc,
        f"outputs D={head_dim}",
        residual.outputs_kernel,
        both,
        sizes
        | {
            "N": 64,
            "BLOCK_Q": residual.OUTPUT_TILES,
            "BLOCK_K": residual.OUTPUT_GROUPS,
            "STAGES": residual.output_stages(SHARED_KIB[cc] * 1024, block_d),
        },
        residual.OUTPUT_WARPS,
        floats=("scale",),
    )
    # of a block eight tiles, four, two and one.
    for rows in (16, 32, 64, 128):
        yield make_variant(
            cc,
            f"residual of {rows} D={head_dim}",
            residual.residual_kernel,
            both | pointers_to(v_variance="fp32", v_square="fp32", ranks="i16"),
            sizes
            | {
                "M": rows,
                "N": 16,
                "R": 128 // rows,
                "BLOCK_Q": residual.SCORE_TILES,
                "BLOCK_K": residual.SCORE_CHUNKS,
                "STEPS": residual.SCORE_STEPS,
                "STAGES": residual.SCORE_STAGES,
            },
            residual.SCORE_WARPS,
            floats=("scale",),
        )


def choosing(cc: int, chunks: int) -> Variant:
    """The largest ranks of a row."""
    return make_variant(
        cc,
        f"largest of {chunks}",
        residual.largest_kernel,
        pointers_to(pairs="i32", kept="i32", words="i32", count="i32"),
        dict(zip(("FIRST", "SECOND"), residual._in_two(chunks), strict=True)),
        residual.TOP_WARPS,
    )


def planning(cc: int, head_dims: list[int], *, every: bool = False) -> Iterator[Variant]:
    """The kernels of mask and plan."""
    for head_dim in head_dims:
        for size in (1, 16, 128) if every else (16,):
            yield pooling(cc, head_dim, size, reordered=True, judged=False)
        yield scores(cc, head_dim)
        yield rotation(cc, head_dim, halves=False)
    yield rotation(cc, max(head_dims), halves=True)
    yield rotation(cc, max(head_dims), halves=False, normed=True)
    yield pooling(cc, max(head_dims), 128, reordered=False, judged=True)
    yield scores(cc, max(head_dims), judged=True)
    # the default tile at 75,600 and 17,776 tokens, and the longest row held on chip.
    for columns in (4725, 1111, top_p.ROW_COLUMNS) if every else (4725,):
        yield top_p_row(cc, columns, judged=False)
    yield top_p_row(cc, 1182, judged=True)
    yield top_p_row(cc, 591, judged=False, counted=True)
    yield top_p_in_passes(cc)
    for window in (64, 4728) if every else (64,):
        yield grouping(cc, window)
    yield from lists(cc)
    for head_dim in head_dims:
        yield measuring(cc, head_dim, summed=False)
        yield from residuals(cc, head_dim)
    yield measuring(cc, max(head_dims), summed=True)
    yield measuring(cc, max(head_dims), summed=False, about_zero=True)
    # groups that means stand for, on the way into the order.
    yield measuring(cc, max(head_dims), summed=True, tile=64)
    yield merging(cc, max(head_dims), variances=True)
    yield merging(cc, max(head_dims), variances=False)
    for bits in (8, 4):
        yield from keeping(cc, max(head_dims), bits)
    # 16 tokens a chunk at 75,600 and at 118,800, in two pieces and in one.
    yield choosing(cc, 4725)
    yield choosing(cc, 7425)
    for head_dim in head_dims:
        for stride in (4, 8, 16, 64) if every else (8,):
            yield antidiagonals(cc, head_dim, stride)
    yield block_sums(cc, 8)
    yield key_factors(cc)
    yield finishing(cc)
    for head_dim in head_dims:
        yield least_sums(cc, head_dim, (64, 32))
        for tile in ((64, 32), (16, 16), (128, 128)) if every else ((64, 32),):
            yield sale_pass(cc, head_dim, tile, "fp8e4nv" if cc >= 89 else "fp16")
            if cc == 90:
                yield sale_on_hopper(head_dim, tile)
