"""The plain Triton kernel of attention, interpreted and on a GPU, and beside it Hopper's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from budget import (
    Kernel,
    Work,
    check_kernel,
    clustered_qkv,
    random_qkv,
    random_work,
)
from kernel_cases import (
    CHUNKS,
    FAR,
    HEAD_DIMS,
    LISTS,
    SIZES,
    Case,
    blocks_that_meet_late,
    far_above,
    listed,
    skip_without,
    strided,
    triton_kernel,
)
from torch import Tensor

from vidsparse.kernels import RelativeGate, quantize_qk, sparse_attention

pytest.importorskip("triton", reason="Triton is not installed here")

# bf16 products are wrong in the interpreter (Triton 3.6 to 3.9), so bf16 is the GPU's.
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


def interpreted_cases() -> Iterator[Case]:
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
    yield "batch 2", case(200, 64, torch.float16, (16, 16), batch=2, heads=2)
    yield "strided", case(200, 64, torch.float16, (16, 16), batch=2, heads=2, layout=strided)


def on_gpu(call: tuple[Tensor, Tensor, Tensor, Work]) -> tuple[Tensor, Tensor, Tensor, Work]:
    q, k, v, work = call
    return q.cuda(), k.cuda(), v.cuda(), work.to("cuda")


def keys_far_above(keys: int, rows: int, above: float) -> None:
    q, k, v, work = far_above(above, keys, 64, rows, torch.float32, tokens=400)
    assert bool(blocks_that_meet_late(work).any())
    for size in SIZES:
        check_kernel(triton_kernel(), q, k, v * size, work)


@listed(interpreted_cases(), only="cpu", quick=5)
def test_interpreted(body: Callable[[], None]) -> None:
    body()


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
class TestOnGpu:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("dim", HEAD_DIMS)
    @pytest.mark.parametrize("keys", CHUNKS)
    @pytest.mark.parametrize("tokens", [129, 1000])
    def test_random_plans_stay_in_the_budget(
        self,
        kernel: Kernel,
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
    def test_ragged_lists(self, kernel: Kernel, counts: list[int], keys: int) -> None:
        q, k, v = (x.cuda() for x in random_qkv(300, 128, torch.bfloat16))
        work = random_work(300, (128, keys), counts=counts, longest_first=False).to("cuda")
        check_kernel(kernel, q, k, v, work)

    @pytest.mark.parametrize("seed", range(200))
    def test_any_plan(self, kernel: Kernel, seed: int) -> None:
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

    def test_more_blocks_than_multiprocessors_and_twice_the_same_bits(self, kernel: Kernel) -> None:
        # 16 heads of 33 blocks: a persistent kernel takes several a program.
        q, k, v = (x.cuda() for x in random_qkv(4200, 64, torch.bfloat16, heads=16))
        for keys in (1, 16):
            work = random_work(4200, (16, keys), heads=16, share=0.1).to("cuda")
            first = kernel(q, k, v, *work.tensors, tile=work.tile, scale=0.1)
            again = kernel(q, k, v, *work.tensors, tile=work.tile, scale=0.1)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            check_kernel(kernel, q, k, v, work)

    @pytest.mark.parametrize("kind", [None, "int8"])
    @pytest.mark.parametrize("keys", CHUNKS)
    def test_the_last_blocks_in_parts(
        self, monkeypatch: pytest.MonkeyPatch, keys: int, kind: str | None
    ) -> None:
        from vidsparse.kernels.attention.hopper import launch

        skip_without("gluon")
        kernel = launch.gluon_attention
        for tokens, dim, rows in ((900, 128, 16), (1000, 96, 128), (333, 64, 64)):
            # with more parts than a list has steps, some have no key; and there are empty lists.
            counts = [tokens // (2 * keys), 1, 0]
            qkv = clustered_qkv(tokens, dim, torch.bfloat16, batch=2, pull=2.0, mean=1.0)
            q, k, v = (x.cuda() for x in qkv)
            work = random_work(tokens, (rows, keys), batch=2, counts=counts).to("cuda")
            options: dict[str, Any] = {"tile": work.tile, "scale": dim**-0.5}
            if kind is not None:
                options["quantized"] = quantize_qk(q, k, kind, q_run=rows)
            monkeypatch.setattr(launch, "split_tail", lambda blocks, *_: (blocks, 1))
            out, lse = kernel(q, k, v, *work.tensors, **options)
            for cut in ((0, 3), (5, 2), (1, 16)):
                monkeypatch.setattr(launch, "split_tail", lambda *_, cut=cut: cut)
                if kind is None:
                    check_kernel(kernel, q, k, v, work)
                # parts are rounded once more, each to half a unit of its last place.
                joined, joined_lse = kernel(q, k, v, *work.tensors, **options)
                unit = 2 * torch.finfo(q.dtype).eps * float(v.abs().max())
                torch.testing.assert_close(joined, out, rtol=0, atol=unit)
                torch.testing.assert_close(joined_lse, lse, rtol=0, atol=1e-4)

    def test_what_an_unknown_triton_is_tried_with(self) -> None:
        from vidsparse.kernels.attention.hopper import launch
        from vidsparse.kernels.selection import hopper_sale

        skip_without("gluon")
        for module in (launch, hopper_sale):
            module.try_out(torch.device("cuda"))
        torch.cuda.synchronize()

    def test_two_heads_that_are_alike_give_the_same(self, kernel: Kernel) -> None:
        q, k, v = (x.cuda().repeat(2, 3, 1, 1) for x in random_qkv(1000, 96, torch.float16))
        work = random_work(1000, (32, 8)).to("cuda")
        tensors = [x.repeat(2, 3, *[1] * (x.dim() - 2)) for x in work.tensors]
        out, lse = kernel(q, k, v, *tensors, tile=work.tile, scale=0.1)
        for x in (out, lse):
            assert torch.equal(x[0, :2].repeat(2, 3, *[1] * (x.dim() - 2)), x)

    @pytest.mark.parametrize("keys", [1, 16])
    def test_short_chunk_numbers(self, kernel: Kernel, keys: int) -> None:
        q, k, v = (x.cuda() for x in random_qkv(500, 128, torch.bfloat16))
        work = random_work(500, (16, keys)).to("cuda")
        expected = kernel(q, k, v, *work.tensors, tile=work.tile, scale=0.1)
        # chunk numbers fit 16 bits; so does what stands behind a list's end.
        index = work.kv_index.clamp_max(2**15 - 1).to(torch.int16)
        got = kernel(q, k, v, work.q_tiles, work.kv_count, index, tile=work.tile, scale=0.1)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))

    def test_keys_outside_the_list_are_not_touched(self, kernel: Kernel) -> None:
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
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))

    @pytest.mark.parametrize("name", ["triton", "gluon"])
    def test_thousands_of_tokens_with_all_at_once(self, name: str) -> None:
        # what SpargeAttn runs: int8, lambda, 128x64 tiles, at a length where stock attention is
        # the yardstick on some rows.
        skip_without(name)
        tokens = 16_384
        q, k, v = (x.cuda() for x in clustered_qkv(tokens, 128, torch.bfloat16, heads=2, pull=2.0))
        work = random_work(tokens, (128, 64), share=0.3).to("cuda")
        skipped = torch.zeros_like(work.kv_count)
        options: dict[str, Any] = {"tile": work.tile, "implementation": name, "quantize": "int8"}
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
        from vidsparse.kernels.dispatch import _KNOWN

        q, k, v = (x.cuda() for x in random_qkv(500, 64, dtype))
        work = random_work(500, (16, 16)).to("cuda")
        check_kernel(_KNOWN[implementation].load(), q, k, v, work)

    def test_large_scores_do_not_overflow(self, kernel: Kernel) -> None:
        q, k, v = (x.cuda() for x in random_qkv(300, 128, torch.bfloat16, spread=20))
        check_kernel(kernel, q, k, v, random_work(300, (16, 16)).to("cuda"))

    @pytest.mark.parametrize("above", FAR)
    @pytest.mark.parametrize("keys", CHUNKS)
    def test_keys_far_above_those_before_them(self, kernel: Kernel, keys: int, above: int) -> None:
        for dim, rows in ((64, 128), (96, 16), (128, 64)):
            q, k, v, work = on_gpu(far_above(above, keys, dim, rows))
            for size in SIZES:
                check_kernel(kernel, q, k, v * size, work)

    @pytest.mark.parametrize("kind", [None, "int8", "fp8"])
    @pytest.mark.parametrize("keys", CHUNKS)
    def test_blocks_are_attended_again_only_where_they_have_to(
        self, monkeypatch: pytest.MonkeyPatch, keys: int, kind: str | None
    ) -> None:
        from vidsparse.kernels.attention.hopper import launch
        from vidsparse.kernels.attention.hopper.ptx import OFFSET_OF_INTEGERS
        from vidsparse.kernels.hardware import device_facts

        skip_without("gluon", kind)
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
            q, k, v, work = on_gpu(far_above(above, keys, 128, 16))
            assert work.kv_count.numel() == 32
            monkeypatch.setattr(launch, "split_tail", lambda *_, cut=cut: cut)
            facts = replace(device_facts(q.device), multiprocessors=programs)
            monkeypatch.setattr(launch, "device_facts", lambda _, facts=facts: facts)
            options: dict[str, Any] = {"tile": work.tile, "scale": 128**-0.5}
            if kind is not None:
                options["quantized"] = quantize_qk(q, k, kind, q_run=16)
            made.clear()
            out, lse = launch.gluon_attention(q, k, v, *work.tensors, **options)
            (words,) = (x for x in made if x.numel() == 3 + work.kv_count.numel())
            some, again = bool(words[2]), words[3:].view(work.kv_count.shape).cpu() != 0
            late = blocks_that_meet_late(work.to("cpu"))
            assert some == bool(again.any()) == (above > 100)
            if cut == everything and some:
                assert torch.equal(again, late)
            assert not bool((again & ~late).any())
            assert not bool(late.all(-1).any())
            # the same products of q and k, and maxima that always run.
            halves = q.half(), k.half(), v.half()
            expected, expected_lse = launch.gluon_attention(*halves, *work.tensors, **options)
            weight = 0.0
            if kind == "int8":
                # each holds integers with an offset, which their scale rounds.
                scales = options["quantized"].q_scale.max() * options["quantized"].k_scale.max()
                largest = OFFSET_OF_INTEGERS.value * 128**-0.5 * scales.item()
                weight = 2 * 2.0**-24 * largest
            close = partial(torch.testing.assert_close, rtol=2.0**-20)
            close(lse, expected_lse, atol=1e-5 + weight)
            # weights and output rounded to 8 bits, the others to 11.
            rounding = 2.0**-8 + 2.0**-10 + 2 * weight
            close(out.float(), expected.float(), atol=rounding * v.abs().max().item())

    def test_nothing_waits_for_the_gpu_between_q_and_output(self) -> None:
        from vidsparse.engine import AttentionEngine
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

    def test_offsets_beyond_32_bits(self, kernel: Kernel) -> None:
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
        out, _ = kernel(q, k, v, *work.tensors, tile=work.tile, scale=0.1)
        # 75,600 is 16 into chunk 1181: the two last chunks hold 80 tokens.
        last = [x[:, -1:, -80:].double() for x in (k, v)]
        rows = q[:, -1:, -80:].double()
        expected = (rows @ last[0].mT * 0.1).softmax(-1) @ last[1]
        torch.testing.assert_close(out[:, -1:, -80:].double(), expected, rtol=0.02, atol=0.02)
        assert not bool(out[:, 0].any())
