"""The Triton kernels of mask and plan: interpreted, and on a GPU where there is one.

The cases are those of ``planning_cases.py``, which says what they are held to.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import (
    DEVICE,
    check_captured,
    check_same_plan,
    drifting,
    listed,
    structured,
)
from planning_cases import cases, check_index, check_mask

from vidsparse.grid import TokenGrid
from vidsparse.masks import pack_bits
from vidsparse.methods import FgAttn, SpargeAttn, SparseMethod
from vidsparse.plan import make_plan, make_plan_of_bits
from vidsparse.planning import plan_attention
from vidsparse.site import CallSite

pytest.importorskip("triton", reason="Triton is not installed here")


@listed(cases(DEVICE), quick=12)
def test_cases(body: Callable[[], None]) -> None:
    body()


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("tile", [(16, 16), (128, 64), (64, 1)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_long_sequences(self, tile: tuple[int, int], dtype: torch.dtype) -> None:
        # 32,760 tokens are no multiple of 16 or 128, and more than a row of one-token tiles holds.
        q, k = (structured(32_760, 128, seed=i).to("cuda", dtype) for i in (0, 1))
        check_mask(q, k, tile, 0.9)

    @pytest.mark.parametrize("merge", ["xor", "xor-window", "consecutive"])
    def test_long_plans(self, merge: str) -> None:
        mask = (torch.rand(1, 2, 2048, 2048, device="cuda") < 0.2).cumsum(2) % 3 == 1
        keys = mask.sum(-1).int() * 16
        plan = make_plan_of_bits(pack_bits(mask), keys, (16, 16), 32_768, merge)
        check_same_plan(plan, make_plan(mask, (16, 16), 32_768, merge))
        check_index(plan)

    @pytest.mark.parametrize(
        "method", [FgAttn(), SpargeAttn(), FgAttn(tile=(16, 1))], ids=["fg", "sparge", "fg 16x1"]
    )
    def test_a_plan_can_be_captured_and_replayed(self, method: SparseMethod) -> None:
        site = CallSite(0, 0, 0.0, TokenGrid(3, 20, 20, text=30))
        q, k, later = (
            drifting(site.grid.tokens, 64, torch.float16, "cuda", seed=i) for i in (0, 1, 2)
        )
        check_captured(method, q, k, later, site)

    def test_planning_a_long_video_takes_less_than_2_gib(self) -> None:
        if torch.cuda.mem_get_info()[1] < 10e9:
            pytest.skip("needs a GPU of 10 GB")
        grid = TokenGrid(21, 45, 80)
        q, k = (torch.randn(1, 40, grid.tokens, 128, device="cuda").bfloat16() for _ in "qk")
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        plan = plan_attention(FgAttn(), q, k, CallSite(0, 0, 0.0, grid))
        assert torch.cuda.max_memory_allocated() - before < 2**31
        del q, k
        # and what waits for the next step is small.
        assert sum(x.numel() * x.element_size() for x in (plan.kv_bits, plan.q_tiles)) < 2**24
