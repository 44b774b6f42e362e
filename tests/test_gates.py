"""Gates: what the papers' algorithms skip, step by step, and what the CPU kernels skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from budget import (
    Work,
    allowed,
    check_lse,
    clustered_qkv,
    errors,
    in_order,
    random_qkv,
    random_work,
    stock,
    truth,
)
from quick import slow_but
from torch import Tensor

from vidsparse.kernels import AbsoluteGate, RelativeGate, quantize_qk, sparse_attention
from vidsparse.kernels.attention.gates import Gate, kept_pieces, skipped_pairs
from vidsparse.kernels.attention.reference import reference_attention
from vidsparse.kernels.attention.torch_sdpa import gather_attention

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned_empty")

KERNELS = {"torch": gather_attention, "reference": reference_attention}


def step_by_step(
    q: Tensor, k: Tensor, v: Tensor, work: Work, gate: Gate, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """SpargeAttn's and BSFA's algorithm 1 in loops: output, log-sum-exp, skipped pairs of blocks.

    One piece after the other with a running maximum, sum and output, as a kernel would; rows of a
    piece decide together.
    """
    rows, keys = work.tile
    tokens, dim = q.shape[2:]
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=q.dtype)
    skipped = torch.zeros_like(work.kv_count)
    thresholds = gate.thresholds(q, -(-tokens // rows)).double()
    for b, h, g in torch.cartesian_prod(*(torch.arange(n) for n in work.kv_count.shape)).tolist():
        tiles = work.q_tiles[b, h, g].tolist()
        members = [t * rows + i if t >= 0 else tokens for t in tiles for i in range(rows)]
        chunks = work.kv_index[b, h, g, : work.kv_count[b, h, g]].tolist()
        run = [t for c in chunks for t in range(c * keys, min(tokens, (c + 1) * keys))]
        places = list(range(0, len(run), gate.keys))
        last_group = (len(run) - 1) // 128 * 128
        order = [p for p in places if p >= last_group] + [p for p in places if p < last_group]
        for first in range(0, len(members), gate.rows):
            alive = [i for i in members[first : first + gate.rows] if i < tokens]
            if not alive:
                continue
            maximum = torch.full((len(alive),), -torch.inf, dtype=q.dtype)
            total = torch.zeros(len(alive), dtype=q.dtype)
            result = torch.zeros(len(alive), dim, dtype=q.dtype)
            limit = thresholds[b, h, [i // rows for i in alive]]
            for place in order:
                piece = run[place : place + gate.keys]
                scores = q[b, h, alive] @ k[b, h, piece].T * scale
                local = scores.amax(1)
                larger = torch.maximum(maximum, local)
                if isinstance(gate, RelativeGate):
                    skip = bool(((local - larger) < limit).all())
                else:
                    skip = bool((local < limit).all())
                    if gate.keep is not None:
                        listed = range(place // keys, -(-(place + len(piece)) // keys))
                        skip &= not any(bool(gate.keep[b, h, g, c]) for c in listed)
                if skip:
                    skipped[b, h, g] += len(alive) * len(piece)
                    if isinstance(gate, AbsoluteGate):
                        continue
                weights = (scores - larger[:, None]).exp()
                shrink = (maximum - larger).exp()
                total = total * shrink + weights.sum(1)
                result = result * shrink[:, None]
                if not skip:
                    result = result + weights @ v[b, h, piece]
                maximum = larger
            some = total > 0
            out[b, h, alive] = torch.where(some[:, None], result / total[:, None], 0)
            lse[b, h, alive] = maximum + total.log()
    return out, lse, skipped


def marks(work: Work) -> Tensor:
    """Marks on about a fifth of all pieces of 64 keys."""
    gen = torch.Generator().manual_seed(5)
    return torch.rand(work.kv_index.shape, generator=gen) < 0.2 * min(1, work.tile[1] / 64)


def tile_thresholds(work: Work) -> Tensor:
    """Thresholds between what a query gives its own run of tokens and what it gives others."""
    gen = torch.Generator().manual_seed(6)
    batch, heads = work.kv_count.shape[:2]
    return torch.rand(batch, heads, -(-work.tokens // work.tile[0]), generator=gen) * 3 + 6


TILES = [(128, 64), (64, 16), (16, 128), (32, 1), (32, 32)]
PIECES = [
    (32, 64), pytest.param(64, 64, marks=pytest.mark.slow),
    pytest.param(128, 64, marks=pytest.mark.slow), (64, 128),
    pytest.param(128, 128, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.fixture(params=list(KERNELS))
def kernel(request: pytest.FixtureRequest) -> Any:
    return KERNELS[request.param]


def both_gates(work: Work, rows: int, keys: int) -> list[Gate]:
    return [
        RelativeGate(-4.0, rows, keys),
        RelativeGate(torch.tensor([-2.0, -6.0]), rows, keys),
        AbsoluteGate(torch.tensor(6.0), None, rows, keys),
        AbsoluteGate(tile_thresholds(work), marks(work), rows, keys),
    ]


@pytest.mark.parametrize(("rows", "keys"), PIECES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_pieces_that_the_papers_skip(
    kernel: Any, tile: tuple[int, int], rows: int, keys: int
) -> None:
    # the last group of keys is short where a list ends with the sequence, and full elsewhere.
    tokens = 700
    q, k, v = (x.double() for x in clustered_qkv(tokens, 64, torch.float32))
    # every other token would mix all runs of tokens in every piece.
    counts = [tokens] if tile[1] == 1 else None
    work = in_order(random_work(tokens, tile, share=0.7, counts=counts, seed=3))
    saw = []
    for gate in both_gates(work, rows, keys):
        skipped = torch.full_like(work.kv_count, -1)
        out, lse = kernel(
            q, k, v, *work.tensors, tile=tile, scale=0.125, gate=gate, skipped=skipped
        )
        expected, expected_lse, expected_skipped = step_by_step(q, k, v, work, gate, 0.125)
        assert torch.equal(skipped, expected_skipped)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
        saw.append(int(skipped.sum()))
    # the test would mean little if all or nothing were skipped.
    assert 0 < max(saw[:2]) < int(work.mask().sum())
    assert 0 < max(saw[2:]) < int(work.mask().sum())


def test_pieces_written_out_by_hand() -> None:
    # one block of two groups of 32 rows, 300 listed keys: pieces 0 to 4, the last of 44; visits go
    # 4 (of the group 256..299), then 0, 1, 2, 3.
    scores = torch.zeros(1, 64, 300)
    scores[..., :64] = -9.0
    scores[..., 64:128] = 2.0
    scores[..., 128:192] = -3.0
    scores[..., 192:256] = -20.0
    scores[..., 256:] = -5.0
    # row 40 sees one high score, so its group computes piece 3.
    scores[0, 40, 200] = 1.0
    # a row without a token would say otherwise, and is not asked.
    scores[0, 3, 192:256] = 50.0
    alive = torch.ones(1, 64, dtype=torch.bool)
    alive[0, 3] = False
    of = {"lengths": torch.tensor([300]), "row_alive": alive}

    def closed(gate: Gate, threshold: float, kept: Tensor | None = None) -> list[list[int]]:
        got = skipped_pairs(
            gate, scores, thresholds=torch.full((1, 64), threshold), kept=kept, **of
        )
        pieces = got[0, ::32, ::64]
        assert torch.equal(
            pieces.repeat_interleave(32, 0).repeat_interleave(64, 1)[:, :300], got[0]
        )
        return pieces.int().tolist()

    # running maxima: -5 at 4, -5 at 0, 2 at 1, 2 at 2 and 3.
    relative = RelativeGate(-4.5, 32, 64)
    assert closed(relative, -4.5) == [[0, 0, 1, 1, 0], [0, 0, 1, 0, 0]]
    assert closed(relative, -3.5) == [[1, 0, 1, 1, 0], [1, 0, 1, 0, 0]]
    absolute = AbsoluteGate(torch.tensor(0.0), None, 32, 64)
    assert closed(absolute, 0.0) == [[1, 0, 1, 1, 1], [1, 0, 1, 0, 1]]
    assert closed(absolute, -3.0) == [[1, 0, 0, 1, 1], [1, 0, 0, 0, 1]]
    kept = torch.tensor([[True, False, False, True, False]])
    assert closed(absolute, 0.0, kept) == [[0, 0, 1, 0, 1], [0, 0, 1, 0, 1]]


@pytest.mark.parametrize(
    ("chunk", "keys", "expected"),
    [
        (64, 64, [1, 0, 0, 1, 0]),
        (32, 64, [1, 1, 0]),
        (16, 64, [1, 0]),
        (128, 64, [1, 1, 0, 0, 0, 0, 1, 1, 0, 0]),
        (64, 128, [1, 1, 0]),
    ],
)
def test_a_piece_with_one_kept_chunk_is_kept(chunk: int, keys: int, expected: list[int]) -> None:
    # the last mark lies behind the list.
    keep = torch.tensor([1, 0, 0, 1, 1]).bool()
    got = kept_pieces(keep, torch.tensor(4), chunk, keys)
    assert got.int().tolist() == expected


@pytest.mark.parametrize("quantized", [False, True], ids=["", "int8"])
def test_thresholds_are_on_the_scores_that_the_caller_knows(kernel: Any, quantized: bool) -> None:
    # keys with a large mean: smoothing moves all scores, and must not move what is skipped.
    q, k, v = clustered_qkv(500, 64, torch.float32, mean=1.0)
    work = random_work(500, (128, 16), share=0.8)
    options: dict[str, Any] = {}
    if quantized:
        options["quantized"] = quantize_qk(q, k, "int8", q_run=16, k_run=1)
    gate = AbsoluteGate(torch.tensor([[4.0], [6.0]]), None, 64, 64)
    skipped = torch.zeros_like(work.kv_count)
    kernel(
        q, k, v, *work.tensors, tile=work.tile, scale=0.125, gate=gate, skipped=skipped, **options
    )
    _, _, expected = step_by_step(q.double(), k.double(), v.double(), work, gate, 0.125)
    assert int(expected.sum()) > 0
    assert int((skipped - expected).abs().sum()) <= 0.02 * int(expected.sum()) * quantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", slow_but([64], [32, 64]))
def test_low_precision_stays_in_the_budget(kernel: Any, rows: int, dtype: torch.dtype) -> None:
    q, k, v = clustered_qkv(500, 64, dtype, batch=2)
    work = random_work(500, (64, 16), batch=2, share=0.6)
    for gate in both_gates(work, rows, 64):
        out, lse = kernel(q, k, v, *work.tensors, tile=work.tile, scale=0.125, gate=gate)
        wide = q.double(), k.double(), v.double()
        true, true_lse, _ = step_by_step(*wide, work, gate, 0.125)
        plain, _ = truth(q, k, v, work, 0.125)
        most, most_rms = allowed(stock(q, k, v, work.mask(), 0.125), plain)
        largest, rms = errors(out, true)
        assert out.dtype == dtype
        assert largest <= most
        assert rms <= most_rms
        check_lse(lse, true_lse, dtype)


def test_gates_that_skip_nothing_change_nothing(kernel: Any) -> None:
    q, k, v = random_qkv(333, 64, torch.float32, batch=2)
    work = random_work(333, (64, 16), batch=2, counts=[21, 9, 1, 0])
    out, lse = reference_attention(q, k, v, *work.tensors, tile=work.tile, scale=0.125)
    skipped = torch.full_like(work.kv_count, -1)
    for gate in (RelativeGate(-torch.inf), AbsoluteGate(torch.tensor(-torch.inf))):
        got = kernel(
            q, k, v, *work.tensors, tile=work.tile, scale=0.125, gate=gate, skipped=skipped
        )
        assert not bool(skipped.any())
        if kernel is reference_attention:
            assert torch.equal(got[0], out)
            assert torch.equal(got[1], lse)
        torch.testing.assert_close(got[0], out)
        torch.testing.assert_close(got[1], lse)


def test_a_gate_that_skips_all_leaves_what_must_stay(kernel: Any) -> None:
    q, k, v = random_qkv(333, 64, torch.float32)
    work = random_work(333, (64, 64), counts=[6, 3, 0])
    scale = {"tile": work.tile, "scale": 0.125}
    skipped = torch.full_like(work.kv_count, -1)
    pairs = work.mask().sum()

    gate: Gate = AbsoluteGate(torch.tensor(torch.inf))
    out, lse = kernel(q, k, v, *work.tensors, **scale, gate=gate, skipped=skipped)
    assert not bool(out.any())
    assert bool((lse == -torch.inf).all())
    assert skipped.sum() == pairs

    # marks on the first chunk of every list: as if there were no others.
    keep = torch.zeros(work.kv_index.shape, dtype=torch.bool)
    keep[..., 0] = True
    gate = AbsoluteGate(torch.tensor(torch.inf), keep)
    out, lse = kernel(q, k, v, *work.tensors, **scale, gate=gate, skipped=skipped)
    first = Work(work.q_tiles, work.kv_count.clamp_max(1), work.kv_index, work.tile, work.tokens)
    expected, expected_lse = kernel(q, k, v, *first.tensors, **scale)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert skipped.sum() == pairs - first.mask().sum()


def test_a_relative_gate_keeps_the_sum(kernel: Any) -> None:
    q, k, v = clustered_qkv(700, 64, torch.float32)
    work = random_work(700, (128, 64), share=0.8)
    _, lse = kernel(q, k, v, *work.tensors, tile=work.tile, scale=0.125)
    skipped = torch.zeros_like(work.kv_count)
    gate = RelativeGate(-1.0)
    _, gated = kernel(
        q, k, v, *work.tensors, tile=work.tile, scale=0.125, gate=gate, skipped=skipped
    )
    assert int(skipped.sum()) > 0
    torch.testing.assert_close(gated, lse)


def test_more_is_skipped_the_nearer_lambda_is_to_zero() -> None:
    q, k, v = clustered_qkv(700, 64, torch.float32)
    work = random_work(700, (128, 64), share=0.8)
    counts = []
    for lambda_ in (-12.0, -6.0, -3.0, -1.0):
        skipped = torch.zeros_like(work.kv_count)
        sparse_attention(
            q, k, v, *work.tensors, tile=work.tile, gate=RelativeGate(lambda_), skipped=skipped
        )
        counts.append(int(skipped.sum()))
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


# ---- through the public call ----


def test_the_counter_is_zero_without_a_gate() -> None:
    q, k, v = random_qkv(200, 64, torch.float32)
    work = random_work(200, (64, 16))
    skipped = torch.full_like(work.kv_count, -1)
    sparse_attention(q, k, v, *work.tensors, tile=work.tile, skipped=skipped)
    assert not bool(skipped.any())


@pytest.mark.parametrize("lambda_", [0.0, 1.0, float("nan")])
def test_lambda_is_negative(lambda_: float) -> None:
    with pytest.raises(ValueError, match="lambda_ must be negative"):
        RelativeGate(lambda_)


@pytest.mark.parametrize(("rows", "keys"), [(16, 64), (64, 32), (256, 64), (64, 256)])
def test_pieces_have_sizes_that_kernels_know(rows: int, keys: int) -> None:
    with pytest.raises(ValueError, match="pieces must have"):
        RelativeGate(-1.0, rows, keys)
    with pytest.raises(ValueError, match="pieces must have"):
        AbsoluteGate(torch.tensor(0.0), None, rows, keys)


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        (RelativeGate(torch.full((3,), -1.0)), r"lambda_ of shape \(3,\) does not broadcast"),
        (AbsoluteGate(torch.zeros(2, 5)), r"threshold of shape \(2, 5\) does not broadcast"),
        (
            AbsoluteGate(torch.zeros(1), torch.zeros(1).bool()),
            "keep must have the shape of kv_index",
        ),
    ],
    ids=["lambda_", "threshold", "keep"],
)
def test_tensors_that_do_not_fit_are_named(gate: Gate, message: str) -> None:
    q, k, v = random_qkv(200, 64, torch.float32)
    work = random_work(200, (64, 16))
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, k, v, *work.tensors, tile=work.tile, gate=gate)


def test_pieces_divide_blocks() -> None:
    q, k, v = random_qkv(200, 64, torch.float32)
    work = random_work(200, (32, 16))
    small = Work(work.q_tiles[..., :1], *work.tensors[1:], work.tile, 200)
    with pytest.raises(ValueError, match="must divide the 32 rows of a block, got 64"):
        sparse_attention(q, k, v, *small.tensors, tile=work.tile, gate=RelativeGate(-1.0))


@pytest.mark.parametrize("wrong", [torch.zeros(1, 2, 2), torch.zeros(2, dtype=torch.int32)])
def test_a_counter_that_does_not_fit_is_refused(wrong: Tensor) -> None:
    q, k, v = random_qkv(200, 64, torch.float32)
    work = random_work(200, (64, 16))
    with pytest.raises(ValueError, match="skipped must be int32"):
        sparse_attention(q, k, v, *work.tensors, tile=work.tile, skipped=wrong)


def test_auto_takes_the_fastest_for_gates_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from vidsparse.kernels import dispatch

    for name in ("gluon", "triton"):
        monkeypatch.setitem(
            dispatch._KNOWN, name, dispatch._KNOWN[name]._replace(reason=lambda *_: None)
        )
    gate = RelativeGate(-4.0)
    assert dispatch.choose("auto", "cpu", torch.bfloat16, 128, gate=gate) == "gluon"
    monkeypatch.setitem(
        dispatch._KNOWN,
        "gluon",
        dispatch._KNOWN["gluon"]._replace(reason=lambda *_: "has no such gate"),
    )
    assert dispatch.choose("auto", "cpu", torch.bfloat16, 128, gate=gate) == "triton"
