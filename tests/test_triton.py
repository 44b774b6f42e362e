"""The GPU kernels: compiled ahead of time, on a GPU where there is one, and `triton` interpreted.

The interpreter is chosen by an environment variable when Triton is first imported, so it runs in a
process of its own: this file as a script. It tries every case and prints one JSON object, and each
test below reads its case's answer.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from budget import (
    Work,
    check_gated,
    check_kernel,
    check_quantized,
    clustered_qkv,
    in_order,
    random_qkv,
    random_work,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vidsparse.kernels import (
    AbsoluteGate,
    RelativeGate,
    quantize_qk,
    sparse_attention,
    support,
)
from vidsparse.kernels.gates import Gate
from vidsparse.kernels.quantize import quantize_runs

pytest.importorskip("triton", reason="Triton is not installed here")

# hundreds of cases in one process: that other work keeps the machine busy is no failure of theirs.
PATIENCE = 1200
pytestmark = pytest.mark.timeout(PATIENCE + 60)

HERE = Path(__file__).parent
CHUNKS = [1, 8, 16, 32, 64, 128]
HEAD_DIMS = [64, 96, 128]
# bf16 products are wrong in the interpreter (Triton 3.6 to 3.9), so bf16 is the GPU's.
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
# lengths of the lists of a head's three blocks, of at most 19 chunks of 16 tokens.
LISTS = {
    "all empty": [0],
    "one chunk or none": [1, 0],
    "full, some, none": [19, 7, 0],
    "any order": [0, 3, 19],
}


# how far scores are above those before them. fp32 holds the weights of the first; of the second the
# weights, not their sums; of the others neither.
FAR = [50, 87, 110, 3000]
# of values: with small ones a product is finite where the sum of weights is not, with large ones
# the other way round.
SIZES = [1, 1e-3, 1e33]
EARLY = 40


def far_above(
    above: float, keys: int, dim: int, rows: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor, Work]:
    """In the last head scores of EARLY tokens are ``above`` others; every second list has none."""
    tokens = 900
    q, k, v = random_qkv(tokens, dim, dtype, batch=2, spread=0.5)
    q[..., 0], k[..., 0] = 16, 0
    k[1, 1, :EARLY, 0] = above * dim**0.5 / 16
    work = random_work(tokens, (rows, keys), batch=2, share=0.5)
    for b, h, g in itertools.product(*map(range, work.kv_count.shape)):
        chunks = work.kv_index[b, h, g, : work.kv_count[b, h, g]]
        if g % 2 and bool((chunks * keys >= EARLY).any()):
            others = chunks[chunks * keys >= EARLY].clone()
            work.kv_count[b, h, g] = len(others)
            chunks[: len(others)] = others
    return q, k, v, work


def triton_kernel() -> Callable[..., object]:
    from vidsparse.kernels.triton_gather import triton_attention

    return triton_attention


def strided(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def interpreted_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and body of every case that the interpreter runs."""

    def case(
        tokens: int,
        dim: int,
        dtype: torch.dtype,
        tile: tuple[int, int],
        *,
        layout: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        batch: int = 1,
        heads: int = 1,
        counts: list[int] | None = None,
        longest_first: bool = True,
    ) -> Callable[[], None]:
        def body() -> None:
            q, k, v = (layout(x) for x in random_qkv(tokens, dim, dtype, batch=batch, heads=heads))
            work = random_work(
                tokens, tile, batch=batch, heads=heads, counts=counts, longest_first=longest_first
            )
            check_kernel(triton_kernel(), q, k, v, work)

        return body

    for name, dtype in DTYPES.items():
        for dim in HEAD_DIMS:
            for keys in CHUNKS:
                yield f"D={dim} N={keys} {name}", case(300, dim, dtype, (16, keys))
        for tokens in (1, 127, 128, 129):
            yield f"S={tokens} {name}", case(tokens, 64, dtype, (32, 16))
        for lists, counts in LISTS.items():
            yield (
                f"{lists} {name}",
                case(300, 64, dtype, (128, 16), counts=counts, longest_first=False),
            )
    for rows in (16, 32, 64, 128):
        yield f"M={rows}", case(300, 64, torch.float16, (rows, 8))
    for above in FAR:
        for keys, rows in ((1, 64), (16, 16), (128, 128)):
            yield f"N={keys} {above} above those before", partial(keys_far_above, keys, rows, above)
    yield from interpreted_gates()
    yield from interpreted_quantized()
    yield "batch 2", case(200, 64, torch.float16, (16, 16), batch=2, heads=2)
    yield "strided", case(200, 64, torch.float16, (16, 16), batch=2, heads=2, layout=strided)


def keys_far_above(keys: int, rows: int, above: float) -> None:
    q, k, v, work = far_above(above, keys, 64, rows, torch.float32)
    for size in SIZES:
        check_kernel(triton_kernel(), q, k, v * size, work)


def gates(work: Work, rows: int, keys: int) -> list[Gate]:
    """One of each kind that skips some pieces of clustered queries and keys, and not all."""
    gen = torch.Generator().manual_seed(6)
    batch, heads = work.kv_count.shape[:2]
    threshold = torch.rand(batch, heads, -(-work.tokens // work.tile[0]), generator=gen) * 3 + 6
    keep = torch.rand(work.kv_index.shape, generator=gen) < 0.2 * min(1, work.tile[1] / 64)
    lambda_ = torch.tensor([-3.0, -6.0])[:heads]
    return [
        RelativeGate(lambda_, rows, keys),
        AbsoluteGate(threshold, keep, rows, keys),
    ]


def interpreted_gates() -> Iterator[tuple[str, Callable[[], None]]]:
    def case(
        which: int,
        tokens: int,
        dim: int,
        tile: tuple[int, int],
        rows: int,
        keys: int,
        *,
        dtype: torch.dtype = torch.float32,
        batch: int = 1,
        heads: int = 1,
        counts: list[int] | None = None,
        kind: str | None = None,
        some: bool = True,
    ) -> Callable[[], None]:
        def body() -> None:
            q, k, v = clustered_qkv(tokens, dim, dtype, batch=batch, heads=heads, mean=0.5)
            work = in_order(
                random_work(tokens, tile, batch=batch, heads=heads, share=0.7, counts=counts)
            )
            gate = gates(work, rows, keys)[which]
            quantized = None if kind is None else quantize_qk(q, k, kind, q_run=tile[0])
            skipped = check_gated(triton_kernel(), q, k, v, work, gate, quantized)
            assert not some or 0 < int(skipped.sum()) < int(work.mask().sum())

        return body

    for which, name in enumerate(("relative", "absolute")):
        for n, keys in enumerate(CHUNKS):
            # single tokens of every list would mix all clusters in every piece.
            counts = [400] if keys == 1 else None
            for dim in (64, 128):
                yield (
                    f"{name} gate D={dim} N={keys}",
                    case(which, 400, dim, (64, keys), (32, 64)[n % 2], 64, counts=counts),
                )
        for rows in (32, 64, 128):
            for keys in (64, 128):
                yield (
                    f"{name} gate {rows}x{keys} fp16",
                    case(which, 300, 64, (16, 16), rows, keys, dtype=torch.float16, some=False),
                )
        for tokens in (1, 127, 129):
            yield f"{name} gate S={tokens}", case(which, tokens, 64, (32, 16), 32, 64, some=False)
        for lists, counts in LISTS.items():
            yield (
                f"{name} gate {lists}",
                case(which, 300, 64, (128, 16), 64, 64, counts=counts, some=False),
            )
        yield f"{name} gate batch 2", case(which, 300, 64, (64, 64), 64, 64, batch=2, heads=2)
        yield f"{name} gate int8", case(which, 400, 64, (64, 16), 32, 64, kind="int8")
        yield (
            f"{name} gate int8, a scale a step",
            case(which, 400, 64, (64, 64), 32, 64, kind="int8"),
        )
        yield f"{name} gate fp8", case(which, 400, 64, (64, 16), 64, 128, kind="fp8")

    def nothing_skipped(gate: Gate) -> Callable[[], None]:
        def body() -> None:
            q, k, v = random_qkv(300, 64, torch.float16, batch=2)
            work = random_work(300, (32, 16), batch=2, counts=[19, 7, 0])
            options = {"tile": work.tile, "scale": 0.125}
            plain = triton_kernel()(q, k, v, *work.tensors, **options)
            gated = triton_kernel()(q, k, v, *work.tensors, **options, gate=gate)
            for a, b in zip(plain, gated, strict=True):
                assert torch.equal(a, b)

        return body

    # with the kernel's own step for a piece: another step rounds otherwise.
    yield "relative gate that skips nothing", nothing_skipped(RelativeGate(-torch.inf, 32, 128))
    never = torch.tensor(-torch.inf)
    yield "absolute gate that skips nothing", nothing_skipped(AbsoluteGate(never, None, 64, 128))

    def all_but_kept() -> None:
        q, k, v = random_qkv(300, 64, torch.float32)
        work = random_work(300, (64, 64), counts=[5, 2, 0])
        keep = torch.zeros(work.kv_index.shape, dtype=torch.bool)
        keep[..., 0] = True
        gate = AbsoluteGate(torch.tensor(torch.inf), keep, 64, 64)
        skipped = check_gated(triton_kernel(), q, k, v, work, gate)
        first = Work(work.q_tiles, work.kv_count.clamp_max(1), work.kv_index, work.tile, 300)
        assert skipped.sum() == work.mask().sum() - first.mask().sum()

    yield "absolute gate that skips all but the kept", all_but_kept


def interpreted_quantized() -> Iterator[tuple[str, Callable[[], None]]]:
    def attention(
        dim: int, tile: tuple[int, int], kind: str, tokens: int = 300, batch: int = 1
    ) -> Callable[[], None]:
        def body() -> None:
            q, k, v = clustered_qkv(tokens, dim, torch.float16, batch=batch, pull=2.0, mean=1.0)
            work = random_work(tokens, tile, batch=batch)
            quantized = quantize_qk(q, k, kind, q_run=tile[0])
            check_quantized(triton_kernel(), q, k, v, work, quantized)

        return body

    for n, keys in enumerate(CHUNKS):
        for dim in HEAD_DIMS:
            kind = ("int8", "fp8")[(n + dim // 32) % 2]
            yield f"{kind} D={dim} N={keys}", attention(dim, (16, keys), kind)
    yield "int8 batch 2", attention(64, (128, 64), "int8", 200, 2)
    yield "int8 one token", attention(64, (128, 64), "int8", 1)

    def rounding(kind: str, run: int, order: bool) -> Callable[[], None]:
        def body() -> None:
            x = strided(random_qkv(333, 96, torch.float16, batch=2)[0])
            if kind == "fp8":
                # numbers that fp8 holds: the interpreter loses a carry when it rounds to it.
                x = (x * 40).to(torch.float8_e4m3fn).to(torch.float16)
                x[..., ::run, 0] = 448.0
            tokens = torch.randperm(333) if order else None
            mean = x.float().mean(2) if kind == "int8" else None
            arguments = (kind, run, tokens, mean, x.float().mean(2))
            check_rounding(x, *arguments)

        return body

    yield "mean of strided keys", check_mean
    for tile, judged in (((16, 16), False), ((128, 64), True), ((1, 128), False)):
        yield (
            f"quantise and pool {tile} judged {judged}",
            partial(check_pooled, "int8", tile, judged=judged),
        )
    for run in (1, 16, 64, 128):
        for kind in ("int8", "fp8"):
            order = run < 64 and kind == "int8"
            yield f"quantise {kind} runs of {run}", rounding(kind, run, order)


def check_mean(device: str = "cpu") -> None:
    """Hold the mean of a kernel to torch's, over more tokens than one program adds up."""
    from vidsparse.kernels.triton_quantize import triton_mean

    x = strided(random_qkv(1100, 96, torch.float16, batch=2)[0].to(device)) + 3
    torch.testing.assert_close(triton_mean(x), x.double().mean(2).float(), rtol=1e-5, atol=1e-5)


def check_pooled(kind: str, tile: tuple[int, int], *, judged: bool, device: str = "cpu") -> None:
    """Hold quantisation that pools to quantising and pooling one after the other."""
    from vidsparse.kernels.triton_pool import pool
    from vidsparse.kernels.triton_quantize import quantize_and_pool

    q, k, _ = (strided(x.to(device)) for x in random_qkv(333, 96, torch.float16, batch=2))
    order = torch.randperm(333, generator=torch.Generator().manual_seed(2)).to(device)
    got, *pooled = quantize_and_pool(q, k, kind, order, tile, judged=judged)
    expected = quantize_qk(q, k, kind, q_run=tile[0], order=order)
    assert (got.q_run, got.k_run) == (expected.q_run, expected.k_run)
    for name in ("q_scale", "k_scale", "shift"):
        a, b = getattr(got, name), getattr(expected, name)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    for name in ("q", "k"):
        a, b = (getattr(x, name).view(torch.int8).int() for x in (got, expected))
        assert (a - b).abs().float().mean() <= 1e-4
    for x, size, means in ((q, tile[0], pooled[0]), (k, tile[1], pooled[1])):
        alone = pool(x[:, :, order], size, judged=judged)
        a, b = ((m.high.float() + m.low.float()) * m.scale.unsqueeze(-1) for m in (means, alone))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert (means.similarity is not None) == judged
        if judged:
            torch.testing.assert_close(means.similarity, alone.similarity, rtol=1e-5, atol=1e-5)


def check_rounding(
    x: torch.Tensor,
    kind: str,
    run: int,
    order: torch.Tensor | None,
    subtract: torch.Tensor | None,
    multiply: torch.Tensor | None,
) -> None:
    """Hold the quantisation kernel to ``quantize_runs``: the same but for ties of rounding."""
    from vidsparse.kernels.triton_quantize import triton_quantize_runs

    arguments = (kind, run, order, subtract, multiply)
    x8, scale, product = triton_quantize_runs(x, *arguments)
    expected, expected_scale, expected_product = quantize_runs(x, *arguments)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    near = 1e-5 * expected_product.abs().max().item()
    torch.testing.assert_close(product, expected_product, rtol=1e-4, atol=near)
    # neighbours in int8 and in fp8's ordered bits, and both as near as can be told in fp32: numbers
    # of few bits have many ties.
    a, b = (t.view(torch.int8).int() for t in (x8, expected))
    off = a != b
    assert int((a - b).abs().max()) <= 1
    assert off.float().mean() <= 1e-2
    exact = x.double() if order is None else x[:, :, order].double()
    if subtract is not None:
        exact = exact - subtract.double().unsqueeze(2)
    exact = exact / expected_scale.double().repeat_interleave(run, 2)[:, :, : x.shape[2], None]
    middle = (x8.double() + expected.double()) / 2
    assert bool((exact - middle)[off].abs().le(1e-5 + 1e-5 * middle[off].abs()).all())


CASES = [name for name, _ in interpreted_cases()]


def main() -> None:
    """Try all cases; print ``{name: what went wrong or null}``."""
    torch.set_num_threads(1)
    answers: dict[str, str | None] = {}
    for name, body in interpreted_cases():
        try:
            body()
            answers[name] = None
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(answers))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python, without the interpreter's flag unless it is given."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.fixture(scope="module")
def answers() -> dict[str, str | None]:
    done = run(str(HERE / "test_triton.py"), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str, answers: dict[str, str | None]) -> None:
    assert answers[name] is None


@pytest.fixture(scope="module")
def compiled() -> str:
    done = run(str(HERE / "compile_ahead.py"), "--head-dim", "128")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def resources(cc: int, compiled: str, name: str) -> list[int]:
    """Bytes spilled by the variants for ``cc`` whose names match."""
    lines = re.findall(rf"^sm_{cc} {name}.*: \d+ registers, \d+ bytes spilled.*$", compiled, re.M)
    print(*lines, sep="\n")
    return [int(stack) for stack in re.findall(r"(\d+) bytes spilled", "\n".join(lines))]


@pytest.mark.parametrize("cc", [80, 89, 90, 100])
def test_triton_compiles_ahead_of_time_and_hardly_spills(cc: int, compiled: str) -> None:
    found = resources(cc, compiled, "triton")
    # four plain ones, two gates, 8 bits without a gate and, where there is fp8, with one.
    assert len(found) == (7 if cc < 89 else 8)
    # 26 to 28 registers of a thread on Ampere and Ada, none on Blackwell. Two programs of 4 warps
    # on a Hopper multiprocessor spill and are faster all the same than one of 8 that does not; with
    # 344 bytes, part of them in the loop, they were 20 to 40 % slower.
    assert max(found) <= {80: 128, 89: 128, 90: 320, 100: 0}[cc]


def test_gluon_compiles_ahead_of_time_for_hopper_and_overlaps_its_products(compiled: str) -> None:
    # at most a few scalars of the producer and, with a gate, of a consumer.
    assert max(resources(90, compiled, "gluon")) <= 64
    found = re.findall(
        r"^sm_90 gluon D=128 (.*): .* (\d+) waits, (\d+) exponentials", compiled, re.M
    )
    assert len(found) == 15
    for name, waits, overlapped in found:
        # one wait after each product of each consumer, and the softmax between the two. With a gate
        # there is a wait more, where the second product is skipped.
        assert int(waits) == (6 if "gate" in name else 4)
        assert int(overlapped) >= 64


def test_sale_on_hopper_chains_its_two_products(compiled: str) -> None:
    assert max(resources(90, compiled, "gluon sale")) == 0
    # of each of three consumers: one wait between the products that waits for nothing, one at the
    # end. More of them would be ptxas' own.
    assert re.findall(r"^sm_90 gluon sale .* (\d+) waits", compiled, re.M) == ["6"]


# the first example imports the kernel.
@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 200), st.integers(0, 600))
def test_a_cut_tail_is_what_full_rounds_leave(blocks: int, programs: int, steps: int) -> None:
    from vidsparse.kernels.gluon_hopper import MOST_PARTS, split_tail

    whole, parts = split_tail(blocks, programs, steps)
    assert 1 <= parts <= MOST_PARTS
    if parts == 1:
        assert whole == blocks
    else:
        # never more steps for the busiest program than with whole blocks.
        assert 0 <= whole < blocks
        assert whole % programs == 0
        rounds = whole // programs * steps
        rounds += -(-(blocks - whole) * parts // programs) * -(-steps // parts)
        assert rounds < -(-blocks // programs) * steps


def test_four_blocks_too_many_are_cut_and_full_rounds_are_not() -> None:
    from vidsparse.kernels.gluon_hopper import split_tail

    assert split_tail(31 * 132 + 4, 132, 77) == (31 * 132, 8)
    assert split_tail(31 * 132, 132, 77) == (31 * 132, 1)
    # lists too short to be worth it.
    assert split_tail(31 * 132 + 4, 132, 6) == (31 * 132 + 4, 1)


@pytest.mark.parametrize("cc", [80, 89, 90, 100])
def test_what_goes_before_compiles_ahead_of_time_and_hardly_spills(cc: int, compiled: str) -> None:
    names = "quantise, mean, pool, scores, top-p, group, join, longest first, list"
    names += ", least sums, key factors, finish"
    for name in names.split(", "):
        found = resources(cc, compiled, name)
        assert found
        # two registers of a thread, in the kernel for rows that do not fit a program.
        assert max(found) <= 8


def blocks_that_meet_late(work: Work) -> Tensor:
    """Blocks of ``far_above`` whose first step, the last 128 keys of a list, has no EARLY ones."""
    late = torch.zeros_like(work.kv_count, dtype=torch.bool)
    at_once = 128 // work.tile[1]
    for g, count in enumerate(work.kv_count[1, 1].tolist()):
        early = work.kv_index[1, 1, g, :count] * work.tile[1] < EARLY
        first = (count - 1) // at_once * at_once
        late[1, 1, g] = bool(early.any()) and not bool(early[first:].any())
    return late


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.usefixtures("poisoned_empty")
class TestOnGpu:
    @pytest.fixture(params=["triton", "gluon"])
    def kernel(self, request: pytest.FixtureRequest) -> Callable[..., object]:
        from vidsparse.kernels.dispatch import _LOADERS

        self.skip_without(request.param)
        return _LOADERS[request.param]()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("dim", HEAD_DIMS)
    @pytest.mark.parametrize("keys", CHUNKS)
    @pytest.mark.parametrize("tokens", [129, 1000])
    def test_random_plans_stay_in_the_budget(
        self,
        kernel: Callable[..., object],
        tokens: int,
        keys: int,
        dim: int,
        dtype: torch.dtype,
    ) -> None:
        for rows in (16, 32, 64, 128):
            q, k, v = (x.cuda() for x in random_qkv(tokens, dim, dtype, batch=2))
            work = random_work(tokens, (rows, keys), batch=2, seed=rows).to("cuda")
            check_kernel(kernel, q, k, v, work)

    @pytest.mark.parametrize("keys", CHUNKS)
    @pytest.mark.parametrize("counts", LISTS.values(), ids=LISTS)
    def test_ragged_lists(
        self, kernel: Callable[..., object], counts: list[int], keys: int
    ) -> None:
        q, k, v = (x.cuda() for x in random_qkv(300, 128, torch.bfloat16))
        work = random_work(300, (128, keys), counts=counts, longest_first=False).to("cuda")
        check_kernel(kernel, q, k, v, work)

    @pytest.mark.parametrize("seed", range(200))
    def test_any_plan(self, kernel: Callable[..., object], seed: int) -> None:
        gen = random.Random(seed)
        tokens, dim = gen.randint(1, 900), gen.choice(HEAD_DIMS)
        tile = gen.choice([16, 32, 64, 128]), gen.choice(CHUNKS)
        batch, heads = gen.randint(1, 2), gen.randint(1, 3)
        share, dtype = gen.uniform(0, 0.8), gen.choice([torch.bfloat16, torch.float16])
        q, k, v = (
            x.cuda() for x in random_qkv(tokens, dim, dtype, batch=batch, heads=heads, seed=seed)
        )
        work = random_work(tokens, tile, batch=batch, heads=heads, share=share, seed=seed)
        check_kernel(kernel, q, k, v, work.to("cuda"))

    def test_more_blocks_than_multiprocessors_and_twice_the_same_bits(
        self, kernel: Callable[..., object]
    ) -> None:
        # 16 heads of 33 blocks: a persistent kernel takes several a program.
        q, k, v = (x.cuda() for x in random_qkv(4200, 64, torch.bfloat16, heads=16))
        for keys in (1, 16):
            work = random_work(4200, (16, keys), heads=16, share=0.1).to("cuda")
            first = kernel(q, k, v, *work.tensors, tile=work.tile, scale=0.1)
            again = kernel(q, k, v, *work.tensors, tile=work.tile, scale=0.1)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))  # type: ignore[call-overload]
            check_kernel(kernel, q, k, v, work)

    @pytest.mark.parametrize("kind", [None, "int8"])
    @pytest.mark.parametrize("keys", CHUNKS)
    def test_the_last_blocks_in_parts(
        self, monkeypatch: pytest.MonkeyPatch, keys: int, kind: str | None
    ) -> None:
        from vidsparse.kernels import gluon_hopper

        self.skip_without("gluon")
        kernel = gluon_hopper.gluon_attention
        for tokens, dim, rows in ((900, 128, 16), (1000, 96, 128), (333, 64, 64)):
            # with more parts than a list has steps, some have no key; and there are empty lists.
            counts = [tokens // (2 * keys), 1, 0]
            qkv = clustered_qkv(tokens, dim, torch.bfloat16, batch=2, pull=2.0, mean=1.0)
            q, k, v = (x.cuda() for x in qkv)
            work = random_work(tokens, (rows, keys), batch=2, counts=counts).to("cuda")
            options = {"tile": work.tile, "scale": dim**-0.5}
            if kind is not None:
                options["quantized"] = quantize_qk(q, k, kind, q_run=rows)
            monkeypatch.setattr(gluon_hopper, "split_tail", lambda blocks, *_: (blocks, 1))
            out, lse = kernel(q, k, v, *work.tensors, **options)
            for cut in ((0, 3), (5, 2), (1, 16)):
                monkeypatch.setattr(gluon_hopper, "split_tail", lambda *_, cut=cut: cut)
                if kind is None:
                    check_kernel(kernel, q, k, v, work)
                # parts are rounded once more, each to half a unit of its last place.
                joined, joined_lse = kernel(q, k, v, *work.tensors, **options)
                unit = 2 * torch.finfo(q.dtype).eps * float(v.abs().max())
                torch.testing.assert_close(joined, out, rtol=0, atol=unit)
                torch.testing.assert_close(joined_lse, lse, rtol=0, atol=1e-4)

    def test_what_an_unknown_triton_is_tried_with(self) -> None:
        from vidsparse.kernels import gluon_hopper, gluon_sale

        self.skip_without("gluon")
        for module in (gluon_hopper, gluon_sale):
            module.try_out(torch.device("cuda"))
        torch.cuda.synchronize()

    def test_two_heads_that_are_alike_give_the_same(self, kernel: Callable[..., object]) -> None:
        q, k, v = (x.cuda().repeat(2, 3, 1, 1) for x in random_qkv(1000, 96, torch.float16))
        work = random_work(1000, (32, 8)).to("cuda")
        tensors = [x.repeat(2, 3, *[1] * (x.dim() - 2)) for x in work.tensors]
        out, lse = kernel(q, k, v, *tensors, tile=work.tile, scale=0.1)  # type: ignore[misc]
        for x in (out, lse):
            assert torch.equal(x[0, :2].repeat(2, 3, *[1] * (x.dim() - 2)), x)

    @pytest.mark.parametrize("keys", [1, 16])
    def test_short_chunk_numbers(self, kernel: Callable[..., object], keys: int) -> None:
        q, k, v = (x.cuda() for x in random_qkv(500, 128, torch.bfloat16))
        work = random_work(500, (16, keys)).to("cuda")
        expected = kernel(q, k, v, *work.tensors, tile=work.tile, scale=0.1)
        # chunk numbers fit 16 bits; so does what stands behind a list's end.
        index = work.kv_index.clamp_max(2**15 - 1).to(torch.int16)
        got = kernel(q, k, v, work.q_tiles, work.kv_count, index, tile=work.tile, scale=0.1)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))  # type: ignore[call-overload]

    def test_keys_outside_the_list_are_not_touched(self, kernel: Callable[..., object]) -> None:
        # infinities and NaN in chunks that no list holds, in both short and full steps.
        for keys in CHUNKS:
            q, k, v = (x.cuda() for x in random_qkv(700, 128, torch.bfloat16, heads=1))
            work = random_work(700, (128, keys), heads=1).to("cuda")
            chunks = -(-700 // keys)
            used = torch.zeros(chunks, dtype=torch.bool)
            for g, count in enumerate(work.kv_count[0, 0].tolist()):
                used[work.kv_index[0, 0, g, :count].long().cpu()] = True
            unused = (~used).nonzero().view(-1)
            expected = kernel(q, k, v, *work.tensors, tile=work.tile, scale=0.1)
            for chunk in unused.tolist():
                k[:, :, chunk * keys : (chunk + 1) * keys] = torch.nan
                v[:, :, chunk * keys : (chunk + 1) * keys] = torch.inf
            got = kernel(q, k, v, *work.tensors, tile=work.tile, scale=0.1)
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))  # type: ignore[call-overload]

    @pytest.mark.parametrize("dim", HEAD_DIMS)
    @pytest.mark.parametrize("keys", CHUNKS)
    def test_gates(self, kernel: Callable[..., object], keys: int, dim: int) -> None:
        dtype = torch.float16 if keys in (8, 32) else torch.bfloat16
        for tokens, rows, piece in ((129, 32, 64), (1000, 64, 64), (1000, 128, 128)):
            q, k, v = (x.cuda() for x in clustered_qkv(tokens, dim, dtype, batch=2))
            counts = [tokens] if keys == 1 else None
            work = in_order(random_work(tokens, (64, keys), batch=2, share=0.7, counts=counts))
            for gate in gates(work, rows, piece):
                skipped = check_gated(kernel, q, k, v, work.to("cuda"), gate.to("cuda"))
                pairs = int(work.mask().sum())
                assert int(skipped.sum()) < pairs
                assert tokens < 1000 or int(skipped.sum()) > 0

    @pytest.mark.parametrize("rows", [32, 64, 128])
    @pytest.mark.parametrize("name", ["triton", "gluon"])
    def test_gates_that_skip_nothing_change_nothing(self, name: str, rows: int) -> None:
        from vidsparse.kernels.triton_gather import _launch

        self.skip_without(name)
        # in bf16 weights are powers of other differences without a gate.
        q, k, v = (x.cuda() for x in random_qkv(1000, 128, torch.float16, batch=2))
        work = random_work(1000, (16, 16), batch=2, counts=[63, 20, 1, 0]).to("cuda")
        step = _launch(q.device, None)[0] if name == "triton" else 128
        never = torch.tensor(-torch.inf)
        options = {"tile": work.tile, "implementation": name}
        plain = sparse_attention(q, k, v, *work.tensors, **options)
        for gate in (RelativeGate(-torch.inf, rows, step), AbsoluteGate(never, None, rows, step)):
            gated = sparse_attention(q, k, v, *work.tensors, **options, gate=gate)
            for a, b in zip(plain, gated, strict=True):
                assert torch.equal(a, b)

    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    @pytest.mark.parametrize("dim", HEAD_DIMS)
    @pytest.mark.parametrize("keys", CHUNKS)
    def test_8_bits(self, kernel: Callable[..., object], keys: int, dim: int, kind: str) -> None:
        self.skip_without("triton", kind)
        for tokens, rows in ((129, 16), (600, 128)):
            qkv = clustered_qkv(tokens, dim, torch.bfloat16, heads=1, pull=2.0, mean=1.0)
            q, k, v = (x.cuda() for x in qkv)
            work = random_work(tokens, (rows, keys), heads=1, seed=rows).to("cuda")
            quantized = quantize_qk(q, k, kind, q_run=rows)
            check_quantized(kernel, q, k, v, work, quantized)

    @pytest.mark.parametrize("run", [1, 4, 16, 128])
    @pytest.mark.parametrize("keys", [1, 16, 128])
    def test_scales_of_any_run(self, kernel: Callable[..., object], keys: int, run: int) -> None:
        q, k, v = (x.cuda() for x in clustered_qkv(500, 64, torch.bfloat16, pull=2.0, mean=1.0))
        work = random_work(500, (32, keys)).to("cuda")
        check_quantized(
            kernel, q, k, v, work, quantize_qk(q, k, "int8", q_run=128 // run, k_run=run)
        )

    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    @pytest.mark.parametrize("keys", CHUNKS)
    def test_8_bits_with_a_gate(self, kernel: Callable[..., object], keys: int, kind: str) -> None:
        self.skip_without("triton", kind)
        q, k, v = (x.cuda() for x in clustered_qkv(1000, 128, torch.bfloat16, mean=1.0))
        counts = [1000] if keys == 1 else None
        work = in_order(random_work(1000, (128, keys), share=0.7, counts=counts))
        quantized = quantize_qk(q, k, kind, q_run=128)
        # hopper's tensor cores add fp8 products with 14 bits.
        flips = 0.02 if kind == "fp8" else 0.0
        for gate in gates(work, 64, 64):
            on_gpu = work.to("cuda")
            check_gated(kernel, q, k, v, on_gpu, gate.to("cuda"), quantized, flips=flips)

    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    @pytest.mark.parametrize("tile", [(16, 16), (128, 64), (64, 1)], ids=str)
    def test_quantisation_that_pools(self, tile: tuple[int, int], kind: str) -> None:
        self.skip_without("triton", kind)
        check_pooled(kind, tile, judged=True, device="cuda")

    @staticmethod
    def skip_without(name: str, kind: str | None = None) -> None:
        capability = torch.cuda.get_device_capability()
        if name == "gluon" and capability != (9, 0):
            pytest.skip("gluon is for compute capability 9.0 (Hopper)")
        if capability < (8, 0):
            pytest.skip("triton needs compute capability 8.0 (Ampere) or newer")
        if kind is not None and "fp8" in kind and capability < (8, 9):
            pytest.skip("fp8 needs compute capability 8.9 (Ada) or newer")
        # on the right GPU any other reason is a fault, not a reason to skip.
        assert support(name, "cuda", torch.bfloat16, 128, quantize=kind) is None

    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    @pytest.mark.parametrize("run", [1, 16, 64, 128])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_rounding_to_8_bits(self, dtype: torch.dtype, run: int, kind: str) -> None:
        self.skip_without("triton", kind)
        x = strided(random_qkv(5000, 96, dtype, batch=2)[0].cuda())
        order = torch.randperm(5000, device="cuda")
        mean = x.float().mean(2)
        check_rounding(x, kind, run, order, mean, mean)
        check_rounding(x, kind, run, None, None, mean)

    @pytest.mark.parametrize("name", ["triton", "gluon"])
    def test_thousands_of_tokens_with_all_at_once(self, name: str) -> None:
        # what SpargeAttn runs: int8, lambda, 128x64 tiles, at a length where stock attention is
        # the yardstick on some rows.
        self.skip_without(name)
        tokens = 16_384
        q, k, v = (x.cuda() for x in clustered_qkv(tokens, 128, torch.bfloat16, heads=2, pull=2.0))
        work = random_work(tokens, (128, 64), share=0.3).to("cuda")
        skipped = torch.zeros_like(work.kv_count)
        options = {"tile": work.tile, "implementation": name, "quantize": "int8"}
        out, lse = sparse_attention(
            q, k, v, *work.tensors, **options, gate=RelativeGate(-4.0), skipped=skipped
        )
        plain, plain_lse = sparse_attention(q, k, v, *work.tensors, **options)
        assert int(skipped.sum(dtype=torch.int64)) > 0
        torch.testing.assert_close(lse, plain_lse, rtol=1e-4, atol=1e-4)
        # a skipped weight is at most exp(lambda) of the largest.
        assert (out - plain).float().norm() < 0.1 * plain.float().norm()
        assert (out - plain).float().norm() > 0

    @pytest.mark.parametrize("implementation", ["torch", "reference"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_the_other_implementations_stay_in_the_budget_too(
        self, implementation: str, dtype: torch.dtype
    ) -> None:
        from vidsparse.kernels.dispatch import _LOADERS

        q, k, v = (x.cuda() for x in random_qkv(500, 64, dtype))
        work = random_work(500, (16, 16)).to("cuda")
        check_kernel(_LOADERS[implementation](), q, k, v, work)

    def test_large_scores_do_not_overflow(self, kernel: Callable[..., object]) -> None:
        q, k, v = (x.cuda() for x in random_qkv(300, 128, torch.bfloat16, spread=20))
        check_kernel(kernel, q, k, v, random_work(300, (16, 16)).to("cuda"))

    @pytest.mark.parametrize("above", FAR)
    @pytest.mark.parametrize("keys", CHUNKS)
    def test_keys_far_above_those_before_them(
        self, kernel: Callable[..., object], keys: int, above: int
    ) -> None:
        for dim, rows in ((64, 128), (96, 16), (128, 64)):
            q, k, v, work = (x.to("cuda") for x in far_above(above, keys, dim, rows))
            for size in SIZES:
                check_kernel(kernel, q, k, v * size, work)

    @pytest.mark.parametrize("kind", [None, "int8", "fp8"])
    @pytest.mark.parametrize("keys", CHUNKS)
    def test_blocks_are_attended_again_only_where_they_have_to(
        self, monkeypatch: pytest.MonkeyPatch, keys: int, kind: str | None
    ) -> None:
        from vidsparse.kernels import gluon_hopper

        self.skip_without("gluon", kind)
        made: list[Tensor] = []

        def zeros(*size: int, real: Callable[..., Tensor] = torch.zeros, **options: Any) -> Tensor:
            made.append(real(*size, **options))
            return made[-1]

        monkeypatch.setattr(torch, "zeros", zeros)
        everything = (32, 1)
        for above, cut, programs in (
            (50, everything, 132),
            (200, everything, 132),
            # a program goes from block to block, and from part to part.
            (200, everything, 3),
            (200, (1, 3), 132),
            (200, (1, 3), 3),
        ):
            q, k, v, work = (x.to("cuda") for x in far_above(above, keys, 128, 16))
            assert work.kv_count.numel() == 32
            monkeypatch.setattr(gluon_hopper, "split_tail", lambda *_, cut=cut: cut)
            monkeypatch.setattr(gluon_hopper, "_multiprocessors", lambda _, n=programs: n)
            options = {"tile": work.tile, "scale": 128**-0.5}
            if kind is not None:
                options["quantized"] = quantize_qk(q, k, kind, q_run=16)
            made.clear()
            out, lse = gluon_hopper.gluon_attention(q, k, v, *work.tensors, **options)
            (words,) = (x for x in made if x.numel() == 3 + work.kv_count.numel())
            some, again = bool(words[2]), words[3:].view(work.kv_count.shape).cpu() != 0
            late = blocks_that_meet_late(work.to("cpu"))
            assert some == bool(again.any()) == (above > 100)
            if cut == everything and some:
                assert torch.equal(again, late)
            assert not bool((again & ~late).any())
            assert not bool(late.all(-1).any())
            # the same products of q and k, and maxima that always run.
            halves = (x.half() for x in (q, k, v))
            expected, expected_lse = gluon_hopper.gluon_attention(*halves, *work.tensors, **options)
            weight = 0.0
            if kind == "int8":
                # each holds integers with an offset, which their scale rounds.
                scales = options["quantized"].q_scale.max() * options["quantized"].k_scale.max()
                largest = gluon_hopper.OFFSET_OF_INTEGERS.value * 128**-0.5 * scales.item()
                weight = 2 * 2.0**-24 * largest
            close = partial(torch.testing.assert_close, rtol=2.0**-20)
            close(lse, expected_lse, atol=1e-5 + weight)
            # weights and output rounded to 8 bits, the others to 11.
            rounding = 2.0**-8 + 2.0**-10 + 2 * weight
            close(out.float(), expected.float(), atol=rounding * v.abs().max().item())

    def test_nothing_waits_for_the_gpu_between_q_and_output(self) -> None:
        from vidsparse.attention import AttentionEngine
        from vidsparse.grid import TokenGrid
        from vidsparse.methods import make_method
        from vidsparse.schedule import Schedule
        from vidsparse.site import CallSite

        grid = TokenGrid(3, 20, 20, text=30)
        q, k, v = (x.cuda() for x in random_qkv(grid.tokens, 64, torch.bfloat16, batch=2))
        for method in ("fg-attn", "spargeattn"):
            for merge in ("xor", "xor-window", "consecutive"):
                engine = AttentionEngine(
                    make_method(method, merge=merge),
                    schedule=Schedule(dense_steps=0, reuse=2),
                    layers=1,
                )
                engine.begin_run(3)
                # compiles the kernel and copies the order to the GPU.
                engine.attend(q, k, v, CallSite(0, 0, 0.0, grid))
                torch.cuda.set_sync_debug_mode("error")
                try:
                    for step in (1, 2):
                        engine.attend(q, k, v, CallSite(0, step, 0.0, grid))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                assert [c.action for c in engine.trace.cells] == ["replan", "reuse", "replan"]

    def test_offsets_beyond_32_bits(self, kernel: Callable[..., object]) -> None:
        # 2.2e9 elements a tensor; every block of every head attends the last two chunks.
        heads, tokens, dim = 231, 75_600, 128
        # by what the GPU has, not by what is free: memory that other tests keep must show.
        if torch.cuda.mem_get_info()[1] < 30e9:
            pytest.skip("needs a GPU of 30 GB")
        q = torch.zeros(1, heads, tokens, dim, dtype=torch.bfloat16, device="cuda")
        k, v = torch.zeros_like(q), torch.zeros_like(q)
        for x, source in zip((q, k, v), random_qkv(512, dim, q.dtype, heads=1), strict=True):
            x[:, -1, -512:] = source[0]
        blocks, chunks = -(-tokens // 128), -(-tokens // 64)
        work = Work(
            torch.arange(blocks, device="cuda").int().expand(1, heads, blocks)[..., None],
            torch.full((1, heads, blocks), 2, dtype=torch.int32, device="cuda"),
            torch.tensor([chunks - 2, chunks - 1], device="cuda").int().expand(1, heads, blocks, 2),
            (128, 64),
            tokens,
        )
        out, _ = kernel(q, k, v, *work.tensors, tile=work.tile, scale=0.1)  # type: ignore[misc]
        # 75,600 is 16 into chunk 1181: the two last chunks hold 80 tokens.
        last = [x[:, -1:, -80:].double() for x in (k, v)]
        rows = q[:, -1:, -80:].double()
        expected = (rows @ last[0].mT * 0.1).softmax(-1) @ last[1]
        torch.testing.assert_close(out[:, -1:, -80:].double(), expected, rtol=0.02, atol=0.02)
        assert not bool(out[:, 0].any())


if __name__ == "__main__":
    main()
