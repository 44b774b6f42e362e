"""What commands answer: JSON for scripts from every one, and tables that a terminal can show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from vidsparse.apps.cli import main

MEASURED = Path(__file__).parents[1] / "docs" / "benchmarks"
SHOWN = {
    "attention": "attention-h200.json",
    "calls": "calls-h200.json",
    "gates": "gates-h200.json",
    "masks": "masks-h200.json",
    "model": "models-h200.json",
}
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    return done


def answer(*arguments: str) -> dict[str, object]:
    """What a command says with ``--json``, which is one line and nothing else."""
    lines = run(*arguments).output.splitlines()
    assert len(lines) == 1
    found = json.loads(lines[0])
    assert isinstance(found, dict)
    return found


def _commands(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, *names, name)
        elif command is not None:
            yield (*names, name), command


def test_every_command_has_a_json_form() -> None:
    found = dict(_commands(main))
    assert ("bench", "quality") in found
    without = [
        " ".join(names)
        for names, command in found.items()
        if not any("--json" in option.opts for option in command.params)
    ]
    assert without == []


@pytest.mark.parametrize("bench", SHOWN)
def test_rows_measured_before_are_answered_as_the_file_has_them(bench: str) -> None:
    path = MEASURED / SHOWN[bench]
    document = json.loads(path.read_text(encoding="utf-8"))
    found = answer("bench", bench, "--show", str(path), "--json")
    assert found["hardware"] == document["hardware"]
    # what a file's version did not know yet has its default.
    told = [each.items() for each in found["rows"]]  # type: ignore[attr-defined]
    assert all(row.items() <= each for row, each in zip(document["rows"], told, strict=True))


def test_a_benchmark_answers_its_rows_with_what_they_rest_on() -> None:
    small = ("--seq-len", "523", "--heads", "1", "--head-dim", "32", "--repeats", "1")
    found = answer("bench", "masks", *small, "--method", "sol-attn", "--json", "--device", "cpu")
    assert found.keys() == {"hardware", "versions", "date", "rows"}
    rows = found["rows"]
    assert isinstance(rows, list)
    assert [(row["method"], row["seq_len"]) for row in rows] == [("sol-attn", 523)]


@pytest.mark.parametrize("command", [("bench", "quality"), ("ablate",)])
def test_a_study_answers_the_rows_of_its_files(command: tuple[str, ...]) -> None:
    rows = str(MEASURED / "quality-small.json")
    calls = ("--calls", str(MEASURED / "ablations-small.json")) if command == ("ablate",) else ()
    found = answer(*command, "--limit-rows", "0", "--out", rows, *calls, "--json")
    measured = json.loads(Path(rows).read_text(encoding="utf-8"))["rows"]
    assert found["videos" if calls else "rows"] == measured


def test_comfyui_s_folder_is_answered_as_it_comes_and_goes(tmp_path: Path) -> None:
    for name in ("main.py", "nodes.py"):
        (tmp_path / name).touch()
    (tmp_path / "custom_nodes").mkdir()
    installed = answer("comfyui", "install", str(tmp_path), "--json")
    folder = installed["folder"]
    assert isinstance(folder, str)
    assert Path(folder).is_dir()
    removed = answer("comfyui", "uninstall", str(tmp_path), "--json")
    assert removed == {"folder": folder, "removed": True}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a command shows on a terminal of 80 columns, which is what rich takes this for."""

    def shown(*arguments: str) -> str:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "80")
        return COLOURS.sub("", run(*arguments).output)

    return shown


@pytest.mark.parametrize("bench", SHOWN)
def test_tables_fit_80_columns_with_every_word_whole(
    bench: str, terminal: Callable[..., str]
) -> None:
    command = ("bench", bench, "--show", str(MEASURED / SHOWN[bench]))
    _, _, *rows = run(*command).output.splitlines()
    shown = terminal(*command)
    assert max(map(len, shown.splitlines())) <= 80
    words = {word for row in rows for word in row.replace("|", " ").split()}
    assert words <= set(shown.split())


@pytest.mark.parametrize(
    "command",
    [
        ("doctor",),
        ("methods",),
        ("models",),
        (
            "ablate", "--limit-rows", "0", "--out", str(MEASURED / "quality-small.json"),
            "--calls", str(MEASURED / "ablations-small.json"),
        ),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_lists_things_fits_80_columns(
    command: tuple[str, ...], terminal: Callable[..., str]
) -> None:
    shown = terminal(*command)
    files = {word for word in command if word.endswith(".json")}
    assert max(len(line) for line in shown.splitlines() if line not in files) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["attention", "--device", "/"], "unknown device '/'"),
        (["calls", "--device", "cuda:" + "9" * 5000], "unknown device 'cuda:9"),
        (["attention", "--seq-len", "9" * 400], "is not in the range 128<=x"),
        (["calls", "--seq-len", "128", "--case", " "], "unknown method ''"),
        (["masks", "--head-dim", "9" * 400], "is not in the range 8<=x"),
        (["model", "--size", "9" * 5000 + "x9"], "is not a size"),
        (
            ["attention", "--seq-len", "100000000", "--heads", "1024", "--head-dim", "1024"],
            "is too small for these tensors. Hint: try fewer tokens or heads.",
        ),
        (["attention", "--show", "deep.json"], "nested too deeply"),
        *(([bench, "--show", "typo.json"], "'typo.json' does not exist") for bench in SHOWN),
        (
            ["quality", "--table", "--limit-rows", "0", "--out", "typo.json"],
            "there is no file of rows typo.json. Hint: name one with --out, or leave --limit-rows",
        ),
        (["quality", "--table", "--limit-rows", "0", "--out", "deep.json"], "nested too deeply"),
        (["quality", "--table", "--limit-rows", "0", "--out", "odd.json"], "no quality study"),
        (["quality", "--table", "--limit-rows", "0", "--out", "bare.json"], "no quality study"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_a_benchmark_cannot_use_is_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deep.json").write_text("[" * 100_000)
    for name, row in (("odd", 3), ("bare", {"study": "plans"})):
        Path(f"{name}.json").write_text(
            json.dumps({"format": "vidsparse-quality/1", "rows": [row]})
        )
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code == 2, done.output
    assert words in " ".join(done.output.split())
