"""Compile the GPU kernels for GPUs that are not here, and print what each variant needs.

    python tests/compile_ahead.py            # the variants that differ, a minute or two
    python tests/compile_ahead.py 90 --all   # every tile and dtype for one generation
    python tests/compile_ahead.py 80 --loops # also how many instructions the main loop has
    python tests/compile_ahead.py 90 --covering # only whether all of the kernels' code compiles

A line holds registers of a thread, bytes of stack (spilled registers), and shared memory of a
block, beside the most that a block of that generation can have. The `gluon` kernel's registers are
those at its start; its line adds how many waits for tensor cores there are (two in each consumer,
more if ptxas serialises the products) and how many exponentials of a thread run beside the second
product (those between the two waits: 64 for 128 keys a step). Exits with 1 if a variant does not
compile or does not fit.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context

import triton
from cubins import compile_variant
from kernel_variants.attention import EXTRAS, attention, gluon_attention, gluon_extras, join_parts
from kernel_variants.base import HEAD_DIMS, SHARED_KIB, Variant
from kernel_variants.planning import means, planning, quantization

from vidsparse.kernels.attention.hopper.arguments import Sizes

TILES = [(m, n) for m in (16, 32, 64, 128) for n in (1, 8, 16, 32, 64, 128)]
DTYPES = ("bf16", "fp16")


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
            yield attention(cc, head_dim, (128, 16), "bf16", means=True)
            for kind in ("int8", "fp8") if cc >= 89 else ("int8",):
                yield quantization(cc, head_dim, kind)
            yield quantization(cc, head_dim, "int8", tile=16)
            yield quantization(cc, head_dim, "int8", tile=128)
            yield means(cc, head_dim)
        yield from planning(cc, head_dims, every=every)


def covering(variants: list[Variant]) -> list[Variant]:
    """As few as have all values that an argument of a kernel has in ``variants``.

    All that is written in a kernel is compiled then, for every type and constant once, though not
    for all that go together. Of two that are as good the first.
    """
    values = [set(_values(variant)) for variant in variants]
    missing = set[tuple[object, ...]]().union(*values)
    chosen = set[int]()
    while missing:
        most = max(range(len(variants)), key=lambda i: len(values[i] & missing))
        missing -= values[most]
        chosen.add(most)
    return [variants[i] for i in sorted(chosen)]


def _values(variant: Variant) -> Iterator[tuple[object, ...]]:
    """What a variant's kernel is compiled for: of each argument the type, or the constant."""
    which = (variant.cc, variant.kernel)
    yield *which, variant.warps, variant.stages
    for name, kind in variant.types.items():
        yield *which, name, kind, name in variant.aligned
    for name, value in variant.constants.items():
        parts = asdict(value) if isinstance(value, Sizes) else {"": value}
        # 1 and True are equal, but compile to different code.
        yield from ((*which, name, part, repr(each)) for part, each in parts.items())


def _capability(text: str) -> int:
    if not text.isdecimal() or int(text) not in SHARED_KIB:
        raise argparse.ArgumentTypeError(f"choose from {', '.join(map(str, SHARED_KIB))}")
    return int(text)


def main() -> int:
    """Compile and print; the exit status says whether all variants compiled and fit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("capability", type=_capability, nargs="*", help="80, 89, 90, 100 or 120")
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, help="only this one")
    parser.add_argument("--all", action="store_true", help="every tile and dtype")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="variants at a time")
    parser.add_argument(
        "--loops", action="store_true", help="also count the instructions of main loops"
    )
    parser.add_argument(
        "--covering",
        action="store_true",
        help="only as few as have every type and constant that an argument has, not read further",
    )
    arguments = parser.parse_args()
    capabilities = arguments.capability or list(SHARED_KIB)
    head_dims = [arguments.head_dim] if arguments.head_dim else list(HEAD_DIMS)
    todo = list(variants(capabilities, head_dims, every=arguments.all))
    if arguments.covering:
        todo = covering(todo)
    print(f"triton {triton.__version__}")
    failed = 0
    # kernels cannot be sent to another process, but a fork has them.
    with ProcessPoolExecutor(
        arguments.jobs, get_context("fork"), initializer=_WORK.extend, initargs=(todo,)
    ) as pool:
        report = partial(_report, loops=arguments.loops, waits=not arguments.covering)
        for variant, (text, right) in zip(todo, pool.map(report, range(len(todo))), strict=True):
            print(f"{variant}: {text}", flush=True)
            failed += not right
    return 1 if failed else 0


# what a process of the pool has to do.
_WORK: list[Variant] = []


def _report(number: int, *, loops: bool, waits: bool) -> tuple[str, bool]:
    """Compile a variant; a line of what it needs, and whether it compiled and fits."""
    variant = _WORK[number]
    limit = SHARED_KIB[variant.cc] * 1024
    try:
        needs = compile_variant(variant, loops=loops, waits=waits)
    except Exception as error:
        return f"FAILED {type(error).__name__}: {error}", False
    fits = needs.shared <= limit
    return (
        f"{needs.registers} registers, {needs.stack} bytes spilled, "
        f"{needs.shared / 1024:.0f} of {limit // 1024} KiB shared"
        + ("" if fits else "  DOES NOT FIT")
        + (
            f", {needs.waits} waits, {needs.overlapped} exponentials overlapped"
            if needs.waits
            else ""
        )
        + (f", {needs.loop} instructions in its main loop" if needs.loop else ""),
        fits,
    )


if __name__ == "__main__":
    sys.exit(main())
