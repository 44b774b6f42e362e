"""The Triton kernels of xattention and sale, and of top-k: interpreted, and on a GPU where one is.

The cases are those of ``selection_cases.py``, which says what they are held to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import (
    DEVICE,
    Tile,
    check_captured,
    drifting,
    listed,
)
from selection_cases import cases, check_antidiagonal, check_sale, sale_cases
from torch import Tensor

from vidsparse.grid import TokenGrid
from vidsparse.methods import Sale, SparseMethod, XAttention
from vidsparse.site import CallSite

pytest.importorskip("triton", reason="Triton is not installed here")


@listed(cases(DEVICE), quick=8)
def test_cases(body: Callable[[], None]) -> None:
    body()


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("stride", [4, 8, 16, 64])
    def test_antidiagonals_of_long_sequences(self, stride: int, dtype: torch.dtype) -> None:
        check_antidiagonal(32_764, (128, 128), stride, "cuda", dim=128, dtype=dtype, top_p=0.9)

    @listed(sale_cases("cuda", "fp8"))
    def test_sale_in_fp8(self, body: Callable[[], None]) -> None:
        # what Hopper has a kernel of its own for.
        from vidsparse.kernels.selection.sale import hopper_sale_reason

        capability = torch.cuda.get_device_capability()
        if capability < (8, 9):
            pytest.skip("fp8 needs compute capability 8.9 (Ada) or newer")
        # else this would be the plain kernel once more.
        assert capability != (9, 0) or hopper_sale_reason(torch.device("cuda")) is None
        body()

    @pytest.mark.parametrize("tile", [(64, 32), (16, 8), (128, 128)], ids=str)
    def test_hoppers_kernel_finds_what_the_plain_one_finds(
        self, monkeypatch: pytest.MonkeyPatch, tile: Tile
    ) -> None:
        from vidsparse.kernels.selection.sale import hopper_sale_reason, sale_words
        from vidsparse.kernels.selection.triton_sale import tuned_sale

        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("gluon is for compute capability 9.0 (Hopper)")
        # else this would be the plain kernel twice.
        assert hopper_sale_reason(torch.device("cuda")) is None
        allocate = torch.empty

        def filled(*args: Any, **kwargs: Any) -> Tensor:
            fresh = allocate(*args, **kwargs)
            return fresh.fill_(-1) if fresh.dtype == torch.int32 else fresh

        # words that nobody writes keep everything.
        monkeypatch.setattr(torch, "empty", filled)
        # blocks of 384 rows that heads do not fill, and keys that end within a step.
        q, k = (drifting(3001, 128, torch.bfloat16, "cuda", batch=3, seed=i) for i in (0, 1))
        kept: dict[str, Any] = {
            "local": 64,
            "full_rows": 2900 // tile[0],
            "full_columns": 2900 // tile[1],
        }
        words, counts = sale_words(q, k, 0.01, tile=tile, **kept)
        how = tuned_sale((9, 0), 227 * 1024)
        plain, plain_counts = sale_words(q, k, 0.01, tile=tile, how=how, **kept)
        assert torch.equal(words, plain)
        assert torch.equal(counts, plain_counts)
        assert 0.02 < float(counts.float().mean()) / 3001 < 0.98

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("riding", ["fp16", "fp8"])
    def test_sale_of_long_sequences(self, riding: str, dtype: torch.dtype) -> None:
        if riding == "fp8" and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("fp8 needs compute capability 8.9 (Ada) or newer")
        check_sale(16_381, (64, 32), "cuda", dim=128, dtype=dtype, local=256, riding=riding)

    @pytest.mark.parametrize("method", [XAttention(), Sale()], ids=["xattention", "sale"])
    def test_a_plan_can_be_captured_and_replayed(self, method: SparseMethod) -> None:
        site = CallSite(0, 0, 0.0, TokenGrid(3, 20, 20, text=30))
        q, k, later = (
            drifting(site.grid.tokens, 64, torch.float16, "cuda", seed=i) for i in (0, 1, 2)
        )
        check_captured(method, q, k, later, site)
