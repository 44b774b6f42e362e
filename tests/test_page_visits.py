"""Visits: their folders, what they keep, and what they have running."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from page_host import host_of
from page_jobs import queue_of

from vidsparse.apps.page import visits as module
from vidsparse.apps.page.errands import Errand, Place
from vidsparse.apps.page.gallery import Gallery
from vidsparse.apps.page.queue import Job
from vidsparse.apps.page.returns import cookie_name, key_in
from vidsparse.apps.page.visits import Visits
from vidsparse.errors import OutputError
from vidsparse.pipelines.models import resolve_model
from vidsparse.pipelines.request import GenerateRequest, resolve

KEY = "k" * 43


def _errand(tab: str = "generate") -> Errand:
    job: Job[Any, Any] = Job(lambda bench, job: None)
    return Errand(place=Place(tab, None, None), job=job, done="Done", show=lambda _: {})


def _keep(folder: Path, number: int, prompt: str, method: str = "dense", **changes: Any) -> Path:
    """Put a video's files into a folder, as far as they are looked at."""
    request = resolve(
        GenerateRequest(prompt=prompt, method=method, device="cpu", seed=number),
        resolve_model("shapes").defaults,
    )
    record = {
        "prompt": prompt,
        "options": request.options(),
        "computed": None if method == "dense" else 0.5,
        "total": 0.62,
        "times": {"total": 1.5},
        **changes,
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{number:04d}-video.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    os.utime(path, (number, number))
    for suffix in (".mp4", ".jpg"):
        path.with_suffix(suffix).touch()
    return path


def test_a_gallery_is_what_lies_in_its_folder_the_latest_first(tmp_path: Path) -> None:
    gallery = Gallery(tmp_path / "visit")
    assert gallery.find() == []
    first = _keep(tmp_path / "visit", 1, "a red ball", "fg-attn")
    _keep(tmp_path / "visit", 2, "a blue ring")
    assert [each.prompt for each in gallery.find()] == ["a blue ring", "a red ball"]
    found = gallery.find()[1]
    assert (found.seed, found.total, found.seconds) == (1, 0.62, 1.5)
    clip = gallery.clip(found)
    assert clip is not None
    assert clip.request.seed == 1
    first.unlink()
    assert gallery.clip(found) is None
    assert [each.prompt for each in gallery.find()] == ["a blue ring"]


def test_a_video_stays_where_its_preset_and_its_picture_are_gone(tmp_path: Path) -> None:
    options = resolve(
        GenerateRequest(prompt="a red ball", method="dense", device="cpu"),
        resolve_model("shapes").defaults,
    ).options()
    files = {"preset": str(tmp_path / "gone.json"), "image": str(tmp_path / "gone.png")}
    _keep(tmp_path, 1, "a red ball", options={**options, **files, "keyframes": {"8": "gone.png"}})
    (found,) = Gallery(tmp_path).find()
    clip = Gallery(tmp_path).clip(found)
    assert clip is not None
    assert (clip.request.preset, clip.request.image) == (files["preset"], files["image"])
    assert clip.request.images() == {"image": files["image"], "keyframe 8": "gone.png"}


def test_a_search_is_for_words_of_prompts_and_methods(tmp_path: Path) -> None:
    _keep(tmp_path, 1, "a Red ball", "fg-attn")
    _keep(tmp_path, 2, "a red ring")
    gallery = Gallery(tmp_path)
    for search, seeds in (
        ("red", [2, 1]), ("RING red", [2]), ("fg-attn", [1]), ("dense ball", []), (" ", [2, 1]),
    ):  # fmt: skip
        assert [each.seed for each in gallery.find(search)] == seeds, search


def test_a_side_of_a_comparison_is_among_the_choices_however_old_it_is(
    tmp_path: Path, monkeypatch: Any
) -> None:
    gr = pytest.importorskip("gradio")
    from vidsparse.apps.page import compare_tab
    from vidsparse.apps.page.desk import Desk
    from vidsparse.apps.page.form import Form
    from vidsparse.apps.page.generate_tab import GenerateTab

    monkeypatch.setattr(compare_tab, "MOST_SHOWN", 2)
    desk = Desk(host_of(tmp_path), queue_of(), Visits(tmp_path))
    with gr.Blocks(), gr.Tab() as shown:
        form = Form(desk.host)
        tab = compare_tab.CompareTab(desk, form, GenerateTab(desk, form), shown)
    desk.queue.close()
    visit = desk.visits.of("one")
    for number in range(1, 6):
        _keep(visit.folder, number, "a ball")

    def sides(updates: dict[Any, Any]) -> list[tuple[list[str], Any]]:
        return [
            ([name for _, name in update["choices"] if name not in ("dense", "form")],
             update.get("value"))
            for update in (updates[control] for control in tab.sides.values())
        ]  # fmt: skip

    new, old = ["0005-video", "0004-video"], "0001-video"
    assert sides(tab.offered(visit, side_a=old)) == [([*new, old], old), ([*new, old], None)]
    # what stands there stays, and what is gone gives way.
    held = {"side_a": old, "side_b": "0009-video"}
    assert sides(tab.offered(visit, held=held)) == [([*new, old], None), ([*new, old], "form")]


def test_what_a_window_shows_is_found_by_its_name_while_it_is_remembered() -> None:
    latest: module.Latest[int] = module.Latest(2)
    assert latest.last is None
    for name, number in (("one", 1), ("two", 2), ("one", 3), ("three", 4)):
        latest.put(name, number)
    assert [latest.get(name) for name in ("one", "two", "three")] == [3, None, 4]
    assert latest.backwards() == [4, 3]


def test_what_is_no_record_of_a_video_is_passed_over(tmp_path: Path) -> None:
    fine = _keep(tmp_path, 1, "a red ball")
    _keep(tmp_path, 2, "no video").with_suffix(".mp4").unlink()
    _keep(tmp_path, 3, "of another version", options={"unheard": 1})
    _keep(tmp_path, 4, "half", times={})
    _keep(tmp_path, 8, "no path", options={"image": 5})
    _keep(tmp_path, 9, "no frames", options={"keyframes": [1]})
    for number, text in ((5, "[]"), (6, "{"), (7, '{"prompt": 1}')):
        _keep(tmp_path, number, "b").write_text(text, encoding="utf-8")
    assert [each.record for each in Gallery(tmp_path).find()] == [fine]


def test_visits_do_not_share_anything_and_their_folders_cannot_be_told(tmp_path: Path) -> None:
    visits = Visits(tmp_path)
    one, two = visits.of("../../etc"), visits.of("other")
    assert visits.of("../../etc") is one
    assert one.folder != two.folder
    for visit in (one, two):
        assert visit.folder.parent == tmp_path
        assert not visit.returns
    stem = one.next_stem("../../up & away")
    assert stem.parent == one.folder
    assert stem.name == "0001-up-away"
    assert one.next_stem("").name == "0002-prompt"


def test_a_key_finds_its_visit_again_and_its_folder_does_not_tell_it(tmp_path: Path) -> None:
    visits = Visits(tmp_path)
    visit = visits.of("a session", KEY)
    assert visits.of("another", KEY) is visit
    assert visits.of("another", "x" * 43) is not visit
    # a session of that name is no key.
    assert visits.of(KEY) is not visit
    assert KEY not in str(visit.folder)
    visits.end("a session")
    assert visits.of("a session", KEY) is visit
    # a page that is started again finds the folder, and goes on counting.
    _keep(visit.folder, 7, "a red ball")
    again = Visits(tmp_path).of("later", KEY)
    assert again.folder == visit.folder
    assert again.next_stem("b").name == "0008-b"
    assert [each.prompt for each in again.gallery.find()] == ["a red ball"]


def test_two_pages_of_one_folder_never_give_a_visitor_s_videos_the_same_name(
    tmp_path: Path, monkeypatch: Any
) -> None:
    _keep(Visits(tmp_path).of("a", KEY).folder, 1, "a red ball")
    one, other = (Visits(tmp_path).of("a", KEY) for _ in range(2))
    assert one.folder == other.folder
    names = [each.next_stem("b").name for each in (one, other, one)]
    assert names == ["0002-b", "0003-b", "0004-b"]
    # both may look before either takes its number.
    monkeypatch.setattr(other, "_last_number", lambda: 3)
    assert other.next_stem("b").name == "0005-b"
    # what keeps numbers is no video.
    assert len(one.gallery.find()) == 1


def test_two_pages_that_meet_a_new_visitor_at_once_have_one_folder_for_it(tmp_path: Path) -> None:
    one = Visits(tmp_path).of("a", KEY)
    # by another clock, and before either of them has made anything.
    time.sleep(1.1)
    other = Visits(tmp_path).of("b", KEY)
    stems = [each.next_stem("a ball") for each in (one, other, one)]
    assert [stem.name[:4] for stem in stems] == ["0001", "0002", "0003"]
    assert {stem.parent for stem in stems} == set(tmp_path.iterdir())


def test_a_number_that_cannot_be_kept_is_refused_in_a_sentence(tmp_path: Path) -> None:
    visit = Visits(tmp_path).of("a", KEY)
    visit.folder.touch()
    with pytest.raises(OutputError, match="cannot be made"):
        visit.next_stem("b")


def test_a_key_is_read_from_one_cookie_and_nothing_else_is_one(tmp_path: Path) -> None:
    name = cookie_name(tmp_path)
    assert name != cookie_name(tmp_path / "other")
    assert key_in(f"a=b; {name}={KEY}; c=d", name) == KEY
    for cookies in ("", f"{name}=short", f"other={KEY}", f"{name}=../{KEY[3:]}", ";;=,\x00"):
        assert key_in(cookies, name) is None


@pytest.mark.parametrize(
    "other",
    [
        'prefs={"a":"b c"}',
        "x=a b",
        "name=J\u00fcrgen",
        "path=/x",
        'u="un',
        "alone",
        "k=[1, 2]",
        "=",
    ],
)
def test_a_key_is_found_beside_whatever_else_its_host_has_set(tmp_path: Path, other: str) -> None:
    name = cookie_name(tmp_path)
    for cookies in (f"{other}; {name}={KEY}", f"{name}={KEY}; {other}", f"{other};{name}={KEY}"):
        assert key_in(cookies, name) == KEY
    # of two, the one that is for all paths, which browsers send last.
    assert key_in(f"{name}={'x' * 43}; {other}; {name}={KEY}", name) == KEY
    assert key_in(f"{name}={KEY}; {name}=short", name) == KEY


def test_a_visit_that_made_nothing_has_no_folder(tmp_path: Path) -> None:
    visit = Visits(tmp_path).of("a")
    visit.next_stem("a red ball")
    assert not visit.folder.exists()


def test_of_what_ended_a_tab_remembers_the_last(tmp_path: Path) -> None:
    visit = Visits(tmp_path).of("a")
    errands = [_errand() for _ in range(4)]
    for errand in errands:
        visit.add(errand)
    visit.add(_errand("compare"))
    for errand in errands[:3]:
        errand.job.cancel()
    assert visit.open("generate") == [errands[3]]
    assert visit.last("generate") is errands[2]
    visit.add(_errand())
    assert visit.errands["generate"][:2] == errands[2:]
    assert (len(visit.open()), visit.last("compare")) == (3, None)


def test_new_visits_push_out_none_that_has_something_running(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "MOST_VISITS", 3)
    visits, errand = Visits(tmp_path), _errand()
    busy = visits.of("busy")
    busy.add(errand)
    for number in range(10):
        visits.of(str(number))
    assert visits.of("busy") is busy
    assert not errand.job.stopping()
    assert len(visits._visits) == 3


def test_the_end_of_a_visit_stops_its_jobs(tmp_path: Path) -> None:
    visits, errand = Visits(tmp_path), _errand()
    visits.of("a").add(errand)
    visits.end("b")
    assert not errand.job.stopping()
    visits.end("a")
    assert errand.job.stopping()
