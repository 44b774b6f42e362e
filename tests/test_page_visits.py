"""Visits: their folders, their clips and their jobs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from vidsparse.apps.page import visits as module
from vidsparse.apps.page.queue import Job
from vidsparse.apps.page.visits import MOST_CLIPS, Visit, Visits
from vidsparse.pipelines.models import resolve_model
from vidsparse.pipelines.request import GenerateRequest, resolve


@dataclasses.dataclass(frozen=True)
class _Clip:
    request: GenerateRequest
    record: dict[str, Any]


def _clip(method: str, seconds: float, **changes: Any) -> Any:
    request = resolve(
        GenerateRequest(prompt="a", method=method, device="cpu", **changes),
        resolve_model("shapes").defaults,
    )
    return _Clip(request, {"times": {"denoise": seconds}})


def test_speed_is_against_the_last_dense_run_that_had_the_same_to_do(tmp_path: Path) -> None:
    visit = Visit(folder=tmp_path)
    asked = _clip("fg-attn", 1.0, steps=5).request
    assert visit.dense_seconds(asked) is None
    for clip in (
        _clip("dense", 4.0, steps=5),
        _clip("dense", 3.0, steps=5, seed=9),
        _clip("dense", 8.0, steps=10),
        _clip("dense", 2.0, steps=5, guidance=1.0),
        _clip("fg-attn", 1.0, steps=5),
    ):
        visit.remember(clip)
    assert visit.dense_seconds(asked) == 3.0


def test_a_visit_remembers_the_latest_and_forgets_the_oldest(tmp_path: Path) -> None:
    visit = Visit(folder=tmp_path)
    for number in range(MOST_CLIPS + 5):
        visit.remember(_clip("dense", number))
    assert len(visit.clips) == MOST_CLIPS
    assert visit.clips[0].record["times"]["denoise"] == MOST_CLIPS + 4


def test_visits_do_not_share_anything_and_their_folders_cannot_be_told(tmp_path: Path) -> None:
    visits = Visits(tmp_path)
    one, two = visits.of("../../etc"), visits.of("other")
    assert visits.of("../../etc") is one
    assert one.folder != two.folder
    for visit in (one, two):
        assert visit.folder.parent == tmp_path
    stem = one.next_stem("../../up & away")
    assert stem.parent == one.folder
    assert stem.name == "0001-up-away"
    assert one.next_stem("").name == "0002-prompt"


def test_a_visit_that_made_nothing_has_no_folder(tmp_path: Path) -> None:
    visit = Visits(tmp_path).of("a")
    visit.next_stem("a red ball")
    assert not visit.folder.exists()


def test_new_visits_push_out_none_that_has_something_running(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "MOST_VISITS", 3)
    visits = Visits(tmp_path)
    job: Job[Any, Any] = Job(lambda bench, job: None)
    busy = visits.of("busy")
    busy.jobs["generate"] = [job]
    for number in range(10):
        visits.of(str(number))
    assert visits.of("busy") is busy
    assert not job.stopping()
    assert len(visits._visits) == 3


def test_the_end_of_a_visit_stops_its_jobs(tmp_path: Path) -> None:
    visits = Visits(tmp_path)
    job: Job[Any, Any] = Job(lambda bench, job: None)
    visits.of("a").jobs["generate"] = [job]
    visits.end("b")
    assert not job.stopping()
    visits.end("a")
    assert job.stopping()
