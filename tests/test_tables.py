"""Tables for Markdown pages and for the terminal: text stays what it is."""

from __future__ import annotations

import pytest

from vidsparse.apps.terminal.tables import growing_table, print_pairs, print_table
from vidsparse.markdown import markdown_table


def test_cells_of_a_markdown_table_cannot_break_it() -> None:
    table = markdown_table(
        ("name", "n"), [("a|b <i>", "1"), ("two\nlines", "01.50"), ("", "")], numbers=("n",)
    )
    assert table.splitlines() == [
        "| name | n |",
        "|---|---:|",
        "| a\\|b &lt;i> | 1 |",
        # numbers are text: as many digits as were written.
        "| two lines | 01.50 |",
        "|  |  |",
    ]


def test_a_markdown_table_without_rows_has_its_titles() -> None:
    assert markdown_table(("a", "b"), []) == "| a | b |\n|---|---|"


def test_a_pipe_gets_every_line_whole(capsys: pytest.CaptureFixture[str]) -> None:
    long = ("[bold]no markup[/bold] " * 20).strip()
    print_table(("title", "[x]"), [(long, "1")])
    print_pairs([("name", long)], indent=2, first=10)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0].split() == ["title", "[x]"]
    assert [line.split() for line in lines[-2:]] == [[*long.split(), "1"], ["name", *long.split()]]


def test_rows_of_a_growing_table_are_there_when_it_is_interrupted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted() -> None:
        with growing_table(("a", "b")) as add:
            add(("1", "2"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert ["1", "2"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_terminal_sees_the_table_grow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # rich takes this for a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    with growing_table(("a", "b")) as add:
        add(("1", "x" * 100))
        assert "xxxx" in capsys.readouterr().out
