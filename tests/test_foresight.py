"""Foresight: which chunks it lists, and what becomes of the others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from budget import clustered_qkv, random_qkv
from foresight_cases import cases
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE, listed
from torch import Tensor

from vidsparse import OptionError, TokenGrid, attend, make_method
from vidsparse.apps.bench.attention_cases import structured_qk
from vidsparse.engine import AttentionEngine
from vidsparse.kernels.attention.means import KeyMeans, counts_of_lists, group_means
from vidsparse.kernels.attention.reference import reference_attention
from vidsparse.kernels.attention.torch_sdpa import gather_attention
from vidsparse.methods import Foresight, SparseMethod
from vidsparse.order import token_order
from vidsparse.plan import plan_of_blocks
from vidsparse.planning import key_means, plan_attention
from vidsparse.residual import error_of_means
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

pytestmark = pytest.mark.usefixtures("one_thread")


def site(grid: TokenGrid) -> CallSite:
    return CallSite(0, 0, 0.0, grid)


def structured(grid: TokenGrid, *, heads: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    device = torch.device("cpu")
    q, k = structured_qk(grid, heads, 64, torch.float32, device)
    _, v = structured_qk(grid, heads, 64, torch.float32, device)
    return q, k, v


# ---- the score ----


@pytest.mark.parametrize("factor", [0.1, 5.0], ids=["even", "sharp"])
def test_the_score_is_the_formula_written_out(factor: float) -> None:
    q, k, v = (x.double() for x in clustered_qkv(71, 8, torch.float32, heads=1, pull=2.0))
    q = factor * q
    score = error_of_means(q, k, v, (32, 16), 16)
    q, k, v = q[0, 0], k[0, 0], v[0, 0]
    tiles, chunks = q.split(16), list(zip(k.split(16), v.split(16), strict=True))
    groups = list(zip(k.split(64), v.split(64), strict=True))
    expected, tails = torch.zeros(3, 5, dtype=torch.float64), 0
    for t, rows in enumerate(tiles):
        mean, square = rows.mean(0), rows.mean(0) ** 2 + rows.var(0, correction=0)

        def of_keys(
            keys: Tensor, mean: Tensor = mean, square: Tensor = square
        ) -> tuple[Tensor, float, float, bool]:
            spread = float(square @ keys.var(0, correction=0)) / 8
            most = 2 * math.log(len(keys))
            tail = spread >= most
            gained = (spread * most) ** 0.5 - most / 2 if tail else spread / 2
            logit = mean @ keys.mean(0) / 8**0.5 + math.log(len(keys)) + gained
            return logit, gained, spread, tail

        logits = torch.stack([of_keys(keys)[0] for keys, _ in groups])
        whole, shares = logits.exp().sum(), logits.softmax(0)
        out = sum(p * values.mean(0) for p, (_, values) in zip(shares, groups, strict=True))
        for j, (keys, values) in enumerate(chunks):
            n = len(keys)
            logit, gained, spread, tail = of_keys(keys)
            tails += tail
            inside = (min(math.exp(spread), n) - 1) / n * values.var(0, correction=0).sum()
            away = ((values.mean(0) - out) ** 2).sum()
            missed = (1 - math.exp(-gained)) ** 2 * away
            share = (logit.exp() / whole).clamp_max(1)
            expected[t // 2, j] += len(rows) * share**2 * (inside + missed)
    torch.testing.assert_close(score[0, 0], expected)
    # one of the two is all about tails.
    assert tails > 10 if factor > 1 else tails == 0


@pytest.mark.parametrize("tokens", [1024, 1041])
def test_a_chunk_that_stands_far_out_of_its_group_has_a_finite_score(tokens: int) -> None:
    # the last chunk of the longer one is a single key, whose mean loses nothing.
    q, k, v = random_qkv(tokens, 64, torch.float32, heads=1)
    q[..., 0], k[..., 0], k[:, :, -17:, 0] = 8.0, 0.0, 80.0
    score = error_of_means(q, k, v, (128, 16))
    assert bool(score.isfinite().all())
    assert bool((score[..., -2:].amax(-1) >= score[..., :-2].amax(-1)).all())


def test_the_score_of_a_long_sequence_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = clustered_qkv(333, 16, torch.float32, batch=2, pull=2.0)
    whole = error_of_means(q, k, v, (32, 16))
    monkeypatch.setattr("vidsparse.residual._AT_ONCE", 1)
    torch.testing.assert_close(error_of_means(q, k, v, (32, 16)), whole)


def test_a_chunk_whose_logits_spread_is_not_taken_for_one_that_rows_attend_to() -> None:
    # logits of sharp heads spread by dozens: normal numbers would have a tail that outweighs every
    # other chunk, and sixteen keys have none.
    torch.manual_seed(0)
    logits = torch.tensor([40**0.5, -(40**0.5)]).repeat(40, 8)
    attended = torch.randperm(40)[:10]
    logits[attended] = 18 + torch.randn(10, 16)
    k, v = torch.zeros(1, 1, 640, 4), torch.randn(1, 1, 640, 4)
    k[0, 0, :, 0] = logits.flatten()
    q = torch.zeros_like(k)
    q[..., 0] = 2.0
    score = error_of_means(q, k, v, (128, 16))
    of_chunks = (q @ k.mT / 2).softmax(-1).unflatten(-1, (-1, 16)).sum((0, 1, 2, 4)) / 640
    assert float(of_chunks[attended].sum()) > 0.9
    for found in score[0, 0].topk(10).indices:
        assert sorted(found.tolist()) == sorted(attended.tolist())


def test_chunks_of_one_key_repeated_need_no_exact_attention() -> None:
    q, k, v = random_qkv(256, 32, torch.float32)
    # every chunk but the fifth is one token, sixteen times: its mean is exact.
    keys, values = (x[:, :, ::16].repeat_interleave(16, 2) for x in (k, v))
    for x, own in ((keys, k), (values, v)):
        x[:, :, 80:96] = own[:, :, 80:96]
    score = error_of_means(q, keys, values, (128, 16))
    assert bool((score.argmax(-1) == 5).all())
    assert bool((score.sort(-1).values[..., -2] < 1e-6 * score.amax(-1)).all())


# ---- the choice ----


@given(
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 40),
    st.floats(0.02, 1),
    st.sampled_from((32, 64, 128)),
    st.sampled_from(("dense", "sparse")),
    st.integers(0, 1000),
)
def test_every_block_lists_the_same_number_and_text_everything_unless_it_chooses(
    frames: int,
    height: int,
    width: int,
    text: int,
    share: float,
    rows: int,
    text_rows: str,
    seed: int,
) -> None:
    grid = TokenGrid(frames, height, width, text=text)
    q, k, v = random_qkv(grid.tokens, 16, torch.float32, seed=seed)
    method = Foresight(share=share, tile=(rows, 16), text_rows=text_rows)
    plan = plan_attention(method, q, k, site(grid), v=v)
    assert plan.block_rows == rows
    chunks = -(-grid.tokens // 16)
    of_video = grid.video // 16 if text else chunks
    full = plan.q_tiles[..., 0] < 0
    if text and text_rows == "dense":
        full = (plan.q_tiles[..., 0] + 1) * rows > grid.video
    assert bool((plan.kv_count[full] == chunks).all())
    listed = min(of_video, max(1, round(share * of_video)))
    assert bool((plan.kv_count[~full] == listed + chunks - of_video).all())


def test_rows_that_are_judged_as_one_follow_the_length() -> None:
    assert [Foresight().rows_for(n) for n in (500, 40_000, 40_001, 75_600)] == [16, 16, 32, 32]
    assert Foresight(rows=64).rows_for(500) == 64
    assert Foresight(tile=(16, 16)).rows_for(75600) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0}, r"share must lie in \(0, 1\]"),
        ({"rows": 24}, "rows must divide the tile's 128 rows, got 24.* 16, 32, 64, 128"),
        ({"rows": 64, "tile": (32, 16)}, "rows must divide the tile's 32 rows.* 16, 32"),
        ({"means": 48}, "means must be a multiple of the tile's 16 keys, got 48"),
        ({"text_rows": "full"}, "text_rows must be one of dense, sparse, got 'full'"),
        ({"means": 64, "tile": (128, 128)}, "Hint: choose from 128, none"),
        ({"top_p": 0.5}, "foresight has no option 'top_p'"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_method("foresight", **options)


def test_without_values_it_cannot_choose() -> None:
    q, k, _ = random_qkv(64, 16, torch.float32)
    with pytest.raises(OptionError, match="foresight needs values"):
        Foresight().select(q, k, site(TokenGrid(1, 8, 8)))


# ---- the output ----


@pytest.mark.parametrize(("text", "text_rows"), [(0, "dense"), (20, "dense"), (20, "sparse")])
def test_the_output_is_the_plan_with_means(text: int, text_rows: str) -> None:
    grid = TokenGrid(3, 12, 12, text=text)
    method = Foresight(share=0.2, text_rows=text_rows)
    q, k, v = structured(TokenGrid(1, 1, grid.tokens))
    out = attend(q, k, v, grid, method)
    order = token_order("hilbert", grid)
    q, k, v = (order.apply(x).double() for x in (q, k, v))
    plan = plan_attention(method, q, k, site(grid), v=v)
    index = plan.kv_index
    means = KeyMeans(
        group_means(k, 64, tokens=grid.video),
        group_means(v, 64, tokens=grid.video),
        counts_of_lists(plan.kv_count, index, 16, grid.tokens, 64),
        64,
    )
    expected, _ = reference_attention(
        q, k, v, plan.q_tiles, plan.kv_count, index, tile=(128, 16), scale=64**-0.5, means=means
    )
    torch.testing.assert_close(order.apply(out).double(), expected, rtol=1e-4, atol=1e-4)


def test_text_is_exact() -> None:
    grid = TokenGrid(3, 12, 12, text=20)
    q, k, v = structured(TokenGrid(1, 1, grid.tokens))
    out = attend(q, k, v, grid, "foresight", share=0.1)
    dense = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out[:, :, -20:], dense[:, :, -20:], rtol=1e-4, atol=1e-5)


def test_text_that_chooses_its_keys_is_as_near_as_the_video() -> None:
    grid = TokenGrid(3, 12, 12, text=60)
    q, k, v = structured(TokenGrid(1, 1, grid.tokens))
    dense = F.scaled_dot_product_attention(q, k, v)
    out = attend(q, k, v, grid, Foresight(share=0.2, tile=(32, 16), text_rows="sparse"))

    def error(part: slice) -> float:
        return float((out - dense)[:, :, part].norm() / dense[:, :, part].norm())

    video, text = error(slice(0, grid.video)), error(slice(grid.video, None))
    assert 0 < text < 1.5 * video


def test_a_share_of_one_is_dense_attention() -> None:
    grid = TokenGrid(3, 9, 9)
    q, k, v = structured(grid)
    out = attend(q, k, v, grid, "foresight", share=1)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), rtol=1e-4, atol=1e-5)


def test_it_errs_less_than_top_p_at_the_same_work() -> None:
    grid = TokenGrid(6, 16, 16)
    q, k, v = structured(grid, heads=4)
    dense = F.scaled_dot_product_attention(q, k, v)

    def run(name: str, **options: object) -> tuple[float, float]:
        engine = AttentionEngine(
            make_method(name, **options), schedule=Schedule(dense_steps=0), layers=1
        )
        engine.begin_run(1)
        out = engine.attend(q, k, v, site(grid))
        computed = engine.trace.cells[0].computed
        assert computed is not None
        return float((out - dense).norm() / dense.norm()), float(computed.mean())

    error, work = run("foresight", share=0.2)
    dropped, more = run("fg-attn", top_p=0.4, means=None)
    assert more > work
    assert error < 0.75 * dropped


def test_a_reused_plan_gets_means_of_its_own_step() -> None:
    grid = TokenGrid(3, 12, 12)
    first, second = structured(grid), structured(grid, seed=1)
    engine = AttentionEngine(
        Foresight(share=0.2), schedule=Schedule(dense_steps=0, reuse=2), layers=1
    )
    engine.begin_run(2)
    engine.attend(*first, site(grid))
    out = engine.attend(*second, CallSite(0, 1, 0.5, grid))
    assert [cell.action for cell in engine.trace.cells] == ["replan", "reuse"]
    dense = F.scaled_dot_product_attention(*second)
    # chosen for other keys, and still far better than means of those would be.
    assert float((out - dense).norm()) < 0.6 * float(dense.norm())


# ---- its kernels, interpreted or on a GPU ----


@pytest.mark.parametrize(("block", "rows"), [(128, 16), (128, 128), (32, 16), (64, 32)])
@pytest.mark.parametrize(("text", "text_rows"), [(0, "dense"), (30, "dense"), (30, "sparse")])
def test_what_kernels_choose_is_as_good(text: int, text_rows: str, block: int, rows: int) -> None:
    # of tokens whose neighbours in order are not alike.
    grid = TokenGrid(3, 16, 16, text=text)
    q, k, v = (x.to(DEVICE) for x in structured(TokenGrid(1, 1, grid.tokens)))
    order = token_order("hilbert", grid, DEVICE)
    tile = (block, 16)
    method = Foresight(share=0.2, rows=rows, tile=tile, text_rows=text_rows)
    chosen = method.choose_blocks(q, k, v, site(grid), order)
    ordered = [order.apply(x) for x in (q, k, v)]
    for got, expected in zip((chosen.q, chosen.k, chosen.v), ordered, strict=True):
        assert torch.equal(got, expected)
    q, k, v = (x.cpu() for x in ordered)
    dense = F.scaled_dot_product_attention(q, k, v)
    errors, shares = [], []
    for plan in (
        plan_of_blocks(chosen.words.cpu(), chosen.count.cpu(), tile, grid.tokens),
        plan_attention(method, q, k, site(grid), v=v),
    ):
        shares.append(plan.computed)
        counts = plan.left_out(64, by_kernel=False)
        means = key_means(k, v, counts, 64, grid.video, by_kernel=False)
        out, _ = gather_attention(
            q,
            k,
            v,
            plan.q_tiles,
            plan.kv_count,
            plan.kv_index,
            tile=tile,
            scale=64**-0.5,
            means=means,
        )
        errors.append(float((out - dense).norm() / dense.norm()))
    assert errors[0] == pytest.approx(errors[1], rel=0.05)
    # equal numbers of chunks, of which the last is short and may be in either's lists.
    torch.testing.assert_close(*shares, rtol=0.01, atol=0)


@listed(cases(), quick=8)
def test_kernels(body: Callable[[], None]) -> None:
    body()


def test_blocks_that_hold_text_stand_first() -> None:
    words = torch.full((1, 2, 3, 1), 0b11, dtype=torch.int32)
    words[:, :, 2] = 0b11111
    count = torch.tensor([2, 2, 5], dtype=torch.int32).expand(1, 2, 3)
    plan = plan_of_blocks(words, count, (128, 64), 300)
    assert plan.q_tiles.flatten(2).tolist() == [[[2, 1, 0]] * 2]
    assert plan.kv_count.tolist() == [[[5, 2, 2]] * 2]
    assert plan.kv_bits.flatten(2).tolist() == [[[31, 3, 3]] * 2]
    # 2 x 128 rows of 128 keys, and 44 rows of all.
    assert plan.computed.flatten().tolist() == pytest.approx([(256 * 128 + 44 * 300) / 90000] * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("text", [0, 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_it_chooses_as_on_a_cpu(dtype: torch.dtype, text: int) -> None:
    grid = TokenGrid(5, 20, 20, text=text)
    q, k, v = (x.to(dtype) for x in structured(TokenGrid(1, 1, grid.tokens)))
    dense = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    errors = []
    for device in ("cpu", "cuda"):
        there = [x.to(device) for x in (q, k, v)]
        out = attend(there[0], there[1], there[2], grid, "foresight", share=0.2)
        errors.append(float((out.cpu().float() - dense).norm() / dense.norm()))
    assert errors[1] == pytest.approx(errors[0], rel=0.05)


# ---- the same score in another method ----


@pytest.mark.parametrize("topk", [0.1, 0.3])
def test_by_the_residual_score_top_k_keeps_the_tiles_whose_mean_would_err_most(topk: float) -> None:
    grid = TokenGrid(3, 9, 9)
    q, k, v = structured(grid)
    method = make_method("fg-attn", topk=topk, score="residual", tile=(32, 16))
    assert isinstance(method, SparseMethod)
    kept = method.select(q, k, site(grid), v=v)
    errors = error_of_means(q, k, v, (32, 16))
    assert bool((kept.sum(-1) == math.ceil(topk * errors.shape[-1])).all())
    least_kept = errors.masked_fill(~kept, torch.inf).amin(-1)
    assert bool((least_kept >= errors.masked_fill(kept, -torch.inf).amax(-1)).all())


def test_by_the_residual_score_top_p_leaves_no_more_than_the_rest_of_the_error() -> None:
    grid = TokenGrid(3, 9, 9)
    q, k, v = structured(grid)
    method = make_method("fg-attn", top_p=0.8, score="residual", tile=(32, 16))
    assert isinstance(method, SparseMethod)
    kept = method.select(q, k, site(grid), v=v)
    errors = error_of_means(q, k, v, (32, 16))
    held = (errors * kept).sum(-1) / errors.sum(-1)
    assert float(held.min()) >= 0.8 - 1e-5
    # the smallest set: without its least tile it would hold less.
    least = errors.masked_fill(~kept, torch.inf).amin(-1) / errors.sum(-1)
    assert bool((held - least < 0.8 + 1e-5).all())


def test_an_unknown_score_is_refused() -> None:
    with pytest.raises(OptionError, match=r"unknown score 'error'.*mass, residual"):
        make_method("fg-attn", score="error")
