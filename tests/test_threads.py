"""Pieces of a call in threads: answers in order, nobody's settings changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from budget import random_qkv, random_work

from vidsparse.kernels import sparse_attention
from vidsparse.kernels.attention.threads import in_threads


@pytest.fixture(autouse=True, params=[1, 2, 5])
def total(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_answers_come_in_the_order_of_the_pieces(total: int) -> None:
    pieces = list(range(7))
    weights = [3, 9, 1, 9, 0, 2, 5]
    assert in_threads(lambda n: n * n, pieces) == [n * n for n in pieces]
    assert in_threads(lambda n: n * n, pieces, weights=weights) == [n * n for n in pieces]
    assert in_threads(lambda n: n, []) == []


def test_threads_share_out_those_of_pytorch_and_leave_the_callers_alone(total: int) -> None:
    def look(_: int) -> tuple[str, int, bool]:
        return (
            threading.current_thread().name,
            torch.get_num_threads(),
            torch.is_grad_enabled(),
        )

    answers = in_threads(look, range(3))
    workers = min(total, 3)
    assert torch.get_num_threads() == total
    assert torch.is_grad_enabled()
    assert {share for _, share, _ in answers} == {total // workers}
    assert not any(grad for *_, grad in answers)
    names = {name for name, *_ in answers}
    assert (threading.current_thread().name in names) == (total == 1)
    # a thread that begins later has the caller's number too.
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [total]


def test_an_error_in_a_piece_reaches_the_caller(total: int) -> None:
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda n: 1 // n, [2, 1, 0])
    assert in_threads(lambda n: 1 // n, [1, 1]) == [1, 1]


@pytest.mark.parametrize("inference", [False, True])
def test_attention_in_threads_is_attention_in_turn(total: int, inference: bool) -> None:
    with torch.inference_mode(inference):
        q, k, v = random_qkv(300, 64, torch.float32, batch=2, heads=3)
        work = random_work(300, (16, 16), batch=2, heads=3)
        got = sparse_attention(q, k, v, *work.tensors, tile=work.tile, implementation="torch")
        for b in range(2):
            for h in range(3):
                one = slice(b, b + 1), slice(h, h + 1)
                alone = sparse_attention(
                    *(x[one] for x in (q, k, v)),
                    *(x[one] for x in work.tensors),
                    tile=work.tile,
                    implementation="torch",
                )
                for whole, part in zip(got, alone, strict=True):
                    torch.testing.assert_close(whole[one], part, rtol=1e-5, atol=1e-6)
