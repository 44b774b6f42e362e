"""Dense attention by the Gluon kernel, which goes through all keys without lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget import Work, check_kernel, check_quantized, clustered_qkv, random_qkv, random_work
from kernel_cases import FAR, HEAD_DIMS, SIZES, far_above, skip_without, strided
from tiny_families import TINY, latents
from tiny_pipelines import tiny_wan
from torch import Tensor

from vidsparse import OptionError, TokenGrid, UnsupportedError
from vidsparse.engine import AttentionEngine
from vidsparse.kernels import dense_attention, quantize_qk
from vidsparse.methods import Dense
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.backends import chooses_backend
from vidsparse.route import DENSE_TOKENS
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite


def everything(tokens: int, *, batch: int = 1, heads: int = 2) -> Work:
    """Lists with which every block attends all keys."""
    chunks = -(-tokens // 128)
    return random_work(tokens, (128, 128), batch=batch, heads=heads, counts=[chunks])


def dense_kernel(
    q: Tensor, k: Tensor, v: Tensor, *plan: Tensor, tile: Any, scale: float, quantized: Any = None
) -> tuple[Tensor, Tensor]:
    return dense_attention(q, k, v, scale=scale, quantize=quantized)


def test_a_cpu_is_refused_in_a_sentence_that_says_why() -> None:
    q = torch.zeros(1, 1, 8, 64)
    with pytest.raises(ValueError, match="cannot run here: it runs on CUDA devices, not on cpu"):
        dense_attention(q, q, q)


def test_operands_and_scale_are_looked_at_first() -> None:
    q = torch.zeros(1, 1, 8, 64)
    with pytest.raises(ValueError, match="scale must be positive and finite, got -1"):
        dense_attention(q, q, q, scale=-1)
    with pytest.raises(ValueError, match="same tokens: q has 8, k has 4"):
        dense_attention(q, q[:, :, :4], q)


def dense_engine(**options: Any) -> AttentionEngine:
    engine = AttentionEngine(Dense(), schedule=Schedule(), layers=1, **options)
    engine.begin_run(1)
    return engine


def test_on_a_cpu_dense_calls_are_the_pipelines_own() -> None:
    q, k, v = random_qkv(60, 64, torch.float32)
    own = torch.randn_like(q)
    for asked in ("auto", "stock"):
        engine = dense_engine(dense_kernel=asked)
        out = engine.attend(q, k, v, CallSite(0, 0, 0.0, TokenGrid(1, 6, 10)), lambda *_: own)
        assert out is own
        assert engine.trace.summary().notes == ()


def test_the_kernel_asked_for_by_name_is_refused_where_it_cannot_run() -> None:
    q, k, v = random_qkv(60, 64, torch.float32)
    engine = dense_engine(dense_kernel="gluon")
    with pytest.raises(UnsupportedError, match="'gluon' kernel cannot run dense attention here"):
        engine.attend(q, k, v, CallSite(0, 0, 0.0, TokenGrid(1, 6, 10)))
    with pytest.raises(OptionError, match="unknown dense kernel 'cudnn'"):
        dense_engine(dense_kernel="cudnn")


def test_a_backend_that_the_user_has_set_counts_as_chosen() -> None:
    from diffusers.models.attention_dispatch import attention_backend

    pipe = tiny_wan()
    with sparsify(pipe, "dense"):
        stock = pipe.transformer.blocks[0].attn1.processor.stock
        assert not chooses_backend(stock)
        with attention_backend("_native_math"):
            assert chooses_backend(stock)
        pipe.transformer.set_attention_backend("native")
        assert chooses_backend(stock)
        pipe.transformer.reset_attention_backend()
        assert not chooses_backend(stock)
    assert not chooses_backend(object())


def test_a_backend_set_for_all_of_diffusers_serves_dense_calls_where_a_processor_has_none() -> None:
    from diffusers.models.attention_dispatch import (
        AttentionBackendName,
        _AttentionBackendRegistry,
        attention_backend,
    )

    pipe = TINY["cosmos2.5"].build()
    latents("cosmos2.5", pipe)
    called: list[str] = []
    math = AttentionBackendName._NATIVE_MATH
    kernel = _AttentionBackendRegistry._backends[math]

    def watched(*args: Any, **kwargs: Any) -> Any:
        called.append("math")
        return kernel(*args, **kwargs)

    layers = len(pipe.transformer.transformer_blocks)
    with (
        pytest.MonkeyPatch.context() as patch,
        attention_backend("_native_math"),
    ):
        patch.setitem(_AttentionBackendRegistry._backends, math, watched)
        latents("cosmos2.5", pipe)
        stock = len(called)
        with sparsify(pipe, "dense"):
            latents("cosmos2.5", pipe)
    assert stock >= 2 * layers
    assert len(called) == 2 * stock


@pytest.fixture
def hopper() -> None:
    skip_without("gluon")


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty", "hopper")
class TestOnGpu:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("dim", HEAD_DIMS)
    @pytest.mark.parametrize("tokens", [1, 127, 128, 129, 1000, 1153])
    def test_every_row_attends_all_keys(self, tokens: int, dim: int, dtype: torch.dtype) -> None:
        q, k, v = (x.cuda() for x in random_qkv(tokens, dim, dtype, batch=2))
        check_kernel(dense_kernel, q, k, v, everything(tokens, batch=2).to("cuda"))

    @pytest.mark.parametrize("heads", [1, 5])
    def test_blocks_that_are_cut_into_parts(self, heads: int) -> None:
        # 33 blocks a head: fewer than programs with one head, more than a round with five.
        tokens = 4200
        q, k, v = (x.cuda() for x in random_qkv(tokens, 64, torch.bfloat16, heads=heads))
        check_kernel(dense_kernel, q, k, v, everything(tokens, heads=heads).to("cuda"))

    def test_heads_beside_channels_in_memory(self) -> None:
        q, k, v = (strided(x.cuda()) for x in random_qkv(700, 128, torch.bfloat16, batch=2))
        check_kernel(dense_kernel, q, k, v, everything(700, batch=2).to("cuda"))

    @pytest.mark.parametrize(
        "layout", ["heads beside channels", "of one product", "one channel on"]
    )
    def test_one_sample_is_read_as_the_pipelines_lay_it_out(self, layout: str) -> None:
        q, k, v = (x.cuda() for x in random_qkv(700, 128, torch.bfloat16))
        if layout == "heads beside channels":
            q, k, v = (strided(part) for part in (q, k, v))
        elif layout == "of one product":
            # as fused projections lay them, each on a multiple of 16 bytes.
            q, k, v = strided(torch.cat((q, k, v), 1)).chunk(3, 1)
        else:
            # nowhere on one.
            q, k, v = (F.pad(part, (1, 1))[..., 1:-1] for part in (q, k, v))
        check_kernel(dense_kernel, q, k, v, everything(700).to("cuda"))

    @pytest.mark.parametrize("tokens", [1, 129, 4200])
    def test_the_output_of_one_sample_lies_as_its_queries_do(self, tokens: int) -> None:
        # the longest is cut into parts, which are joined.
        q, k, v = (strided(x.cuda()) for x in random_qkv(tokens, 128, torch.bfloat16, heads=5))
        out, _ = dense_attention(q, k, v)
        assert out.transpose(1, 2).is_contiguous()
        check_kernel(dense_kernel, q, k, v, everything(tokens, heads=5).to("cuda"))

    @pytest.mark.parametrize("above", FAR)
    @pytest.mark.parametrize("size", SIZES)
    def test_scores_far_above_the_first_ones(self, above: float, size: float) -> None:
        q, k, v, _ = far_above(above, 128, 64, 128)
        work = everything(q.shape[2], batch=2)
        check_kernel(dense_kernel, q.cuda(), k.cuda(), (v * size).cuda(), work.to("cuda"))

    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    @pytest.mark.parametrize("tokens", [129, 1000])
    def test_scores_in_8_bits(self, tokens: int, kind: str) -> None:
        q, k, v = (x.cuda() for x in clustered_qkv(tokens, 128, torch.bfloat16, pull=2.0, mean=1.0))
        quantized = quantize_qk(q, k, kind, q_run=128, k_run=64)
        check_quantized(dense_kernel, q, k, v, everything(tokens).to("cuda"), quantized)

    def test_the_engine_takes_the_faster_one_and_says_so(self) -> None:
        own = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, device="cuda")
        for tokens, asked, keep, ours in (
            (DENSE_TOKENS, "auto", False, True),
            (DENSE_TOKENS - 1, "auto", False, False),
            (DENSE_TOKENS, "auto", True, False),
            (DENSE_TOKENS, "stock", False, False),
            (60, "gluon", True, True),
        ):
            q, k, v = (x.cuda() for x in random_qkv(tokens, 64, torch.bfloat16))
            engine = dense_engine(dense_kernel=asked)
            site = CallSite(0, 0, 0.0, TokenGrid(1, 1, tokens))
            out = engine.attend(q, k, v, site, lambda *_: own, keep_dense=keep)
            assert (out is not own) == ours
            told = ("dense calls by the gluon kernel",) if ours else ()
            summary = engine.trace.summary()
            assert summary.notes == told
            assert summary.implementation == ("gluon" if ours else "the pipeline's dense attention")
            if ours:
                stock = torch.nn.functional.scaled_dot_product_attention(q, k, v)
                torch.testing.assert_close(out, stock, rtol=0.02, atol=0.02)
