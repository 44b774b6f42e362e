"""Disks that are full at every write in turn, folders that are closed, and encoders that die."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_runs import Commands, Encoder, digests, form, hidden

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and mounts"),
]

PROMPTS = ["a red circle", "a blue square that moves"]
SIZE = ("--frames", "9", "--size", "64x64", "--device", "cpu", "--steps", "2")
PAGE = 4096
# more than all files of a run together.
PAGES = 60


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    (tmp_path / "two.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    return Commands(tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that holds few pages."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={PAGES * PAGE}", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip()
        # the superuser alone may, and in some containers not even it; all else is a fault.
        assert re.search("superuser|permi|must be root", said, re.IGNORECASE), said
        pytest.skip(f"no small file system can be made here: {said}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def ballast(disk: Path, pages: int) -> None:
    """Leave so many pages free."""
    file = disk / "ballast"
    file.unlink(missing_ok=True)
    free = os.statvfs(disk).f_bavail
    size = (free - pages) * os.statvfs(disk).f_frsize
    file.write_bytes(b"\0" * max(0, size))
    assert os.statvfs(disk).f_bavail == pages


def generating(model: Path, *options: str) -> tuple[str, ...]:
    return ("generate", "two.txt", "--model", str(model), *SIZE, *options)


def complete(folder: Path) -> list[str]:
    """Videos whose record says that they are finished and of that size."""
    found = []
    for record in sorted(folder.glob("*/*.json")):
        told = json.loads(record.read_text(encoding="utf-8"))
        if record.with_suffix(".mp4").stat().st_size == told["file"]["bytes"]:
            found.append(record.stem)
    return found


def test_a_disk_that_is_full_at_any_write_costs_no_finished_file(
    commands: Commands, tiny_model: Path, disk: Path, record_property: Callable[[str, object], None]
) -> None:
    given = generating(tiny_model, "--out", "disk/o")
    assert commands.run(given).status == 0
    (clean,) = (disk / "o").iterdir()
    videos = digests(clean, "*.mp4")
    used = sum(-(-path.stat().st_size // PAGE) for path in clean.iterdir())
    shutil.rmtree(disk / "o")
    faults = 0
    # every page that the run comes to lack, or some of them.
    pages = range(used + 1) if form(short=0, long=1) else sorted({0, 1, used // 2, used - 1})
    for free in pages:
        ballast(disk, free)
        ended = commands.run(given)
        assert ended.status in (0, 1, 2), ended.said
        assert "Traceback" not in ended.said
        if ended.status:
            faults += 1
            assert "No space left on device" in ended.said
        assert hidden(disk) == []
        before = complete(disk / "o")
        ballast(disk, used + 4)
        # whatever was finished then is still there, and the next run makes the rest.
        assert complete(disk / "o") == before
        ended = commands.run(given)
        assert ended.status == 0, ended.said
        assert ended.printed.count("already there") == len(before)
        assert digests(next((disk / "o").iterdir()), "*.mp4") == videos
        # with all videos there and no room, making them again must lose none.
        ballast(disk, free)
        again = commands.run((*given, "--overwrite"))
        assert "Traceback" not in again.said
        if again.status:
            assert digests(next((disk / "o").iterdir()), "*.mp4") == videos
            assert len(complete(disk / "o")) == len(PROMPTS)
        (disk / "ballast").unlink()
        shutil.rmtree(disk / "o")
    record_property("faults", faults)
    assert faults


@pytest.mark.parametrize("command", ["compare", "calibrate"])
def test_a_full_disk_ends_every_command_in_one_sentence(
    command: str, commands: Commands, tiny_model: Path, disk: Path
) -> None:
    given = {
        "compare": ("compare", "two.txt", "--model", str(tiny_model), *SIZE, "--out", "disk/o"),
        "calibrate": (
            "calibrate", "--prompts", "two.txt", "--model", str(tiny_model), *SIZE, "--out",
            "disk/p", "--method", "bsfa", "--groups", "1", "--dense-steps", "0",
        ),
    }[command]  # fmt: skip
    for free in range(form(short=1, long=12)):
        ballast(disk, free)
        ended = commands.run(given)
        assert hidden(disk) == []
        if free and ended.status == 0:
            # all of it fits.
            break
        assert ended.status in (1, 2), ended
        assert "Traceback" not in ended.said
        assert "No space left on device" in ended.said
    (disk / "ballast").unlink()
    if ended.status:
        ended = commands.run(given)
    assert ended.status == 0, ended.said


def test_two_runs_in_one_folder_make_each_video_once(commands: Commands, tiny_model: Path) -> None:
    import threading

    given = generating(tiny_model, "--out", "o")
    other = Commands(commands.folder / "other")
    other.folder.mkdir()
    shutil.copy(commands.folder / "two.txt", other.folder)
    together = (*given[:-1], str(commands.folder / "o"))
    ended = []
    for _ in range(form(short=1, long=10)):
        thread = threading.Thread(target=lambda: ended.append(other.run(together)))
        thread.start()
        ended.append(commands.run(given))
        thread.join()
        one, two = ended[-2:]
        # whoever comes second is refused, or finds the videos there.
        assert sorted((one.status, two.status)) in ([0, 0], [0, 2])
        assert all("Traceback" not in each.said for each in (one, two))
        assert len(complete(commands.folder / "o")) == len(PROMPTS)
        assert hidden(commands.folder / "o") == []
        shutil.rmtree(commands.folder / "o")


@pytest.mark.parametrize("what", ["missing", "no program", "killed", "silent"])
def test_an_encoder_that_fails_in_any_way_is_one_sentence_for_each_prompt(
    what: str, commands: Commands, tiny_model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "encoder"
    # a process that is forked here has the variables of its server, so that it sets them itself.
    setup = Encoder(what, str(script))
    given = generating(tiny_model, "--out", "o")
    ended = commands.run(given, setup=setup)
    assert "Traceback" not in ended.said
    if what in ("missing", "no program"):
        # found before the model is loaded.
        assert ended.status == 2, ended
        assert "ffmpeg, which writes videos, cannot be started" in ended.said
        assert "Loading" not in ended.said
    else:
        assert ended.status == 1, ended
        reason = "was ended by SIGKILL" if what == "killed" else "0 of 9 frames could be read"
        assert reason in ended.said
    assert not list((tmp_path / "o").rglob("*.mp4"))
    assert hidden(tmp_path) == []
    assert commands.run(given).status == 0
    assert len(complete(tmp_path / "o")) == len(PROMPTS)
