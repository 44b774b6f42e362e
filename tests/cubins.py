"""One kernel compiled for a GPU that is not here, and what the compiler made of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource


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
    """What a compiled variant takes; waits and overlap are counted in the Gluon kernel alone.

    ``loop`` is how many instructions its first loop with matrix products has, where asked for.
    """

    registers: int
    stack: int
    shared: int
    waits: int = 0
    overlapped: int = 0
    loop: int = 0


def compile_variant(variant: Variant, *, loops: bool = False, waits: bool = True) -> Usage:
    """Compile for ``variant``'s GPU as the launcher would, and read the cubin's needs.

    Without ``waits`` those of the Gluon kernel are not counted, which takes a fifth of its time.
    """
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
        gluon = waits and variant.source is GluonASTSource
        read = gluon or loops
        code = _tool("nvdisasm", "--print-code", "--no-dataflow", file.name) if read else ""
        overlap = _overlap(code) if gluon else (0, 0)
    loop = _loop(code) if loops else 0
    return Usage(int(found[1]), int(found[2]), compiled.metadata.shared, *overlap, loop)


def _loop(code: str) -> int:
    """Instructions of the first loop that multiplies matrices, 0 where there is none."""
    lines = code.splitlines()
    labels: dict[str, int] = {}
    for place, line in enumerate(lines):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = place
        back = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if back and back[1] in labels:
            loop = [each for each in lines[labels[back[1]] : place + 1] if "/*" in each]
            if any(re.search(r"\b(HG?MMA|[IQ]G?MMA)\b", each) for each in loop):
                return sum(bool(re.search(r"/\*[0-9a-f]{4,}\*/\s+\S", each)) for each in loop)
    return 0


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
