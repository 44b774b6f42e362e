"""Compile the Triton kernels for GPUs that are not here, and print what each variant needs.

    python tests/compile_ahead.py            # the variants that differ, a minute or two
    python tests/compile_ahead.py 90 --all   # every tile and dtype for one generation

A line holds registers of a thread, bytes of stack (spilled registers), and shared memory of a
block, beside the most that a block of that generation can have. Exits with 1 if a variant does not
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
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vidsparse.kernels import triton_gather, triton_mask, triton_plan, triton_pool, triton_quantize
from vidsparse.kernels.gates import KEY_GROUP
from vidsparse.kernels.quantize import FORMATS, ROWS_AT_ONCE, SMALLEST

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

    def __str__(self) -> str:
        return f"sm_{self.cc} {self.name}"


@dataclass(frozen=True)
class Usage:
    """What a compiled variant takes."""

    registers: int
    stack: int
    shared: int


def variants(
    capabilities: list[int], head_dims: list[int], *, every: bool = False
) -> Iterator[Variant]:
    """The variants whose code differs most, or every tile and dtype."""
    for cc in capabilities:
        for head_dim in head_dims:
            tiles = TILES if every else [(16, 1), (16, 16), (128, 128)]
            for dtype in DTYPES if every else ["bf16"]:
                for tile in tiles:
                    yield attention(cc, head_dim, tile, dtype)
            yield attention(cc, head_dim, (32, 8), "fp16", aligned=False)
        for head_dim in head_dims if every else [max(head_dims)]:
            for gate, quantize in EXTRAS:
                if quantize != "fp8" or cc >= 89:
                    yield attention(cc, head_dim, (128, 64), "bf16", gate=gate, quantize=quantize)
            for kind in ("int8", "fp8") if cc >= 89 else ("int8",):
                yield quantization(cc, head_dim, kind)
        yield from planning(cc, head_dims, every=every)


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
    """The attention kernel; counts and lengths are multiples of 16 unless ``aligned`` is false."""
    large = SHARED_KIB[cc] * 1024 >= triton_gather.LARGE_SHARED_BYTES
    step = triton_gather.BLOCK_N_LARGE if large else triton_gather.BLOCK_N_SMALL
    types = dict.fromkeys(("v_ptr", "out_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("q_ptr", "k_ptr"), f"*{EIGHT_BITS[quantize] if quantize else dtype}")
    types |= dict.fromkeys(("q_tiles_ptr", "kv_count_ptr"), "*i32")
    types |= dict.fromkeys(("S", "G", "C", "BH"), "i32")
    types |= {"lse_ptr": "*fp32", "kv_index_ptr": "*i16", "scale_log2": "fp32"}
    constants = {
        "D": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "M": tile[0],
        "N": tile[1],
        "BLOCK_M": 128,
        "BLOCK_N": 64 if gate else step,
        "KEY_GROUP": KEY_GROUP,
        "STAGES": triton_gather.STAGES,
        "Q_RUN": tile[0],
        "K_RUN": 64,
        "GATE": gate,
        "GATE_ROWS": 64,
    }
    scales = _pointers(q_scale="fp32", k_scale="fp32", shift="fp32")
    gating = _pointers(threshold="fp32", kept="i1", skipped="i32")
    for wanted, pointers in ((quantize, scales), (gate, gating)):
        if wanted:
            types |= pointers
        else:
            constants |= dict.fromkeys(pointers)
    name = f"D={head_dim} {tile[0]}x{tile[1]} {dtype}" + ("" if aligned else " odd lengths")
    return Variant(
        cc,
        name + (f" {gate} gate" if gate else "") + (f" {quantize}" if quantize else ""),
        triton_gather.gather_attention_kernel,
        types,
        constants,
        frozenset("SC" if aligned else "C"),
        triton_gather.WARPS,
    )


def quantization(cc: int, head_dim: int, kind: str) -> Variant:
    """Rounding to 8 bits, smoothed and in another order."""
    wide = dict.fromkeys(("scale", "subtract", "multiply", "product"), "fp32")
    return _variant(
        cc,
        f"quantise D={head_dim} {kind}",
        triton_quantize.quantize_kernel,
        _pointers(x="bf16", out=EIGHT_BITS[kind], order="i64", **wide),
        {
            "D": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "RUN": 64,
            "ROWS": ROWS_AT_ONCE,
            "TOP": FORMATS[kind][1],
            "SMALLEST": SMALLEST,
            "INTEGER": kind == "int8",
        },
        triton_quantize.WARPS,
        aligned=tuple(f"stride_x{d}" for d in "bhs"),
    )


def planning(cc: int, head_dims: list[int], *, every: bool = False) -> Iterator[Variant]:
    """The kernels of mask and plan."""
    for head_dim in head_dims:
        for size in (1, 16, 128) if every else (16,):
            yield pool(cc, head_dim, size, reordered=True, judged=False)
        yield scores(cc, head_dim)
    yield pool(cc, max(head_dims), 128, reordered=False, judged=True)
    yield scores(cc, max(head_dims), judged=True)
    # the default tile at 75,600 and 17,776 tokens, and the longest row held on chip.
    for columns in (4725, 1111, triton_mask.ROW_COLUMNS) if every else (4725,):
        yield top_p(cc, columns, judged=False)
    yield top_p(cc, 1182, judged=True)
    yield top_p_long(cc)
    for window in (64, 4728) if every else (64,):
        yield group(cc, window)
    yield from lists(cc)


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
) -> Variant:
    """A variant whose other arguments are 32-bit integers."""
    types = dict(pointers) | dict.fromkeys(floats, "fp32")
    types |= {n: "i32" for n in kernel.arg_names if n not in types and n not in constants}
    return Variant(cc, name, kernel, types, constants, frozenset(aligned), warps)


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


def scores(cc: int, head_dim: int, *, judged: bool = False) -> Variant:
    """The pooled product."""
    similarity = _pointers(k_similarity="fp32")
    halves = ("q_high", "q_low", "k_high", "k_low")
    wide = ("q_scale", "k_scale", "scores")
    rows, columns = triton_mask.score_block(SHARED_KIB[cc] * 1024, head_dim)
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
            "STAGES": triton_mask.SCORE_STAGES,
            "JUDGED": judged,
        },
        triton_mask.SCORE_WARPS,
        floats=("factor", "theta"),
        aligned=("LD",),
    )


def _judge(judged: bool) -> tuple[dict[str, str], dict[str, Any]]:
    names = _pointers(q_similarity="fp32")
    return (names, {}) if judged else ({}, dict.fromkeys(names))


def top_p(cc: int, columns: int, *, judged: bool) -> Variant:
    """Top-p of a row held on chip."""
    body, tail = triton_mask.row_pieces(columns)
    present, absent = _judge(judged)
    return _variant(
        cc,
        f"top-p {columns} columns" + " judged" * judged,
        triton_mask.top_p_kernel,
        _pointers(scores="fp32", words="i32", keys="i32") | present,
        absent | {"N": 16, "BLOCK_Q": 128, "BODY": body, "TAIL": tail, "JUDGED": judged},
        triton_mask.row_warps(body + tail),
        floats=("top_p", "theta"),
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
        },
        triton_mask.LONG_WARPS,
        floats=("top_p", "theta"),
        aligned=("LD",),
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
        triton_plan.BLOCK_WARPS,
    )
    names = ("q_tiles", "count", "words", "q_tiles_out", "count_out", "words_out")
    yield _variant(
        cc,
        "longest first",
        triton_plan.longest_first_kernel,
        _pointers(**dict.fromkeys(names, "i32")),
        {"R": 8, "BLOCK_G": triton_plan.RANK_BLOCKS, "BLOCK_W": 256},
        triton_plan.BLOCK_WARPS,
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


def compile_variant(variant: Variant) -> Any:
    """Compile for ``variant``'s GPU as the launcher would."""
    names = variant.kernel.arg_names
    missing = set(names) - set(variant.types) - set(variant.constants)
    assert not missing, f"the kernel has arguments unknown here: {sorted(missing)}"
    divisible = [
        n for n in names if n in variant.types and (n.endswith("_ptr") or n in variant.aligned)
    ]
    source = ASTSource(
        fn=variant.kernel,
        signature={n: variant.types.get(n, "constexpr") for n in names},
        constexprs=variant.constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in divisible},
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", variant.cc, 32),
        options={"num_warps": variant.warps},
    )


def usage(compiled: Any) -> Usage:
    """What the cubin needs."""
    registers, stack = _resources(compiled.asm["cubin"])
    return Usage(registers, stack, compiled.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes, by the ``cuobjdump`` that Triton's wheel carries."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, f"cuobjdump answered {text!r}"
    return int(found[1]), int(found[2])


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
            needs = usage(compile_variant(variant))
        except Exception as error:
            failed += 1
            print(f"{variant}: FAILED {type(error).__name__}: {error}", flush=True)
            continue
        verdict = "" if needs.shared <= limit else "  DOES NOT FIT"
        failed += bool(verdict)
        print(
            f"{variant}: {needs.registers} registers, {needs.stack} bytes spilled, "
            f"{needs.shared / 1024:.0f} of {limit // 1024} KiB shared{verdict}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
