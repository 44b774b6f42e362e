"""What means taken out of queries and keys are worth to int8 attention, on calls with outliers."""

from __future__ import annotations

import torch
from budget import random_qkv

from vidsparse import CallSite, TokenGrid
from vidsparse.apps.studies.smoothing import SMOOTHED, block_means, errors, int8_scores, rows
from vidsparse.calls import RecordedCall

GRID = TokenGrid(3, 10, 10)


def a_call(shift: float) -> RecordedCall:
    """A call whose queries and keys have one channel that sticks out so far."""
    q, k, v = random_qkv(GRID.tokens, 64, torch.float32)
    for x in (q, k):
        x[..., 5] += shift
    return RecordedCall(q=q, k=k, v=v, site=CallSite(0, 0, 0.0, GRID))


def test_a_mean_of_queries_by_block_takes_out_what_the_keys_mean_leaves() -> None:
    erred = {name: float(each.mean()) for name, each in errors(a_call(20.0)).items()}
    assert erred["keys, queries by block"] < erred["keys"] / 2.5
    assert erred["keys, all queries"] < erred["keys"] / 2.5
    assert erred["keys"] < erred["nothing"]


def test_without_a_channel_that_sticks_out_means_are_worth_little() -> None:
    erred = errors(a_call(0.0))
    assert float(erred["keys"].mean()) < 0.02
    ratio = erred["keys, queries by block"].mean() / erred["keys"].mean()
    assert 0.8 < float(ratio) < 1.2


def test_all_scores_are_those_of_the_product_up_to_rounding_and_a_number_a_row() -> None:
    call = a_call(3.0)
    q, k = call.q.double(), call.k.double()
    for name in SMOOTHED:
        off = int8_scores(q, k, name) - q @ k.mT
        off = off - off.mean(-1, keepdim=True)
        assert float(off.std() / (q @ k.mT).std()) < 0.03, name


def test_a_block_s_mean_is_of_the_queries_it_has() -> None:
    q = torch.arange(1.0, 131.0).view(1, 1, 130, 1)
    assert block_means(q)[0, 0, [0, 63, 64, 129], 0].tolist() == [32.5, 32.5, 96.5, 129.5]


def test_a_table_has_a_row_for_every_call_and_their_mean() -> None:
    made = list(rows((a_call(0.0), a_call(200.0))))
    assert [row["layer"] for row in made] == ["0", "0", "all"]
    each = [float(row["keys"]) for row in made]
    assert abs(each[2] - (each[0] + each[1]) / 2) < 1e-5
