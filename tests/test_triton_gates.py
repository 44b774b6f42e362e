"""Gates in the kernels of attention, interpreted and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from budget import (
    Kernel,
    Work,
    check_gated,
    clustered_qkv,
    in_order,
    random_qkv,
    random_work,
)
from kernel_cases import (
    CHUNKS,
    HEAD_DIMS,
    LISTS,
    Case,
    listed,
    skip_without,
    triton_kernel,
)

from vidsparse.kernels import AbsoluteGate, RelativeGate, quantize_qk, sparse_attention
from vidsparse.kernels.attention.gates import Gate

pytest.importorskip("triton", reason="Triton is not installed here")


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


def interpreted_gates() -> Iterator[Case]:
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
            options: dict[str, Any] = {"tile": work.tile, "scale": 0.125}
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


@listed(interpreted_gates(), only="cpu", quick=5)
def test_interpreted(body: Callable[[], None]) -> None:
    body()


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
class TestOnGpu:
    @pytest.mark.parametrize("dim", HEAD_DIMS)
    @pytest.mark.parametrize("keys", CHUNKS)
    def test_gates(self, kernel: Kernel, keys: int, dim: int) -> None:
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
        from vidsparse.kernels.attention.triton_gather import _launch

        skip_without(name)
        # in bf16 weights are powers of other differences without a gate.
        q, k, v = (x.cuda() for x in random_qkv(1000, 128, torch.float16, batch=2))
        work = random_work(1000, (16, 16), batch=2, counts=[63, 20, 1, 0]).to("cuda")
        step = _launch(q.device, None)[0] if name == "triton" else 128
        never = torch.tensor(-torch.inf)
        options: dict[str, Any] = {"tile": work.tile, "implementation": name}
        plain = sparse_attention(q, k, v, *work.tensors, **options)
        for gate in (RelativeGate(-torch.inf, rows, step), AbsoluteGate(never, None, rows, step)):
            gated = sparse_attention(q, k, v, *work.tensors, **options, gate=gate)
            for a, b in zip(plain, gated, strict=True):
                assert torch.equal(a, b)

    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    @pytest.mark.parametrize("keys", CHUNKS)
    def test_8_bits_with_a_gate(self, kernel: Kernel, keys: int, kind: str) -> None:
        skip_without("triton", kind)
        q, k, v = (x.cuda() for x in clustered_qkv(1000, 128, torch.bfloat16, mean=1.0))
        counts = [1000] if keys == 1 else None
        work = in_order(random_work(1000, (128, keys), share=0.7, counts=counts))
        quantized = quantize_qk(q, k, kind, q_run=128)
        # hopper's tensor cores add fp8 products with 14 significant bits.
        flips = 0.02 if kind == "fp8" else 0.0
        for gate in gates(work, 64, 64):
            on_gpu = work.to("cuda")
            check_gated(kernel, q, k, v, on_gpu, gate.to("cuda"), quantized, flips=flips)
