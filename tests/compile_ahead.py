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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vidsparse.kernels import triton_gather, triton_quantize
from vidsparse.kernels.gates import KEY_GROUP
from vidsparse.kernels.quantize import FORMATS, ROWS_AT_ONCE, SMALLEST

# shared memory a block can opt in to, in KiB, by compute capability (CUDA programming guide).
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}

TILES = [(m, n) for m in (16, 32, 64, 128) for n in (1, 8, 16, 32, 64, 128)]
HEAD_DIMS = (64, 96, 128)
DTYPES = ("bf16", "fp16")
EIGHT_BITS = {"int8": "i8", "fp8": "fp8e4nv"}
# gate and 8-bit format; the generations that have fp8 products are those from 8.9 on.
EXTRAS = [("relative", None), ("absolute", None), (None, "int8"), ("relative", "fp8")]


@dataclass(frozen=True)
class Variant:
    """One specialisation of the kernel."""

    cc: int
    head_dim: int
    tile: tuple[int, int]
    dtype: str
    # lengths and counts that are multiples of 16 compile to another kernel.
    aligned: bool = True
    gate: str | None = None
    quantize: str | None = None

    @property
    def block_n(self) -> int:
        if self.gate is not None:
            return 64
        large = SHARED_KIB[self.cc] * 1024 >= triton_gather.LARGE_SHARED_BYTES
        return triton_gather.BLOCK_N_LARGE if large else triton_gather.BLOCK_N_SMALL

    def __str__(self) -> str:
        m, n = self.tile
        return (
            f"sm_{self.cc} D={self.head_dim} {m}x{n} {self.dtype}"
            + ("" if self.aligned else " odd lengths")
            + (f" {self.gate} gate" if self.gate else "")
            + (f" {self.quantize}" if self.quantize else "")
        )


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
                    yield Variant(cc, head_dim, tile, dtype)
            yield Variant(cc, head_dim, (32, 8), "fp16", aligned=False)
            if every or head_dim == max(head_dims):
                for gate, quantize in EXTRAS:
                    if quantize != "fp8" or cc >= 89:
                        yield Variant(cc, head_dim, (128, 64), "bf16", True, gate, quantize)


def compile_variant(variant: Variant) -> Usage:
    """Compile for ``variant``'s GPU as the launcher would, and read the cubin's needs."""
    kernel = triton_gather.gather_attention_kernel
    constants: dict[str, object] = {
        "D": variant.head_dim,
        "BLOCK_D": triton.next_power_of_2(variant.head_dim),
        "M": variant.tile[0],
        "N": variant.tile[1],
        "BLOCK_M": 128,
        "BLOCK_N": variant.block_n,
        "KEY_GROUP": KEY_GROUP,
        "STAGES": triton_gather.STAGES,
        "Q_RUN": variant.tile[0],
        "K_RUN": 64,
        "GATE": variant.gate,
        "GATE_ROWS": 64,
    }
    types = dict.fromkeys(("v_ptr", "out_ptr"), f"*{variant.dtype}")
    eight_bits = EIGHT_BITS.get(variant.quantize or "", variant.dtype)
    types |= dict.fromkeys(("q_ptr", "k_ptr"), f"*{eight_bits}")
    types |= dict.fromkeys(("q_tiles_ptr", "kv_count_ptr", "kv_index_ptr"), "*i32")
    types |= dict.fromkeys(("S", "G", "C", "BH"), "i32")
    types |= {"lse_ptr": "*fp32", "scale_log2": "fp32"}
    scales = dict.fromkeys(("q_scale_ptr", "k_scale_ptr", "shift_ptr"), "*fp32")
    gate = {"threshold_ptr": "*fp32", "skipped_ptr": "*i32", "kept_ptr": "*i1"}
    for wanted, pointers in ((variant.quantize, scales), (variant.gate, gate)):
        if wanted:
            types |= pointers
        else:
            constants |= dict.fromkeys(pointers)
    return _compile(variant.cc, kernel, types, constants, triton_gather.WARPS, variant.aligned)


def compile_quantization(cc: int, head_dim: int, kind: str) -> Usage:
    """Compile the kernel that makes 8-bit operands, in another order and smoothed."""
    types = dict.fromkeys(("stride_xb", "stride_xh", "stride_xs", "H", "S", "RUNS"), "i32")
    types |= dict.fromkeys(("scale_ptr", "subtract_ptr", "multiply_ptr", "product_ptr"), "*fp32")
    types |= {"x_ptr": "*bf16", "out_ptr": f"*{EIGHT_BITS[kind]}", "order_ptr": "*i64"}
    constants = {
        "D": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "RUN": 64,
        "ROWS": ROWS_AT_ONCE,
        "TOP": FORMATS[kind][1],
        "SMALLEST": SMALLEST,
        "INTEGER": kind == "int8",
    }
    kernel = triton_quantize.quantize_kernel
    return _compile(cc, kernel, types, constants, triton_quantize.WARPS, True)


def _compile(
    cc: int,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, object],
    warps: int,
    aligned: bool,
) -> Usage:
    names = kernel.arg_names
    missing = set(names) - set(types) - set(constants)
    assert not missing, f"the kernel has arguments unknown here: {sorted(missing)}"
    divisible = [
        n
        for n in names
        if n in types and (n.endswith("_ptr") or (aligned and (n in "SC" or "stride" in n)))
    ]
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types[n] for n in names},
        constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in divisible},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", cc, 32),
        options={"num_warps": warps},
    )
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
    jobs: list[tuple[str, int, Callable[[], Usage]]] = [
        (str(variant), variant.cc, partial(compile_variant, variant))
        for variant in variants(capabilities, head_dims, every=arguments.all)
    ]
    for cc in capabilities:
        for kind in EIGHT_BITS:
            if kind != "fp8" or cc >= 89:
                job = partial(compile_quantization, cc, max(head_dims), kind)
                jobs.append((f"sm_{cc} D={max(head_dims)} quantise to {kind}", cc, job))
    for name, cc, job in jobs:
        limit = SHARED_KIB[cc] * 1024
        try:
            usage = job()
        except Exception as error:
            failed += 1
            print(f"{name}: FAILED {type(error).__name__}: {error}", flush=True)
            continue
        verdict = "" if usage.shared <= limit else "  DOES NOT FIT"
        failed += bool(verdict)
        print(
            f"{name}: {usage.registers} registers, {usage.stack} bytes spilled, "
            f"{usage.shared / 1024:.0f} of {limit // 1024} KiB shared{verdict}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
