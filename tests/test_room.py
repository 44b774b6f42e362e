"""What memory is said to be free."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vidsparse import room


def limited(folder: Path, most: str) -> Path:
    for name, text in [("max", most), ("current", "3000\n"), ("stat", "anon 2000\nfile 900\n")]:
        (folder / f"memory.{name}").write_text(text, encoding="ascii")
    return folder


def test_a_container_leaves_what_it_has_not_taken_and_files_that_make_room(tmp_path: Path) -> None:
    assert room._free_of_container(limited(tmp_path, "10000\n")) == 7900


@pytest.mark.parametrize("most", ["max\n", None])
def test_a_container_without_a_limit_says_nothing(tmp_path: Path, most: str | None) -> None:
    folder = tmp_path / "none" if most is None else limited(tmp_path, most)
    assert room._free_of_container(folder) is None


def test_processes_of_one_machine_share_what_they_may_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: 1000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert room.lockable_bytes() == 400
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert room.lockable_bytes() == 50
    # where nobody tells what is free, nothing is locked.
    monkeypatch.setattr(room, "free_bytes", lambda device: None)
    assert room.lockable_bytes() == 0


def test_what_a_run_before_has_locked_is_room_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # of the machine's 1,000 bytes a run has locked 400, and uses 100 of them.
    stats = {"allocated_bytes.current": 400, "active_bytes.current": 100}
    monkeypatch.setattr(room, "free_bytes", lambda device: 600)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: stats)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert room.lockable_bytes() == 240 + 300
