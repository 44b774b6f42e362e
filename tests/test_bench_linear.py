"""``vidsparse bench linear``: blocks without attention, checked and timed by format of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bench_models import TINY, shrink
from click.testing import CliRunner, Result
from quick import slow_but

from vidsparse.apps.bench import linear, model_shapes
from vidsparse.apps.bench.linear import LinearRow, linear_file
from vidsparse.apps.bench.model_shapes import MODEL_SHAPES
from vidsparse.apps.cli import main
from vidsparse.apps.commands import bench_linear
from vidsparse.pipelines import linear as layers_of
from vidsparse.pipelines import placement

SLOW = pytest.mark.slow


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    for module in (linear, bench_linear):
        monkeypatch.setattr(module, "MODEL_SHAPES", model_shapes.MODEL_SHAPES)
    monkeypatch.setattr(layers_of, "SMALLEST", dict.fromkeys(layers_of.SMALLEST, 16))


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "linear", *arguments])


def measured(file: Path, family: str, *arguments: str) -> list[LinearRow]:
    shape = MODEL_SHAPES[family]
    frames = 2 * shape.frame_factor + shape.frame_rest
    small = ("--size", "256x192", "--frames", str(frames), "--repeats", "1")
    done = bench("--family", family, *small, "--json", str(file), *arguments)
    assert done.exit_code == 0, done.output
    return linear_file(file).typed(LinearRow)


@pytest.mark.parametrize("family", slow_but(["wan-1.3b", "hunyuanvideo"], TINY))
@pytest.mark.usefixtures("tiny")
def test_a_block_of_each_kind_is_measured_without_its_attention(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("attention was called")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    rows = measured(tmp_path / "rows.json", family, "--linear", "int8")
    kinds = MODEL_SHAPES[family].blocks
    assert [(row.blocks, row.linear) for row in rows] == [
        (kind, name) for kind in kinds for name in ("none", "int8")
    ]
    for own, eight in zip(rows[::2], rows[1::2], strict=True):
        assert (own.error, own.layers, own.own_ms) == (0.0, 0, own.ms)
        assert eight.own_ms == own.ms > 0
        assert eight.ms > 0
        assert 0 < eight.error < 0.05
        assert 0 < eight.layers <= eight.of
        assert eight.tokens == own.tokens > 64
        assert not eight.compiled


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_compiled_blocks_are_held_against_compiled_ones(tmp_path: Path) -> None:
    rows = measured(tmp_path / "rows.json", "wan-1.3b", "--linear", "int8", "--compile")
    assert [(row.linear, row.compiled) for row in rows] == [
        ("none", False), ("none", True), ("int8", True),
    ]  # fmt: skip
    eager, own, eight = rows
    assert own.own_ms == own.ms == eight.own_ms
    assert eager.own_ms == eager.ms
    assert own.error < 1e-5


@pytest.mark.parametrize("how", ["--no-compile", pytest.param("--compile", marks=SLOW)])
@pytest.mark.parametrize("part", ["scale_shift_table", "attn1.to_k.bias", "attn2.to_v.bias"])
@pytest.mark.usefixtures("tiny")
def test_no_time_is_told_of_a_wrong_block(
    part: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(pipe: Any, name: str, **options: Any) -> None:
        layers_of.quantize_linear(pipe, name, **options)
        pipe.transformer.blocks[0].get_parameter(part).data += 10

    monkeypatch.setattr(linear, "quantize_linear", spoil)
    small = ("--family", "wan-1.3b", "--size", "64x64", "--frames", "5")
    done = bench(*small, "--linear", "int8", how)
    assert done.exit_code == 2
    assert "no time is reported for a wrong result" in " ".join(done.output.split())


@pytest.mark.usefixtures("tiny")
def test_rows_are_shown_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    (own, eight) = measured(file, "wan-1.3b", "--linear", "int8")
    shown = bench("--show", str(file))
    assert shown.exit_code == 0, shown.output
    assert f"| {own.tokens:,} x {own.features:,} | fp32 |  | no |" in shown.output
    assert f"| int8 | {eight.layers} of {eight.of} | no | {eight.ms:.2f} |" in shown.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--linear", "fp8"), "linear fp8 needs an NVIDIA GPU"),
        (("--size", "100x64"), "width and height must be multiples of 16"),
        (("--frames", "6"), "frames must be 4k+1, got 6. Hint: 5."),
        (("--linear", "bf16", "--dtype", "bf16"), "linear bf16 needs"),
    ],
)
def test_what_cannot_be_measured_is_said_first(arguments: tuple[str, ...], message: str) -> None:
    done = bench("--family", "wan-1.3b", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_without_any_other_format_each_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(placement, "has_bf16_products", lambda: False)
    done = bench("--family", "wan-1.3b")
    assert done.exit_code == 2
    words = " ".join(done.output.split())
    assert "no other format runs here: linear fp8 needs torchao" in words
    assert "linear bf16 needs a CPU with AVX512-BF16" in words
