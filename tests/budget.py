"""How far a kernel may be from the truth, and plans to try it on.

The yardstick is ``reference_attention`` in fp64 on the very inputs the kernel got, so the rounding
of the inputs is nobody's fault. What precision a dtype allows is then read off the attention that
users have today: ``F.scaled_dot_product_attention`` with the plan's token mask, in the same dtype,
against the same yardstick. A kernel may be wrong by twice that, in the largest error and in RMS:
once for the roundings it shares with stock attention (weights before the second product, the
output), once for adding in another order. Both are taken over the whole tensor, for one element of
stock attention can be exact by luck.

The floor covers calls in which stock attention is exact or nearly so (one key, fp32): an output
that is off by a few units in the last place of the largest value is still right. Rounding alone
costs half a unit; each of the two products, the exponential and the division may cost as much again
in a kernel that works in the dtype itself, hence 4 units at most and 1 in RMS.

Products in 8 bits add an error that their formats promise. Rounding to a grid of width u is off by
u / 12**0.5 in RMS, independently for every element, and to first order an output moves by

    d o_i = scale * sum_j p_ij (v_j - o_i) (dq_i k_j + q_i dk_j)

where all keys share dq_i. ``eight_bit_rms`` adds up the variances; a kernel may be wrong by half as
much again (the second order, and a finite sample), and by what 16 bits allow on top.

The log-sum-exp is used as exp(lse - other lse) to weigh outputs against each other, so an absolute
error of it is a relative error of an output. A quarter of a unit in the last place of the inputs'
dtype is half of what rounding the output costs anyway: no one can see less. In fp32, where sums of
S terms dominate, the allowance is 8 units in the last place of the largest value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.kernels import QuantizedQK
from vidsparse.kernels.attention.gates import Gate
from vidsparse.kernels.attention.means import (
    KeyMeans,
    counts_of_lists,
    group_means,
    quantize_means,
)
from vidsparse.kernels.attention.reference import reference_attention, token_mask

# takes q, k, v and a plan, returns output and log-sum-exp.
Kernel = Callable[..., tuple[Tensor, Tensor]]

TIMES_STOCK = 2.0
FLOOR_MAX_ULPS = 4.0
FLOOR_RMS_ULPS = 1.0
TIMES_EIGHT_BIT = 1.5


@dataclass(frozen=True)
class Work:
    """The plan half of a kernel's arguments."""

    q_tiles: Tensor
    kv_count: Tensor
    kv_index: Tensor
    tile: tuple[int, int]
    tokens: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_tiles, self.kv_count, self.kv_index

    def mask(self) -> Tensor:
        return token_mask(*self.tensors, self.tile, self.tokens)

    def to(self, device: str) -> Work:
        q_tiles, kv_count, kv_index = (t.to(device) for t in self.tensors)
        return Work(q_tiles, kv_count, kv_index, self.tile, self.tokens)


def random_work(
    tokens: int,
    tile: tuple[int, int],
    *,
    batch: int = 1,
    heads: int = 2,
    share: float = 0.4,
    counts: list[int] | None = None,
    longest_first: bool = True,
    seed: int = 0,
) -> Work:
    """Blocks of shuffled query tiles with ragged random key lists.

    ``counts`` gives the list lengths of every head (cycled, cut to the chunks there are) instead of
    lengths around ``share``. What lies behind a list's end is a number no chunk has: a kernel
    that reads it fails.
    """
    gen = torch.Generator().manual_seed(seed)
    rows, keys = tile
    per_block = 128 // rows
    q_count, k_count = -(-tokens // rows), -(-tokens // keys)
    blocks = -(-q_count // per_block)
    q_tiles = torch.full((batch, heads, blocks * per_block), -1, dtype=torch.int32)
    kv_index = torch.full((batch, heads, blocks, k_count), 2**30, dtype=torch.int32)
    kv_count = torch.zeros(batch, heads, blocks, dtype=torch.int32)
    for b in range(batch):
        for h in range(heads):
            q_tiles[b, h, :q_count] = torch.randperm(q_count, generator=gen)
            if counts is None:
                drawn = torch.rand(blocks, generator=gen) * 2 * share * k_count
                lengths = [min(k_count, max(1, round(x))) for x in drawn.tolist()]
            else:
                lengths = [min(k_count, counts[(g + h) % len(counts)]) for g in range(blocks)]
            if longest_first:
                lengths.sort(reverse=True)
            for g, length in enumerate(lengths):
                kv_count[b, h, g] = length
                chosen = torch.randperm(k_count, generator=gen)[:length].sort().values
                kv_index[b, h, g, :length] = chosen
    return Work(q_tiles.view(batch, heads, blocks, per_block), kv_count, kv_index, tile, tokens)


def in_order(work: Work) -> Work:
    """The same lists for blocks of neighbouring tiles, whose rows look at the same keys."""
    flat = work.q_tiles.flatten(2)
    tiles = -(-work.tokens // work.tile[0])
    line = torch.arange(flat.shape[-1], dtype=torch.int32)
    line[tiles:] = -1
    q_tiles = line.expand_as(flat).view_as(work.q_tiles)
    return Work(q_tiles, work.kv_count, work.kv_index, work.tile, work.tokens)


def random_qkv(
    tokens: int,
    dim: int,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    heads: int = 2,
    spread: float = 1.5,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k, v ``[B, H, S, D]``; scores spread over ``spread ** 2`` standard deviations."""
    gen = torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens, dim)
    q, k = (torch.randn(shape, generator=gen) * spread for _ in range(2))
    v = torch.randn(shape, generator=gen)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def clustered_qkv(
    tokens: int,
    dim: int,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    heads: int = 2,
    width: int = 64,
    pull: float = 4.0,
    mean: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v whose queries look at some runs of ``width`` tokens and hardly at others.

    Every run has a direction of its own and one that it shares with some others; ``mean`` is added
    to all keys. Scores (at the default scale) differ by about ``pull ** 2`` between runs.
    """
    gen = torch.Generator().manual_seed(seed)
    runs = -(-tokens // width)
    centres = torch.randn(batch, heads, runs, dim, generator=gen)
    centres += torch.randn(batch, heads, 1 + runs // 3, dim, generator=gen).repeat(1, 1, 3, 1)[
        :, :, :runs
    ]
    centres = (centres * pull / dim**0.25 / 2**0.5).repeat_interleave(width, 2)[:, :, :tokens]
    q, k, v = random_qkv(
        tokens, dim, torch.float32, batch=batch, heads=heads, spread=0.5, seed=seed + 1
    )
    common = mean * torch.randn(batch, heads, 1, dim, generator=gen)
    return (q + centres).to(dtype), (k + centres + common).to(dtype), v.to(dtype)


def truth(q: Tensor, k: Tensor, v: Tensor, work: Work, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in fp64, on the CPU."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    return reference_attention(q, k, v, *work.to("cpu").tensors, tile=work.tile, scale=scale)


def stock(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """PyTorch's attention under a token mask in the inputs' dtype, zeros where nothing is kept."""
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.masked_fill(~mask.any(-1, keepdim=True), 0)


def check_gated(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: Work,
    gate: Gate,
    quantized: QuantizedQK | None = None,
    *,
    flips: float = 0.0,
) -> Tensor:
    """Hold a kernel with a gate to the gated reference; the pairs that the gate skipped.

    The budget is that of the attention without a gate, which does the same products. A score so
    near a threshold that rounding decides may flip: ``flips`` is the share of all pairs that may,
    and where it is not zero the output is not held to the reference's.
    """
    options: dict[str, Any] = {"tile": work.tile, "scale": q.shape[-1] ** -0.5}
    skipped = torch.full_like(work.kv_count, -1)
    out, lse = kernel(
        q, k, v, *work.tensors, **options, gate=gate, quantized=quantized, skipped=skipped
    )
    wide = q.cpu().double(), k.cpu().double(), v.cpu().double()
    on_cpu = work.to("cpu")
    expected = torch.zeros_like(on_cpu.kv_count)
    true, true_lse = reference_attention(
        *wide,
        *on_cpu.tensors,
        **options,
        gate=gate.to("cpu"),
        quantized=None if quantized is None else quantized.to("cpu"),
        skipped=expected,
    )
    pairs = int(on_cpu.mask().sum())
    off = int((skipped.cpu() - expected).abs().sum())
    assert off <= flips * pairs, f"{off} of {pairs} pairs are skipped that should not be, or not"
    plain, _ = truth(q, k, v, work, options["scale"])
    most, most_rms = allowed(stock(q, k, v, work.mask(), options["scale"]), plain)
    assert out.dtype == q.dtype
    assert bool(out.isfinite().all()), "output holds NaN or Inf"
    if not flips:
        largest, rms = errors(out, true)
        assert largest <= most, f"largest error {largest:.3g}, budget {most:.3g}"
        assert rms <= most_rms, f"RMS error {rms:.3g}, budget {most_rms:.3g}"
        check_lse(lse, true_lse, q.dtype)
    return skipped


def _rounding_variance(x8: Tensor, scale: Tensor, run: int, kind: str) -> Tensor:
    """Variance of the rounding error of every element of an 8-bit tensor, fp64."""
    width = scale.double().repeat_interleave(run, 2)[:, :, : x8.shape[2], None]
    if kind == "fp8":
        # e4m3: three bits after the leading one, whose place is -6 at the least.
        magnitude = x8.double().abs().clamp_min(2.0**-6)
        width = width * 2.0 ** (magnitude.log2().floor() - 3)
    return (width**2 / 12).expand(x8.shape)


def eight_bit_rms(
    q: Tensor, k: Tensor, v: Tensor, work: Work, scale: float, quantized: QuantizedQK
) -> tuple[float, float]:
    """RMS error that 8 bits make in the output and in the log-sum-exp, to first order."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    k = k - k.mean(2, keepdim=True)
    x8 = (quantized.q.cpu(), quantized.k.cpu())
    scales = (quantized.q_scale.cpu(), quantized.k_scale.cpu())
    q_variance = _rounding_variance(x8[0], scales[0], quantized.q_run, quantized.kind)
    k_variance = _rounding_variance(x8[1], scales[1], quantized.k_run, quantized.kind)
    mask = work.to("cpu").mask()
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    p = scores.softmax(-1).nan_to_num(0)
    o = p @ v
    variance = torch.empty_like(o)
    for at in itertools.product(*map(range, p.shape[:2])):
        # [S, D of v, D of k], a head at a time.
        pairs = v[at].unsqueeze(2) * k[at].unsqueeze(1)
        moved = (p[at] @ pairs.flatten(1)).view_as(pairs)
        moved -= o[at].unsqueeze(2) * (p[at] @ k[at]).unsqueeze(1)
        variance[at] = (moved**2 * q_variance[at].unsqueeze(1)).sum(-1)
    weight = p**2 * (q**2 @ k_variance.mT)
    variance += weight @ v**2 - 2 * o * (weight @ v) + o**2 * weight.sum(-1, keepdim=True)
    # where every row has one key, nothing but rounding is left of it.
    variance.clamp_min_(0)
    lse_variance = ((p @ k) ** 2 * q_variance).sum(-1) + weight.sum(-1)
    kept = mask.any(-1)
    return (
        scale * variance.mean().sqrt().item(),
        scale * lse_variance[kept].mean().sqrt().item(),
    )


def check_quantized(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: Work,
    quantized: QuantizedQK,
    scale: float | None = None,
    times: float = TIMES_EIGHT_BIT,
) -> None:
    """Hold a kernel with 8-bit operands to two yardsticks.

    The one in fp64 on the very 8-bit operands, within the budget of 16 bits; and fp64 attention on
    ``q`` and ``k``, within what 8 bits add.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options: dict[str, Any] = {"tile": work.tile, "scale": scale}
    out, lse = kernel(q, k, v, *work.tensors, **options, quantized=quantized)
    wide = q.cpu().double(), k.cpu().double(), v.cpu().double()
    same, same_lse = reference_attention(
        *wide, *work.to("cpu").tensors, **options, quantized=quantized.to("cpu")
    )
    true, true_lse = truth(q, k, v, work, scale)
    stock_out = stock(q, k, v, work.mask(), scale)
    most, most_rms = allowed(stock_out, true)
    slack = 0.0
    if quantized.kind == "fp8" and q.is_cuda:
        # ada's and hopper's tensor cores keep 14 significant bits of a sum of fp8 products, and
        # round at every 32 of them.
        q_wide, k_wide = (x.abs() for x in quantized.to("cpu").dequantized(torch.float64))
        slack = 2.0**-12 * scale * (q_wide @ k_wide.mT).max().item()
    largest, rms = errors(out, same)
    assert out.dtype == q.dtype
    assert bool(out.isfinite().all()), "output holds NaN or Inf"
    most += slack * v.abs().max().item()
    assert largest <= most, f"largest error {largest:.3g}, budget {most:.3g}"
    assert rms <= most_rms + slack, f"RMS error {rms:.3g}, budget {most_rms + slack:.3g}"
    check_lse(lse, same_lse, q.dtype, slack)
    promised, promised_lse = eight_bit_rms(q, k, v, work, scale, quantized)
    _, rms = errors(out, true)
    budget = times * promised + most_rms
    assert rms <= budget, f"8 bits: RMS error {rms:.3g}, budget {budget:.3g}"
    kept = true_lse.isfinite()
    if bool(kept.any()):
        _, rms = errors(lse.cpu()[kept], true_lse[kept])
        budget = times * promised_lse + allowed_lse(true_lse, q.dtype)
        assert rms <= budget, f"8 bits: RMS error of lse {rms:.3g}, budget {budget:.3g}"


def errors(got: Tensor, true: Tensor) -> tuple[float, float]:
    """Largest and RMS error."""
    difference = got.cpu().double() - true
    return difference.abs().max().item(), difference.square().mean().sqrt().item()


def allowed(stock_out: Tensor, true: Tensor) -> tuple[float, float]:
    """The budget for the largest and the RMS error of an output in ``stock_out``'s dtype."""
    largest, rms = errors(stock_out, true)
    unit = torch.finfo(stock_out.dtype).eps * true.abs().max().item()
    return (
        max(TIMES_STOCK * largest, FLOOR_MAX_ULPS * unit),
        max(TIMES_STOCK * rms, FLOOR_RMS_ULPS * unit),
    )


def allowed_lse(true_lse: Tensor, dtype: torch.dtype) -> float:
    """The budget for the largest error of a log-sum-exp of inputs in ``dtype``."""
    finite = true_lse[true_lse.isfinite()]
    top = finite.abs().max().item() if finite.numel() else 0.0
    return max(torch.finfo(dtype).eps / 4, 8 * torch.finfo(torch.float32).eps * max(1.0, top))


def check_output(got: Tensor, stock_out: Tensor, true: Tensor, what: str = "output") -> None:
    """Assert that ``got`` stays inside the budget."""
    assert got.dtype == stock_out.dtype, f"{what} is {got.dtype}, not {stock_out.dtype}"
    assert bool(got.isfinite().all()), f"{what} holds NaN or Inf"
    largest, rms = errors(got, true)
    most, most_rms = allowed(stock_out, true)
    assert largest <= most, f"{what}: largest error {largest:.3g}, budget {most:.3g}"
    assert rms <= most_rms, f"{what}: RMS error {rms:.3g}, budget {most_rms:.3g}"


def check_lse(got: Tensor, true: Tensor, dtype: torch.dtype, slack: float = 0.0) -> None:
    """Assert that a log-sum-exp stays inside the budget, and is -inf exactly where it must be.

    ``slack`` is what the scores themselves may be off by.
    """
    got = got.cpu()
    empty = true == -torch.inf
    assert torch.equal(got == -torch.inf, empty), "-inf stands in the wrong rows"
    kept = ~empty
    if bool(kept.any()):
        largest, _ = errors(got[kept], true[kept])
        most = allowed_lse(true, dtype) + slack
        assert largest <= most, f"log-sum-exp: largest error {largest:.3g}, budget {most:.3g}"


def check_kernel(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, work: Work, scale: float | None = None
) -> None:
    """Run ``kernel`` (the shared signature) and hold its output and log-sum-exp to the budget."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = kernel(q, k, v, *work.tensors, tile=work.tile, scale=scale)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    true, true_lse = truth(q, k, v, work, scale)
    check_output(out, stock(q, k, v, work.mask(), scale), true)
    check_lse(lse, true_lse, q.dtype)
    kept = work.mask().any(-1).cpu()
    assert not bool(out.cpu()[~kept].any()), "a row without keys is not zero"


def means_for(k: Tensor, v: Tensor, work: Work, size: int) -> KeyMeans:
    """Means of groups of ``size`` tokens for a plan, on the device of ``k``."""
    counts = counts_of_lists(work.kv_count, work.kv_index, work.tile[1], work.tokens, size)
    return KeyMeans(group_means(k, size), group_means(v, size), counts, size)


def with_means(k: Tensor, v: Tensor, mask: Tensor, means: KeyMeans) -> tuple[Tensor, ...]:
    """Keys, values and a mask whose plain attention is that with means.

    Behind the tokens stands each token's mean; a row sees a token, or else its mean.
    """
    tokens = k.shape[2]
    own_k, own_v = (x.repeat_interleave(means.size, 2)[:, :, :tokens] for x in (means.k, means.v))
    in_a_block = torch.ones_like(mask)
    return (
        torch.cat([k, own_k], 2),
        torch.cat([v, own_v], 2),
        torch.cat([mask, in_a_block & ~mask], -1),
    )


def check_with_means(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: Work,
    size: int,
    *,
    gate: Gate | None = None,
    quantized: QuantizedQK | None = None,
) -> None:
    """Hold a kernel with means of groups of ``size`` tokens to the reference in fp64.

    The budget is that of plain attention to every row's listed keys and the means of the others.
    """
    means = means_for(k, v, work, size)
    if quantized is not None:
        means = quantize_means(means, quantized)
    options: dict[str, Any] = {"tile": work.tile, "scale": q.shape[-1] ** -0.5}
    out, lse = kernel(
        q, k, v, *work.tensors, **options, gate=gate, quantized=quantized, means=means
    )
    on_cpu = means.to("cpu")
    wide_q, wide_k, wide_v = (x.cpu().double() for x in (q, k, v))
    true, true_lse = reference_attention(
        wide_q,
        wide_k,
        wide_v,
        *work.to("cpu").tensors,
        **options,
        gate=None if gate is None else gate.to("cpu"),
        quantized=None if quantized is None else quantized.to("cpu"),
        means=replace(on_cpu, k=on_cpu.k.double(), v=on_cpu.v.double()),
    )
    every_k, every_v, mask = with_means(k, v, work.mask(), means)
    stock_out = stock(q, every_k, every_v, mask, options["scale"])
    plain = F.scaled_dot_product_attention(
        wide_q,
        every_k.cpu().double(),
        every_v.cpu().double(),
        attn_mask=mask.cpu(),
        scale=q.shape[-1] ** -0.5,
    )
    most, most_rms = allowed(stock_out, plain)
    slack = 0.0
    if quantized is not None and quantized.kind == "fp8" and q.is_cuda:
        q_wide, k_wide = (x.abs() for x in quantized.to("cpu").dequantized(torch.float64))
        slack = 2.0**-12 * options["scale"] * (q_wide @ k_wide.mT).max().item()
    largest, rms = errors(out, true)
    assert out.dtype == q.dtype
    assert bool(out.isfinite().all()), "output holds NaN or Inf"
    most += slack * v.abs().max().item()
    assert largest <= most, f"largest error {largest:.3g}, budget {most:.3g}"
    assert rms <= most_rms + slack, f"RMS error {rms:.3g}, budget {most_rms + slack:.3g}"
    check_lse(lse, true_lse, q.dtype, slack)
