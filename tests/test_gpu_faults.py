"""`gpu_faults.py` watches over cases that take their process with them, or hang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_faults
import pytest

# stands for a process that runs cases: two that are right, one that ends it, one that hangs.
_CASES = """
import json, os, sys, time
part, group, first, path = sys.argv[2:6]
with open(path, "a") as file:
    for number in range(int(first), 5):
        print(json.dumps({"begin": number, "name": str(number)}), file=file, flush=True)
        if number == 1:
            print("Segmentation fault", file=sys.stderr, flush=True)
            os._exit(11)
        if number == 2:
            time.sleep(60)
        how = "failed" if number == 4 else "passed"
        end = {"end": number, "name": str(number), "how": how, "said": "no", "seconds": 0.1}
        print(json.dumps(end), file=file, flush=True)
"""


def test_a_case_that_ends_its_process_or_hangs_fails_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "cases.py"
    script.write_text(_CASES, encoding="utf-8")
    monkeypatch.setattr(gpu_faults, "__file__", str(script))
    watch = gpu_faults.Watch(tmp_path, tmp_path / "found.json", 1, [])
    group = gpu_faults.Group("plans", 5, "all", list("01234"), sanitized=False)
    watch.run([group], jobs=1, seconds=60, patience=1)
    hows = ["passed", "failed", "failed", "passed", "failed"]
    assert [facts["how"] for facts in group.ended] == hows
    assert "status 11: Segmentation fault" in group.ended[1]["said"]
    assert "hangs" in group.ended[2]["said"]
    assert not watch.table()
    row = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["groups"][0]
    assert (row["passed"], row["failed"], row["not_run"]) == (2, 3, 0)
    assert "FAILED plans, all, 2: hangs" in capsys.readouterr().out


def test_what_does_not_run_in_time_is_not_taken_for_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "cases.py"
    script.write_text("import time; time.sleep(60)", encoding="utf-8")
    monkeypatch.setattr(gpu_faults, "__file__", str(script))
    watch = gpu_faults.Watch(tmp_path, None, 1, [])
    group = gpu_faults.Group("plans", 1, "all", ["0"], sanitized=False)
    watch.run([group], jobs=1, seconds=0.5, patience=10)
    assert group.process is None
    assert watch.rows()[0]["not_run"] == 1
    assert not watch.table()


def test_errors_that_the_sanitizer_counts_make_a_run_wrong(tmp_path: Path) -> None:
    group = gpu_faults.Group("plans", 1, "all", ["0"], sanitized=True)
    group.ended = [{"name": "0", "how": "passed", "seconds": 0.1}]
    group.logs = [tmp_path / "log"]
    watch = gpu_faults.Watch(tmp_path, None, 1, [], [group])
    # a log without a sum says nothing.
    assert not watch.table()
    for errors in (0, 3):
        group.logs[0].write_text(f"========= ERROR SUMMARY: {errors} errors\n", encoding="utf-8")
        assert watch.table() == (errors == 0)


def test_without_the_sanitizer_nothing_is_right_that_only_it_could_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_faults, "sanitizer_command", list)
    monkeypatch.setattr(sys, "argv", ["gpu_faults.py", "plans", "--only-sanitizer"])
    with pytest.raises(SystemExit):
        gpu_faults.main()


def groups(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """What the program finds without a sanitizer."""
    pytest.importorskip("triton")
    found = tmp_path / "found.json"
    command = [sys.executable, gpu_faults.__file__, *arguments, "--sanitize", "0"]
    done = subprocess.run([*command, "--json", str(found)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))["groups"]
    return rows


@pytest.mark.slow
@pytest.mark.faults
def test_the_program_runs_without_a_gpu_too(tmp_path: Path) -> None:
    rows = groups(tmp_path, "plans", "--plans", "2", "--jobs", "2")
    assert sum(row["passed"] for row in rows) == 2


@pytest.mark.slow
@pytest.mark.faults
def test_what_the_guard_costs_is_measured_of_calls_and_of_blocks(tmp_path: Path) -> None:
    (row,) = groups(tmp_path, "guard", "--turns", "1")
    assert row["passed"] == row["cases"] > 0
    for cost in row["found"].values():
        assert cost["call_ms"] > 0
        assert cost["block_ms"] > 0
        assert cost["kept"] == pytest.approx(0.3, abs=0.05)
        told = {"call_percent", "call_noise_percent", "block_percent", "block_noise_percent"}
        assert told | {"tokens", "heads", "head_dim"} <= cost.keys()
