"""Heads dealt to processes by their work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vidsparse.grid import TokenGrid
from vidsparse.methods import SparseMethod, make_method
from vidsparse.methods.numbers import Numbers
from vidsparse.pipelines.balance import deal_by_work, imbalance
from vidsparse.site import CallSite

# 40 heads as Wan 14B has them, whose densities rise from 0.05 to 0.6: the worst order.
SKEWED = torch.linspace(0.05, 0.6, 40)


@pytest.mark.parametrize(("count", "in_order"), [(2, 1.43), (4, 1.65), (8, 1.76)])
def test_skewed_heads_are_dealt_nearly_evenly(count: int, in_order: float) -> None:
    before, mean = imbalance(SKEWED, count)
    dealt = deal_by_work(SKEWED.tolist(), count)
    after, _ = imbalance(SKEWED[list(dealt.heads)], count)
    assert before / mean == pytest.approx(in_order, abs=0.01)
    assert after / mean < 1.01


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_every_head_is_dealt_once_and_processes_have_equally_many(count: int) -> None:
    work = torch.rand(12, generator=torch.Generator().manual_seed(0)).tolist()
    dealt = deal_by_work(work, count)
    assert sorted(dealt.heads) == list(range(12))
    assert [len(dealt.of(rank)) for rank in range(count)] == [12 // count] * count


def test_equal_heads_are_dealt_in_an_order_of_no_consequence() -> None:
    dealt = deal_by_work([0.3] * 8, 2)
    most, mean = imbalance(torch.full((8,), 0.3)[list(dealt.heads)], 2)
    assert most == pytest.approx(mean)


@pytest.mark.parametrize(
    ("name", "options", "equal"),
    [
        ("foresight", {}, True),
        # each tile is a block of its own.
        ("foresight", {"tile": "64x16"}, True),
        ("fg-attn", {"topk": 0.2, "tile": "128x16"}, True),
        ("fg-attn", {"topk": 0.2, "tile": "16x16"}, False),
        ("fg-attn", {"tile": "128x128"}, False),
        ("spargeattn", {"topk": 0.2}, False),
    ],
)
def test_methods_that_list_equal_counts_say_so(
    name: str, options: dict[str, Any], equal: bool
) -> None:
    method = make_method(name, **options)
    assert isinstance(method, SparseMethod)
    assert method.equal_heads is equal


def test_numbers_are_those_of_the_heads_that_a_process_has() -> None:
    numbers = Numbers({"tau": torch.arange(12.0).view(1, 2, 6)}, None)
    site = CallSite(layer=1, step=0, timestep=0.0, grid=TokenGrid(1, 1, 1), heads=(5, 0, 3))
    assert numbers.of("tau", site, torch.device("cpu")).tolist() == [11.0, 6.0, 9.0]
