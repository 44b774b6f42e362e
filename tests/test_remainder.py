"""What a call lacked of the dense output: rounded, added again, and where it is kept."""

from __future__ import annotations

import pytest
import torch
from budget import random_qkv
from engine_calls import GRID
from torch import Tensor

from vidsparse.remainder import Keeping, Remainder, choose_keeping, lack_of_room

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _operands() -> tuple[Tensor, Tensor, Tensor]:
    return random_qkv(GRID.tokens, 64, torch.float32)


@pytest.mark.parametrize("head_dim", [64, 75])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adding_what_was_kept_gives_the_dense_output_to_half_a_step(
    dtype: torch.dtype, bits: int, head_dim: int
) -> None:
    torch.manual_seed(0)
    dense = torch.randn(2, 3, 50, head_dim).to(dtype)
    sparse = (dense + 0.2 * torch.randn(2, 3, 50, head_dim).to(dtype)).to(dtype)
    keeping = Keeping(bits)
    kept = Remainder.of(dense, sparse, bits)
    # a step, and what the dtype rounds: the difference, the scale, the sum.
    most = 2 ** (bits - 1) - 1
    step = (dense - sparse).abs().amax(-1, keepdim=True).double() / most
    rounding = 4 * torch.finfo(dtype).eps * dense.double().abs().amax()
    error = (kept.add_to(sparse.clone()).double() - dense.double()).abs()
    assert bool((error <= 0.5 * step + rounding).all())
    assert keeping.bytes_for(dense) == kept.values.nbytes + kept.scale.nbytes


def test_half_of_it_is_half_in_any_form() -> None:
    dense, sparse, _ = _operands()
    in_4 = Remainder.of(dense, sparse, 4)
    for kept in (Remainder.of(dense, sparse, 8), in_4, in_4.to_host()):
        whole, half = (kept.add_to(torch.zeros_like(dense), factor) for factor in (1.0, 0.5))
        assert torch.allclose(0.5 * whole, half, rtol=1e-6, atol=0)
        assert bool(half.any())


def test_in_the_machine_s_memory_the_same_is_kept() -> None:
    dense, sparse, _ = _operands()
    here = Remainder.of(dense, sparse, 4)
    there = here.to_host()
    assert torch.equal(here.add_to(sparse.clone()), there.add_to(sparse.clone()))


GIB = 2**30


@pytest.mark.parametrize(
    ("tokens", "heads", "calls", "on_gpu", "on_host", "spared", "expected"),
    [
        # a small model, whatever the machine has.
        (2304, 6, 16, 4 * GIB, 0, 0, Keeping(8)),
        # Wan 14B at 720p with guidance on large and small GPUs: 15.3 GiB of 196 MiB each.
        (75_600, 40, 80, 100 * GIB, 0, 0, Keeping(4)),
        (75_600, 40, 80, 100 * GIB, 64 * GIB, 15 * GIB, Keeping(4)),
        (75_600, 40, 80, 100 * GIB, 64 * GIB, 12 * GIB, Keeping(4, 67)),
        (75_600, 40, 80, 100 * GIB, 64 * GIB, 0, Keeping(4, 5)),
        (75_600, 40, 80, 14 * GIB, 64 * GIB, 0, Keeping(4, 5)),
        # too little of the machine's memory for all but a little, and for what goes beyond room.
        (75_600, 40, 80, 14 * GIB, 14 * GIB, 0, Keeping(4, 73)),
        (75_600, 40, 80, 14 * GIB, GIB, 0, None),
        (75_600, 40, 80, 0, 64 * GIB, 20 * GIB, Keeping(4, 0)),
        (2304, 6, 16, 0, 0, 0, None),
    ],
)
def test_what_is_kept_goes_where_there_is_room(
    tokens: int,
    heads: int,
    calls: int,
    on_gpu: int,
    on_host: int,
    spared: int,
    expected: Keeping | None,
) -> None:
    # of its shape and dtype alone.
    q = torch.empty(1, heads, tokens, 128, dtype=torch.bfloat16, device="meta")
    found = choose_keeping(q, calls, on_gpu, on_host, spared)
    assert found == expected
    each = Keeping(4).bytes_for(q)
    told = lack_of_room(q, calls, on_gpu, found)
    if found is None:
        assert told is not None
        assert told.endswith("nothing was kept")
    elif each * calls <= on_gpu:
        assert told is None
    elif found.most_on_gpu is not None:
        away = (calls - found.most_on_gpu) * each / GIB
        assert told is not None
        assert told.endswith(f"{away:.1f} are in the machine's memory")


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_that_lacks_nothing_stays_as_it_is(bits: int) -> None:
    dense, *_ = _operands()
    out = Remainder.of(dense, dense.clone(), bits).add_to(dense.clone())
    assert torch.equal(out, dense)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_with_nan_shows_it_and_no_other_does(bits: int) -> None:
    dense, *_ = _operands()
    broken = dense.clone()
    broken[0, 0, 7, 3] = torch.nan
    out = Remainder.of(broken, dense, bits).add_to(dense.clone())
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 0, 7]]


of_shapes = pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 3, 77, 64), torch.float32),
        ((1, 2, 130, 128), torch.float16),
        ((1, 2, 33, 96), torch.float16),
        ((1, 1, 1, 5), torch.float32),
    ],
)


@pytest.mark.parametrize("bits", [8, 4])
@of_shapes
@pytest.mark.parametrize("neighbours", [True, False])
def test_the_kernel_rounds_what_is_lacking_to_half_a_step(
    bits: int, shape: tuple[int, ...], dtype: torch.dtype, neighbours: bool
) -> None:
    batch, heads, tokens, dim = shape
    gen = torch.Generator().manual_seed(bits)
    dense, sparse = (
        torch.randn(batch, tokens, heads, dim, generator=gen).to(DEVICE, dtype).transpose(1, 2)
        for _ in range(2)
    )
    if not neighbours:
        dense = dense.contiguous()
    # a row that lacks nothing, and one that lacks more than a number of 16 bits holds.
    sparse[0, 0, 0] = dense[0, 0, 0]
    if dtype == torch.float16 and tokens > 1:
        dense[0, 0, 1, 0], sparse[0, 0, 1, 0] = 6e4, -6e4
    found = Remainder.of(dense, sparse, bits, by_kernel=True)
    expected = Remainder.of(dense.cpu(), sparse.cpu(), bits)
    assert found.values.shape == expected.values.shape
    assert found.values.dtype == expected.values.dtype
    assert found.scale.shape == expected.scale.shape
    assert found.scale.dtype == dtype
    lacking = (dense.double() - sparse.double()).cpu()
    zeros = torch.zeros(shape, dtype=torch.float64)
    here = Remainder(found.values.cpu(), found.scale.cpu().double(), bits)
    parts = [lacking] if bits == 8 else lacking.split(-(-dim // 2), -1)
    most = 2 ** (bits - 1) - 1
    steps = [part.abs().amax(-1, keepdim=True).expand(part.shape) / most for part in parts]
    # half a step, and what the scale was rounded by for each of the steps.
    bound = torch.cat(steps, -1) * (0.5 + most * torch.finfo(dtype).eps) + 1e-7
    assert bool(((here.add_to(zeros) - lacking).abs() <= bound).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_that_the_kernel_rounds_keeps_its_nan_and_its_infinity(bits: int) -> None:
    dense, *_ = (x.to(DEVICE) for x in _operands())
    broken = dense.clone()
    broken[0, 0, 7, 3], broken[0, 0, 9, 40] = torch.nan, torch.inf
    out = Remainder.of(broken, dense, bits, by_kernel=True).add_to(dense.clone()).cpu()
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 0, 7], [0, 0, 9]]
    rest = out.isfinite().all(-1)
    assert torch.equal(out[rest], dense.cpu()[rest])


@pytest.mark.parametrize("bits", [8, 4])
@of_shapes
@pytest.mark.parametrize("neighbours", [True, False])
def test_the_kernel_adds_what_torch_adds(
    bits: int, shape: tuple[int, ...], dtype: torch.dtype, neighbours: bool
) -> None:
    from vidsparse.kernels.tokens.remainder import add_scaled

    batch, heads, tokens, dim = shape
    gen = torch.Generator().manual_seed(bits)
    # in the layout of the pipelines heads of a token are neighbours.
    dense, sparse, out = (
        torch.randn(batch, tokens, heads, dim, generator=gen, dtype=torch.float32)
        .to(dtype)
        .transpose(1, 2)
        for _ in range(3)
    )
    if not neighbours:
        out = out.contiguous()
    lacking = Remainder.of(dense, sparse, bits)
    expected = lacking.add_to(out.clone(), 0.7)
    found = out.to(DEVICE, copy=True)
    values, scale = lacking.values.to(DEVICE), lacking.scale.to(DEVICE)
    assert add_scaled(found, values, scale, 0.7, bits) is found
    assert found.stride() == out.stride()
    # each is rounded once, of the same sum.
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(found.cpu(), expected, rtol=step, atol=4 * step)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_kernel_too_leaves_rows_that_lack_nothing_and_shows_those_with_nan(bits: int) -> None:
    from vidsparse.kernels.tokens.remainder import add_scaled

    dense, *_ = _operands()
    broken = dense.clone()
    broken[0, 0, 7, 3] = torch.nan
    lacking = Remainder.of(broken, dense, bits)
    values, scale = lacking.values.to(DEVICE), lacking.scale.to(DEVICE)
    out = add_scaled(dense.clone().to(DEVICE), values, scale, 1.0, bits).cpu()
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 0, 7]]
    rest = ~out.isnan().any(-1)
    assert torch.equal(out[rest], dense[rest])
