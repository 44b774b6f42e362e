"""What the page's jobs do: cancelled in the middle, they leave nothing behind."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from page_jobs import wait

from vidsparse.apps.page.queue import Job, JobQueue
from vidsparse.errors import OptionError
from vidsparse.pipelines.request import GenerateRequest


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

    def write_video(frames: Any, path: Path, *rest: Any) -> None:
        written.append(path)
        if len(written) == videos:
            job.cancel()
        write(frames, path, *rest)

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
