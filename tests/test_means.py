"""Attention in which means stand for the keys that are not listed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget import (
    check_with_means,
    clustered_qkv,
    errors,
    in_order,
    means_for,
    random_qkv,
    random_work,
    truth,
    with_means,
)
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE, LISTS, Case, listed, skip_without, triton_kernel

from vidsparse.kernels import AbsoluteGate, RelativeGate, quantize_qk, sparse_attention
from vidsparse.kernels.attention import torch_sdpa
from vidsparse.kernels.attention.gates import Gate
from vidsparse.kernels.attention.means import counts_of_chunks, counts_of_lists, group_means
from vidsparse.kernels.attention.reference import reference_attention
from vidsparse.kernels.attention.torch_sdpa import gather_attention
from vidsparse.masks import pack_bits

pytestmark = pytest.mark.usefixtures("one_thread")

KERNELS = {"torch": gather_attention, "reference": reference_attention}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# chunk sizes, and the groups of tokens that go with them.
SIZES = [(1, 32), (8, 64), (16, 32), (16, 64), (16, 128), (64, 64), (128, 128)]


@pytest.fixture(params=list(KERNELS))
def on_cpu(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return KERNELS[request.param]


# ---- what it means ----


@pytest.mark.parametrize(("keys", "size"), SIZES)
def test_a_token_that_is_not_listed_is_its_groups_mean(keys: int, size: int) -> None:
    q, k, v = (x.double() for x in clustered_qkv(300, 32, torch.float32, batch=2))
    work = random_work(300, (32, keys), batch=2)
    means = means_for(k, v, work, size)
    out, lse = reference_attention(q, k, v, *work.tensors, tile=work.tile, scale=0.2, means=means)
    every_k, every_v, mask = with_means(k, v, work.mask(), means)
    expected = F.scaled_dot_product_attention(q, every_k, every_v, attn_mask=mask, scale=0.2)
    torch.testing.assert_close(out, expected)
    scores = (q @ every_k.mT * 0.2).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_lists_of_everything_leave_nothing_to_means(on_cpu: Callable[..., Any]) -> None:
    q, k, v = random_qkv(333, 64, torch.float32)
    work = random_work(333, (16, 16), counts=[21])
    means = means_for(k, v, work, 64)
    assert not bool(means.counts.any())
    # a mean that stands for nothing may be anything.
    means = replace(means, k=means.k + 1e3, v=means.v * torch.inf)
    options = {"tile": work.tile, "scale": 0.125}
    plain = on_cpu(q, k, v, *work.tensors, **options)
    finite = replace(means, v=torch.zeros_like(means.v))
    got = on_cpu(q, k, v, *work.tensors, **options, means=finite)
    for a, b in zip(plain, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_keys_that_are_alike_in_every_group_lose_nothing() -> None:
    q, k, v = (x.double() for x in random_qkv(256, 32, torch.float32))
    k, v = (x[:, :, ::64].repeat_interleave(64, 2) for x in (k, v))
    work = random_work(256, (16, 16), share=0.2)
    means = means_for(k, v, work, 64)
    out, _ = reference_attention(q, k, v, *work.tensors, tile=work.tile, scale=0.3, means=means)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, scale=0.3))


def test_means_err_less_than_leaving_out() -> None:
    q, k, v = clustered_qkv(1024, 64, torch.float32, pull=2.0)
    work = random_work(1024, (128, 16), share=0.3)
    dense = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    _, dropped = errors(truth(q, k, v, work, 0.125)[0], dense)
    means = means_for(k, v, work, 64)
    out, _ = gather_attention(q, k, v, *work.tensors, tile=work.tile, scale=0.125, means=means)
    _, approximated = errors(out, dense)
    assert approximated < 0.7 * dropped


@given(
    st.integers(1, 700),
    st.sampled_from(SIZES),
    st.floats(0, 1),
    st.integers(0, 2**30),
)
def test_counts_and_lists_make_all_tokens(
    tokens: int, sizes: tuple[int, int], share: float, seed: int
) -> None:
    keys, size = sizes
    work = random_work(tokens, (64, keys), share=share, seed=seed)
    counts = counts_of_lists(work.kv_count, work.kv_index, keys, tokens, size)
    groups = -(-tokens // size)
    assert counts.shape[-1] % 128 == 0
    assert not bool(counts[..., groups:].any())
    chunks = -(-tokens // keys)
    for g, count in enumerate(work.kv_count[0, 0].tolist()):
        listed = work.kv_index[0, 0, g, :count]
        there = count * keys - (chunks * keys - tokens) * int(bool((listed == chunks - 1).any()))
        assert int(counts[0, 0, g].sum()) == tokens - there


def test_a_mean_leaves_out_the_tokens_behind_the_video() -> None:
    x = torch.arange(10.0).view(1, 1, 10, 1)
    assert group_means(x, 4).flatten().tolist() == [1.5, 5.5, 8.5]
    assert group_means(x, 4, tokens=6).flatten().tolist() == [1.5, 4.5, 0.0]


# ---- every implementation that runs on a CPU ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 15, 129, 333])
def test_any_length_in_every_dtype(
    on_cpu: Callable[..., Any], tokens: int, dtype: torch.dtype
) -> None:
    check_with_means(on_cpu, *random_qkv(tokens, 64, dtype), random_work(tokens, (16, 16)), 64)


@pytest.mark.parametrize(("keys", "size"), SIZES)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_every_chunk_and_group(on_cpu: Callable[..., Any], dim: int, keys: int, size: int) -> None:
    q, k, v = clustered_qkv(300, dim, torch.float32, batch=2)
    check_with_means(on_cpu, q, k, v, random_work(300, (64, keys), batch=2), size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [[0], [1, 0], [21], [21, 0], [21, 21, 7, 0]], ids=str)
def test_ragged_lists(on_cpu: Callable[..., Any], counts: list[int], dtype: torch.dtype) -> None:
    q, k, v = random_qkv(333, 64, dtype)
    check_with_means(on_cpu, q, k, v, random_work(333, (16, 16), counts=counts), 64)


@pytest.mark.parametrize("tokens", [333, 336])
@pytest.mark.parametrize("means", [True, False])
@pytest.mark.parametrize("counts", [[5], [5, 1], [0], [19, 20], [21]], ids=str)
def test_a_short_call_goes_together_and_is_as_one_in_threads(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], means: bool, tokens: int
) -> None:
    # the last chunk lacks 3 of its 16 tokens, or none, where heads do not follow one another.
    q, k, v = clustered_qkv(tokens, 64, torch.float32, batch=2)
    if tokens % 16 == 0:
        k, v = (F.pad(x, (0, 0, 0, 16))[:, :, :tokens] for x in (k, v))
    work = random_work(tokens, (32, 16), batch=2, counts=counts)
    options: dict[str, Any] = {
        "tile": work.tile,
        "scale": 0.125,
        "means": means_for(k, v, work, 64) if means else None,
    }
    spans = []
    attend = torch_sdpa._attend_span

    def watched(call: Any, span: Any, pieces: Any) -> Any:
        spans.append(span)
        return attend(call, span, pieces)

    monkeypatch.setattr(torch_sdpa, "_attend_span", watched)
    together = gather_attention(q, k, v, *work.tensors, **options)
    apart_anyway = counts in ([5, 1], [21]) or (counts == [0] and not means)
    assert (len(spans) == 1) == (not apart_anyway)
    monkeypatch.setattr(torch_sdpa, "SHORT_BYTES", 0)
    spans.clear()
    apart = gather_attention(q, k, v, *work.tensors, **options)
    assert len(spans) >= 4
    for got, expected in zip(together, apart, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_8_bits(on_cpu: Callable[..., Any], kind: str) -> None:
    q, k, v = clustered_qkv(300, 64, torch.bfloat16, pull=2.0, mean=1.0)
    quantized = quantize_qk(q, k, kind, q_run=64)
    check_with_means(on_cpu, q, k, v, random_work(300, (64, 16)), 64, quantized=quantized)


@pytest.mark.parametrize("which", ["relative", "absolute"])
def test_a_gate_acts_on_listed_keys(on_cpu: Callable[..., Any], which: str) -> None:
    q, k, v = clustered_qkv(400, 64, torch.float32)
    work = in_order(random_work(400, (64, 64), share=0.7))
    gate = RelativeGate(-4.0) if which == "relative" else AbsoluteGate(torch.tensor(6.0), None)
    check_with_means(on_cpu, q, k, v, work, 64, gate=gate)
    # a gate that skips every pair leaves the means alone.
    never = AbsoluteGate(torch.tensor(torch.inf), None)
    means = means_for(k, v, work, 64)
    options = {"tile": work.tile, "scale": 0.125}
    out, _ = on_cpu(q, k, v, *work.tensors, **options, gate=never, means=means)
    nothing = replace(work, kv_count=torch.zeros_like(work.kv_count))
    alone, _ = on_cpu(q, k, v, *nothing.tensors, **options, means=means)
    torch.testing.assert_close(out, alone)


# ---- bad input ----


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = random_qkv(300, 64, torch.float32)
    work = random_work(300, (64, 16))
    call = partial(sparse_attention, q, k, v, *work.tensors, tile=work.tile)
    means = means_for(k, v, work, 64)
    for wrong, message in (
        (
            replace(means, size=48),
            "a multiple of the 16 keys of a chunk, and one of 32, 64, 128, got 48",
        ),
        (replace(means, size=32), "mean keys must be"),
        (replace(means, v=means.v.half()), "mean values must be"),
        (replace(means, counts=means.counts[..., :5]), "counts of means must be uint8"),
    ):
        with pytest.raises(ValueError, match=message):
            call(means=wrong)
    with pytest.raises(ValueError, match="a multiple of the 128 keys of a chunk"):
        sparse_attention(q, k, v, *random_work(300, (64, 128)).tensors, tile=(64, 128), means=means)


# ---- the plain kernels, interpreted or on a GPU ----


def cases() -> Iterator[Case]:
    def case(
        tokens: int,
        dim: int,
        keys: int,
        size: int,
        *,
        dtype: torch.dtype = torch.float16,
        counts: list[int] | None = None,
        kind: str | None = None,
        gate: Gate | None = None,
        low: float | None = None,
    ) -> Callable[[], None]:
        def body() -> None:
            q, k, v = clustered_qkv(tokens, dim, dtype, pull=2.0, mean=0.5)
            if low is not None:
                # a channel that all queries and keys share puts all scores there.
                q[..., 0], k[..., 0] = 8.0, low / 8 * dim**0.5
            work = random_work(tokens, (64, keys), counts=counts)
            if gate is not None:
                work = in_order(work)
            quantized = None if kind is None else quantize_qk(q, k, kind, q_run=64)
            check_with_means(triton_kernel(), q, k, v, work, size, gate=gate, quantized=quantized)

        return body

    for keys, size in ((1, 32), (8, 64), (16, 128), (64, 64), (128, 128)):
        yield f"of {size} N={keys}", case(300, 64, keys, size)
        yield f"of {size} N={keys} fp32", case(300, 96, keys, size, dtype=torch.float32)
    for lists, counts in LISTS.items():
        yield lists, case(300, 64, 16, 64, dtype=torch.float32, counts=counts)
    yield "int8", case(300, 128, 16, 64, kind="int8")
    yield "relative gate", case(400, 64, 64, 64, gate=RelativeGate(-4.0, 64, 64))
    yield "one token", case(1, 64, 16, 64)
    for low in (-20.0, -60.0):
        yield f"scores of {low:g}", case(300, 64, 16, 64, low=low)


@listed(cases(), only="cpu")
def test_the_plain_kernel_interpreted(body: Callable[[], None]) -> None:
    body()


@pytest.mark.parametrize(
    ("keys", "size"), [(1, 32), (1, 128), (8, 64), (16, 64), (64, 64), (128, 128)]
)
@pytest.mark.parametrize("tokens", [1, 127, 333, 4111])
def test_counts_by_kernel_are_those_of_the_lists(tokens: int, keys: int, size: int) -> None:
    from vidsparse.kernels.selection.plan import count_left_out

    chunks, groups = -(-tokens // keys), -(-tokens // size)
    listed = torch.rand(1, 2, 3, chunks, generator=torch.Generator().manual_seed(0)) < 0.5
    listed[:, :, 0], listed[:, :, 1] = True, False
    expected = counts_of_chunks(~listed, keys, tokens, size, groups)
    words = pack_bits(listed).to(DEVICE)
    got = count_left_out(words, keys, tokens, size, expected.shape[-1])
    assert torch.equal(got.cpu(), expected)
    # as a plan that came with more from another process.
    part = torch.cat([words + 1, words], -1)[..., words.shape[-1] :]
    got = count_left_out(part, keys, tokens, size, expected.shape[-1])
    assert torch.equal(got.cpu(), expected)


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
class TestOnGpu:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("dim", [64, 96, 128])
    @pytest.mark.parametrize(("keys", "size"), SIZES)
    def test_budget(
        self,
        kernel: Callable[..., Any],
        keys: int,
        size: int,
        dim: int,
        dtype: torch.dtype,
    ) -> None:
        for tokens, rows in ((129, 16), (1000, 128), (1024, 64)):
            q, k, v = (x.cuda() for x in clustered_qkv(tokens, dim, dtype, batch=2, pull=2.0))
            work = random_work(tokens, (rows, keys), batch=2, seed=rows).to("cuda")
            check_with_means(kernel, q, k, v, work, size)

    @pytest.mark.parametrize("counts", [[0], [1, 0], [19], [19, 7, 0], [0, 3, 19]], ids=str)
    @pytest.mark.parametrize("keys", [1, 16])
    def test_ragged_lists(self, kernel: Callable[..., Any], keys: int, counts: list[int]) -> None:
        q, k, v = (x.cuda() for x in random_qkv(300, 128, torch.bfloat16))
        work = random_work(300, (128, keys), counts=counts, longest_first=False).to("cuda")
        check_with_means(kernel, q, k, v, work, 64)

    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    @pytest.mark.parametrize(("keys", "size"), SIZES)
    def test_8_bits(self, kernel: Callable[..., Any], keys: int, size: int, kind: str) -> None:
        qkv = clustered_qkv(1000, 128, torch.bfloat16, pull=2.0, mean=1.0)
        q, k, v = (x.cuda() for x in qkv)
        work = random_work(1000, (64, keys)).to("cuda")
        quantized = quantize_qk(q, k, kind, q_run=64)
        check_with_means(kernel, q, k, v, work, size, quantized=quantized)

    @pytest.mark.parametrize("kind", [None, "int8"])
    @pytest.mark.parametrize("which", ["relative", "absolute"])
    def test_gates(self, kernel: Callable[..., Any], which: str, kind: str | None) -> None:
        q, k, v = (x.cuda() for x in clustered_qkv(1000, 128, torch.bfloat16))
        work = in_order(random_work(1000, (64, 64), share=0.7)).to("cuda")
        threshold = torch.tensor(6.0)
        gate = RelativeGate(-4.0) if which == "relative" else AbsoluteGate(threshold, None)
        quantized = None if kind is None else quantize_qk(q, k, kind, q_run=64)
        check_with_means(kernel, q, k, v, work, 64, gate=gate.to("cuda"), quantized=quantized)

    @pytest.mark.parametrize("seed", range(60))
    def test_any_plan(self, kernel: Callable[..., Any], seed: int) -> None:
        gen = random.Random(seed)
        tokens, dim = gen.randint(1, 1500), gen.choice([64, 96, 128])
        keys, size = gen.choice(SIZES)
        tile = gen.choice([16, 32, 64, 128]), keys
        batch, heads = gen.randint(1, 2), gen.randint(1, 3)
        qkv = random_qkv(tokens, dim, torch.bfloat16, batch=batch, heads=heads, seed=seed)
        share = gen.uniform(0, 0.8)
        work = random_work(tokens, tile, batch=batch, heads=heads, share=share, seed=seed)
        q, k, v = (x.cuda() for x in qkv)
        check_with_means(kernel, q, k, v, work.to("cuda"), size)

    @pytest.mark.parametrize("keys", [1, 16])
    def test_the_last_blocks_in_parts(self, monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
        from vidsparse.kernels.attention.hopper import launch

        skip_without("gluon")
        # two and three steps of means of 32 tokens.
        for tokens, cut in ((8192, (0, 2)), (8192, (5, 2)), (12000, (7, 3))):
            counts = [60, tokens // (2 * keys), 1, 0]
            q, k, v = (x.cuda() for x in random_qkv(tokens, 128, torch.bfloat16, heads=1))
            work = random_work(tokens, (128, keys), heads=1, counts=counts).to("cuda")
            means = means_for(k, v, work, 32)
            options = {"tile": work.tile, "scale": 128**-0.5, "means": means}
            run = partial(launch.gluon_attention, q, k, v, *work.tensors, **options)
            monkeypatch.setattr(launch, "split_tail", lambda blocks, *_: (blocks, 1))
            out, lse = run()
            monkeypatch.setattr(launch, "split_tail", lambda *_, cut=cut: cut)
            joined, joined_lse = run()
            unit = 2 * torch.finfo(q.dtype).eps * float(v.abs().max())
            torch.testing.assert_close(joined, out, rtol=0, atol=unit)
            torch.testing.assert_close(joined_lse, lse, rtol=0, atol=1e-4)

    def test_lists_without_a_gate_or_means_are_as_they_were(
        self, kernel: Callable[..., Any]
    ) -> None:
        q, k, v = (x.cuda() for x in random_qkv(1000, 128, torch.bfloat16))
        work = random_work(1000, (128, 16), counts=[63]).to("cuda")
        means = means_for(k, v, work, 64)
        options = {"tile": work.tile, "scale": 128**-0.5}
        plain = kernel(q, k, v, *work.tensors, **options)
        got = kernel(q, k, v, *work.tensors, **options, means=means)
        for a, b in zip(plain, got, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-3)
