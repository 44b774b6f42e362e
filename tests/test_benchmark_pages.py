"""The pages of measurements: what prints and draws them again must go on doing so."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from vidsparse.apps.cli import main
from vidsparse.apps.studies.configurations import ABLATIONS, STUDIES, configurations
from vidsparse.apps.studies.quality_tables import markdown_tables, quality_file
from vidsparse.pipelines.models import resolve_model
from vidsparse.pipelines.speed import bundle_for

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("BENCHMARKS.md", "docs/ablations.md", "docs/models.md")
# what only reads rows that are there.
COMMAND = re.compile(r"^vidsparse (.*(?:--show|--limit-rows 0).*)$", re.M)


def documented() -> list[str]:
    return [line for page in PAGES for line in COMMAND.findall((ROOT / page).read_text("utf-8"))]


def test_commands_that_measure_nothing_are_documented() -> None:
    assert len(documented()) >= 4


@pytest.mark.parametrize("command", documented())
def test_a_documented_command_works_on_the_rows_that_are_there(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    # tables on the pages are those of the rows.
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / "docs" / page.name).read_bytes() == page.read_bytes()
    if "--show" in command:
        printed = [line for line in result.output.splitlines() if line.startswith("| ")]
        rows = json.loads((ROOT / arguments[arguments.index("--show") + 1]).read_text())["rows"]
        # a line for each row of a small file, and above them the columns.
        assert len(printed) > min(10, len(rows))
        assert set(printed) <= set((ROOT / "BENCHMARKS.md").read_text("utf-8").splitlines())


def test_every_study_of_the_quality_file_has_a_table() -> None:
    files = (ROOT / "docs/benchmarks").glob("quality-*.json")
    rows = [row for file in files for row in quality_file(file).rows]
    studies = {row["study"] for row in rows}
    assert studies == {*STUDIES, *ABLATIONS}
    tables = markdown_tables(rows)
    for study in studies:
        assert f"frames: {study}\n" in tables


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/benchmarks").glob("quality-*.json")), ids=lambda path: path.name
)
def test_a_rerun_finds_every_committed_row(path: Path) -> None:
    known = list(configurations((*STUDIES, *ABLATIONS)))
    rows = quality_file(path).rows
    assert [row for row in rows if not any(one.describes(row) for one in known)] == []


@pytest.mark.parametrize(
    ("model", "name"),
    [("shapes", "shapes-cached"), ("shapes-joint", "shapes-joint"), ("scenes", "scenes")],
)
def test_what_a_card_tells_of_a_speed_was_measured(model: str, name: str) -> None:
    file = ROOT / f"docs/benchmarks/quality-speeds-{name}.json"
    rows = {row["speed"]: row for row in json.loads(file.read_text("utf-8"))["rows"]}
    defaults = resolve_model(model).defaults
    assert set(defaults.speeds) == {"high", "balanced", "fast"}
    for speed, known in defaults.speeds.items():
        assert (known["psnr"], known["prompts"]) == (
            round(rows[speed]["psnr_mean"], 1),
            rows[speed]["prompts"],
        )
        assert known.get("linear", "none") == rows[speed]["linear"]
        ran = bundle_for(speed, defaults, steps=defaults.steps, device="cpu", dtype="fp32").cache
        # one whose outputs swing leaves nothing out.
        assert rows[speed]["cache"] in (ran, "none")
