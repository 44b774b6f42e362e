"""Token grids and orders: round trips, what each order is, and why Hilbert is the default."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import vidsparse
from vidsparse.grid import TokenGrid
from vidsparse.order import ORDERS, token_order

sizes = st.integers(1, 9)
grids = st.builds(
    TokenGrid, sizes, sizes, sizes, text=st.integers(0, 5), text_first=st.booleans()
) | st.builds(TokenGrid, sizes, sizes, sizes, text=st.integers(3, 5), lead=st.integers(0, 3))


def coordinates(grid: TokenGrid) -> list[tuple[int, int, int]]:
    return [
        (t, y, x) for t in range(grid.frames) for y in range(grid.height) for x in range(grid.width)
    ]


def walk(name: str, grid: TokenGrid) -> list[tuple[int, int, int]]:
    """The video positions in the order in which ``name`` visits them."""
    where = coordinates(grid)
    return [where[i] for i in token_order(name, grid).permutation[: grid.video].tolist()]


def steps(path: list[tuple[int, int, int]]) -> list[int]:
    return [
        sum(abs(a - b) for a, b in zip(here, there, strict=True)) for here, there in pairwise(path)
    ]


@settings(max_examples=60)
@given(grid=grids, name=st.sampled_from(ORDERS))
def test_undo_after_apply_is_exact(grid: TokenGrid, name: str) -> None:
    x = torch.randn(2, 2, grid.tokens, 3)
    order = token_order(name, grid)
    assert torch.equal(order.undo(order.apply(x)), x)
    assert torch.equal(order.apply(order.undo(x)), x)


@settings(max_examples=60)
@given(grid=grids, name=st.sampled_from(ORDERS))
def test_text_stands_last_in_its_own_order(grid: TokenGrid, name: str) -> None:
    before = grid.text if grid.text_first else grid.lead
    permutation = token_order(name, grid).permutation.tolist()
    text = [*range(before), *range(before + grid.video, grid.tokens)]
    assert permutation[grid.video :] == text
    assert sorted(permutation) == list(range(grid.tokens))


@pytest.mark.parametrize(
    "grid",
    [TokenGrid(1, 1, 1), TokenGrid(1, 7, 5), TokenGrid(13, 24, 24), TokenGrid(3, 5, 7, text=226)],
    ids=str,
)
@pytest.mark.parametrize("name", ORDERS)
def test_inverse_is_the_inverse_permutation(name: str, grid: TokenGrid) -> None:
    order = token_order(name, grid)
    everyone = torch.arange(grid.tokens)
    assert torch.equal(order.permutation[order.inverse], everyone)
    assert torch.equal(order.inverse[order.permutation], everyone)


# name: the coordinates by which positions are sorted, slowest first.
SORTED_BY = {"rowmajor": (0, 1, 2), "columnmajor": (0, 2, 1), "timemajor": (1, 2, 0)}


@pytest.mark.parametrize("name", SORTED_BY)
def test_plain_orders_sort_by_their_axes(name: str) -> None:
    grid = TokenGrid(3, 4, 5)
    axes = SORTED_BY[name]
    assert walk(name, grid) == sorted(coordinates(grid), key=lambda p: [p[a] for a in axes])


def test_rowmajor_changes_nothing_when_text_is_last() -> None:
    grid = TokenGrid(3, 4, 5, text=7)
    assert torch.equal(token_order("rowmajor", grid).permutation, torch.arange(grid.tokens))


def test_random_is_a_shuffle_and_always_the_same() -> None:
    grid = TokenGrid(4, 8, 8)
    token_order.cache_clear()
    first = token_order("random", grid).permutation
    token_order.cache_clear()
    assert torch.equal(token_order("random", grid).permutation, first)
    assert max(steps(walk("random", grid))) > 8


@pytest.mark.parametrize("side", [2, 4, 8])
def test_hilbert_steps_to_a_direct_neighbour_on_a_full_cube(side: int) -> None:
    assert set(steps(walk("hilbert", TokenGrid(side, side, side)))) == {1}


@pytest.mark.parametrize("grid", [TokenGrid(9, 16, 16), TokenGrid(5, 11, 14)], ids=str)
def test_hilbert_tiles_are_the_most_compact(grid: TokenGrid) -> None:
    def spread(name: str, tile: int = 16) -> float:
        """Mean distance of a tile's positions from their centre, over full tiles."""
        path = torch.tensor(walk(name, grid), dtype=torch.float64)
        tiles = path[: grid.video // tile * tile].view(-1, tile, 3)
        return (tiles - tiles.mean(1, keepdim=True)).norm(dim=-1).mean().item()

    hilbert = spread("hilbert")
    for other in ("rowmajor", "columnmajor", "timemajor"):
        assert hilbert < 0.7 * spread(other)
    assert spread("rowmajor") < spread("random")


def test_one_frame_keeps_hilbert_neighbours_near() -> None:
    path = walk("hilbert", TokenGrid(1, 16, 16))
    assert sum(steps(path)) / len(path) < 2


def test_orders_are_cached_by_name_grid_and_device() -> None:
    grid = TokenGrid(2, 3, 4)
    assert token_order("hilbert", grid) is token_order("hilbert", TokenGrid(2, 3, 4))
    assert token_order("hilbert", grid) is not token_order("hilbert", TokenGrid(2, 4, 3))
    assert token_order("hilbert", grid) is not token_order("rowmajor", grid)


def test_an_order_made_in_inference_mode_serves_training() -> None:
    token_order.cache_clear()
    grid = TokenGrid(2, 3, 4)
    with torch.inference_mode():
        token_order("hilbert", grid)
    x = torch.randn(1, 1, grid.tokens, 2, requires_grad=True)
    token_order("hilbert", grid).apply(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_an_unknown_order_is_named_with_the_known_ones() -> None:
    with pytest.raises(vidsparse.OptionError, match=r"'zigzag'.*hilbert, rowmajor"):
        token_order("zigzag", TokenGrid(1, 2, 2))


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, -1, 1), (1, 1, 0), (1, 1, 1, -1)])
def test_a_grid_without_tokens_is_refused(bad: tuple[int, ...]) -> None:
    with pytest.raises(vidsparse.OptionError, match="at least 1"):
        TokenGrid(*bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"lead": 6}, "lead must be from 0 to 5, the number of text tokens, got 6"),
        ({"lead": -1}, "lead must be from 0 to 5, the number of text tokens, got -1"),
        ({"lead": 2, "text_first": True}, "lead must be 0 with text_first, got 2"),
    ],
)
def test_text_before_the_video_is_a_part_of_the_text(bad: dict[str, int], said: str) -> None:
    with pytest.raises(vidsparse.OptionError, match=said):
        TokenGrid(1, 2, 2, text=5, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [(9.0, 16, 16), (9, "16", 16), (9, 16, 16, None)])
def test_a_grid_of_parts_of_tokens_is_refused(bad: Any) -> None:
    with pytest.raises(vidsparse.OptionError, match=r"counted in whole tokens, got .* Hint: "):
        TokenGrid(*bad)


def test_a_grid_takes_whole_numbers_of_any_kind() -> None:
    assert TokenGrid(*np.array([9, 16, 16])).video == 2304


def test_a_grid_counts_video_and_text() -> None:
    grid = TokenGrid(9, 16, 16, text=226)
    assert (grid.video, grid.tokens) == (2304, 2530)


def test_a_prompt_of_another_length_walks_no_new_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    from vidsparse import order

    walk, walked = order._BUILDERS["hilbert"], []

    def watched(grid: TokenGrid) -> NDArray[np.int64]:
        walked.append(grid)
        return walk(grid)

    monkeypatch.setitem(order._BUILDERS, "hilbert", watched)
    # a grid that no other test asks for: answers are kept.
    for text in (3, 4, 0):
        made = token_order("hilbert", TokenGrid(3, 5, 29, text))
        assert sorted(made.permutation.tolist()) == list(range(435 + text))
        assert made.permutation.tolist()[435:] == list(range(435, 435 + text))
    assert len(walked) == 1
