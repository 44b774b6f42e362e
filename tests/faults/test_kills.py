"""Commands that are killed at random moments: the next run ends with exactly the right files."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_runs import Commands, Ended, chance, digests, form, hidden

from vidsparse.pipelines.video import read_video
from vidsparse.presets import load_preset

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.name != "posix", reason="sends signals"),
]

PROMPTS = ["a red circle", "a blue square that moves", "a red square left"]
SIZE = ("--frames", "9", "--size", "64x64", "--device", "cpu")
# one fresh folder, killed so often in a row before a run may come to its end.
KILLS_IN_A_ROW = form(short=2, long=3)
ROUNDS = form(short=1, long=7)
MORE_ROUNDS = 5
ENDS = {
    signal.SIGKILL: {-signal.SIGKILL},
    # before the command line listens, a signal ends the process in its own way.
    signal.SIGTERM: {143, -signal.SIGTERM},
    signal.SIGINT: {130, 1},
}


def _after(moment: float) -> Callable[[float], bool]:
    return lambda spent: spent >= moment


def _writing(folder: Path) -> Callable[[float], bool]:
    """True once a file is being written below ``folder`` that was not begun before."""
    begun = {path.name for path in folder.rglob(".*.tmp")}
    return lambda _: any(path.name not in begun for path in folder.rglob(".*.tmp"))


class Killer:
    """Runs one command again and again, and kills it until it may end.

    Args:
        commands: what runs it.
        arguments: the command, with ``{out}`` for where it writes.
        name: of the test, for its random numbers.
    """

    def __init__(self, commands: Commands, arguments: tuple[str, ...], name: str) -> None:
        self._commands = commands
        self._arguments = arguments
        self._random = chance(name)
        # the first run is slower than the others: it is no measure.
        self.straight("warm")
        self._seconds = self._run("clean").seconds
        self.clean = commands.folder / "clean"
        self.hits = 0

    def rounds(self) -> Iterator[int]:
        """The rounds of the form, and some more where no kill has hit: a run may be too quick."""
        for number in range(ROUNDS + MORE_ROUNDS):
            if number >= ROUNDS and self.hits:
                return
            yield number

    def straight(self, out: str) -> Path:
        """Run it without a fault; answers the folder that it wrote to."""
        ended = self._run(out)
        assert ended.status == 0, ended.said
        return self._commands.folder / out

    def killed(self, out: str, look: Callable[[], None]) -> Path:
        """Run it until it ends, killed some times on the way; ``look`` is called after each."""
        place = self._commands.folder / out
        for turn in range(KILLS_IN_A_ROW):
            how = self._random.choice([signal.SIGKILL, signal.SIGKILL, *ENDS])
            # a short form has few turns, and the moment when a file is written can be missed.
            if turn % 2 == 0:
                when = _after(self._random.uniform(0, 0.6) * self._seconds)
            else:
                when = _writing(place.parent)
            ended = self._run(out, when=when, how=how)
            self.hits += ended.hit
            assert "Traceback" not in ended.said, ended.said
            if ended.status == 0:
                # the machine was busier when it was measured.
                self._seconds = min(self._seconds, ended.seconds)
                break
            assert ended.status in ENDS[how], ended
            look()
        return self.straight(out)

    def _run(
        self, out: str, *, when: Callable[[float], bool] | None = None, how: int = signal.SIGKILL
    ) -> Ended:
        given = [part.replace("{out}", out) for part in self._arguments]
        return self._commands.run(given, when=when, how=how)


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    (tmp_path / "three.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    return Commands(tmp_path)


def test_killed_generations_lose_nothing_and_end_complete(
    commands: Commands, tiny_model: Path, record_property: Callable[[str, object], None]
) -> None:
    given = ("generate", "three.txt", "--model", str(tiny_model), *SIZE, "--steps", "3")
    killer = Killer(commands, (*given, "--out", "{out}"), "generate")
    (clean,) = killer.clean.iterdir()
    videos = digests(clean, "*.mp4")
    assert len(videos) == len(PROMPTS)
    for number in killer.rounds():
        place = commands.folder / f"g{number}"
        kept: dict[str, int] = {}

        def look(place: Path = place, kept: dict[str, int] = kept) -> None:
            for record in place.glob("*/*.json"):
                told = json.loads(record.read_text(encoding="utf-8"))
                video = record.with_suffix(".mp4")
                assert video.stat().st_size == told["file"]["bytes"]
                # what was finished once is never made again.
                assert kept.setdefault(video.name, video.stat().st_mtime_ns) == (
                    video.stat().st_mtime_ns
                )

        (folder,) = killer.killed(place.name, look).iterdir()
        look()
        assert digests(folder, "*.mp4") == videos
        assert all(len(read_video(path)) == 9 for path in folder.glob("*.mp4"))
        names = {path.name for path in folder.iterdir()} - {".vidsparse.lock"}
        assert names == {path.name for path in clean.iterdir()} - {".vidsparse.lock"}
    record_property("kills", killer.hits)
    assert killer.hits


def test_killed_comparisons_end_with_the_report_of_an_untouched_one(
    commands: Commands, tiny_model: Path, record_property: Callable[[str, object], None]
) -> None:
    given = ("compare", "three.txt", "--model", str(tiny_model), *SIZE, "--steps", "3")
    killer = Killer(commands, (*given, "--out", "{out}"), "compare")
    (clean,) = killer.clean.iterdir()

    def numbers(folder: Path) -> list[object]:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        named = ("number", "prompt", "seed", "psnr", "ssim", "flicker", "frames", "work")
        return [[each[name] for name in named] for each in report["prompts"]]

    for number in killer.rounds():
        (folder,) = killer.killed(f"c{number}", lambda: None).iterdir()
        assert numbers(folder) == numbers(clean)
        assert digests(folder, "*.mp4") == digests(clean, "*.mp4")
        assert hidden(folder) == []
        assert {path.name for path in folder.iterdir()} == {path.name for path in clean.iterdir()}
    record_property("kills", killer.hits)
    assert killer.hits


def test_killed_studies_end_with_the_rows_of_an_untouched_one(
    commands: Commands, tiny_model: Path, record_property: Callable[[str, object], None]
) -> None:
    given = ("bench", "quality", "three.txt", "--model", str(tiny_model), *SIZE, "--steps", "3")
    how = ("--study", "tiles", "--limit-rows", "4", "--batch", "1", "--commit", "0")
    killer = Killer(commands, (*given, *how, "--out", "{out}/rows.json"), "study")

    def rows(folder: Path) -> list[object]:
        told = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
        # all but what the clock said.
        return [
            {name: value for name, value in row.items() if "seconds" not in name}
            | {"speedup": None}
            for row in told["rows"]
        ]

    # each run makes at most four of the rows that are missing: those of the first four are alike.
    clean = rows(killer.clean)[:4]
    for number in killer.rounds():
        place = commands.folder / f"s{number}"

        def look(place: Path = place) -> None:
            if (place / "rows.json").exists():
                assert rows(place)[:4] == clean[: len(rows(place))]

        made = killer.killed(place.name, look)
        assert rows(made)[:4] == clean
        assert hidden(made) == []
    record_property("kills", killer.hits)
    assert killer.hits


def test_killed_calibrations_end_with_the_preset_of_an_untouched_one(
    commands: Commands, tiny_model: Path, record_property: Callable[[str, object], None]
) -> None:
    import torch

    given = ("calibrate", "--prompts", "three.txt", "--model", str(tiny_model), *SIZE)
    how = ("--steps", "4", "--dense-steps", "1", "--method", "bsfa", "--groups", "1")
    # dense videos are files of their own until the end.
    target = ("--fractions", "0.5", "--target-psnr", "20")
    command = (*given, *how, *target, "--overwrite", "--out", "{out}/p")
    killer = Killer(commands, command, "calibrate")
    clean = load_preset(str(killer.clean / "p"))
    assert clean.measured["tries"]
    for number in killer.rounds():
        made = load_preset(str(killer.killed(f"p{number}", lambda: None) / "p"))
        assert made.tables.keys() == clean.tables.keys()
        assert all(torch.equal(made.tables[name], clean.tables[name]) for name in clean.tables)
        assert made.measured == clean.measured
        left = {path.name for path in (commands.folder / f"p{number}").iterdir()}
        assert left == {path.name for path in killer.clean.iterdir()}
    record_property("kills", killer.hits)
    assert killer.hits
