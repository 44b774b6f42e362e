"""``vidsparse bench model``: tiny models of every family by the command's own path."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import torch.nn.functional as F
from bench_models import TINY, shrink
from click.testing import CliRunner, Result
from quick import slow_but

from vidsparse.apps.bench.model_forward import (
    Stopwatch,
    first_blocks,
    planned_to_order,
    random_plan,
    watched_attention,
)
from vidsparse.apps.bench.model_readings import (
    MERGED,
    merged_share,
    projected_ratio,
    projected_step,
)
from vidsparse.apps.bench.model_rows import COLUMNS, ModelRow
from vidsparse.apps.bench.model_shapes import MODEL_SHAPES
from vidsparse.apps.cli import main
from vidsparse.apps.commands.bench_model import bench_model
from vidsparse.engine import AttentionEngine
from vidsparse.grid import TokenGrid
from vidsparse.kernels import sparse_attention
from vidsparse.kernels.tokens.formats import FORMATS
from vidsparse.methods import make_method
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

CPU = torch.device("cpu")
DOCS = Path(__file__).parents[1] / "docs" / "benchmarks"

# the rows that issue and benchmark pages are made from name at least these.
PUBLISHED = {
    "family",
    "shape",
    "tokens",
    "computed",
    "warmup",
    "impl",
    "dense_ms",
    "fa4_ms",
    "stock_ms",
    "sparse_ms",
    "mask_plan_ms",
    "peak_gib_dense",
    "peak_gib_sparse",
    "ratio_cudnn",
    "ratio_fa4",
    "ratio_stock",
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published models, shrunk."""
    shrink(monkeypatch)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "model", *arguments])


def measured(file: Path, *arguments: str) -> list[dict[str, Any]]:
    result = bench(*arguments, "--device", "cpu", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


@pytest.mark.parametrize("family", slow_but(["wan-1.3b"], TINY))
@pytest.mark.usefixtures("tiny")
def test_every_family_is_measured_by_the_command(family: str, tmp_path: Path) -> None:
    shape = MODEL_SHAPES[family]
    frames = 2 * shape.frame_factor + shape.frame_rest
    assert shape.frames_of(shape.latent(256, 192, frames).latent_frames) == frames
    small = ["--size", "256x192", "--frames", str(frames), "--layers", "1"]
    (row,) = measured(tmp_path / "rows.json", "--family", family, *small)
    assert set(row) >= PUBLISHED
    assert (row["family"], row["layers"], row["warmup"]) == (family, 1, shape.warmup)
    assert row["impl"] == "torch"
    assert row["tokens"] > 64
    assert row["computed"] == pytest.approx(shape.computed, abs=0.2)
    assert 0 < row["kernel_ms"] < row["sparse_ms"]
    assert 0 < row["attention_ms"] < row["dense_ms"]
    assert 0 < row["mask_plan_ms"] < row["sparse_ms"]
    assert row["peak_gib_dense"] is row["ratio_cudnn"] is row["fa4_ms"] is None
    expected = projected_ratio(row["stock_ms"], row["sparse_ms"], shape.warmup, 50)
    assert row["ratio_stock"] == pytest.approx(expected, abs=0.01)


SMALL = ("--family", "wan-1.3b", "--size", "128x128", "--frames", "5", "--layers", "1")


@pytest.mark.usefixtures("tiny")
def test_rows_are_kept_and_only_missing_ones_measured(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    first = measured(file, *SMALL)
    again = bench(*SMALL, "--device", "cpu", "--json", str(file))
    assert "measured already" in again.output
    assert json.loads(file.read_text())["rows"] == first
    eight = ("--quantize", "int8", "--quantize", "fp8")
    more = measured(file, *SMALL, "--quantize", "none", *eight)
    assert more[0] == first[0]
    assert [row["impl"] for row in more] == ["torch", "torch int8", "torch fp8"]
    other = measured(file, *SMALL, "--computed", "0.7")
    assert len(other) == 4
    tiles = measured(file, *SMALL, "--tile", "16x16", "--tile", "32x32")
    assert [row["tile"] for row in tiles] == ["32x32", "32x32", "32x32", "32x32", "16x16"]


def test_every_8_bit_product_of_the_kernels_is_offered() -> None:
    (kind,) = (p.type for p in bench_model.params if p.name == "quantize")
    assert isinstance(kind, click.Choice)
    assert set(kind.choices) == {"none", *FORMATS}


@pytest.mark.usefixtures("tiny")
def test_rows_are_shown_as_a_table(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    measured(file, *SMALL)
    shown = bench("--show", str(file))
    assert shown.exit_code == 0, shown.output
    table = [line for line in shown.output.splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert all(line.count("|") == len(COLUMNS) + 1 for line in table)
    assert "wan-1.3b (1 layers)" in table[-1]
    other = bench("--show", str(file), "--tile", "16x16")
    assert len([line for line in other.output.splitlines() if line.startswith("|")]) == 2


# measured on an H100 and in tiles of 32 alone.
ON_H100 = {"minimax-h3"}


@pytest.mark.parametrize(
    ("file", "tile", "families", "means"),
    [
        ("models-h200.json", "16x16", set(MODEL_SHAPES) - ON_H100, 0),
        ("models-h200.json", "32x32", set(MODEL_SHAPES) - ON_H100, 0),
        # since then fg-attn has a mean for every 64 tokens, which is computed too.
        ("models-h100.json", "32x32", ON_H100, 1 / 64),
    ],
)
def test_published_rows_are_of_whole_models_at_their_density(
    file: str, tile: str, families: set[str], means: float
) -> None:
    published = json.loads((DOCS / file).read_text())["rows"]
    rows = [row for row in published if row["tile"] == tile]
    assert {row["family"] for row in rows} == families
    for row in rows:
        shape = MODEL_SHAPES[row["family"]]
        assert row["layers"] == shape.full_layers()
        assert row["shape"] == f"{shape.width}x{shape.height}x{shape.frames}"
        assert row["computed"] == pytest.approx(shape.computed + means, abs=0.002)
        for kind, dense in (("cudnn", "dense_ms"), ("fa4", "fa4_ms"), ("stock", "stock_ms")):
            if row[dense] is None:
                assert row[f"ratio_{kind}"] is None
                continue
            expected = projected_ratio(row[dense], row["sparse_ms"], row["warmup"], row["steps"])
            assert row[f"ratio_{kind}"] == pytest.approx(expected, abs=0.001)


def published(family: str, tile: str) -> ModelRow:
    rows = json.loads((DOCS / "models-h200.json").read_text())["rows"]
    return next(
        ModelRow(**row)
        for row in rows
        if (row["family"], row["tile"], row["impl"]) == (family, tile, "gluon")
    )


@pytest.mark.parametrize("tile", MERGED)
def test_merging_is_that_of_the_quality_rows(tile: str) -> None:
    rows = json.loads((DOCS / "quality-small.json").read_text())["rows"]
    measured = sorted(
        (round(row["selected"], 3), round(row["computed"], 3))
        for row in rows
        if row["study"] == "merging"
        and row["size"] == "384x384"
        and (row["options"]["merge"], row["options"]["tile"]) == ("xor-window", tile)
    )
    assert tuple(measured) == MERGED[tile]
    for selected, computed in measured:
        assert merged_share(tile, selected) == pytest.approx(computed)
    assert (merged_share(tile, 0.0), merged_share(tile, 1.0)) == (0.0, 1.0)
    halfway = [sum(pair) / 2 for pair in zip(*measured, strict=True)]
    assert merged_share(tile, halfway[0]) == pytest.approx(halfway[1])


def test_tiles_that_nobody_measured_have_no_second_reading() -> None:
    # a tile as high as a block is merged with no other.
    assert merged_share("128x16", 0.3) == 0.3
    assert merged_share("16x64", 0.3) is None
    row = replace(published("wan-14b", "32x32"), tile="16x64")
    assert row.computed_if_selected is row.ratio_if_selected(row.dense_ms) is None


def test_a_step_is_projected_by_its_kernel_alone() -> None:
    assert projected_step(10.0, 4.0, measured=0.4, computed=0.4) == 10
    assert projected_step(10.0, 4.0, measured=0.4, computed=0.8) == pytest.approx(14)
    # the kernel's own rows: from 0.3 to 0.5 it takes at most as much more as that.
    kernel = {
        row["kept"]: row["ms"]
        for row in json.loads((DOCS / "attention-h200.json").read_text())["rows"]
        if (row["case"], row["tile"], row["impl"], row["seq_len"], row["dense_impl"])
        == ("kernel", "128x16", "gluon", 75600, "cudnn")
    }
    (low, low_ms), (high, high_ms) = sorted(kernel.items())
    assert 0.98 < (high_ms / low_ms) / (high / low) <= 1


def test_the_careful_reading_is_the_slower_one() -> None:
    for family in MODEL_SHAPES.keys() - ON_H100:
        row = published(family, "16x16")
        assert row.computed_if_selected is not None
        assert row.computed_if_selected > row.computed
        for ms, measured in (
            (row.dense_ms, row.ratio_cudnn),
            (row.fa4_ms, row.ratio_fa4),
            (row.stock_ms, row.ratio_stock),
        ):
            careful = row.ratio_if_selected(ms)
            assert careful is not None
            assert measured is not None
            assert 1 < careful < measured
        assert row.ratio_if_selected(None) is None


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('{"rows": []}')
    result = bench("--show", str(file))
    assert result.exit_code == 2
    assert "holds no model benchmark" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--family", "wan-15b"], "wan-15b"),
        (["--size", "1280by720"], "size"),
        (["--family", "wan-1.3b", "--size", "1280x725"], "multiples of 16"),
        (["--family", "wan-1.3b", "--frames", "80"], "4k+1"),
        (["--family", "wan-1.3b", "--layers", "31"], "30 layers"),
        (["--tile", "5x5"], "tile"),
        (["--quantize", "int4"], "int4"),
        (["--computed", "0"], "computed"),
        (["--device", "cpu", "--dtype", "float8"], "dtype"),
        (["--show", "nowhere.json"], "does not exist"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], said: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.usefixtures("tiny")
def test_an_implementation_that_cannot_run_is_said(tmp_path: Path) -> None:
    result = bench(*SMALL, "--device", "cpu", "--implementation", "gluon")
    assert result.exit_code == 2
    assert "cannot run here" in result.output


@pytest.mark.usefixtures("tiny")
def test_a_wrong_kernel_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        out, lse = sparse_attention(*args, **kwargs)
        return out * 1.5, lse

    monkeypatch.setattr("vidsparse.engine.sparse_attention", wrong)
    result = bench(*SMALL, "--device", "cpu")
    assert result.exit_code == 2
    assert "no speed is reported for a wrong result" in result.output


def test_published_sizes_give_the_published_lengths() -> None:
    lengths = {}
    for name, shape in MODEL_SHAPES.items():
        latent = shape.latent(shape.width, shape.height, shape.frames)
        lengths[name] = (latent.latent_frames, latent.latent_height, latent.latent_width)
    assert lengths == {
        "wan-14b": (21, 90, 160),
        "wan-1.3b": (21, 90, 160),
        "hunyuanvideo": (33, 90, 160),
        "mochi": (28, 60, 106),
        "cogvideox-5b": (13, 60, 90),
        "ltx-2": (16, 32, 48),
        "minimax-h3": (37, 48, 84),
    }


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("wan-14b", 14.3),
        ("wan-1.3b", 1.42),
        ("hunyuanvideo", 12.8),
        ("mochi", 10.0),
        ("cogvideox-5b", 5.57),
        ("ltx-2", 18.9),
        # 61.7 GiB, which is what diffusers says of it.
        ("minimax-h3", 33.1),
    ],
)
def test_models_have_the_published_number_of_weights(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = MODEL_SHAPES[name].build(None, torch.bfloat16, torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.02)


def test_parts_that_checkpoints_keep_exact_stay_so() -> None:
    model = MODEL_SHAPES["wan-14b"].build(1, torch.bfloat16, torch.device("meta"))
    assert model.blocks[0].scale_shift_table.dtype == torch.float32
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert model.rope.freqs_cos.dtype == torch.float32


@pytest.mark.parametrize(("layers", "counts"), [(1, (1, 0)), (3, (1, 2)), (60, (20, 40))])
def test_fewer_layers_keep_the_proportion_of_kinds(layers: int, counts: tuple[int, int]) -> None:
    shape = replace(
        MODEL_SHAPES["hunyuanvideo"],
        config={
            **MODEL_SHAPES["hunyuanvideo"].config,
            "num_attention_heads": 1,
            "attention_head_dim": 8,
            "rope_axes_dim": (2, 2, 4),
        },
    )
    model = shape.build(layers, torch.float32, torch.device("meta"))
    assert (len(model.transformer_blocks), len(model.single_transformer_blocks)) == counts


@pytest.mark.parametrize("density", [0.28, 0.4])
@pytest.mark.parametrize("text", [0, 50])
@pytest.mark.parametrize("tile", [(16, 16), (128, 16)])
def test_a_plan_to_order_has_its_density_and_every_tile_once(
    density: float, text: int, tile: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    video = 5000
    q = torch.empty(2, 3, video + text, 8)
    plan = random_plan(q, video, tile, density, 0.5)
    assert plan.computed.mean().item() == pytest.approx(density, rel=0.02)
    tiles = plan.q_tiles.flatten(2)
    count = -(-(video + text) // tile[0])
    for of_head in tiles.flatten(0, 1):
        held = of_head[of_head >= 0]
        assert sorted(held.tolist()) == list(range(count))
    lengths = plan.kv_count.float()
    assert lengths.max() / lengths.min() > 2
    assert bool((lengths.diff(dim=-1) <= 0).all())


def test_a_plan_to_order_keeps_text_in_full() -> None:
    torch.manual_seed(0)
    video, text = 4000, 40
    plan = random_plan(torch.empty(1, 2, video + text, 8), video, (16, 16), 0.3, 0.5)
    chunks = -(-(video + text) // 16)
    index = plan.kv_index[0, 0]
    for block in range(plan.kv_count.shape[2]):
        listed = set(index[block, : plan.kv_count[0, 0, block]].tolist())
        assert listed >= set(range(video // 16, chunks))
        if any(tile * 16 + 15 >= video for tile in plan.q_tiles[0, 0, block].tolist()):
            assert len(listed) == chunks


def test_the_engine_plans_itself_and_runs_the_plan_to_order() -> None:
    grid = TokenGrid(4, 16, 16)
    engine = AttentionEngine(
        make_method("fg-attn", top_p=0.9), schedule=Schedule(dense_steps=0), layers=1
    )
    planned = []
    planner = engine.planner

    def counted(*args: Any) -> Any:
        planned.append(1)
        return planner(*args)

    engine.planner = counted
    q, k, v = (torch.randn(1, 2, grid.tokens, 16) for _ in "qkv")
    watch = Stopwatch(CPU)
    with planned_to_order(engine, watch, density=0.4, skew=0.5, quantize=None) as seen:
        engine.attend(q, k, v, CallSite(0, 0, 0.0, grid))
    (cell,) = engine.trace.cells
    assert cell.computed is not None
    assert cell.computed.mean().item() == pytest.approx(0.4, abs=0.02)
    assert len(planned) == len(seen.real) == 1
    assert seen.real[0].mean().item() > 0.8
    assert 0 < watch.milliseconds() < (cell.seconds or 0) * 1e3
    assert engine.planner is counted
    assert engine.kernel is sparse_attention


def test_attention_of_whole_videos_is_counted_and_replaced() -> None:
    q = torch.randn(1, 2, 64, 8)
    text = torch.randn(1, 2, 5, 8)
    watch, replaced = Stopwatch(CPU), []

    def other(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        replaced.append(tuple(k.shape))
        return torch.zeros_like(q)

    with watched_attention(watch, 64, other):
        assert bool((F.scaled_dot_product_attention(q, q, q) == 0).all())
        assert bool((F.scaled_dot_product_attention(query=q, key=q, value=q) == 0).all())
        assert bool((F.scaled_dot_product_attention(q, text, text) != 0).any())
        mask = torch.ones(64, 64, dtype=torch.bool)
        assert bool((F.scaled_dot_product_attention(q, q, q, attn_mask=mask) != 0).any())
    stock = F.scaled_dot_product_attention(q, q, q)
    assert bool((stock != 0).any())
    assert replaced == [(1, 2, 64, 8)] * 2
    assert watch.milliseconds() > 0
    assert watch.milliseconds() == 0


def test_only_the_first_blocks_run_and_all_come_back() -> None:
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in range(5))
    whole = model.blocks
    with first_blocks(model, {"blocks": "num_layers"}, 2):
        assert [*model.blocks] == [*whole][:2]
    with first_blocks(model, {"blocks": "num_layers"}, 2, last=True):
        assert [*model.blocks] == [whole[0], whole[1], whole[4]]
    with first_blocks(model, {"blocks": "num_layers"}, 5, last=True):
        assert [*model.blocks] == [*whole]
    assert model.blocks is whole


def test_only_the_repetition_of_steps_is_projected() -> None:
    assert projected_ratio(10.0, 5.0, 0.24, 50) == pytest.approx(500 / (12 * 10 + 38 * 5))
    assert projected_ratio(10.0, 5.0, 1.0, 50) == 1


def test_rows_hold_what_is_published() -> None:
    assert {field.name for field in fields(ModelRow)} >= PUBLISHED
