"""Fuzzed inputs: a sentence or a video comes of each, and nothing is written elsewhere."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from fault_runs import chance, form

from vidsparse.apps.cli import main
from vidsparse.apps.commands.generate import generate

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.usefixtures("one_thread"),
]

SMALL = ("--frames", "5", "--size", "32x32", "--steps", "1", "--device", "cpu")
# seconds that no input may take.
MOST = 60
# ten thousand together, more of those that are soon refused.
TIMES = {
    name: form(short=40, long=long)
    for name, long in {
        "options": 6000, "others": 1000, "prompts": 2000, "presets": 1000, "records": 500,
        "models": 500,
    }.items()
}  # fmt: skip

NUMBERS = [
    "0", "-1", "1", "2", "3", "0.5", "1e308", "1e400", "-0", "nan", "inf", "9" * 400, "0x10", "1_0",
    "٣", "1,5", "2.7", " 4 ", "16x16", "0x0", "32x", "1e-320",
]  # fmt: skip
TEXTS = [
    "", " ", "dense", "auto", "../..", "/", "~", "-", "--", "x" * 5000, "\x00", "a\nb", "\u202e",
    "\ud800", "{}", "null", "%s%n", "$(true)", "кольцо", "0:1", "1/0", "true",
]  # fmt: skip
JSON: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, 10**30, "", "x", "../../etc/passwd", [], [[]], {}, {"a": {}},
    "9" * 300,
]  # fmt: skip


def tree_places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in list(pairs):
        yield (*at, key)
        if isinstance(each, dict | list):
            yield from tree_places(each, (*at, key))


def changed_json(text: str, rng: random.Random) -> str:
    """A JSON text with some of its values replaced, removed, doubled or renamed; or cut short."""
    value = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        places = list(tree_places(value))
        if not places:
            break
        *way, last = rng.choice(places)
        parent = value
        for key in way:
            parent = parent[key]
        what = rng.randrange(4)
        if what == 0:
            del parent[last]
        elif what == 1 and isinstance(parent, dict):
            parent[str(last) + rng.choice(["x", "", " "])] = parent.pop(last)
        elif what == 2 and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        else:
            # a copy: what is put into it later must not come up elsewhere.
            parent[last] = copy.deepcopy(rng.choice(JSON))
    made = json.dumps(value)
    chances = rng.random()
    if chances < 0.05:
        return made[: rng.randrange(len(made))]
    if chances < 0.1:
        return "[" * 100_000 + made
    return made


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes with some of them changed, removed or inserted."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1) if made else 0
        what = rng.randrange(4)
        if what == 0:
            del made[at : at + rng.randint(1, 50)]
        elif what == 1:
            made[at:at] = rng.randbytes(rng.randint(1, 20))
        elif what == 2:
            made[at : at + 1] = rng.randbytes(1)
        else:
            made = made[:at]
    return bytes(made)


class Desk:
    """A folder to run in, and what must hold after every run."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        (folder / "one.txt").write_text("a red circle\n", encoding="utf-8")

    def run(self, *arguments: str, by_host: bool = False) -> Result:
        """Run a command there, and check that it ended as documented.

        With ``by_host`` a prompt may fail for a reason of the host's, in its words: a model's files
        hold settings that nobody but it reads.
        """
        before = self.listing()
        result = CliRunner().invoke(main, list(arguments))
        shown = f"{arguments}\n{result.output[-3000:]}"
        assert result.exit_code in (0, 1, 2), shown
        escaped = result.exception
        assert escaped is None or isinstance(escaped, SystemExit), f"{shown}\n{escaped!r}"
        assert "Traceback" not in result.output, shown
        # exit 1 is for prompts that could not be made, and their reason is of our own words.
        foreign = re.search(r"(failed|Error): \w+(Error|Exception|Warning)\b", result.output)
        assert by_host or not foreign, shown
        assert "defect" not in result.output, shown
        # processes that it starts speak for themselves.
        if result.exit_code == 2 and "--gpus" not in arguments:
            assert "Error" in result.output, shown
        assert self.listing() - before <= {"o"}, shown
        return result

    def listing(self) -> set[str]:
        """What lies in the folder and beside it."""
        return {path.name for path in (*self.folder.iterdir(), *self.folder.parent.iterdir())}


@pytest.fixture
def desk(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    folder = tmp_path / "desk"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return Desk(folder, tiny_model)


# commands with options of their own, and what keeps a run of theirs short where all are fine.
TENSORS = ("--seq-len", "128", "--heads", "1", "--head-dim", "16", "--repeats", "1")
OTHERS = {
    ("compare", "one.txt"): (*SMALL, "--out", "o"),
    ("calibrate",): ("--prompts", "one.txt", *SMALL, "--method", "bsfa", "--out", "o/p"),
    ("bench", "attention"): (*TENSORS, "--implementation", "torch", "--kept", "0.5"),
    ("bench", "calls"): TENSORS,
    ("bench", "masks"): (*TENSORS, "--method", "fg-attn"),
}


def generating(model: Path | str, *options: str) -> tuple[str, ...]:
    return ("generate", "one.txt", "--model", str(model), *SMALL, "--out", "o", *options)


def test_fuzzed_options_end_in_a_sentence_or_a_video(desk: Desk) -> None:
    rng = chance("options")
    kept = {"out", "device", "model", "help", "compile", "verbose", "quiet"}
    options = [
        each for each in generate.params if isinstance(each, click.Option) and each.name not in kept
    ]
    for _ in range(TIMES["options"]):
        given: list[str] = []
        for option in rng.sample(options, rng.randint(1, 4)):
            given.append(rng.choice(option.opts))
            if not option.is_flag:
                # sizes and counts that are taken would only take long.
                given.append(rng.choice([*NUMBERS, *TEXTS]))
        desk.run(*generating(desk.model, *given))


def test_fuzzed_options_of_other_commands_end_in_a_sentence_or_an_answer(desk: Desk) -> None:
    rng = chance("others")
    # what writes where it is told to, is measured for minutes, or takes a model of another name.
    kept = {"out", "device", "model", "help", "compile", "verbose", "quiet", "json_path", "plot"}
    kept |= {"suite", "data", "show", "overwrite"}
    for _ in range(TIMES["others"]):
        names = rng.choice(sorted(OTHERS))
        command: Any = main
        for name in names:
            if isinstance(command, click.Group):
                command = command.get_command(click.Context(command), name)
        options = [
            each
            for each in command.params
            if isinstance(each, click.Option) and each.name not in kept
        ]
        given: list[str] = []
        for option in rng.sample(options, rng.randint(1, 2)):
            given.append(rng.choice(option.opts))
            if not option.is_flag:
                given.append(rng.choice([*NUMBERS, *TEXTS]))
        of_a_model = ("--model", str(desk.model)) if names[0] != "bench" else ()
        desk.run(*names, *OTHERS[names], *of_a_model, *given)


def test_fuzzed_prompt_files_end_in_a_sentence_or_videos(desk: Desk) -> None:
    rng = chance("prompts")
    pieces = [b"a red circle\n", b"# no prompt\n", b"\xef\xbb\xbf", b"\r\n", b"\xff\xfe", b"\x00"]
    pieces += [
        b" " * 100,
        b"x" * 9_999,
        "кольцо\n".encode(),
        b"\x1b[31m",
        b"../../x\n",
        b"\x85\x0c",
    ]
    for _ in range(TIMES["prompts"]):
        data = b"".join(rng.choice(pieces) for _ in range(rng.randint(0, 4)))
        if rng.random() < 0.3:
            data = changed_bytes(data, rng)
        (desk.folder / "one.txt").write_bytes(data)
        desk.run(*generating(desk.model, "--method", "dense"))
        shutil.rmtree(desk.folder / "o", ignore_errors=True)


def test_fuzzed_presets_are_refused_or_run(desk: Desk) -> None:
    rng = chance("presets")
    made = desk.run(
        "calibrate", "--prompts", "one.txt", "--model", str(desk.model), "--frames", "9", "--size",
        "64x64", "--steps", "2", "--device", "cpu", "--method", "bsfa", "--groups", "1",
        "--dense-steps", "0", "--out", "o/p",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    text = (desk.folder / "o" / "p.json").read_text(encoding="utf-8")
    tables = (desk.folder / "o" / "p.safetensors").read_bytes()
    codes = set()
    for _ in range(TIMES["presets"]):
        (desk.folder / "o" / "p.json").write_text(
            changed_json(text, rng) if rng.random() < 0.8 else text, encoding="utf-8"
        )
        data = changed_bytes(tables, rng) if rng.random() < 0.3 else tables
        (desk.folder / "o" / "p.safetensors").write_bytes(data)
        # no size of its own: it brings one, which the fuzz may have made a large one.
        codes.add(
            desk.run(
                "generate", "one.txt", "--model", str(desk.model), "--device", "cpu", "--steps",
                "2", "--frames", "9", "--size", "64x64", "--preset", "o/p", "--out", "o",
            ).exit_code
        )  # fmt: skip
    assert 2 in codes


def test_fuzzed_records_and_videos_are_made_again_or_kept(desk: Desk) -> None:
    rng = chance("records")
    given = generating(desk.model, "--method", "dense", "--verify")
    assert desk.run(*given).exit_code == 0
    (video,) = desk.folder.glob("o/*/*.mp4")
    record = video.with_suffix(".json")
    clean, text = video.read_bytes(), record.read_text(encoding="utf-8")
    for _ in range(TIMES["records"]):
        changes = rng.randrange(3)
        if changes != 1:
            record.write_text(changed_json(text, rng), encoding="utf-8")
        if changes != 0:
            video.write_bytes(changed_bytes(clean, rng))
        assert desk.run(*given).exit_code == 0
        # finished or not, the folder holds this prompt's video as it was made the first time.
        assert any(path.read_bytes() == clean for path in video.parent.glob("*.mp4"))
        for path in video.parent.glob("*"):
            if path.suffix in (".mp4", ".json"):
                path.unlink()
        video.write_bytes(clean)
        record.write_text(text, encoding="utf-8")


def test_fuzzed_model_folders_are_refused_or_run(desk: Desk) -> None:
    rng = chance("models")
    names = sorted(
        path.relative_to(desk.model)
        for path in desk.model.rglob("*")
        if path.suffix in (".json", ".safetensors")
    )
    for _ in range(TIMES["models"]):
        copy = desk.folder / "o" / "model"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(desk.model, copy)
        file = copy / rng.choice(names)
        if file.suffix == ".json":
            file.write_text(changed_json(file.read_text(encoding="utf-8"), rng), encoding="utf-8")
        else:
            file.write_bytes(changed_bytes(file.read_bytes()[:20_000], rng))
        desk.run(*generating(copy, "--method", "dense"), by_host=True)
