"""NaN and infinities show in the rows that saw them, and in no other; huge scores are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from budget import Kernel, random_qkv, random_work
from kernel_cases import DEVICE, Case, listed, triton_kernel
from torch import Tensor

from vidsparse.kernels import AbsoluteGate, RelativeGate, quantize_qk, sparse_attention
from vidsparse.kernels.attention import with_lse
from vidsparse.kernels.attention.means import KeyMeans, counts_of_lists, group_means
from vidsparse.kernels.attention.reference import reference_attention
from vidsparse.kernels.attention.torch_sdpa import gather_attention

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("one_thread", "poisoned_empty")]

TOKENS, DIM = 333, 64
NAN, INF = float("nan"), float("inf")
# chunk 0, which lists are padded with, one in the middle, and the last token of a short chunk.
PLACES = [3, 150, 332]
ON_A_CPU = {"torch": gather_attention, "reference": reference_attention}
TILES = [(16, 16), (64, 1), (128, 64)]


@pytest.fixture(params=[*ON_A_CPU, "torch without flash"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    if request.param == "torch without flash":
        monkeypatch.setattr(with_lse, "has_flash", lambda device: False)
        return gather_attention
    return ON_A_CPU[request.param]


def rows_that_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention in fp64, each row over its own keys alone; zeros without any."""
    q, k, v = (x.double() for x in (q, k, v))
    out = torch.zeros_like(q)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        keys = mask[b, h, i].nonzero().flatten()
        if len(keys):
            weights = (k[b, h, keys] @ q[b, h, i] * scale).softmax(0)
            out[b, h, i] = weights @ v[b, h, keys]
    return out


def poison(x: Tensor, token: int, number: float, *, whole: bool = False) -> Tensor:
    """``x`` with ``number`` in one channel, or all of them, of a token of the first head."""
    x = x.clone()
    x[0, 0, token, slice(None) if whole else 5] = number
    return x


def check(
    kernel: Kernel,
    dtype: torch.dtype,
    tile: tuple[int, int],
    operand: str,
    number: float,
    token: int,
    *,
    roundings: float = 0.0,
    **options: Any,
) -> None:
    """Exactly the rows that saw ``number`` show it, all others are as they were without it.

    Up to roundings: Triton's kernel attends such a block again, with running maxima, and in 8 bits
    the keys' mean is another.
    """
    q, k, v = (x.to(DEVICE) for x in random_qkv(TOKENS, DIM, dtype))
    # of one sign, so that an infinite query or key gives scores of inf, not of -inf.
    q[..., 5], k[..., 5] = q[..., 5].abs() + 0.5, k[..., 5].abs() + 0.5
    work = random_work(TOKENS, tile, counts=[-(-TOKENS // tile[1]), 2, 1, 0])
    mask = work.mask()
    call = partial(kernel, tile=work.tile, scale=DIM**-0.5, **options)
    tables = work.to(DEVICE).tensors
    clean, clean_lse = call(q, k, v, *tables)
    bad = {"q": q, "k": k, "v": v}
    bad[operand] = poison(bad[operand], token, number)
    out, lse = call(*bad.values(), *tables)
    if operand == "q":
        saw = torch.zeros_like(mask[..., 0])
        saw[0, 0, token] = mask[0, 0, token].any()
    else:
        saw = mask[..., token].clone()
        saw[:, 1:] = False
    assert operand == "q" or 0 < int(saw.sum()) < TOKENS
    saw = saw.to(DEVICE)
    shown = ~out.isfinite()
    assert torch.equal(shown.any(-1), saw)
    if operand == "v":
        assert torch.equal(shown[..., 5], saw)
        assert not bool(shown[..., :5].any())
        torch.testing.assert_close(lse, clean_lse, rtol=0, atol=1e-5)
    else:
        assert bool(shown[saw].all())
        torch.testing.assert_close(lse[~saw], clean_lse[~saw], rtol=0, atol=1e-5 + roundings)
        # -inf would say that a row has no keys.
        assert bool((lse[saw].isnan() | (lse[saw] == INF)).all())
    unit = 4 * torch.finfo(dtype).eps * float(v.abs().max())
    torch.testing.assert_close(out[~saw], clean[~saw], rtol=0, atol=unit + roundings)


# ---- on a CPU ----


@pytest.mark.parametrize("token", PLACES)
@pytest.mark.parametrize("number", [NAN, INF])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_what_is_not_finite_shows_in_exactly_the_rows_that_saw_it(
    kernel: Kernel, tile: tuple[int, int], operand: str, number: float, token: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(kernel, dtype, tile, operand, number, token)


@pytest.mark.parametrize("token", PLACES)
@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_infinities_of_either_sign_do_what_a_softmax_of_the_row_does(
    kernel: Kernel, number: float, token: int
) -> None:
    # an infinite key is nothing where its score is -inf, as in stock attention.
    q, k, v = random_qkv(TOKENS, DIM, torch.float32)
    work = random_work(TOKENS, (16, 16), counts=[21, 5, 2, 0])
    for operand in "qkv":
        bad = {"q": q, "k": k, "v": v}
        bad[operand] = poison(bad[operand], token, number)
        out, _ = kernel(*bad.values(), *work.tensors, tile=work.tile, scale=0.125)
        true = rows_that_attend(bad["q"], bad["k"], bad["v"], work.mask(), 0.125)
        assert torch.equal(out.isfinite(), true.isfinite())
        there = true.isfinite()
        torch.testing.assert_close(out[there].double(), true[there], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gate", ["relative", "absolute"])
@pytest.mark.parametrize("operand", ["q", "k"])
@pytest.mark.parametrize("name", list(ON_A_CPU))
def test_a_gate_does_not_skip_what_is_not_a_number(name: str, operand: str, gate: str) -> None:
    made = {
        "relative": RelativeGate(-8.0, rows=32),
        "absolute": AbsoluteGate(torch.tensor(-2.0), rows=32),
    }[gate]
    for token in PLACES:
        check(ON_A_CPU[name], torch.float32, (16, 16), operand, NAN, token, gate=made)


@pytest.mark.parametrize("operand", ["k", "v"])
@pytest.mark.parametrize("name", list(ON_A_CPU))
def test_a_mean_that_is_not_a_number_shows_where_it_stands_for_tokens(
    name: str, operand: str
) -> None:
    q, k, v = random_qkv(TOKENS, DIM, torch.float32)
    work = random_work(TOKENS, (16, 16), counts=[21, 17, 9])
    counts = counts_of_lists(work.kv_count, work.kv_index, 16, TOKENS, 32)
    means = KeyMeans(group_means(k, 32), group_means(v, 32), counts, 32)
    call = partial(ON_A_CPU[name], q, k, v, *work.tensors, tile=work.tile, scale=0.125)
    clean, _ = call(means=means)
    # listed in full by some blocks, and not by others.
    by_some = (counts[0, 0] > 0).any(0) & (counts[0, 0] == 0).any(0)
    group = int(by_some[: means.groups].nonzero()[0])
    broken = poison(getattr(means, operand), group, NAN)
    changed = replace(means, k=broken) if operand == "k" else replace(means, v=broken)
    out, _ = call(means=changed)
    stands = torch.zeros(1, 2, TOKENS, dtype=torch.bool)
    for g in range(work.q_tiles.shape[2]):
        for tile in work.q_tiles[0, 0, g].tolist():
            if tile >= 0:
                stands[0, 0, tile * 16 : tile * 16 + 16] = bool(counts[0, 0, g, group])
    assert 0 < int(stands.sum()) < TOKENS
    assert torch.equal((~out.isfinite()).any(-1), stands)
    assert torch.equal(out[~stands], clean[~stands])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_huge_equal_scores_are_averaged(kernel: Kernel, dtype: torch.dtype) -> None:
    _, _, v = random_qkv(TOKENS, DIM, dtype)
    q = k = torch.full((1, 2, TOKENS, DIM), 1e9, dtype=dtype)
    work = random_work(TOKENS, (16, 16))
    out, lse = kernel(q, k, v, *work.tensors, tile=work.tile, scale=1.0)
    mask = work.mask().to(dtype)
    torch.testing.assert_close(out, (mask @ v) / mask.sum(-1, keepdim=True), rtol=0, atol=1e-5)
    assert bool(lse.isfinite().all())


# ---- 8 bits ----


def in_8_bits(name: str, kind: str) -> Kernel:
    return partial(sparse_attention, implementation=name, chosen=True, quantize=kind)


@pytest.mark.parametrize("token", PLACES)
@pytest.mark.parametrize("number", [NAN, INF])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", list(ON_A_CPU))
def test_8_bits_show_what_is_not_finite_in_the_rows_that_saw_it(
    name: str, tile: tuple[int, int], operand: str, number: float, token: int
) -> None:
    for kind in ("int8", "fp8"):
        check(in_8_bits(name, kind), torch.float32, tile, operand, number, token, roundings=5e-2)


def test_a_scale_and_a_mean_are_of_what_is_finite() -> None:
    q, k, _ = random_qkv(TOKENS, DIM, torch.float32)
    clean = quantize_qk(q, poison(k, 150, 0.0), "int8")
    for number in (NAN, INF, -INF):
        made = quantize_qk(q, poison(k, 150, number), "int8")
        torch.testing.assert_close(made.mean, clean.mean)
        lost = torch.zeros_like(made.k_scale, dtype=torch.bool)
        lost[0, 0, 150 // 64] = True
        assert torch.equal(made.k_scale.isnan(), lost)
        torch.testing.assert_close(made.k_scale[~lost], clean.k_scale[~lost])
        assert bool(made.shift.isfinite().all())


# ---- Triton's kernel ----


def triton_cases() -> Iterator[Case]:
    def case(*args: Any, kernel: Kernel | None = None, **options: Any) -> Callable[[], None]:
        return lambda: check(kernel or triton_kernel(), *args, **options)

    for dtype in (torch.float16, torch.float32 if DEVICE == "cpu" else torch.bfloat16):
        for operand in "kqv":
            for number in (NAN, INF):
                for token in PLACES:
                    yield (
                        f"{number} in {operand} {token} {dtype}",
                        case(dtype, (64, 16), operand, number, token),
                    )
        for operand in "kq":
            for gate in (RelativeGate(-8.0), AbsoluteGate(torch.tensor(-2.0), rows=64)):
                yield (
                    f"{gate.__class__.__name__} {operand} {dtype}",
                    case(dtype, (64, 16), operand, NAN, 150, gate=gate),
                )

    for operand in "kqv":
        for tile in ((64, 16), (128, 64)):
            yield (
                f"int8 {operand} {tile}",
                case(
                    torch.float16,
                    tile,
                    operand,
                    NAN if tile[1] == 16 else INF,
                    150,
                    kernel=in_8_bits("triton", "int8"),
                    roundings=5e-2,
                ),
            )


@listed(triton_cases(), quick=6)
def test_triton_shows_what_is_not_finite_in_the_rows_that_saw_it(
    body: Callable[[], None],
) -> None:
    body()
