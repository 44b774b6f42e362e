"""Cases of the kernels that choose for Foresight, held to what torch computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from budget import clustered_qkv, random_qkv
from kernel_cases import DEVICE, Case

from vidsparse import TokenGrid
from vidsparse.kernels.attention.means import group_means
from vidsparse.masks import unpack_bits
from vidsparse.methods import Foresight
from vidsparse.order import token_order
from vidsparse.planning import order_and_average
from vidsparse.residual import error_of_means
from vidsparse.route import find_route


def cases() -> Iterator[Case]:
    def scores(tokens: int, rows: int, dim: int) -> Callable[[], None]:
        def body() -> None:
            from vidsparse.kernels.selection.residual import largest_chunks, residual_ranks
            from vidsparse.kernels.tokens.moments import (
                merge_means,
                merge_moments,
                reorder_and_measure,
            )

            dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
            q, k, v = (x.to(DEVICE) for x in clustered_qkv(tokens, dim, dtype, batch=2, pull=2.0))
            order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).to(DEVICE)
            q, q_tiles = reorder_and_measure(q, order, rows, about_zero=True)
            k, k_chunks = reorder_and_measure(k, order, 16)
            v, v_chunks = reorder_and_measure(v, order, 16, summed=True)
            groups = merge_moments(k_chunks, 64), merge_means(v_chunks, 64)
            ranks = residual_ranks(q_tiles, k_chunks, v_chunks, groups, 128 // rows, dim**-0.5)
            score = error_of_means(q, k, v, (128, 16), rows)
            chunks = score.shape[-1]
            for first, second in ((1, 9), (9, 1), (chunks, 5)):
                kept = torch.tensor([first, second] * (score.shape[1] // 2), dtype=torch.int32)
                kept = kept.to(DEVICE)
                words, count = largest_chunks(ranks, kept, chunks, score.shape[-2])
                chosen = unpack_bits(words, chunks)
                assert bool((chosen.sum(-1) == kept.unsqueeze(-1)).all())
                assert bool((count == kept.unsqueeze(-1)).all())
                inside = torch.arange(chunks, device=DEVICE) < kept.view(-1, 1, 1)
                best = (score.sort(-1, descending=True).values * inside).sum(-1)
                # ranks hold 8 bits.
                assert bool(((score * chosen).sum(-1) >= 0.98 * best).all())

        return body

    for tokens, rows, dim in ((1000, 32, 64), (777, 128, 64), (515, 64, 128), (301, 16, 96)):
        yield f"scores S={tokens} M={rows} D={dim}", scores(tokens, rows, dim)

    def ties() -> None:
        from vidsparse.kernels.selection.residual import largest_chunks

        gen = torch.Generator().manual_seed(0)
        ranks = torch.randint(0, 6, (2, 3, 5, 77), generator=gen).to(torch.int16)
        ranks[0, 0, 0] = 0
        ranks[0, 0, 1] = 32767
        place = torch.arange(77)
        for kept in (1, 20, 77):
            expected = (ranks.int() * 100 - place).topk(kept).indices
            alike = torch.full((3,), kept, dtype=torch.int32, device=DEVICE)
            words, count = largest_chunks(ranks.to(DEVICE), alike, 77, 5)
            chosen = unpack_bits(words.cpu(), 77)
            wanted = torch.zeros_like(chosen).scatter_(-1, expected, True)
            assert torch.equal(chosen, wanted)
            assert bool((count == kept).all())
        # text: the last three chunks of all blocks, and all chunks of the last block.
        alike = torch.full((3,), 7, dtype=torch.int32, device=DEVICE)
        words, count = largest_chunks(ranks.to(DEVICE), alike, 74, 4)
        chosen = unpack_bits(words.cpu(), 77)
        assert bool(chosen[..., 74:].all())
        assert bool(chosen[:, :, 4].all())
        assert count[..., :4].unique().tolist() == [10]
        assert count[..., 4].unique().tolist() == [77]

    yield "of equal scores the first", ties

    def two_pieces() -> None:
        from vidsparse.kernels.selection.residual import _in_two, largest_chunks

        chunks, opened = 2100, 2090
        assert _in_two(chunks) == (2048, 512)
        gen = torch.Generator().manual_seed(0)
        # the last block's scores are all alike: the first ones end in the second piece.
        ranks = torch.randint(0, 6, (1, 2, 3, chunks), generator=gen).to(torch.int16)
        ranks[0, :, 2] = 4
        place = torch.arange(opened)
        for kept in (1, 700, 2060):
            expected = (ranks[..., :opened].int() * chunks - place).topk(kept).indices
            alike = torch.full((2,), kept, dtype=torch.int32, device=DEVICE)
            # of any strides.
            laid = ranks.transpose(1, 2).contiguous().transpose(1, 2)
            words, count = largest_chunks(laid.to(DEVICE), alike, opened, 3)
            chosen = unpack_bits(words.cpu(), chunks)
            wanted = torch.zeros_like(chosen)
            wanted[..., :opened].scatter_(-1, expected, True)
            wanted[..., opened:] = True
            assert torch.equal(chosen, wanted)
            assert bool((count == kept + chunks - opened).all())

    yield "of long rows in two pieces", two_pieces

    def moments() -> None:
        from vidsparse.kernels.tokens.moments import (
            merge_means,
            merge_moments,
            reorder_and_measure,
        )

        x = random_qkv(333, 96, torch.float32, batch=2)[0].transpose(1, 2).contiguous()
        x = x.transpose(1, 2).to(DEVICE)
        for size in (16, 4, 64):
            same, fine = reorder_and_measure(x, None, size)
            assert same is x
            runs = list(x.split(size, 2))
            torch.testing.assert_close(fine.mean, torch.stack([r.mean(2) for r in runs], 2))
            spread = torch.stack([r.var(2, correction=0) for r in runs], 2)
            torch.testing.assert_close(fine.variance, spread, rtol=1e-4, atol=1e-5)
            _, summed = reorder_and_measure(x, None, size, summed=True)
            torch.testing.assert_close(summed.variance, spread.sum(-1), rtol=1e-4, atol=1e-4)
            squares = torch.stack([r.square().mean(2) for r in runs], 2)
            _, about_zero = reorder_and_measure(x, None, size, about_zero=True)
            torch.testing.assert_close(about_zero.variance, squares)
            for whole in (64, 128):
                groups = torch.stack([r.mean(2) for r in x.split(whole, 2)], 2)
                torch.testing.assert_close(merge_means(fine, whole), groups)
                torch.testing.assert_close(merge_means(summed, whole), groups)
                merged = merge_moments(fine, whole)
                wide = torch.stack([r.var(2, correction=0) for r in x.split(whole, 2)], 2)
                torch.testing.assert_close(merged.mean, groups)
                torch.testing.assert_close(merged.variance, wide, rtol=1e-4, atol=1e-5)

    yield "moments", moments

    def averages() -> None:
        grid = TokenGrid(3, 10, 13)
        order = token_order("hilbert", grid, torch.device(DEVICE))
        x = random_qkv(grid.tokens, 96, torch.float32, batch=2)[0].to(DEVICE)
        route = find_route(Foresight(), x, x, x)
        by_kernel = replace(route, reorders=True, lists=True)
        ordered, means = order_and_average(x, order, 64, grid.video, by_kernel)
        assert torch.equal(ordered, order.apply(x, by_kernel=False))
        torch.testing.assert_close(means, group_means(ordered, 64))
        # a group that text stands in is not of the video's tokens alone.
        assert order_and_average(x, order, 64, grid.video - 9, by_kernel)[1] is None
        assert order_and_average(x, order, None, grid.video, by_kernel)[1] is None

    yield "means on the way into the order", averages
