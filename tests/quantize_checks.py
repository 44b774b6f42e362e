"""What a kernel's mean, and its rounding to 8 bits with pooling on the way, are held to."""

from __future__ import annotations

import torch
from budget import random_qkv
from kernel_cases import strided

from vidsparse.kernels import quantize_qk


def check_mean(device: str = "cpu") -> None:
    """Hold the mean of a kernel to torch's, over more tokens than one program adds up."""
    from vidsparse.kernels.tokens.triton_quantize import triton_mean

    x = strided(random_qkv(1100, 96, torch.float16, batch=2)[0].to(device)) + 3
    torch.testing.assert_close(triton_mean(x), x.double().mean(2).float(), rtol=1e-5, atol=1e-5)


def check_pooled(kind: str, tile: tuple[int, int], *, judged: bool, device: str = "cpu") -> None:
    """Hold quantisation that pools to quantising and pooling one after the other."""
    from vidsparse.kernels.tokens.pool import pool
    from vidsparse.kernels.tokens.quantize import quantize_and_pool

    q, k, _ = (strided(x.to(device)) for x in random_qkv(333, 96, torch.float16, batch=2))
    order = torch.randperm(333, generator=torch.Generator().manual_seed(2)).to(device)
    got, *pooled = quantize_and_pool(q, k, kind, order, tile, judged=judged)
    expected = quantize_qk(q, k, kind, q_run=tile[0], order=order)
    assert (got.q_run, got.k_run) == (expected.q_run, expected.k_run)
    for name in ("q_scale", "k_scale", "shift"):
        a, b = getattr(got, name), getattr(expected, name)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    for name in ("q", "k"):
        a, b = (getattr(x, name).view(torch.int8).int() for x in (got, expected))
        assert (a - b).abs().float().mean() <= 1e-4
    for x, size, means in ((q, tile[0], pooled[0]), (k, tile[1], pooled[1])):
        alone = pool(x[:, :, order], size, judged=judged)
        a, b = ((m.high.float() + m.low.float()) * m.scale.unsqueeze(-1) for m in (means, alone))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert (means.similarity is not None) == judged
        if judged:
            torch.testing.assert_close(means.similarity, alone.similarity, rtol=1e-5, atol=1e-5)
