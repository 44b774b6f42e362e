"""What can run where is decided once, as a call begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vidsparse.attention import attend
from vidsparse.engine import AttentionEngine
from vidsparse.errors import UnsupportedError
from vidsparse.grid import TokenGrid
from vidsparse.kernels import dispatch
from vidsparse.kernels.attention.gates import Gate
from vidsparse.methods import Bsfa, FgAttn, Foresight, Sale, SpargeAttn, SparseMethod, XAttention
from vidsparse.route import Route, find_route, lacks_a_kernel
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite


def route_of(method: SparseMethod, dtype: torch.dtype = torch.float16, **more: Any) -> Route:
    q = torch.empty(1, 2, 64, 64, dtype=dtype)
    return find_route(method, q, q, q, **more)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Triton's kernels run; only questions are asked here, so nothing does."""
    monkeypatch.setattr("vidsparse.route.triton_reason", lambda device: None)
    monkeypatch.setattr("vidsparse.route.plans_on_device", lambda *q: True)


@pytest.mark.parametrize("method", [FgAttn(), SpargeAttn(), XAttention(), Sale()], ids=repr)
def test_on_a_cpu_torch_does_all_of_it(method: SparseMethod) -> None:
    assert route_of(method) == Route(
        implementation="torch",
        quantize=None,
        gates=True,
        selection="select",
        reorders=False,
        lists=False,
        block_rows=64,
    )


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("method", "dtype", "selection"),
    [
        (FgAttn(), torch.float32, "rule"),
        (SpargeAttn(), torch.float16, "rule"),
        (XAttention(), torch.bfloat16, "words"),
        (XAttention(), torch.float32, "select"),
        (Sale(), torch.float16, "words"),
        (Sale(), torch.float32, "select"),
        (Sale(tile=(32, 1)), torch.float16, "select"),
    ],
    ids=repr,
)
def test_kernels_select_where_they_can(
    method: SparseMethod, dtype: torch.dtype, selection: str
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    route = route_of(method, dtype)
    assert (route.selection, route.reorders, route.lists) == (selection, True, True)


@pytest.mark.usefixtures("triton")
def test_kernels_move_no_tokens_whose_gradient_is_wanted() -> None:
    q = torch.empty(1, 2, 64, 64)
    wanted = torch.empty(1, 2, 64, 64, requires_grad=True)
    assert find_route(FgAttn(), q, q, q).reorders
    for tensors in ((wanted, q, q), (q, wanted, q), (q, q, wanted)):
        route = find_route(FgAttn(), *tensors)
        assert (route.selection, route.reorders, route.lists) == ("rule", False, True)
        with torch.no_grad():
            assert find_route(FgAttn(), *tensors).reorders


def test_the_gate_and_the_8_bit_format_are_known_beforehand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def reason(device: Any, dtype: Any, dim: int, gate: Gate | None, quantize: str | None) -> str:
        asked.append((None if gate is None else gate.keys, quantize))
        return "cannot"

    monkeypatch.setitem(dispatch._KNOWN, "gluon", dispatch._KNOWN["gluon"]._replace(reason=reason))
    route_of(SpargeAttn(lambda_=-6.0, quantize="fp8"))
    route_of(SpargeAttn(quantize="none"))
    route_of(FgAttn(), quantize="int8")
    assert asked == [(64, "fp8"), (None, None), (None, "int8")]


@pytest.mark.parametrize("kernel", ["gluon", "triton"])
def test_a_gate_that_costs_time_is_left_out_unless_its_kernel_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    gated = SpargeAttn(lambda_=-6.0)
    assert route_of(gated).gates
    can = dispatch._KNOWN[kernel]._replace(reason=lambda *call: None)
    monkeypatch.setitem(dispatch._KNOWN, kernel, can)
    assert route_of(gated).implementation == kernel
    assert not route_of(gated).gates
    assert route_of(gated, implementation=kernel).gates
    assert route_of(gated, implementation="torch").gates
    # its gate is what this method computes less by.
    assert route_of(Bsfa()).gates


def test_a_method_of_smaller_blocks_gets_a_kernel_that_runs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, whole = Foresight(tile=(32, 16)), Foresight()
    assert [route_of(method).block_rows for method in (small, whole, FgAttn())] == [32, 64, 64]
    monkeypatch.setattr("vidsparse.route.block_rows", lambda device: 128)
    monkeypatch.setattr("vidsparse.route.plans_on_device", lambda *q: True)
    for name in ("gluon", "triton"):
        can = dispatch._KNOWN[name]._replace(reason=lambda *call: None)
        monkeypatch.setitem(dispatch._KNOWN, name, can)

    def way(method: SparseMethod, **asked: Any) -> tuple[str, int, str]:
        route = route_of(method, **asked)
        return route.implementation, route.block_rows, route.selection

    assert way(whole) == ("gluon", 128, "blocks")
    assert way(small) == ("triton", 32, "blocks")
    assert way(small, implementation="triton") == ("triton", 32, "blocks")
    # several tiles to a block, since it was asked for: their lists are joined.
    assert way(small, implementation="gluon") == ("gluon", 128, "select")
    # where it does not know the 8-bit format, the next one runs, as with whole blocks.
    can = dispatch._KNOWN["triton"]._replace(reason=lambda *call: "cannot" if call[4] else None)
    monkeypatch.setitem(dispatch._KNOWN, "triton", can)
    assert way(small, quantize="fp8")[:2] == ("torch", 32)
    # tiles of others join anyway.
    assert way(FgAttn(tile=(32, 16)))[:2] == ("gluon", 128)


def test_an_implementation_that_cannot_run_is_said() -> None:
    with pytest.raises(UnsupportedError, match=r"'gluon' .* not on cpu\. Hint: auto"):
        route_of(FgAttn(), implementation="gluon")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Route]:
    """The routes that engines find; once there is one, nobody may ask what can run."""

    def never(*anything: Any, **more: Any) -> None:
        raise AssertionError("this was decided as the call began")

    found: list[Route] = []

    def once(*tensors: Any, **more: Any) -> Route:
        found.append(find_route(*tensors, **more))
        for name in ("kernels.dispatch.choose", "kernels.dispatch.support", "order.triton_reason"):
            monkeypatch.setattr(f"vidsparse.{name}", never)
        monkeypatch.setattr("vidsparse.plan.triton_reason", never)
        return found[-1]

    monkeypatch.setattr("vidsparse.engine.find_route", once)
    monkeypatch.setattr("vidsparse.planning.find_route", never)
    return found


def test_nothing_on_the_way_asks_again(found: list[Route]) -> None:
    grid = TokenGrid(2, 8, 8)
    q, k, v = (torch.randn(1, 2, grid.tokens, 64) for _ in range(3))
    out: Tensor = attend(q, k, v, grid, SpargeAttn(tile=(32, 32), lambda_=-6.0))
    assert out.shape == q.shape
    assert len(found) == 1


def test_nothing_asks_again_to_keep_and_add_what_a_plan_lacks(found: list[Route]) -> None:
    engine = AttentionEngine(
        Foresight(share=0.1), schedule=Schedule(dense_steps=0, refresh=1), layers=1
    )
    engine.begin_run(3)
    grid = TokenGrid(2, 8, 8)
    q, k, v = (torch.randn(1, 2, grid.tokens, 64) for _ in range(3))
    for step in range(3):
        engine.attend(q, k, v, CallSite(0, step, 0.0, grid))
    assert {cell.action for cell in engine.trace.cells} == {"refresh", "reuse"}
    assert len(found) == 1


@pytest.mark.parametrize(
    ("dtype", "dim", "says"),
    [
        (torch.float32, 64, "not in fp32. Hint: load the pipeline in bf16."),
        (torch.bfloat16, 72, "handles head dims 64, 96 and 128, not 72."),
        (torch.bfloat16, 64, "does not run the method's gate or its 8-bit format here."),
    ],
)
def test_a_gpu_that_runs_no_kernel_of_ours_is_told_why(
    dtype: torch.dtype, dim: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "triton_reason", lambda device: None)
    # of a device that is no CPU; nothing runs.
    q = torch.empty(1, 2, 64, dim, dtype=dtype, device="meta")
    note = lacks_a_kernel(q, "torch")
    assert note is not None
    assert note.endswith(says)
    assert lacks_a_kernel(q, "triton") is None
    assert lacks_a_kernel(torch.empty(1, 2, 64, dim), "torch") is None


@pytest.mark.gpu
def test_a_pipeline_in_fp32_on_a_gpu_says_that_it_is_slower() -> None:
    q = torch.randn(1, 2, 64, 64, device="cuda")
    for implementation, notes in (("auto", 1), ("torch", 0)):
        engine = AttentionEngine(
            FgAttn(), schedule=Schedule(dense_steps=0), layers=1, implementation=implementation
        )
        engine.begin_run(1)
        engine.attend(q, q, q, CallSite(0, 0, 1.0, TokenGrid(1, 8, 8)))
        assert sum("in fp32" in note for note in engine.trace.notes) == notes
