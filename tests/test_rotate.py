"""Rotary embedding in one pass: the same bits as PyTorch's separate operations.

As in ``test_triton.py``, the interpreter has a process of its own: this file as a script.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from test_triton import PATIENCE, run
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")
pytestmark = pytest.mark.timeout(PATIENCE + 60)

HERE = Path(__file__).parent
# the interpreter rounds to bf16 otherwise than GPUs and PyTorch do.
INTERPRETED = {"fp16": torch.float16}
ON_GPU = {**INTERPRETED, "bf16": torch.bfloat16}

Check = Callable[[], None]


def plain(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool = False) -> Tensor:
    if halves:
        first, second = x.chunk(2, -1)
        rotated = (
            torch.addcmul(first * cos, -sin, second.to(sin.dtype)),
            torch.addcmul(second * cos, sin, first.to(sin.dtype)),
        )
        return torch.cat(rotated, -1).type_as(x).contiguous()
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def angles(*shape: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 5
    return angle.cos(), angle.sin()


def check(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool = False) -> None:
    from vidsparse.kernels.triton_rotate import can_rotate, rotate_rows

    assert can_rotate(x, cos, sin)
    got = rotate_rows(x, cos, sin, halves=halves)
    assert got.is_contiguous()
    expected = plain(x, cos, sin, halves=halves)
    if halves:
        # multiplied and added at once, which neither the interpreter nor every CPU does.
        torch.testing.assert_close(got, expected, rtol=torch.finfo(x.dtype).eps, atol=1e-7)
    else:
        assert torch.equal(got, expected)


def cases(device: str, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Check]]:
    """Name and body of every case: the shapes in which families hold their angles."""

    def of(dtype: torch.dtype, *shape: int) -> Tensor:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return x.to(device, dtype)

    def table(*shape: int) -> tuple[Tensor, Tensor]:
        cos, sin = angles(*shape)
        return cos.to(device), sin.to(device)

    twice = tuple(t[..., 0::2] for t in table(37, 1, 64))
    for name, dtype in dtypes.items():
        x = of(dtype, 2, 37, 3, 64)
        yield f"{name} of tokens", partial(check, x, *table(1, 37, 1, 32))
        yield f"{name} every angle twice", partial(check, x, *twice)
        yield f"{name} of heads", partial(check, x, *table(37, 3, 32))
        yield f"{name} of samples", partial(check, x, *table(2, 37, 1, 32))
        yield f"{name} part of a sequence", partial(check, x[:, 7:], *table(30, 1, 32))
        wide = of(dtype, 1, 3, 37, 96).transpose(1, 2)
        yield f"{name} 96 channels, strided", partial(check, wide, *table(37, 1, 48))
        by_head = tuple(t.transpose(1, 2) for t in table(2, 3, 37, 32))
        yield f"{name} halves", partial(check, x, *by_head, halves=True)
        yield f"{name} halves, strided", partial(check, wide, *table(37, 1, 48), halves=True)
        yield f"{name} over all heads", partial(check, of(dtype, 2, 37, 192), *table(1, 37, 96))


def main() -> None:
    """Try all cases in the interpreter; print ``{name: what went wrong or null}``."""
    answers: dict[str, str | None] = {}
    for name, body in cases("cpu", INTERPRETED):
        try:
            body()
            answers[name] = None
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(answers))


@pytest.fixture(scope="module")
def answers() -> dict[str, str | None]:
    done = run(str(HERE / "test_rotate.py"), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name, _ in cases("cpu", INTERPRETED)])
def test_interpreted(name: str, answers: dict[str, str | None]) -> None:
    assert answers[name] is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", [name for name, _ in cases("cpu", ON_GPU)])
def test_on_a_gpu(name: str) -> None:
    dict(cases("cuda", ON_GPU))[name]()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_processors_use_it_but_not_where_gradients_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vidsparse.kernels import triton_rotate
    from vidsparse.pipelines.adapter import rotate

    def unwanted(*args: object, halves: bool) -> Tensor:
        raise AssertionError("the kernel ran")

    x = torch.randn(1, 5, 2, 16, device="cuda", dtype=torch.bfloat16)
    cos, sin = (t.cuda() for t in angles(5, 1, 8))
    expected = plain(x, cos, sin)
    assert torch.equal(rotate(x, cos, sin), expected)
    monkeypatch.setattr(triton_rotate, "rotate_rows", unwanted)
    assert torch.equal(rotate(x.clone().requires_grad_(), cos, sin), expected)
    with pytest.raises(AssertionError, match="the kernel ran"):
        rotate(x, cos, sin)


def test_other_tensors_are_left_to_pytorch() -> None:
    from vidsparse.kernels.triton_rotate import can_rotate

    x = torch.randn(1, 5, 2, 16).half()
    cos, sin = angles(5, 1, 8)
    assert can_rotate(x, cos, sin)
    assert not can_rotate(x.float(), cos, sin)
    assert not can_rotate(x.flatten()[1:-15].view(1, 9, 1, 16), cos, sin)
    assert not can_rotate(x, cos.double(), sin.double())
    assert not can_rotate(x.transpose(2, 3), cos, sin)
    assert not can_rotate(x[0, 0], cos, sin)


if __name__ == "__main__":
    main()
