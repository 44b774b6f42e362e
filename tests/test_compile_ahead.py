"""The GPU kernels compiled ahead of time: what they spill, and what the compiler made of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

# dozens of kernels for one generation: other work on the machine is no failure of theirs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# 89 is 80 with fp8, which the later ones have as well; `compile_ahead.py 89` compiles it.
GENERATIONS = [80, 90, 100]
every_generation = pytest.mark.parametrize("compiled", GENERATIONS, indirect=True)
hopper = pytest.mark.parametrize("compiled", [90], indirect=True)


@dataclass(frozen=True)
class Compiled:
    """What ``compile_ahead.py`` printed for one compute capability."""

    cc: int
    text: str

    def spilled(self, name: str) -> list[int]:
        """Bytes spilled by the variants whose names begin with ``name``."""
        pattern = rf"^sm_{self.cc} {name}.*: \d+ registers, (\d+) bytes spilled"
        return [int(stack) for stack in re.findall(pattern, self.text, re.M)]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Compiled:
    # a process of its own: in this one Triton may interpret.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_ahead.py")
    done = subprocess.run(
        [sys.executable, script, str(request.param), "--head-dim", "128"],
        env=environment,
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return Compiled(request.param, done.stdout)


@every_generation
def test_triton_compiles_ahead_of_time_and_hardly_spills(compiled: Compiled) -> None:
    found = compiled.spilled("triton (?!.* means:)")
    # four plain ones, two gates, 8 bits without a gate and, where there is fp8, with one.
    assert len(found) == (7 if compiled.cc < 89 else 8)
    # 26 to 28 registers of a thread on Ampere and Ada, none on Blackwell. Two programs of 4 warps
    # on a Hopper multiprocessor spill and are faster all the same than one of 8 that does not; with
    # 344 bytes, part of them in the loop, they were 20 to 40 % slower.
    assert max(found) <= {80: 128, 89: 128, 90: 320, 100: 0}[compiled.cc]
    # a second loop, over means, costs Ampere ten registers of a thread more.
    (means,) = compiled.spilled("triton .* means")
    assert means <= {80: 160, 89: 128, 90: 320, 100: 0}[compiled.cc]


@hopper
def test_gluon_compiles_ahead_of_time_for_hopper_and_overlaps_its_products(
    compiled: Compiled,
) -> None:
    # at most a few scalars of the producer and, with a gate, of a consumer.
    assert max(compiled.spilled("gluon")) <= 64
    found = re.findall(
        r"^sm_90 gluon D=128 (.*): .* (\d+) waits, (\d+) exponentials", compiled.text, re.M
    )
    # of the attention kernel, each line.
    assert len(found) == len(re.findall(r"^sm_90 gluon D=128", compiled.text, re.M)) == 21
    for name, waits, overlapped in found:
        # one wait after each product of each consumer, and the softmax between the two. With a gate
        # there is a wait more, where the second product is skipped.
        assert int(waits) == (6 if "gate" in name else 4)
        assert int(overlapped) >= 64


@hopper
def test_sale_on_hopper_chains_its_two_products(compiled: Compiled) -> None:
    assert max(compiled.spilled("gluon sale")) == 0
    # of each of three consumers: one wait between the products that waits for nothing, one at the
    # end. More of them would be ptxas' own.
    assert re.findall(r"^sm_90 gluon sale .* (\d+) waits", compiled.text, re.M) == ["6"]


@every_generation
def test_what_goes_before_compiles_ahead_of_time_and_hardly_spills(compiled: Compiled) -> None:
    names = "quantise, mean, pool, scores, top-p, group, join, longest first, list"
    names += ", least sums, key factors, finish, left out"
    names += ", moments, merge, outputs, residual, largest, add 8 bits, add 4 bits"
    for name in names.split(", "):
        found = compiled.spilled(name)
        assert found
        # two registers of a thread, in the kernel for rows that do not fit a program.
        assert max(found) <= 8
