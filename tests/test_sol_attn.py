"""Sol-Attn: which blocks it computes, and what becomes of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget import clustered_qkv, random_qkv
from torch import Tensor

from vidsparse import OptionError, TokenGrid, attend
from vidsparse.methods import SolAttn
from vidsparse.site import CallSite

pytestmark = pytest.mark.usefixtures("one_thread")


def site(grid: TokenGrid) -> CallSite:
    return CallSite(0, 0, 0.0, grid)


def error(out: Tensor, dense: Tensor) -> float:
    return float((out - dense).norm() / dense.norm())


def test_the_threshold_is_the_formula_written_out() -> None:
    tokens, tile = 16 * 11 + 5, 16
    q, k, _ = clustered_qkv(tokens, 32, torch.float32, heads=1, pull=2.0)
    kept = SolAttn(tau=0.7, tile=(tile, tile)).select(q, k, site(TokenGrid(1, 1, tokens)))[0, 0]
    rows = [part.mean(0) for part in q[0, 0].split(tile)]
    keys = torch.stack([part.mean(0) for part in k[0, 0].split(tile)])
    for i, row in enumerate(rows):
        mean = float(row @ keys.mean(0))
        spread = sum(float(row[d]) ** 2 * float(keys[:, d].var(correction=0)) for d in range(32))
        for j, key in enumerate(keys):
            expected = abs(i - j) <= 1 or float(row @ key) > mean + 0.7 * spread**0.5
            assert bool(kept[i, j]) == expected, (i, j)
    assert not bool(kept.all())


@pytest.mark.parametrize("tile", [(16, 64), (64, 16), (128, 32)])
def test_blocks_on_the_diagonal_and_beside_it_are_exact(tile: tuple[int, int]) -> None:
    tokens = 1000
    q, k, _ = random_qkv(tokens, 32, torch.float32)
    kept = SolAttn(tau=100.0, tile=tile, means=128).select(q, k, site(TokenGrid(1, 10, 100)))[0, 0]
    for i in range(kept.shape[0]):
        own = {token // tile[1] for token in range(i * tile[0], min(tokens, (i + 1) * tile[0]))}
        near = {j for one in own for j in (one - 1, one, one + 1) if 0 <= j < kept.shape[1]}
        # the last row's tile may have none of the tokens that a whole one had.
        assert near <= set(kept[i].nonzero().flatten().tolist())
        assert int(kept[i].sum()) <= len(near) + tile[0] // tile[1] + 1


def test_keys_of_text_do_not_move_the_threshold() -> None:
    grid = TokenGrid(2, 16, 16, text=64)
    q, k, _ = random_qkv(grid.tokens, 32, torch.float32)
    method = SolAttn()
    kept = method.select(q, k, site(grid))
    k = k.clone()
    k[:, :, grid.video :] *= 50
    video = grid.video // 64
    assert torch.equal(method.select(q, k, site(grid))[..., :video], kept[..., :video])


def test_less_tau_computes_more_and_errs_less() -> None:
    grid = TokenGrid(3, 20, 20)
    q, k, v = clustered_qkv(grid.tokens, 32, torch.float32, heads=2, pull=2.0)
    dense = F.scaled_dot_product_attention(q, k, v)
    errors, shares = [], []
    for tau in (3.0, 1.0, 0.0, -100.0):
        method = SolAttn(tau=tau)
        shares.append(float(method.select(q, k, site(grid)).float().mean()))
        errors.append(error(attend(q, k, v, grid, method), dense))
    assert shares == sorted(shares)
    assert errors == sorted(errors, reverse=True)
    assert shares[-1] == 1
    assert errors[-1] < 1e-5


def test_what_it_skips_enters_by_means() -> None:
    grid = TokenGrid(3, 20, 20)
    q, k, v = clustered_qkv(grid.tokens, 32, torch.float32, heads=2, pull=1.0)
    dense = F.scaled_dot_product_attention(q, k, v)
    with_means, dropped = (
        error(attend(q, k, v, grid, SolAttn(tau=1.5, means=means)), dense) for means in (64, None)
    )
    assert with_means < 0.5 * dropped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": float("nan")}, "tau must be a finite number"),
        ({"tau": "1"}, "tau must be a finite number"),
        ({"tile": (64, 128), "means": 64}, "means must be a multiple of the tile's 128 keys"),
        ({"merge": "pairs"}, "merge"),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SolAttn(**options)
