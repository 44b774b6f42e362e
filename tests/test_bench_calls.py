"""``vidsparse bench calls``: time and error of whole calls, and cases that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from vidsparse.apps.bench.calls import CASES, CallRow
from vidsparse.apps.bench.inputs import recorded
from vidsparse.apps.bench.method_cases import method_of
from vidsparse.apps.cli import main


def bench(*arguments: str) -> Result:
    small = ("--seq-len", "512", "--heads", "2", "--head-dim", "32", "--repeats", "1")
    return CliRunner().invoke(main, ["bench", "calls", *small, *arguments])


def test_every_case_is_a_method_with_its_options() -> None:
    for case in CASES:
        name, *settings = case.split()
        method = method_of(case)
        assert method.name == name
        for setting in settings:
            option, value = setting.split("=")
            told = method.options()[option]
            assert ("none" if told is None else str(told)) == value


def test_rows_hold_time_and_error_against_the_same_dense_run(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    cases = ("foresight share=0.2", "fg-attn top_p=0.5 means=none", "fg-attn top_p=0.5")
    done = bench(*(part for case in cases for part in ("--case", case)), "--json", str(path))
    assert done.exit_code == 0, done.output
    document = json.loads(path.read_text())
    rows = [CallRow(**row) for row in document["rows"]]
    assert tuple(row.case for row in rows) == cases
    assert len({row.dense_ms for row in rows}) == 1
    for row in rows:
        assert row.speedup == pytest.approx(row.dense_ms / row.ms)
    _, dropped, approximated = rows
    assert approximated.error < dropped.error
    # a mean for each 64 of 512 tokens.
    assert approximated.computed == pytest.approx(dropped.computed + 1 / 64)
    shown = bench("--show", str(path))
    for row in rows:
        assert f"| {row.case} |" in shown.output
    assert {"hardware", "versions", "date"} < set(document)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nearest", "unknown method 'nearest'"),
        ("dense", "dense is not sparse"),
        ("foresight share", "'share' of 'foresight share' has no value"),
        ("foresight share=much", "share of 'foresight share=much' cannot be 'much'"),
        ("foresight top_p=0.5", "foresight has no option 'top_p'"),
        ("foresight share=0.1 share=0.2", "'foresight share=0.1 share=0.2' gives share twice"),
    ],
)
def test_what_is_no_case_is_one_sentence_before_any_other_is_measured(
    case: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vidsparse.apps.bench.calls.first_dense_of", None)
    done = bench("--case", "foresight share=0.1", "--case", case)
    assert done.exit_code == 2
    assert message in done.output


RUN = ("--data", "shapes", "--size", "128x128", "--frames", "9", "--steps", "3")


def test_calls_of_a_model_say_what_they_are_and_are_the_same_again(tmp_path: Path) -> None:
    found = []
    for name in ("once.json", "again.json"):
        path = tmp_path / name
        done = bench(*RUN, "--case", "fg-attn top_p=0.8 means=none", "--json", str(path))
        assert done.exit_code == 0, done.output
        found.append(CallRow(**json.loads(path.read_text())["rows"][0]))
    first, again = found
    # the model says the shape, whatever else was asked for.
    assert (first.seq_len, first.heads, first.head_dim) == (192, 4, 64)
    assert first.data == "shapes, 128x128, 9 frames, layers 0, 4, 7 at steps 0, 1, 2 of 3"
    assert (again.error, again.computed) == (first.error, first.computed)
    assert 0 < first.error < 0.5
    assert f"192x4x64 of {first.data}" in bench("--show", str(path)).output


def test_recorded_calls_are_of_three_layers_and_steps_and_differ() -> None:
    data = recorded(
        "shapes-joint",
        size=(64, 64),
        frames=9,
        steps=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
        say=print,
    )
    sites = {(call.site.layer, call.site.step) for call in data.calls}
    assert len(sites) == len(data.calls)
    assert {step for _, step in sites} == {0, 1}
    # text takes part here, and is in the grid that orders tokens.
    tokens, _, _ = data.shape
    assert all(call.site.grid.tokens == tokens and call.site.grid.text for call in data.calls)
    first, second, *_ = data.calls
    assert not torch.equal(first.q, second.q)


def test_a_model_that_is_not_there_is_one_sentence() -> None:
    done = bench("--data", "nowhere")
    assert done.exit_code == 2
    assert "there is no model 'nowhere'" in done.output


@pytest.mark.parametrize("which", ["masks", "calls", "attention"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--size 128x128", "--size is for a model's run, and none was asked for"),
        ("--frames 9 --steps 3", "--frames and --steps are for a model's run"),
    ],
)
def test_a_run_of_no_model_is_refused(which: str, given: str, said: str) -> None:
    small = ("--seq-len", "512", "--heads", "2", "--head-dim", "32", "--repeats", "1")
    done = CliRunner().invoke(main, ["bench", which, *small, *given.split()])
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    assert said in line
    assert "Hint: add --data" in line
