"""What the page's jobs do: cancelled in the middle, they leave nothing behind."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import pytest
from page_jobs import wait

from vidsparse.apps.page.queue import Job, JobQueue
from vidsparse.errors import OptionError
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.speedup import TimedPair


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A device's bench with a tiny model, loaded and warm."""
    from tiny_pipelines import save_tiny_wan

    from vidsparse.apps.page.workbench import Workbench

    made = Workbench("cpu")
    made.load(str(save_tiny_wan(tmp_path_factory.mktemp("bench") / "tiny")))
    return made


def _tiny_request(bench: Any) -> GenerateRequest:
    (model,) = {bench._loaded.ref.name}
    return GenerateRequest(
        prompt="a red circle", model=model, steps=2, frames=9, width=64, height=64
    )


@pytest.mark.parametrize("part", ["text_encoder", "vae"])
@pytest.mark.parametrize("task", ["make_clip", "compare"])
def test_a_cancel_is_heard_while_text_is_encoded_and_frames_are_decoded(
    bench: Any, tmp_path: Path, part: str, task: str
) -> None:
    from vidsparse.apps.page import tasks

    pipe, request = bench._loaded.pipe, _tiny_request(bench)
    inside = {"text_encoder": pipe.text_encoder.encoder, "vae": pipe.vae.decoder.conv_in}[part]
    ran: list[None] = []

    def cancel(*_: object) -> None:
        ran.append(None)
        job.cancel()

    job: Job[Any, Any] = Job(getattr(tasks, task)(request, tmp_path / "0001-it"))
    queue = JobQueue([("cpu", bench)], waiting=4)
    hook = inside.register_forward_pre_hook(cancel)
    try:
        snapshot = wait(queue.submit(job))
    finally:
        hook.remove()
    assert snapshot.state == "cancelled"
    assert snapshot.step == (2 if part == "vae" else 0)
    # it stopped in there, after the first of three latent frames at the latest.
    assert len(ran) == 1
    assert not any(module._forward_pre_hooks for module in pipe.vae.modules())
    assert list(tmp_path.iterdir()) == []
    # the device is free, and what it makes next is whole.
    job = queue.submit(Job(tasks.make_clip(request, tmp_path / "0002-it")))
    assert wait(job).state == "done"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jpg", ".json", ".mp4"]
    queue.close()


@pytest.mark.parametrize(("task", "videos"), [("make_clip", 1), ("compare", 3)])
def test_a_cancel_while_videos_are_written_leaves_none(
    bench: Any, tmp_path: Path, monkeypatch: Any, task: str, videos: int
) -> None:
    from vidsparse.apps.page import tasks
    from vidsparse.pipelines import video

    written: list[Path] = []
    write = video.write_video

    def write_video(frames: Any, path: Path, *rest: Any, **named: Any) -> None:
        written.append(path)
        if len(written) == videos:
            job.cancel()
        write(frames, path, *rest, **named)

    monkeypatch.setattr(video, "write_video", write_video)
    job: Job[Any, Any] = Job(getattr(tasks, task)(_tiny_request(bench), tmp_path / "0001-it"))
    queue = JobQueue([("cpu", bench)], waiting=4)
    assert wait(queue.submit(job)).state == "cancelled"
    assert len(written) == videos
    assert list(tmp_path.iterdir()) == []
    queue.close()


def test_two_devices_never_load_at_once(monkeypatch: Any) -> None:
    from vidsparse.apps.page.workbench import Workbench
    from vidsparse.pipelines import models

    loading: list[str] = []

    def load(model: str, **_: Any) -> Any:
        loading.append(model)
        assert len(loading) == 1
        time.sleep(0.05)
        loading.remove(model)
        raise OptionError("enough")

    monkeypatch.setattr(models, "load", load)
    queue = JobQueue([(name, Workbench(name)) for name in ("cuda:0", "cuda:1")], waiting=4)
    jobs = [queue.submit(Job(lambda bench, job: bench.load("shapes"))) for _ in range(2)]
    assert [str(job.error) for job in jobs if wait(job)] == ["enough"] * 2
    queue.close()


def test_a_dense_video_kept_from_another_job_says_when_it_was_made(
    bench: Any, tmp_path: Path
) -> None:
    from vidsparse.apps.page import draw, tasks

    queue = JobQueue([("cpu", bench)], waiting=4)
    request = dataclasses.replace(_tiny_request(bench), prompt="a green circle", seed=3)

    def run(work: Any) -> Any:
        job: Job[Any, Any] = queue.submit(Job(work))
        assert wait(job).state == "done", job.error
        return job.result

    first = run(tasks.compare(request, tmp_path / "0001-it"))
    assert first.timed[0].kept is None
    second = run(tasks.compare(request, tmp_path / "0002-it"))
    (pair,) = second.timed
    assert re.fullmatch(r"\d\d:\d\d", pair.kept or "")
    assert f"dense kept from {pair.kept}" in draw.pair_facts(second)
    # a tiny video's times are noise, however often they are taken.
    timed = run(tasks.make_in_turns(second))
    assert [each.kept for each in timed.timed] == [None] * tasks.TURNS
    assert "too short to time" in draw.pair_facts(timed)
    assert not re.search(r"<b>[\d.]+x</b>", draw.pair_facts(first) + draw.pair_facts(timed))
    long = tuple(TimedPair(dense=8.0, sparse=each) for each in (4.0, 3.2))
    assert "<b>2.22x</b>" in draw.pair_facts(dataclasses.replace(timed, timed=long))
    queue.close()


def test_a_report_s_dense_video_is_of_the_same_job_for_every_setting(
    bench: Any, tmp_path: Path
) -> None:
    from vidsparse.apps.page import tasks

    queue = JobQueue([("cpu", bench)], waiting=4)
    request = dataclasses.replace(_tiny_request(bench), seed=5)
    settings = [
        (f"top_p {value}", dataclasses.replace(request, method_options={"top_p": value}))
        for value in (0.3, 0.9)
    ]
    places: set[str] = set()
    said: list[str] = []

    def announce(label: str, found: Any) -> None:
        said.append(label)
        places.add(job.snapshot().place)

    work = tasks.report(settings, ["a red circle", "a blue circle"], tmp_path / "r", announce)
    job: Job[Any, Any] = Job(work, parts=12)
    assert wait(queue.submit(job)).state == "done", job.error
    assert said == ["top_p 0.3", "top_p 0.9"] * 2
    assert "prompt 2 of 2, setting 1 of 2" in places
    for _, report in job.result.reports:
        assert [each.kept for each in report.comparisons] == [None, None]
    # and once more: now the dense videos are an earlier job's.
    again: Job[Any, Any] = Job(
        tasks.report(settings[:1], ["a red circle"], tmp_path / "again", lambda *_: None)
    )
    assert wait(queue.submit(again)).state == "done", again.error
    assert again.result.reports[0][1].speedup.why.startswith("dense kept from")
    queue.close()


@pytest.mark.parametrize(("fails", "how"), [(False, "was cancelled"), (True, "ended by an error")])
def test_a_report_that_ends_early_is_written_as_far_as_it_came(
    bench: Any, tmp_path: Path, fails: bool, how: str
) -> None:
    from vidsparse.apps.page import tasks

    queue = JobQueue([("cpu", bench)], waiting=4)
    request = _tiny_request(bench)
    settings = [
        (f"top_p {value}", dataclasses.replace(request, method_options={"top_p": value}))
        for value in (0.3, 0.9)
    ]
    said: list[str] = []
    kept: list[tasks.ReportFiles] = []

    def announce(label: str, found: Any) -> None:
        said.append(label)
        if len(said) == 3 and fails:
            raise OptionError("no more")
        if len(said) == 3:
            job.cancel()

    prompts = ["a red circle", "a blue circle"]
    work = tasks.report(settings, prompts, tmp_path / "r", announce, kept.append)
    job: Job[Any, Any] = Job(work, parts=12)
    assert wait(queue.submit(job)).state == ("failed" if fails else "cancelled")
    (files,) = kept
    assert files.ended == f"The report {how}: 3 of 4 comparisons were made."
    assert [len(report.comparisons) for _, report in files.reports] == [2, 1]
    page = files.page.read_text(encoding="utf-8")
    assert page.count("data:video/mp4;base64,") == 3
    assert files.ended in page
    assert files.archive.is_file()
    # nothing is written of one that ends before its first comparison.
    none = tasks.report(settings, prompts, tmp_path / "none", lambda *_: None, kept.append)

    def at_once(bench: Any, job: Job[Any, Any]) -> Any:
        job.cancel()
        return none(bench, job)

    early: Job[Any, Any] = Job(at_once)
    assert wait(queue.submit(early)).state == "cancelled"
    assert len(kept) == 1
    assert not (tmp_path / "none" / "report.html").exists()
    queue.close()
