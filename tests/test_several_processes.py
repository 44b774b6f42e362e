"""Commands of several processes, here two on a CPU (gloo): ``bench gpus`` and ``compare``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from vidsparse.apps.bench.gpus_rows import GpusRow
from vidsparse.apps.bench.model_forward import Stopwatch, planned_to_order
from vidsparse.apps.cli import main
from vidsparse.engine import AttentionEngine
from vidsparse.grid import TokenGrid
from vidsparse.methods import make_method
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

WORKER = Path(__file__).with_name("forked_commands.py")
PROMPT = "a large red circle that moves right on a plain black background"
VIDEO = "--steps 2 --frames 5 --size 64x64 --top-p 0.5"
H200 = Path(__file__).parents[1] / "docs" / "benchmarks" / "multi-gpu-h200.json"
SMALL = "--size 256x192 --frames 5 --layers 2 --repeats 1"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The rows' file, and what several commands said, one after the other."""
    file = tmp_path_factory.mktemp("gpus") / "rows.json"
    bench, wan = "bench gpus", f"--family wan-1.3b {SMALL}"
    prompts = file.parent / "p.txt"
    prompts.write_text(f"{PROMPT}\n", encoding="utf-8")
    elsewhere = file.parent / "h200.json"
    shutil.copy(H200, elsewhere)
    commands = [
        f"{bench} {wan} --json {file}",
        f"{bench} {wan} --json {file}",
        f"{bench} {wan} --json {file} --kind even --compile",
        f"broken {bench} --kind even {wan}",
        f"{bench} {wan} --kind even --json {elsewhere}",
        f"compare {prompts} {VIDEO} --out {file.parent / 'compared'}",
    ]
    words = " then ".join(commands).split()
    told = subprocess.run(
        [sys.executable, str(WORKER), *words],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    return file, told


@pytest.fixture(scope="module")
def all_rows(done: tuple[Path, Any]) -> list[GpusRow]:
    return [GpusRow(**row) for row in json.loads(done[0].read_text("utf-8"))["rows"]]


@pytest.fixture(scope="module")
def rows(all_rows: list[GpusRow]) -> dict[tuple[str, str, bool], GpusRow]:
    found = [row for row in all_rows if not row.compiled]
    by_kind = {(row.family, row.kind, row.balance): row for row in found}
    assert len(by_kind) == len(found)
    return by_kind


@pytest.mark.slow
def test_every_kind_is_measured_once(rows: dict[tuple[str, str, bool], GpusRow]) -> None:
    assert list(rows) == [
        ("wan-1.3b", "even", True),
        ("wan-1.3b", "ring", True),
        ("wan-1.3b", "skewed", True),
        ("wan-1.3b", "skewed", False),
        ("wan-1.3b", "apart", True),
    ]
    for row in rows.values():
        assert (row.processes, row.layers, row.repeats) == (2, 2, 1)
        assert row.ring == (2 if row.kind == "ring" else 1)
        times = [getattr(row, field.name) for field in fields(row) if field.name.endswith("_ms")]
        assert min(times) > 0
        assert row.kernel_mean_ms <= row.kernel_ms < row.sparse_ms


@pytest.mark.slow
def test_all_together_give_what_one_gives(rows: dict[tuple[str, str, bool], GpusRow]) -> None:
    # heads by themselves are computed alike; a ring joins parts.
    assert max(row.error for row in rows.values()) < 1e-6
    assert rows["wan-1.3b", "ring", True].error > 0


@pytest.mark.slow
def test_compiled_blocks_have_a_row_of_their_own(all_rows: list[GpusRow]) -> None:
    (row,) = [row for row in all_rows if row.compiled]
    (plain,) = [one for one in all_rows if one.kind == "even" and not one.compiled]
    assert (row.kind, row.computed, row.calls) == ("even", plain.computed, plain.calls)
    assert row.error < 1e-6


@pytest.mark.slow
def test_the_exchange_is_q_k_v_there_and_the_output_back(
    rows: dict[tuple[str, str, bool], GpusRow],
) -> None:
    row = rows["wan-1.3b", "skewed", False]
    # fp32, 16 channels a head; half of what a process has of each goes to the other one.
    held = row.tokens / 2 * row.heads * 16 * 4
    assert row.exchange_mb == pytest.approx(row.calls * 4 * held / 2 / 1e6, abs=1e-3)
    # a prediction of 16 channels, and the plans that branches share.
    apart = rows["wan-1.3b", "apart", True]
    assert apart.calls == row.calls / 2
    assert 16 * 2 * 24 * 32 * 4 / 1e6 < apart.exchange_mb < row.exchange_mb / 2
    ring = rows["wan-1.3b", "ring", True]
    assert 2 * ring.calls * held / 1e6 < ring.exchange_mb < 5 * ring.calls * held / 1e6


@pytest.mark.slow
def test_heads_dealt_by_work_are_even(rows: dict[tuple[str, str, bool], GpusRow]) -> None:
    dealt, in_order = (rows["wan-1.3b", "skewed", balance] for balance in (True, False))
    assert dealt.computed == in_order.computed
    assert dealt.busiest < 1.05 < 1.3 < in_order.busiest


@pytest.mark.slow
def test_a_run_is_put_together_of_its_steps(rows: dict[tuple[str, str, bool], GpusRow]) -> None:
    row = rows["wan-1.3b", "even", True]
    assert row.run_s == pytest.approx((12 * row.dense_ms + 38 * row.sparse_ms) / 1e3)
    assert row.one_run_s == pytest.approx((12 * row.one_dense_ms + 38 * row.one_sparse_ms) / 1e3)


@pytest.mark.slow
def test_rows_that_are_there_are_not_measured_again(done: tuple[Path, Any]) -> None:
    assert done[1].stderr.count("measured already") == 1


@pytest.mark.slow
def test_what_differs_from_one_process_is_not_timed(done: tuple[Path, Any]) -> None:
    codes = done[1].stdout.splitlines()[-1]
    # what a process said before it ended is all that tells why it did.
    assert codes == "codes 0 0 0 2 2 0", f"{codes}\n{done[1].stderr[:20_000]}"
    assert "no speed is reported for a wrong result" in done[1].stderr


@pytest.mark.slow
def test_rows_of_other_hardware_are_left_alone(done: tuple[Path, Any]) -> None:
    assert (done[0].parent / "h200.json").read_bytes() == H200.read_bytes()
    assert "h200.json holds rows of NVIDIA H200 in bf16, not of" in done[1].stderr


@pytest.mark.slow
def test_rows_of_new_files_say_their_tile_and_dtype(done: tuple[Path, Any]) -> None:
    document = json.loads(done[0].read_text("utf-8"))
    assert document["dtype"] == "fp32"
    assert {row["tile"] for row in document["rows"]} == {"32x32"}


@pytest.mark.slow
def test_rows_are_shown_again(done: tuple[Path, Any]) -> None:
    result = CliRunner().invoke(main, ["bench", "gpus", "--show", str(done[0])])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 6


@pytest.mark.slow
def test_both_sides_of_a_comparison_are_made_by_all(done: tuple[Path, Any]) -> None:
    (path,) = (done[0].parent / "compared").rglob("report.json")
    report = json.loads(path.read_text(encoding="utf-8"))
    assert "Every video of both sides was made by 2 processes together." in report["notes"]
    (one,) = report["prompts"]
    for side in ("dense", "sparse"):
        assert (one[side]["processes"], one[side]["apart"]) == (2, True)
    # both branches of a step, each by one of the processes, unless the command says otherwise.
    assert 0 < report["summary"]["computed"] < 1
    assert one["psnr"] > 15
    assert done[1].stderr.count("Warming up") == 1


def test_a_head_has_the_same_lists_in_every_process() -> None:
    grid, densities = TokenGrid(4, 16, 16), (0.1, 0.3, 0.5, 0.7)
    q, k, v = (torch.randn(1, 4, grid.tokens, 16) for _ in "qkv")
    made = make_method("fg-attn", top_p=0.9)
    engine = AttentionEngine(made, schedule=Schedule(dense_steps=0), layers=1)
    watch = Stopwatch(torch.device("cpu"))
    with planned_to_order(engine, watch, density=densities, skew=0.5, quantize=None):
        whole = engine.attend(q, k, v, CallSite(0, 0, 0.0, grid))
        dealt = [3, 0]
        site = CallSite(0, 0, 0.0, grid, heads=(3, 0))
        some = engine.attend(q[:, dealt], k[:, dealt], v[:, dealt], site)
        site = CallSite(0, 0, 0.0, grid, first_head=2)
        last = engine.attend(q[:, 2:], k[:, 2:], v[:, 2:], site)
    computed = engine.trace.cells[0].computed
    assert computed is not None
    assert computed[0].tolist() == pytest.approx(densities, abs=0.05)
    # other lists would move outputs by as much as they are.
    torch.testing.assert_close(some, whole[:, dealt])
    torch.testing.assert_close(last, whole[:, 2:])


def refused(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["bench", "gpus", "--device", "cpu", *arguments])
    assert result.exit_code == 2, result.output
    assert result.stderr.count("Error:") == 1
    return result


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--gpus 2"),
        (["--gpus", "1"], "1 is not in the range"),
        (["--gpus", "100000"], "not in the range"),
        (["--gpus", "1000"], "this machine has room for"),
        (["--gpus", "4", "--ring", "3"], "--ring 3 does not divide"),
        (["--gpus", "2", "--tile", "nonsense"], "nonsense"),
        (["--gpus", "2", "--frames", "8"], "frames must be"),
        (["--gpus", "2", "--linear", "fp8"], "fp8 needs"),
        (["--gpus", "2", "--json", __file__], "cannot be read as JSON"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(arguments: list[str], says: str) -> None:
    assert says in refused(*arguments).stderr
