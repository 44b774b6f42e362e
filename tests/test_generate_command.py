"""What ``vidsparse generate`` makes of a prompts file, what it makes again, and what it prints."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prompt_runs import PROMPTS, SMALL, Machine, Run, video_names

from vidsparse.apps.cli import main
from vidsparse.apps.commands.compare import compare
from vidsparse.apps.runs.prompts import SLUG_CHARACTERS, Prompt, slug
from vidsparse.apps.runs.run_folder import RunFolder
from vidsparse.apps.runs.team import Team
from vidsparse.apps.terminal.console import Terminal
from vidsparse.pipelines.generate import Generated
from vidsparse.pipelines.video import read_video

pytest_plugins = ["prompt_runs"]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "videos"


def test_generate_writes_a_video_and_a_record_for_every_prompt(generate: Run, out: Path) -> None:
    done = generate()
    assert done.exit_code == 0, done.output
    names = ["0001-a-red-circle-that-moves-right", "0002-a-blue-square-that-moves-left"]
    assert video_names(out) == [f"{name}.mp4" for name in names]
    (folder,) = out.iterdir()
    assert folder.name.startswith("two-fg-attn-")

    for name, prompt in zip(names, PROMPTS.split("\n")[2:], strict=False):
        record = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        assert record["prompt"] == prompt.strip()
        assert record["options"]["method_options"] == {
            "top_p": 0.9,
            "topk": None,
            "score": "mass",
            "tile": "16x16",
            "merge": "xor-window",
            "means": 64,
            "plans": "shared",
        }
        assert 0 < record["selected"] <= record["computed"] <= 1
        assert read_video(folder / f"{name}.mp4").shape == (5, 32, 32, 3)
    assert str(folder / f"{names[0]}.mp4") in done.stdout


def test_a_cpu_makes_a_smaller_video_of_a_large_model_and_says_so(
    machine: Machine, prompts: Path, out: Path
) -> None:
    def run(*options: str) -> str:
        asked = ["--model", "scenes", "--device", "cpu", "--steps", "1", "--method", "dense"]
        done = CliRunner().invoke(main, ["generate", str(prompts), *asked, *options])
        assert done.exit_code == 0, done.output
        return done.output

    said = run("--out", str(out))
    assert "On a CPU scenes makes 33 frames of 320x320 unless others are asked for" in said
    assert "Its own 81 of 640x640 are 9.3 times the tokens" in said
    videos = sorted(out.glob("*/*.mp4"))
    assert [read_video(video).shape for video in videos] == [(33, 320, 320, 3)] * len(videos)
    said = run("--frames", "5", "--size", "32x32", "--out", str(out / "asked"))
    assert "On a CPU" not in said


def test_a_run_in_which_nothing_was_sparse_says_so(generate: Run) -> None:
    done = generate("--dense-steps", "1.0", file="-", stdin=b"a red circle")
    assert done.exit_code == 0, done.output
    assert "nothing was sparse, though fg-attn was asked for: dense: so are all its" in done.stdout
    asked = generate("--method", "dense", file="-", stdin=b"a red circle")
    assert "nothing was sparse" not in asked.stdout


def test_calls_that_fell_back_are_named_with_the_reason(
    generate: Run, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = machine.generate

    def fallen(*args: Any) -> Generated:
        made = make(*args)
        made.record["notes"].append("dense: the host has a mask for this call")
        return made

    monkeypatch.setattr(machine, "generate", fallen)
    done = generate()
    assert "of a sparse call's); some calls were dense: the host has a mask" in done.stdout


def test_a_rerun_makes_nothing_and_loads_nothing(
    generate: Run, machine: Machine, out: Path
) -> None:
    assert generate().exit_code == 0
    assert (machine.loads, len(machine.made)) == (1, 2)
    again = generate()
    assert again.exit_code == 0
    assert (machine.loads, len(machine.made)) == (1, 2)
    assert again.stdout.count("already there") == 2


def test_overwrite_makes_everything_again(generate: Run, machine: Machine) -> None:
    generate()
    assert generate("--overwrite").exit_code == 0
    assert len(machine.made) == 4


def test_other_settings_get_another_folder(generate: Run, machine: Machine, out: Path) -> None:
    generate()
    generate("--seed", "1")
    generate("--method", "spargeattn", "--tau", "0.5")
    assert len(machine.made) == 6
    assert len(list(out.iterdir())) == 3


def test_a_missing_video_or_record_is_made_again(
    generate: Run, machine: Machine, out: Path
) -> None:
    generate()
    next(out.rglob("0001-*.mp4")).unlink()
    next(out.rglob("0002-*.json")).write_text("{ broken", encoding="utf-8")
    generate()
    assert machine.made[2:] == machine.made[:2]


def test_a_video_that_was_cut_short_is_made_again(
    generate: Run, machine: Machine, out: Path
) -> None:
    generate()
    whole = next(out.rglob("0001-*.mp4"))
    data = whole.read_bytes()
    whole.write_bytes(data[:1000])
    generate()
    assert machine.made[2:] == machine.made[:1]
    assert whole.read_bytes() == data


def test_verify_finds_a_changed_byte_that_the_size_does_not_tell(
    generate: Run, machine: Machine, out: Path
) -> None:
    generate()
    changed = next(out.rglob("0002-*.mp4"))
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    generate()
    assert len(machine.made) == 2
    generate("--verify")
    assert machine.made[2:] == machine.made[1:2]


def test_a_record_that_was_edited_is_of_no_finished_video(
    generate: Run, machine: Machine, out: Path
) -> None:
    generate()
    record = next(out.rglob("0001-*.json"))
    value = json.loads(record.read_text(encoding="utf-8"))
    value["options"]["seed"] = 7
    record.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    generate()
    assert machine.made[2:] == machine.made[:1]


def test_a_pair_from_another_run_is_no_finished_video(
    generate: Run, machine: Machine, out: Path
) -> None:
    import shutil

    generate("--seed", "1")
    (one,) = out.iterdir()
    generate()
    (two,) = set(out.iterdir()) - {one}
    for path in one.glob("0001-*"):
        shutil.copy(path, two)
    generate()
    assert machine.made[4:] == machine.made[:1]


def test_a_finished_run_needs_no_folder_that_can_be_written_to(
    generate: Run, machine: Machine, out: Path
) -> None:
    generate()
    (folder,) = out.iterdir()
    (folder / ".vidsparse.lock").unlink(missing_ok=True)
    # no lock can be taken here, by root neither.
    (folder / ".vidsparse.lock").mkdir()
    folder.chmod(0o555)
    done = generate()
    folder.chmod(0o755)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("already there") == 2
    assert generate("--overwrite").exit_code == 2


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_folder_whose_name_is_no_text_costs_no_video(
    generate: Run, machine: Machine, tiny_model: Path, tmp_path: Path, out: Path
) -> None:
    import shutil

    strange = tmp_path / "model-\udcff"
    shutil.copytree(tiny_model, strange)
    done = generate("--model", str(strange))
    assert done.exit_code == 0, done.output
    assert generate("--model", str(strange)).exit_code == 0
    assert len(machine.made) == 2


def test_an_edited_line_is_made_under_its_new_name_and_the_old_file_stays(
    generate: Run, machine: Machine, prompts: Path, out: Path
) -> None:
    generate()
    prompts.write_text(PROMPTS.replace("red circle", "red square"), encoding="utf-8")
    generate()
    assert machine.made[2:] == ["a red square that moves right"]
    assert [name[:16] for name in video_names(out)] == [
        "0001-a-red-circl",
        "0001-a-red-squar",
        "0002-a-blue-squa",
    ]


def test_an_edit_behind_the_end_of_the_name_keeps_both_files(
    generate: Run, machine: Machine, prompts: Path, out: Path
) -> None:
    long = "a red circle that moves right over a plain and very grey background"
    prompts.write_text(f"{long} slowly", encoding="utf-8")
    generate()
    prompts.write_text(f"{long} quickly", encoding="utf-8")
    generate()
    generate()
    assert machine.made == [f"{long} slowly", f"{long} quickly"]
    assert len(video_names(out)) == 2


def test_a_video_under_its_second_name_is_found_when_the_first_is_gone(
    generate: Run, machine: Machine, prompts: Path, out: Path
) -> None:
    long = "a red circle that moves right over a plain and very grey background"
    for text in (f"{long} slowly", f"{long} quickly"):
        prompts.write_text(text, encoding="utf-8")
        generate()
    (folder,) = out.iterdir()
    first, second = sorted(video_names(out), key=len)
    (folder / first).unlink()
    (folder / first).with_suffix(".json").unlink()
    generate()
    assert len(machine.made) == 2
    assert video_names(out) == [second]


def test_a_record_with_keyframes_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder, prompt = RunFolder(tmp_path, "s"), Prompt(number=1, text="x", line=1)
    target = folder.target(prompt)
    target.video.write_bytes(b"video")
    # as numbers 9 comes first, and as text, which names in JSON are, 17.
    keyframes = {9: "a.png", 17: "b.png"}
    folder.write_record(target, {"prompt": "x", "options": {"keyframes": keyframes}})
    assert folder.target(prompt, verify=True).finished


def test_quiet_prints_paths_only(generate: Run, machine: Machine, out: Path) -> None:
    done = generate("-q")
    assert [Path(line).name for line in done.stdout.splitlines()] == video_names(out)
    assert done.stderr == ""


def test_standard_input(generate: Run, machine: Machine, out: Path) -> None:
    done = generate(file="-", stdin="a red circle\r\nein grüner Ring".encode())
    assert done.exit_code == 0, done.output
    assert machine.made == ["a red circle", "ein grüner Ring"]
    assert next(out.iterdir()).name.startswith("stdin-fg-attn-")


def test_words_the_model_lacks_are_named(
    machine: Machine, tiny_model: Path, tmp_path: Path, prompts: Path, out: Path
) -> None:
    model = tmp_path / "worded"
    model.symlink_to(tiny_model)
    card = {"vocabulary": ["a", "red", "blue", "circle", "that", "moves", "left", "right"]}
    (tiny_model / "vidsparse.json").write_text(json.dumps(card), encoding="utf-8")
    try:
        done = CliRunner().invoke(
            main, ["generate", str(prompts), "--model", str(model), *SMALL, "--out", str(out)]
        )
    finally:
        (tiny_model / "vidsparse.json").unlink()
    assert done.exit_code == 0
    assert "prompt 2" in done.stderr
    assert "square" in done.stderr
    assert "prompt 1" not in done.stderr


def test_the_bar_counts_steps_on_a_terminal(
    generate: Run, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rich takes this for a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    text = generate().stderr
    assert "a red circle that moves right" in text
    assert "decoding" in text


@pytest.mark.slow
def test_letters_that_the_terminal_does_not_know_cost_no_video(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text("a red кольцо\n", encoding="utf-8")
    command = [sys.executable, "-m", "vidsparse", "generate", "one.txt", "--out", "o"]
    done = subprocess.run(
        [*command, "--model", str(tiny_model), *SMALL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert done.returncode == 0, done.stderr
    assert "0001-a-red-\\u043a" in done.stdout


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A Red/Circle: moves... right!", "a-red-circle-moves-right"),
        ("../../etc/passwd", "etc-passwd"),
        ("ein grüner Ring", "ein-grüner-ring"),
        ("?!", "prompt"),
        ("x" * 500, "x" * SLUG_CHARACTERS),
        ("word " * 50, "-".join(["word"] * 9)),
    ],
)
def test_slugs(prompt: str, name: str) -> None:
    assert slug(prompt) == name


def test_json_is_all_that_goes_to_standard_output(generate: Run, machine: Machine) -> None:
    done = generate("--json")
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    assert [each["state"] for each in answer["videos"]] == ["made", "made"]
    for each in answer["videos"]:
        assert Path(each["video"]).is_file()
        assert Path(each["record"]).is_file()
    again = json.loads(generate("--json").stdout)
    assert [each["state"] for each in again["videos"]] == ["kept", "kept"]
    assert again["folder"] == answer["folder"]


def test_json_says_which_prompt_failed(generate: Run, machine: Machine) -> None:
    machine.fail_on = "blue"
    done = generate("--json")
    assert done.exit_code == 1
    assert [each["state"] for each in json.loads(done.stdout)["videos"]] == ["made", "failed"]


def test_json_says_that_a_team_which_failed_made_nothing_from_there_on(
    generate: Run, machine: Machine, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts.write_text(f"{PROMPTS}a green circle\n", encoding="utf-8")
    machine.fail_on = "blue"
    # the first of two processes, without the second.
    team = Team(0, 2)
    monkeypatch.setattr("vidsparse.apps.commands.generate.join_team", lambda *_: team)
    for name in ("connect", "tell", "wait_to_be_ended"):
        monkeypatch.setattr(Team, name, lambda *_: None)
    done = generate("--json")
    assert done.exit_code == 1, done.output
    videos = json.loads(done.stdout)["videos"]
    assert [each["state"] for each in videos] == ["made", "failed", "failed"]
    assert [Path(each["video"]).exists() for each in videos] == [True, False, False]


def test_generate_says_which_command_shows_what_it_cost(
    generate: Run, machine: Machine, prompts: Path
) -> None:
    said = generate("--top-p", "0.3", "--overwrite").stderr
    (line,) = [line for line in said.splitlines() if line.startswith("Next")]
    command = shlex.split(line.partition(": ")[2])
    assert command[:3] == ["vidsparse", "compare", str(prompts)]
    assert command[command.index("--top-p") + 1] == "0.3"
    assert "--overwrite" not in command
    # it can be given as it stands.
    compare.make_context("compare", command[2:], obj=Terminal())
    assert "Next" not in generate("--method", "dense").stderr
