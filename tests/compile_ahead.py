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
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from vidsparse.kernels import gluon_hopper, triton_gather

# shared memory a block can opt in to, in KiB, by compute capability (CUDA programming guide).
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}

TILES = [(m, n) for m in (16, 32, 64, 128) for n in (1, 8, 16, 32, 64, 128)]
HEAD_DIMS = (64, 96, 128)
DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel."""

    implementation: str
    cc: int
    head_dim: int
    tile: tuple[int, int]
    dtype: str
    # lengths and counts that are multiples of 16 compile to another kernel.
    aligned: bool = True

    @property
    def block_n(self) -> int:
        large = SHARED_KIB[self.cc] * 1024 >= triton_gather.LARGE_SHARED_BYTES
        return triton_gather.BLOCK_N_LARGE if large else triton_gather.BLOCK_N_SMALL

    def __str__(self) -> str:
        m, n = self.tile
        return f"{self.implementation} sm_{self.cc} D={self.head_dim} {m}x{n} {self.dtype}" + (
            "" if self.aligned else " odd lengths"
        )


@dataclass(frozen=True)
class Usage:
    """What a compiled variant takes."""

    registers: int
    stack: int
    shared: int
    waits: int
    overlapped: int


def variants(
    capabilities: list[int], head_dims: list[int], *, every: bool = False
) -> Iterator[Variant]:
    """The variants whose code differs most, or every tile and dtype."""
    for implementation, ccs in {"triton": capabilities, "gluon": [90]}.items():
        for cc in (cc for cc in ccs if cc in capabilities):
            for head_dim in head_dims:
                tiles = TILES if every else [(16, 1), (16, 16), (128, 128)]
                for dtype in DTYPES if every else ["bf16"]:
                    for tile in tiles:
                        yield Variant(implementation, cc, head_dim, tile, dtype)
                yield Variant(implementation, cc, head_dim, (32, 8), "fp16", aligned=False)


def _triton_source(variant: Variant) -> ASTSource:
    constants = {
        "D": variant.head_dim,
        "BLOCK_D": triton.next_power_of_2(variant.head_dim),
        "M": variant.tile[0],
        "N": variant.tile[1],
        "BLOCK_M": 128,
        "BLOCK_N": variant.block_n,
        "STAGES": triton_gather.STAGES,
    }
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{variant.dtype}")
    types |= dict.fromkeys(("q_tiles_ptr", "kv_count_ptr", "kv_index_ptr"), "*i32")
    types |= dict.fromkeys(("S", "G", "C", "BH"), "i32")
    types |= {"lse_ptr": "*fp32", "scale_log2": "fp32"}
    return _source(ASTSource, triton_gather.gather_attention_kernel, variant, types, constants)


def _gluon_source(variant: Variant) -> GluonASTSource:
    m, n = variant.tile
    padded = 64 if variant.head_dim == 64 else 128
    config = gluon_hopper.config(n, padded)
    constants = {
        "D": variant.head_dim,
        "DP": padded,
        "M": m,
        "N": n,
        "BN": config.step,
        "STAGES": config.stages,
        "CONSUMER_REGS": config.consumer_registers,
        "PRODUCER_REGS": config.producer_registers,
        "PRODUCER_WARPS": 1 if n >= 8 else 4,
    }
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    boxes = {"q_desc": min(m, 64), "k_desc": max(n, 8), "v_desc": max(n, 8)}
    types = {
        name: f"tensordesc<{variant.dtype}[1, {rows}, 64],{layout!r}>"
        for name, rows in boxes.items()
    }
    types |= dict.fromkeys(("k_ptr", "v_ptr", "out_ptr"), f"*{variant.dtype}")
    types |= dict.fromkeys(("q_tiles_ptr", "kv_count_ptr", "counter_ptr"), "*i32")
    # odd lengths stand for short sequences, whose chunk numbers fit 16 bits.
    types |= {"kv_index_ptr": "*i32" if variant.aligned else "*i16"}
    types |= dict.fromkeys(("S", "G", "C", "BH", "TOGETHER"), "i32")
    types |= {"lse_ptr": "*fp32", "scale_log2": "fp32"}
    return _source(GluonASTSource, gluon_hopper.gather_attention_kernel, variant, types, constants)


def _source(
    kind: type, kernel: Any, variant: Variant, types: dict[str, str], constants: dict[str, Any]
) -> Any:
    """The kernel's source with the types and alignments that a launch would find."""
    names = kernel.arg_names
    missing = set(names) - set(types) - set(constants)
    assert not missing, f"the kernel has arguments unknown here: {sorted(missing)}"
    divisible = [n for n in names if n.endswith("_ptr") or (variant.aligned and n in "SC")]
    return kind(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types[n] for n in names},
        constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in divisible},
    )


def compile_variant(variant: Variant) -> Usage:
    """Compile for ``variant``'s GPU as the launcher would, and read the cubin's needs."""
    if variant.implementation == "gluon":
        source, warps = _gluon_source(variant), 4
    else:
        source, warps = _triton_source(variant), triton_gather.WARPS
    compiled = triton.compile(
        source, target=GPUTarget("cuda", variant.cc, 32), options={"num_warps": warps}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        found = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", "-res-usage", file.name))
        assert found, "cuobjdump found no registers"
        waits, overlapped = 0, 0
        if variant.implementation == "gluon":
            waits, overlapped = _overlap(_tool("nvdisasm", file.name))
    return Usage(int(found[1]), int(found[2]), compiled.metadata.shared, waits, overlapped)


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
            usage = compile_variant(variant)
        except Exception as error:
            failed += 1
            print(f"{variant}: FAILED {type(error).__name__}: {error}", flush=True)
            continue
        verdict = "" if usage.shared <= limit else "  DOES NOT FIT"
        failed += bool(verdict)
        print(
            f"{variant}: {usage.registers} registers, {usage.stack} bytes spilled, "
            f"{usage.shared / 1024:.0f} of {limit // 1024} KiB shared{verdict}"
            + (
                f", {usage.waits} waits, {usage.overlapped} exponentials overlapped"
                if variant.implementation == "gluon"
                else ""
            ),
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
