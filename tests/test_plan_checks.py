"""What `attend` and `sparse_attention` check of their operands and plans, and rows in no block."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from broken_plans import EXTRAS, SAID, damaged, extra_options, of_16_bits, wrecked
from budget import Work, check_kernel, random_qkv, random_work, truth
from fault_runs import form
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE as TRITON_ON
from torch import Tensor

from vidsparse import OptionError, TokenGrid, attend
from vidsparse.kernels import RelativeGate, quantize_qk, sparse_attention
from vidsparse.kernels.attention import checks
from vidsparse.kernels.attention.checks import Answer, faults_of_plan, harmless, raise_found

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned_empty")

TOKENS = 300
ON_A_CPU = ["torch", "reference"]
QKV = tuple[Tensor, Tensor, Tensor]


def run(qkv: QKV, work: Work, **options: Any) -> tuple[Tensor, Tensor]:
    return sparse_attention(*qkv, *work.tensors, **{"tile": work.tile, **options})


# ---- operands ----


def _wrong_operands() -> dict[str, tuple[Callable[[QKV], tuple[Any, Any, Any]], str]]:
    return {
        "v of another head dim": (
            lambda x: (x[0], x[1], x[2][..., :32]),
            "same head dim: q has 64, v has 32",
        ),
        "longer keys and values": (
            lambda x: (x[0][:, :, :200], x[1], x[2]),
            "same tokens: q has 200, k has 300",
        ),
        "shorter values": (
            lambda x: (x[0], x[1], x[2][:, :, :299]),
            "same tokens: q has 300, v has 299",
        ),
        "another batch": (
            lambda x: (x[0], x[1], x[2].repeat(2, 1, 1, 1)),
            "same batch: q has 1, v has 2",
        ),
        "other heads": (lambda x: (x[0], x[1][:, :1], x[2]), "same heads: q has 2, k has 1"),
        "another dtype": (
            lambda x: (x[0].bfloat16(), x[1].half(), x[2].bfloat16()),
            "same dtype: q is torch.bfloat16, k is torch.float16",
        ),
        "another device": (
            lambda x: (x[0], x[1].to("meta"), x[2]),
            "same device: q is on cpu, k is on meta",
        ),
        "three dimensions": (lambda x: (x[0], x[1][0], x[2]), r"k must be a dense tensor \[B, H"),
        "whole numbers": (lambda x: tuple(y.int() for y in x), "q must hold floating point"),
        "a list": (lambda x: (x[0].tolist(), x[1], x[2]), "q must be a tensor .* got list"),
        "no tokens": (lambda x: tuple(y[:, :, :0] for y in x), "q of shape .* is empty"),
        "no batch": (lambda x: tuple(y[:0] for y in x), "q of shape .* is empty"),
        "no channels": (lambda x: tuple(y[..., :0] for y in x), "q of shape .* is empty"),
    }


@pytest.mark.parametrize(
    ("change", "said"), _wrong_operands().values(), ids=list(_wrong_operands())
)
def test_operands_that_do_not_fit_are_refused_in_one_sentence(
    change: Callable[[QKV], tuple[Any, Any, Any]], said: str
) -> None:
    q, k, v = change(random_qkv(TOKENS, 64, torch.float32))
    with pytest.raises(OptionError, match=said):
        attend(q, k, v, TokenGrid(3, 10, 10), top_p=1)
    with pytest.raises(ValueError, match=said):
        run((q, k, v), random_work(TOKENS, (16, 16)))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), "1"])
def test_a_scale_is_positive_and_finite(scale: Any) -> None:
    with pytest.raises(ValueError, match="scale must be positive and finite, got"):
        run(random_qkv(TOKENS, 64, torch.float32), random_work(TOKENS, (16, 16)), scale=scale)


def test_attend_wants_a_method_and_a_grid() -> None:
    q, k, v = random_qkv(TOKENS, 64, torch.float32)
    for wrong in (5, None, object()):
        with pytest.raises(OptionError, match="a method is a name or a method that is built"):
            attend(q, k, v, TokenGrid(3, 10, 10), wrong, top_p=0.5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="unknown method ''"):
        attend(q, k, v, TokenGrid(3, 10, 10), "")
    with pytest.raises(OptionError, match="grid must be a TokenGrid, got tuple"):
        attend(q, k, v, (3, 10, 10))  # type: ignore[arg-type]


# ---- shapes of a plan ----


def _wrong_tables() -> dict[str, tuple[Callable[[Work], Work], str]]:
    def other(**tables: Any) -> Callable[[Work], Work]:
        return lambda work: replace(work, **{n: f(getattr(work, n)) for n, f in tables.items()})

    return {
        "no pair of sizes": (other(tile=lambda t: t[0]), "tile must be two positive whole numbers"),
        "rows of 0": (other(tile=lambda t: (0, t[1])), "tile must be two positive whole numbers"),
        "half a tile": (other(tile=lambda t: (16.0, t[1])), "tile must be two positive whole"),
        "numbers of 64 bits": (other(q_tiles=Tensor.long), "q_tiles must be int32"),
        "counts of 16 bits": (other(kv_count=Tensor.short), "kv_count must be int32"),
        "lists of floats": (other(kv_index=Tensor.float), "kv_index must be int16 or int32"),
        "lists in Python": (other(kv_index=Tensor.tolist), "of 4 dimensions, got list"),
        "flat lists": (other(kv_index=lambda x: x.flatten(2)), "kv_index must be .* 4 dimensions"),
        "another device": (other(kv_index=lambda x: x.to("meta")), "on meta, and q on cpu"),
        "other heads": (other(kv_count=lambda x: x[:, :1]), r"heads of q, \(1, 2\), got \(1, 1\)"),
        "fewer lists": (other(kv_index=lambda x: x[:, :, :2]), "has 2 blocks, and q_tiles has 3"),
        "fewer counts": (other(kv_count=lambda x: x[:, :, :2]), "has 2 blocks, and q_tiles has 3"),
        "no blocks": (
            other(**{n: lambda x: x[:, :, :0] for n in ("q_tiles", "kv_count", "kv_index")}),
            "q_tiles of shape .* is empty",
        ),
    }


@pytest.mark.parametrize(("change", "said"), _wrong_tables().values(), ids=list(_wrong_tables()))
def test_tables_of_another_shape_are_refused_in_one_sentence(
    change: Callable[[Work], Work], said: str
) -> None:
    work = change(random_work(TOKENS, (16, 16)))
    for validate in (None, False):
        with pytest.raises(ValueError, match=said):
            run(random_qkv(TOKENS, 64, torch.float32), work, validate=validate)


@pytest.mark.parametrize("tile", [(16, 16), (128, 128)], ids=str)
def test_a_plan_for_more_tokens_is_refused_by_its_shape(tile: tuple[int, int]) -> None:
    q, k, v = random_qkv(300, 64, torch.float32)
    with pytest.raises(ValueError, match=r"[qk] has 300 tokens, which are .* but the"):
        run((q, k, v), random_work(3000, tile), validate=False)


def test_a_kernel_in_triton_wants_blocks_of_a_power_of_two() -> None:
    q, k, v = random_qkv(TOKENS, 64, torch.float16)
    work = random_work(TOKENS, (100, 16))
    for name in ("triton", "gluon"):
        with pytest.raises(ValueError, match=f"the '{name}' .* this plan's have 100"):
            run((q, k, v), work, implementation=name, chosen=True)
    run((q, k, v), work, implementation="torch")


def test_a_counter_and_8_bit_operands_fit_the_call() -> None:
    q, k, v = random_qkv(TOKENS, 64, torch.float32)
    work = random_work(TOKENS, (16, 16))
    counter = torch.zeros(*work.kv_count.shape, 2, dtype=torch.int32)[..., 0]
    with pytest.raises(ValueError, match="skipped must be contiguous"):
        run((q, k, v), work, skipped=counter, gate=RelativeGate(-1.0))
    eight = quantize_qk(q, k, "int8")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"k": eight.k[:, :, :200].contiguous()}, r"k must be torch.int8 \(1, 2, 300, 64\)"),
        ({"k_scale": eight.k_scale[:, :, :3]}, r"k_scale must be torch.float32 \(1, 2, 5\)"),
        ({"q_scale": eight.q_scale.double()}, "q_scale must be torch.float32"),
        ({"shift": eight.shift.mT.contiguous().mT}, "must be contiguous, and on cpu"),
    ]
    for change, said in changes:
        with pytest.raises(ValueError, match=said):
            run((q, k, v), work, quantize=replace(eight, **change))


# ---- values of a plan ----


@st.composite
def plans(draw: st.DrawFn) -> Work:
    """Plans of every shape: odd lengths, short lists and empty ones, places without a tile."""
    rows, keys = draw(st.sampled_from([16, 32, 64, 128])), draw(st.sampled_from([1, 8, 16, 64]))
    work = random_work(
        # two tiles and two chunks at the least: something can stand twice, or fall.
        draw(st.integers(max(rows, keys) + 1, 400)),
        (rows, keys),
        batch=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 2)),
        share=draw(st.floats(0, 0.8)),
        counts=draw(st.none() | st.lists(st.integers(0, 400), min_size=1, max_size=3)),
        longest_first=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )
    if draw(st.booleans()):
        # some tiles are in no block.
        gen = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        gone = torch.rand(work.q_tiles.shape, generator=gen) < draw(st.floats(0, 1))
        work = replace(work, q_tiles=work.q_tiles.masked_fill(gone, -1))
    return work


@pytest.mark.faults
@settings(max_examples=form(short=60, long=1000))
@given(work=plans(), seed=st.integers(0, 2**31))
def test_a_valid_plan_is_run_and_right_and_rows_in_no_block_are_zeros(
    work: Work, seed: int
) -> None:
    qkv = random_qkv(
        work.tokens,
        16,
        torch.float32,
        batch=work.q_tiles.shape[0],
        heads=work.q_tiles.shape[1],
        seed=seed,
    )
    true, true_lse = truth(*qkv, work, 0.25)
    seen = work.mask().any(-1)
    for name in ON_A_CPU:
        for validate in (None, True):
            out, lse = run(qkv, work, implementation=name, scale=0.25, validate=validate)
            torch.testing.assert_close(out.double(), true, rtol=0, atol=1e-5)
            torch.testing.assert_close(lse.double(), true_lse.double(), rtol=1e-5, atol=1e-5)
            assert torch.equal(out[~seen], torch.zeros_like(out[~seen]))
            assert bool((lse[~seen] == -torch.inf).all())


@pytest.mark.faults
@settings(max_examples=form(short=60, long=1000))
@given(work=plans(), kind=st.sampled_from(list(SAID)), seed=st.integers(0, 2**31))
def test_a_broken_plan_is_refused_by_what_is_wrong_with_it(
    work: Work, kind: str, seed: int
) -> None:
    if kind == "twice":
        tiles = torch.arange(-(-work.tokens // work.tile[0]), dtype=torch.int32)
        flat = torch.full_like(work.q_tiles[0, 0].flatten(), -1)
        flat[: len(tiles)] = tiles
        q_tiles = flat.view_as(work.q_tiles[0, 0]).expand_as(work.q_tiles).contiguous()
        work = replace(work, q_tiles=q_tiles)
    broken = damaged(work, kind, torch.Generator().manual_seed(seed))
    batch, heads = work.q_tiles.shape[:2]
    qkv = random_qkv(work.tokens, 16, torch.float32, batch=batch, heads=heads)
    for name in ON_A_CPU:
        for validate in (None, True):
            # another tensor each time, so that each use is a first one.
            again = replace(broken, kv_index=broken.kv_index.clone())
            for _ in range(2):
                with pytest.raises(ValueError, match=SAID[kind]):
                    run(qkv, again, implementation=name, validate=validate)


@pytest.mark.faults
@settings(max_examples=form(short=60, long=1000))
@given(work=plans(), kinds=st.lists(st.sampled_from(list(SAID)[:-1])), seed=st.integers(0, 2**31))
def test_what_runs_before_the_answer_points_nowhere_else(
    work: Work, kinds: list[str], seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    right = harmless(*work.tensors, work.tile, work.tokens)
    kept = Work(*right, work.tile, work.tokens)
    assert torch.equal(kept.mask(), work.mask())
    assert torch.equal(kept.kv_count, work.kv_count)
    assert torch.equal(kept.q_tiles, work.q_tiles)
    for kind in kinds:
        work = damaged(work, kind, gen)
    q_tiles, count, index = harmless(*work.tensors, work.tile, work.tokens)
    tiles, chunks = (-(-work.tokens // size) for size in work.tile)
    assert index.dtype == work.kv_index.dtype
    assert int(q_tiles.max()) < tiles
    assert int(count.min()) >= 0
    assert int(count.max()) <= min(chunks, index.shape[-1])
    assert int(index.min()) >= 0
    assert int(index.max()) < chunks
    # kernels look for the short chunk at a list's end alone.
    inner = torch.arange(index.shape[-1]) < count.unsqueeze(-1) - 1
    assert not bool((inner & (index == chunks - 1)).any())


def test_a_plan_written_to_after_its_first_use_is_checked_again() -> None:
    qkv, work = random_qkv(TOKENS, 64, torch.float32), random_work(TOKENS, (16, 16))
    run(qkv, work)
    for name, said in (("q_tiles", "tile number"), ("kv_count", "length"), ("kv_index", "chunk")):
        table = getattr(work, name)
        before = table.clone()
        table[0, 0, 0] = 2**20
        with pytest.raises(ValueError, match=said):
            run(qkv, work)
        table.copy_(before)
        run(qkv, work)
    with torch.inference_mode():
        kv_index = work.kv_index.clone()
        hidden = replace(work, kv_index=kv_index)
        run(qkv, hidden)
        kv_index[0, 0, 0, 0] = -1
        with pytest.raises(ValueError, match="chunk number"):
            run(qkv, hidden)


def test_a_plan_is_looked_at_once_and_forgotten_with_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []

    def counted(*args: Any) -> tuple[Tensor, Tensor]:
        looked.append(1)
        return faults_of_plan(*args)

    monkeypatch.setattr(checks, "faults_of_plan", counted)
    qkv, work = random_qkv(TOKENS, 64, torch.float32), random_work(TOKENS, (16, 16))
    gc.collect()
    before = len(checks._USES)
    for _ in range(3):
        run(qkv, work)
    assert len(looked) == 1
    run(qkv, work, validate=False)
    assert len(looked) == 1
    run(qkv, work, validate=True)
    assert len(looked) == 2
    assert len(checks._USES) == before + 1
    del work
    gc.collect()
    assert len(checks._USES) == before


def test_the_answer_of_a_gpu_is_told_once_when_it_is_there_and_nobody_waits() -> None:
    class Queue:
        done = False

        def query(self) -> bool:
            return self.done

    queue, later = Queue(), Queue()
    right = torch.zeros(6, dtype=torch.bool)
    broken = right.clone()
    broken[3] = True
    more: dict[str, Any] = {"places": 19, "tile": (16, 16), "tokens": TOKENS}
    answers = [Answer(right, queue, **more), Answer(broken, queue, **more)]
    answers.append(Answer(broken, later, **more))
    raise_found(answers)
    assert len(answers) == 3
    queue.done = True
    with pytest.raises(
        ValueError, match=r"earlier call had a broken plan: the plan .* is neither from 0 to 18"
    ):
        raise_found(answers)
    assert len(answers) == 1
    raise_found(answers)
    assert len(answers) == 1


# ---- what Triton's kernel reads and writes, whatever a plan says ----


@pytest.mark.faults
@pytest.mark.skipif(TRITON_ON != "cpu", reason="watches what Triton's interpreter does")
@pytest.mark.timeout(3600)
@settings(max_examples=form(short=8, long=100))
@given(
    kinds=st.lists(st.sampled_from(list(SAID)), min_size=1, max_size=4),
    tile=st.sampled_from([(16, 1), (32, 16), (64, 64), (128, 128)]),
    # fewer than a chunk's, a chunk's and one, and more.
    tokens=st.sampled_from([100, 129, 300]),
    extra=st.sampled_from(EXTRAS),
    is_short=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_no_plan_makes_the_triton_kernel_read_or_write_outside_of_its_tensors(
    kinds: list[str], tile: tuple[int, int], tokens: int, extra: str, is_short: bool, seed: int
) -> None:
    from interpreter import only_inside

    q, k, v = random_qkv(tokens, 64, torch.float16)
    right = random_work(tokens, tile, seed=seed)
    work = wrecked(right, kinds, seed)
    if is_short:
        right, work = of_16_bits(right), of_16_bits(work)
    options = extra_options(extra, right, k, v)
    options |= {"implementation": "triton", "chosen": True, "validate": False}
    with only_inside() as found:
        run((q, k, v), right, **options)
        # the watch itself finds nothing in a right plan.
        assert found == []
        run((q, k, v), work, **options)
    assert found == []


# ---- rows in no block, by Triton's kernel ----


@pytest.mark.parametrize("kind", [None, "int8"])
def test_rows_in_no_block_are_zeros_in_triton_too(kind: str | None) -> None:
    pytest.importorskip("triton")
    from kernel_cases import DEVICE

    q, k, v = (x.to(DEVICE) for x in random_qkv(TOKENS, 64, torch.float16))
    work = random_work(TOKENS, (32, 16))
    lost = work.q_tiles.clone()
    lost[:, :, 1] = -1
    work = replace(work, q_tiles=lost).to(DEVICE)
    seen = work.mask().any(-1)
    assert not bool(seen.all())
    for _ in range(2):
        out, lse = run((q, k, v), work, implementation="triton", chosen=True, quantize=kind)
        assert torch.equal(out[~seen], torch.zeros_like(out[~seen]))
        assert bool((lse[~seen] == -torch.inf).all())
        assert bool(out.isfinite().all())
        assert bool(lse[seen].isfinite().all())


@pytest.mark.gpu
def test_on_a_gpu_a_broken_plan_harms_nothing_and_is_told_later(
    kernel: Callable[..., Any],
) -> None:
    name = "gluon" if "gluon" in kernel.__name__ else "triton"
    q, k, v = (x.cuda() for x in random_qkv(TOKENS, 64, torch.bfloat16))
    qkv = q, k, v
    work = random_work(TOKENS, (32, 16))
    # what is made once, compiled code and pinned memory, makes the host wait.
    run(qkv, work.to("cuda"), implementation=name)
    torch.cuda.synchronize()
    for number, kind in enumerate(SAID):
        broken = damaged(work, kind, torch.Generator().manual_seed(number)).to("cuda")
        # half a second in which no answer comes: with one at hand the call itself would raise.
        torch.cuda._sleep(1_000_000_000)
        run(qkv, broken, implementation=name)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match=SAID[kind]):
            run(qkv, work.to("cuda"), implementation=name)
        with pytest.raises(ValueError, match=SAID[kind]):
            run(qkv, broken, implementation=name, validate=True)
        # an access elsewhere would be an error from here on.
        run(qkv, broken, implementation=name, validate=False)
        torch.cuda.synchronize()
    good = work.to("cuda")
    for _ in range(2):
        check_kernel(partial(sparse_attention, implementation=name), q, k, v, good)
        torch.cuda.synchronize()
