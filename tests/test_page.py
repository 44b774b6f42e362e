"""The page's logic without a browser: queue, form, limits, uploads, guard, drawing, command."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from vidsparse.apps.cli import main
from vidsparse.apps.options import build_request
from vidsparse.apps.page.host import Host, HostPreset, Limits, read_presets
from vidsparse.apps.page.queue import Cancelled, Job, JobQueue, QueueFullError, Snapshot
from vidsparse.apps.page.uploads import read_image, read_prompt_file, read_prompts
from vidsparse.apps.page.visits import MOST_CLIPS, Visit, Visits
from vidsparse.errors import OptionError
from vidsparse.methods import METHODS, make_method
from vidsparse.pipelines.models import resolve_model
from vidsparse.pipelines.request import GenerateRequest, resolve
from vidsparse.presets import Preset

PATIENCE = 20


# ---- queue ----


class _Gate:
    """Work that says when it began and waits to be let through."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.open = threading.Event()

    def __call__(self, bench: Any, job: Job[Any, Any]) -> str:
        self.began.set()
        while not self.open.wait(0.005):
            job.check()
        return f"by {bench}"


def _queue(devices: int = 1, waiting: int = 8) -> JobQueue[str]:
    return JobQueue([(f"d{i}", f"bench {i}") for i in range(devices)], waiting=waiting)


def _wait(job: Job[Any, Any]) -> Snapshot:
    until = time.monotonic() + PATIENCE
    while not (snapshot := job.snapshot()).finished:
        assert time.monotonic() < until, snapshot
        time.sleep(0.002)
    return snapshot


def test_jobs_of_one_device_run_one_at_a_time_and_in_order() -> None:
    queue, running, order = _queue(), [], []

    def work(number: int) -> Any:
        def run(bench: str, job: Job[Any, Any]) -> int:
            running.append(number)
            assert len(running) == 1
            time.sleep(0.005)
            running.remove(number)
            order.append(number)
            return number

        return run

    jobs = [queue.submit(Job(work(number))) for number in range(6)]
    assert [_wait(job).state for job in jobs] == ["done"] * 6
    assert order == [0, 1, 2, 3, 4, 5]
    assert [job.result for job in jobs] == order
    queue.close()


def test_every_device_works_at_the_same_time() -> None:
    queue = _queue(devices=2)
    gates = [_Gate(), _Gate()]
    jobs = [queue.submit(Job(gate)) for gate in gates]
    assert all(gate.began.wait(PATIENCE) for gate in gates)
    for gate in gates:
        gate.open.set()
    for job in jobs:
        _wait(job)
    assert {job.result for job in jobs} == {"by bench 0", "by bench 1"}
    queue.close()


def test_a_cancelled_job_frees_its_device_and_those_behind_move_up() -> None:
    queue = _queue()
    first, second, third = _Gate(), _Gate(), _Gate()
    running, waiting, last = (queue.submit(Job(gate)) for gate in (first, second, third))
    assert first.began.wait(PATIENCE)
    assert (waiting.snapshot().ahead, last.snapshot().ahead) == (1, 2)
    waiting.cancel()
    assert waiting.snapshot().state == "cancelled"
    queue.forget_cancelled()
    assert last.snapshot().ahead == 1
    running.cancel()
    assert _wait(running).state == "cancelled"
    assert third.began.wait(PATIENCE)
    third.open.set()
    assert _wait(last).state == "done"
    assert not second.began.is_set()
    queue.close()


def test_a_failed_job_keeps_its_error_and_the_next_one_runs(caplog: Any) -> None:
    def fail(bench: str, job: Job[Any, Any]) -> None:
        raise OptionError("no such thing")

    queue = _queue()
    failed, fine = queue.submit(Job(fail)), queue.submit(Job(lambda bench, job: 7))
    assert _wait(failed).state == "failed"
    assert str(failed.error) == "no such thing"
    assert (_wait(fine).state, fine.result) == ("done", 7)
    # a visitor's mistake is nothing for the host's log.
    assert not caplog.records
    queue.close()


def test_no_more_jobs_wait_than_the_host_allows() -> None:
    queue, gate = _queue(waiting=2), _Gate()
    running = queue.submit(Job(gate))
    assert gate.began.wait(PATIENCE)
    waiting = [queue.submit(Job(gate)) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 jobs are waiting"):
        queue.submit(Job(gate))
    # a cancelled one gives its place away.
    waiting[0].cancel()
    queue.submit(Job(gate))
    gate.open.set()
    assert _wait(running).state == "done"
    queue.close()


def test_closing_cancels_what_runs_and_what_waits() -> None:
    queue, gate = _queue(), _Gate()
    jobs = [queue.submit(Job(gate)) for _ in range(3)]
    assert gate.began.wait(PATIENCE)
    queue.close()
    assert [job.snapshot().state for job in jobs] == ["cancelled"] * 3
    with pytest.raises(QueueFullError):
        queue.submit(Job(gate))


def test_followers_see_every_stage_and_the_end_at_once() -> None:
    gate, queue = _Gate(), _queue()

    def work(bench: str, job: Job[Any, Any]) -> str:
        job.begin_part("dense")
        for step in range(1, 4):
            job.advance(step, 4, 0.5)
        gate(bench, job)
        job.advance(4, 4, 0.5)
        return "made"

    job: Job[Any, Any] = Job(work, parts=2)

    async def follow() -> list[Snapshot]:
        seen = []
        async for snapshot in job.follow():
            seen.append(snapshot)
            if snapshot.step == 3:
                gate.open.set()
        return seen

    async def both() -> list[Snapshot]:
        following = asyncio.ensure_future(follow())
        await asyncio.sleep(0)
        queue.submit(job)
        return await asyncio.wait_for(following, PATIENCE)

    seen = asyncio.run(both())
    assert seen[0].state == "waiting"
    assert seen[-1].state == "done"
    assert [s.finished for s in seen].count(True) == 1
    (third,) = [s for s in seen if s.step == 3 and s.state == "running"][:1]
    # 3 of 8 steps of two videos, half a second each.
    assert (third.done, third.left, third.phase) == (3 / 8, 2.5, "dense")
    queue.close()


def test_the_time_left_counts_what_follows_the_steps() -> None:
    seen = []

    def work(bench: str, job: Job[Any, Any]) -> None:
        job.expect_after_steps(3.0)
        for _ in range(2):
            job.begin_part("a video")
            job.advance(1, 2, 1.0)
            seen.append(job.snapshot().left)

    queue = _queue()
    _wait(queue.submit(Job(work, parts=2)))
    assert seen == [3 * 1.0 + 2 * 3.0, 1 * 1.0 + 1 * 3.0]
    queue.close()


def test_a_stop_heard_by_the_work_is_a_cancel_not_a_failure() -> None:
    def work(bench: str, job: Job[Any, Any]) -> None:
        raise Cancelled("cancelled")

    queue = _queue()
    assert _wait(queue.submit(Job(work))).state == "cancelled"
    queue.close()


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
        snapshot = _wait(queue.submit(job))
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
    assert _wait(job).state == "done"
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
    assert _wait(queue.submit(job)).state == "cancelled"
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
    assert [str(job.error) for job in jobs if _wait(job)] == ["enough"] * 2
    queue.close()


# ---- what the host allows ----


def _host(tmp_path: Path, **limits: int) -> Host:
    return Host(
        models=(resolve_model("shapes"),),
        folder=tmp_path,
        devices=("cpu",),
        limits=Limits(**limits),
    )


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(OptionError, match="limit of steps"):
        Limits(steps=0)


@pytest.mark.parametrize(
    ("limit", "name"), [("frames", "frames"), ("side", "width"), ("steps", "steps")]
)
def test_a_request_beyond_a_limit_is_refused(limit: str, name: str) -> None:
    request = resolve(GenerateRequest(prompt="a"), resolve_model("shapes").defaults)
    Limits().check(request)
    with pytest.raises(OptionError, match=f"{name} can be at most 3 on this page"):
        Limits(**{limit: 3}).check(request)


def test_visitors_choose_from_the_host_s_models_only(tmp_path: Path) -> None:
    host = _host(tmp_path)
    assert host.model("shapes").name == "shapes"
    for name in ("/etc", "../shapes", "owner/name", None, ["shapes"]):
        with pytest.raises(OptionError, match="this page has no model"):
            host.model(name)


# ---- presets ----


def _save_preset(path: Path, method: str = "spargeattn", layers: int | None = None) -> Path:
    """A preset for the bundled model, or for one like it with another number of layers."""
    (config,) = resolve_model("shapes").transformers
    own = {name: value for name, value in config.items() if not name.startswith("_")}
    if layers is not None:
        own["num_layers"] = layers
    fractions = torch.tensor([0.3, 0.6]).expand(1, config["num_layers"], 4, 2)
    tables = {
        "spargeattn": {"tau": torch.full((1, config["num_layers"], 4), 0.7)},
        "bsfa": {
            "fraction": fractions,
            "threshold": torch.zeros(1, config["num_layers"], 4, 1, 2, 9),
        },
    }
    return Preset(
        method=method,
        options=make_method(method).options(),
        order="hilbert",
        tables=tables[method],
        model={
            "name": "shapes",
            "weights_hash": "0",
            "transformers": [{"class": config["_class_name"], "config": own}],
        },
        video={"frames": 17, "width": 128, "height": 96},
        grid=(5, 6, 8),
    ).save(path)


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    folder = tmp_path / "presets"
    for method in ("spargeattn", "bsfa"):
        _save_preset(folder / f"small-{method}", method)
    return folder


def _read(*paths: Path, **limits: int) -> tuple[HostPreset, ...]:
    return read_presets([str(path) for path in paths], [resolve_model("shapes")], Limits(**limits))


def test_a_folder_offers_its_presets_that_fit_and_leaves_the_others(
    presets: Path, caplog: Any
) -> None:
    (presets / "notes.json").write_text("{}", encoding="utf-8")
    _save_preset(presets / "deeper", layers=99)
    found = _read(presets)
    assert [(each.name, each.preset.method) for each in found] == [
        ("small-bsfa", "bsfa"), ("small-spargeattn", "spargeattn"),
    ]  # fmt: skip
    assert all(each.models == ("shapes",) for each in found)
    (warning,) = caplog.messages
    assert "deeper.json was calibrated for shapes, and this page has shapes" in warning


def test_what_cannot_be_offered_is_refused_with_a_reason(presets: Path, tmp_path: Path) -> None:
    deeper = _save_preset(tmp_path / "deeper", layers=99)
    same = _save_preset(tmp_path / "small-bsfa")
    for paths, limits, words in (
        ([deeper], {}, "Hint: offer that model with --model"),
        ([tmp_path / "none"], {}, "there is no preset file"),
        ([tmp_path / "page"], {}, "there is no preset in"),
        ([presets / "small-bsfa.json"], {"side": 96}, "cannot be offered: width can be at most 96"),
        ([presets, same], {}, "have one name, small-bsfa"),
    ):
        (tmp_path / "page").mkdir(exist_ok=True)
        with pytest.raises(OptionError, match=words):
            _read(*paths, **limits)


@pytest.fixture
def calibrated(presets: Path, tmp_path: Path) -> Any:
    gr = pytest.importorskip("gradio")
    from vidsparse.apps.page.form import Form

    with gr.Blocks():
        return Form(dataclasses.replace(_host(tmp_path), presets=_read(presets)))


def test_bsfa_is_offered_once_there_is_a_preset_for_it(calibrated: Any, form: Any) -> None:
    assert "bsfa" in calibrated.groups
    assert "bsfa" not in form.groups
    assert form.controls["preset"].visible is False
    assert calibrated.controls["preset"].visible is True
    with pytest.raises(OptionError, match=r"calibrated numbers only\. Hint: choose a preset"):
        calibrated.request(_values(calibrated, method="bsfa"))


@pytest.mark.parametrize("name", ["small-spargeattn", "small-bsfa"])
def test_a_chosen_preset_makes_the_command_line_s_request(
    calibrated: Any, presets: Path, name: str
) -> None:
    (chosen,) = [each for each in calibrated.host.presets if each.name == name]
    values = {
        "method": chosen.preset.method, "preset": name, **calibrated.values_of_preset(chosen),
    }  # fmt: skip
    request, _ = calibrated.request(_values(calibrated, **values))
    assert request == _command_line(method=None, preset=str(presets / f"{name}.json"))
    again, _ = calibrated.request({**_values(calibrated), **calibrated.values_of(request)})
    assert again == request


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preset": "/etc/passwd"}, "no preset '/etc/passwd'. Hint: those for shapes are: small-b"),
        ({"preset": ["small-bsfa"]}, "unknown preset"),
        ({"preset": "small-bsfa"}, "the preset small-bsfa is for bsfa, not for spargeattn"),
        ({"frames": 33}, "was calibrated on 17 frames of 128x96, not on 33"),
        ({"order": "rowmajor"}, "calibrated in hilbert order"),
        ({"spargeattn_tau": 0.5}, "tau is settled by"),
    ],
)
def test_what_does_not_fit_a_preset_is_refused(
    calibrated: Any, changes: dict[str, Any], words: str
) -> None:
    (chosen,) = [each for each in calibrated.host.presets if each.name == "small-spargeattn"]
    values = {
        "method": "spargeattn", "preset": chosen.name, **calibrated.values_of_preset(chosen),
        "spargeattn_merge": "consecutive",
    }  # fmt: skip
    calibrated.request(_values(calibrated, **values))
    with pytest.raises(OptionError, match=words):
        calibrated.request(_values(calibrated, **{**values, **changes}))


def test_a_preset_for_another_model_names_it(calibrated: Any) -> None:
    other = dataclasses.replace(calibrated.host.models[0], name="other")
    with pytest.raises(OptionError, match="was made for shapes, not for other"):
        calibrated.host.preset("small-bsfa", other)


def test_only_what_may_change_is_shown_beside_a_preset(presets: Path, tmp_path: Path) -> None:
    gr = pytest.importorskip("gradio")
    from vidsparse.apps.page.choices import Choices
    from vidsparse.apps.page.desk import Desk
    from vidsparse.apps.page.form import Form
    from vidsparse.apps.page.report_tab import ReportTab

    desk = Desk(
        dataclasses.replace(_host(tmp_path), presets=_read(presets)), _queue(), Visits(tmp_path)
    )
    with gr.Blocks():
        form = Form(desk.host)
        report = ReportTab(desk, form)
        choices = Choices(desk, form, report)

    def shown(updates: dict[Any, Any], names: str) -> list[Any]:
        return [updates[form.controls[name]]["visible"] for name in names.split()]

    settled = "order frames width height"
    updates = choices.choose_preset("shapes", "fg-attn", "small-spargeattn")
    assert updates[form.controls["method"]]["value"] == "spargeattn"
    assert shown(updates, f"{settled} spargeattn_tau spargeattn_tile") == [False] * 6
    assert shown(updates, "spargeattn_quantize spargeattn_merge") == [True, True]
    assert updates[form.controls["frames"]]["value"] == 17
    assert "settles tau by head" in updates[form.controls["preset"]]["info"]
    assert updates[report.vary]["choices"] == ["nothing", "quantize", "merge"]

    # a method that does nothing without a preset brings its first.
    updates = choices.choose_method("shapes", "bsfa")
    assert updates[form.controls["preset"]]["value"] == "small-bsfa"
    assert shown(updates, f"bsfa_keep bsfa_tile {settled}") == [True] + [False] * 5
    assert updates[form.groups["bsfa"]]["visible"]
    assert not updates[form.folds["bsfa"]]["visible"]

    # and none of it is left when the preset is.
    updates = choices.choose_preset("shapes", "bsfa", "")
    assert updates[form.controls["method"]]["value"] == "fg-attn"
    assert shown(updates, f"{settled} fg_attn_top_p fg_attn_tile") == [True] * 6
    assert not updates[form.groups["bsfa"]]["visible"]
    desk.queue.close()


# ---- form ----


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Any:
    gr = pytest.importorskip("gradio")
    from vidsparse.apps.page.form import Form

    with gr.Blocks():
        return Form(_host(tmp_path_factory.mktemp("form"), frames=49, side=512))


def _values(form: Any, **changes: Any) -> dict[str, Any]:
    values = {name: control.value for name, control in form.controls.items()}
    return {**values, "prompt": "a red ball", **changes}


def _command_line(**changes: Any) -> GenerateRequest:
    options: dict[str, Any] = {
        "model": "shapes", "frames": None, "size": None, "steps": None, "guidance": None,
        "negative_prompt": "", "preset": None, "image": None, "last_image": None, "seed": 0,
        "fps": None, "lora": None, "method": "fg-attn",
        "order": None, "dense_steps": None, "dense_last_steps": 0, "dense_layers": None,
        "dense_last_layers": None, "reuse": None, "device": "cpu", "dtype": None, "offload": "none",
        "compile": False, "implementation": "auto",
    }  # fmt: skip
    request = build_request("a red ball", {**options, **changes})
    return resolve(request, resolve_model("shapes").defaults)


METHODS_OFFERED = [
    name for name, cls in METHODS.items() if not getattr(cls, "needs_numbers", False)
]


@pytest.mark.parametrize("method", METHODS_OFFERED)
def test_the_untouched_form_makes_the_command_line_s_request(form: Any, method: str) -> None:
    request, warnings = form.request(_values(form, method=method))
    assert request == _command_line(method=method)
    assert warnings == []


def test_every_option_of_every_method_has_a_control(form: Any) -> None:
    from vidsparse.apps.page.form import parameter

    assert list(form.groups) == METHODS_OFFERED
    for name in METHODS_OFFERED:
        for field in METHODS[name].option_fields():
            control = form.controls[parameter(name, field.name)]
            assert control.info == field.metadata["help"]


def test_a_new_method_s_controls_follow_its_declaration() -> None:
    gr = pytest.importorskip("gradio")
    from vidsparse.apps.page.form import control_for
    from vidsparse.methods.base import option

    @dataclasses.dataclass
    class New:
        share: float = option(0.5, flag="--share", metavar="P", help="a share")
        blocks: int = option(4, flag="--blocks", metavar="N", help="a count", convert=int)
        fast: bool = option(False, flag="--fast", metavar="", help="a switch", convert=bool)
        kind: str = option("a", flag="--kind", metavar="K", help="a", convert=str, choices=("a",))
        gate: float | None = option(None, flag="--gate", metavar="L", help="a gate")

    with gr.Blocks():
        kinds = [type(control_for(field, field.default)) for field in dataclasses.fields(New)]
    assert kinds == [gr.Number, gr.Number, gr.Checkbox, gr.Dropdown, gr.Textbox]


def test_the_form_reads_what_the_browser_sends(form: Any) -> None:
    changes = {
        "seed": 7.0, "steps": 5, "frames": 9, "width": 64, "height": 128.0, "guidance": 2,
        "dense_steps": "2", "dense_last_layers": "0.5", "order": "hilbert", "reuse": 2,
        "fg_attn_top_p": 1, "fg_attn_tile": "32x8", "fg_attn_merge": "xor", "spargeattn_tau": 7,
    }  # fmt: skip
    request, _ = form.request(_values(form, **changes))
    assert request == _command_line(
        seed=7, steps=5, frames=9, size=(64, 128), guidance=2, dense_steps=2,
        dense_last_layers=0.5, order="hilbert", reuse=2, method_option_top_p="1",
        method_option_tile="32x8", method_option_merge="xor",
    )  # fmt: skip


def test_the_settings_of_a_request_make_it_again(form: Any) -> None:
    values = _values(
        form, method="spargeattn", spargeattn_tau=0.7, spargeattn_tile="64x64", seed=3, steps=4,
        dense_steps="3", negative_prompt="blur", order="timemajor",
    )  # fmt: skip
    request, _ = form.request(values)
    again, _ = form.request({**_values(form), **form.values_of(request)})
    assert again == request


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "  "}, "there is no prompt"),
        ({"prompt": None}, "there is no prompt"),
        ({"prompt": "a " * 6000}, "at most 10,000 characters"),
        ({"model": "/etc/passwd"}, "this page has no model"),
        ({"method": "magic"}, "unknown method"),
        ({"method": ["fg-attn"]}, "unknown method"),
        ({"fg_attn_top_p": 0}, "top_p must lie in"),
        ({"fg_attn_top_p": "much"}, "top_p cannot be 'much'"),
        ({"fg_attn_tile": "7x7"}, "tile must be MxN"),
        ({"frames": 10}, "Hint: use 9"),
        ({"frames": 53}, "at most 49 on this page"),
        ({"width": 1024}, "at most 512 on this page"),
        ({"height": 24}, "multiple of"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"steps": 2.5}, "must be a whole number"),
        ({"steps": float("nan")}, "must be a number"),
        ({"steps": "5"}, "must be a number"),
        ({"seed": -1}, "seed must be"),
        ({"guidance": True}, "guidance must be a number"),
        ({"dense_steps": "some"}, "neither a count"),
        ({"dense_steps": "1.5"}, "dense_steps"),
        ({"dense_steps": None}, "must be a count"),
        ({"order": "spiral"}, "unknown token order"),
        ({"order": ["hilbert"]}, "unknown token order"),
        ({"implementation": "magic"}, "unknown implementation"),
    ],
)
def test_bad_input_is_one_clear_sentence(form: Any, changes: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        form.request(_values(form, **changes))


def test_words_the_model_never_learned_are_a_warning(form: Any) -> None:
    _, warnings = form.request(_values(form, prompt="a red dragon"))
    assert warnings == ["shapes never learned dragon: it will guess."]


def test_a_model_that_takes_a_picture_gets_it_and_one_that_needs_it_asks(
    tmp_path: Path,
) -> None:
    gr = pytest.importorskip("gradio")
    from vidsparse.apps.page.form import Form

    shapes = resolve_model("shapes")
    picture = tmp_path / "first.png"
    Image.new("RGB", (64, 64)).save(picture)
    for text_class, needed in (("WanPipeline", False), (None, True)):
        model = dataclasses.replace(
            shapes,
            text_class=text_class,
            image_class="WanImageToVideoPipeline",
            takes_last_image=needed,
        )
        host = dataclasses.replace(_host(tmp_path), models=(model,))
        with gr.Blocks():
            form = Form(host)
        assert form.images["image"][0].visible
        assert form.images["last_image"][0].visible == needed
        request, _ = form.request(_values(form), {"image": picture, "last_image": picture})
        assert request.image == str(picture)
        # a picture that the model has no use for is left out.
        assert request.last_image == (str(picture) if needed else None)
        if needed:
            with pytest.raises(OptionError, match="upload its first frame"):
                form.request(_values(form), {"last_image": picture})
        else:
            assert form.request(_values(form))[0].image is None


def test_a_model_without_pictures_hides_their_upload(form: Any, tmp_path: Path) -> None:
    assert not any(upload.visible for upload, _ in form.images.values())
    pictures = dict.fromkeys(form.images, tmp_path / "first.png")
    request, _ = form.request(_values(form), pictures)
    assert (request.image, request.last_image) == (None, None)


def test_the_model_s_own_settings_of_a_method_are_shown(tmp_path: Path) -> None:
    gr = pytest.importorskip("gradio")
    from vidsparse.apps.page.form import Form

    shapes = resolve_model("shapes")
    own = {"fg-attn": {"top_p": 0.7, "tile": "32x32"}}
    defaults = dataclasses.replace(
        shapes.defaults, method_options=own, dense_steps=3, dense_layers=1, frames=81
    )
    host = _host(tmp_path, frames=50)
    host = dataclasses.replace(host, models=(dataclasses.replace(shapes, defaults=defaults),))
    with gr.Blocks():
        form = Form(host)
    request, _ = form.request(_values(form))
    assert (request.method_options["top_p"], request.method_options["tile"]) == (0.7, "32x32")
    # as many as the host allows, and no size that the model cannot make.
    assert (request.dense_steps, request.dense_layers, request.frames) == (3, 1, 49)


# ---- uploads ----


def _png(tmp_path: Path, size: tuple[int, int] = (32, 16), kind: str = "PNG") -> Path:
    path = tmp_path / "up.bin"
    Image.new("RGBA" if kind == "PNG" else "RGB", size, (200, 10, 10)).save(path, format=kind)
    return path


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_decoded_and_written_anew(tmp_path: Path, kind: str) -> None:
    made = read_image(_png(tmp_path, kind=kind), tmp_path / "new.png", megabytes=1)
    with Image.open(made) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (32, 16))
        assert np.allclose(np.asarray(image)[8, 16], (200, 10, 10), atol=8)


def test_nothing_of_the_upload_but_its_pixels_stays(tmp_path: Path) -> None:
    path = _png(tmp_path, kind="JPEG")
    image = Image.open(path)
    exif = image.getexif()
    exif[0x010E] = "where I live"
    image.save(path, format="JPEG", exif=exif)
    path.write_bytes(path.read_bytes() + b"<script>")
    made = read_image(path, tmp_path / "new.png", megabytes=1)
    data = made.read_bytes()
    assert b"where I live" not in data
    assert b"<script>" not in data


def _bomb() -> bytes:
    # a header that promises 60,000 x 60,000 pixels in a hundred bytes.
    file = io.BytesIO()
    Image.new("L", (1, 1)).save(file, format="PNG")
    data = bytearray(file.getvalue())
    data[16:24] = (60_000).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no picture"),
        (b"GIF89a" + b"\0" * 50, "no picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture"),
        (_bomb(), "broken|megapixels"),
        (b"x" * (2**20 + 1), "at most 1 MB"),
    ],
)
def test_what_is_no_picture_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "up.png"
    path.write_bytes(data)
    with pytest.raises(OptionError, match=words):
        read_image(path, tmp_path / "new.png", megabytes=1)
    assert not (tmp_path / "new.png").exists()


def test_a_cut_picture_is_refused(tmp_path: Path) -> None:
    path = _png(tmp_path, (640, 480), "JPEG")
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(OptionError, match="broken"):
        read_image(path, tmp_path / "new.png", megabytes=1)


def test_a_prompt_file_is_read_like_the_command_line_s(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeff# comment\na ball\r\n\n  a ring  \n".encode())
    assert read_prompt_file(path, megabytes=1, most=2) == ["a ball", "a ring"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xfe\x00a", "not UTF-8"),
        (b"# nothing\n", "there is no prompt"),
        (b"a\nb\nc\n", "at most 2 prompts"),
        (b"a\0b\n", "NUL"),
        (b"a" * (2**20 + 1), "at most 1 MB"),
    ],
)
def test_a_bad_prompt_file_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(data)
    with pytest.raises(OptionError, match=words):
        read_prompt_file(path, megabytes=1, most=2)


def test_an_upload_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="did not arrive"):
        read_prompt_file(tmp_path / "none.txt", megabytes=1, most=2)
    assert read_prompts("one", most=1) == ["one"]


# ---- guard ----


def _ask(path: str, body: bytes | None = None, kind: bytes = b"application/json") -> tuple:
    pytest.importorskip("starlette")
    from vidsparse.apps.page.guard import Guard

    reached: list[bytes] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        reached.append(message.get("body", b""))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sent: list[dict] = []
    # in two pieces, as servers deliver them.
    whole = body or b""
    pieces = [
        {"type": "http.request", "body": whole[: len(whole) // 2], "more_body": True},
        {"type": "http.request", "body": whole[len(whole) // 2 :], "more_body": False},
    ]

    async def receive() -> dict:
        return pieces.pop(0)

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET" if body is None else "POST",
        "path": path,
        "headers": [(b"content-type", kind)],
    }
    asyncio.run(Guard(inner)(scope, receive, send))
    return sent[0]["status"], reached


def test_the_guard_passes_on_what_is_fine_unchanged() -> None:
    body = json.dumps({"data": ["see https://example.org", {"path": "/tmp/x.png"}]}).encode()
    assert _ask("/gradio_api/queue/join", body) == (200, [body])
    assert _ask("/gradio_api/file=/tmp/x.mp4")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=http://example.org/x",
        "/gradio_api/file=HTTPS://example.org/x",
        "/sub/gradio_api/proxy=https://example.hf.space/x",
    ],
)
def test_the_guard_lets_nobody_fetch_through_the_server(path: str) -> None:
    assert _ask(path) == (403, [])


def test_the_guard_takes_no_file_by_its_address() -> None:
    file = {"path": "http://example.org/x.png", "meta": {"_type": "gradio.FileData"}}
    for value in ({"data": [file]}, {"data": [[{"a": file}]]}):
        assert _ask("/gradio_api/queue/join", json.dumps(value).encode()) == (400, [])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[" * 200 + b"]" * 200, 400),
        (b"[" * 100_000, 400),
        (b'"' + b"a" * (3 * 2**20) + b'"', 413),
    ],
)
def test_the_guard_turns_away_what_is_no_request(body: bytes, status: int) -> None:
    assert _ask("/gradio_api/queue/join", body) == (status, [])


# ---- visits ----


@dataclasses.dataclass(frozen=True)
class _Clip:
    request: GenerateRequest
    record: dict


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


def test_the_end_of_a_visit_stops_its_jobs(tmp_path: Path) -> None:
    visits = Visits(tmp_path)
    job: Job[Any, Any] = Job(lambda bench, job: None)
    visits.of("a").jobs["generate"] = [job]
    visits.end("b")
    assert not job.stopping()
    visits.end("a")
    assert job.stopping()


# ---- drawing ----


def test_texts_of_visitors_are_escaped() -> None:
    from vidsparse.apps.page import draw

    evil = "<img src=x onerror=alert(1)>\"'"
    for page in (draw.alert(evil), draw.note(evil), draw.links([(evil, Path(f"/o/{evil}"))])):
        assert "<img" not in page
        assert "&lt;img" in page


def test_the_status_says_where_a_job_is() -> None:
    from vidsparse.apps.page import draw

    base = Snapshot(
        state="waiting", ahead=2, phase="dense", done=0.0, step=0, steps=0, elapsed=0.0, left=None,
        stopping=False,
    )  # fmt: skip
    assert "2 jobs before yours" in draw.status(base)
    running = dataclasses.replace(
        base, state="running", step=3, steps=8, done=0.375, elapsed=2.0, left=100.0
    )
    page = draw.status(running, warnings=["careful"])
    for words in ("Dense", "step 3 / 8", "about 2 min left", 'aria-valuenow="38"', "careful"):
        assert words in page
    stopping = dataclasses.replace(running, stopping=True)
    assert "Stopping after this step" in draw.status(stopping)
    decoding = draw.status(dataclasses.replace(stopping, step=8))
    assert "<b>Stopping</b>" in decoding
    cancelled = dataclasses.replace(running, state="cancelled")
    assert "at step 3 / 8; your settings and videos are kept" in draw.status(cancelled)
    assert "ready" in draw.status(dataclasses.replace(running, state="done"), "It is ready")


# ---- command ----


@pytest.mark.parametrize("flag", ["--share", "--listen"])
def test_others_are_let_in_with_a_password_only(flag: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["ui", flag, "--out", str(tmp_path / "o")])
    assert done.exit_code == 2
    assert f"{flag} lets others run jobs" in done.stderr
    assert "Hint: add --auth USER:PASSWORD" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("auth", ["anna", ":secret", "anna:", ""])
def test_a_login_needs_both_its_parts(auth: str, tmp_path: Path) -> None:
    options = ["ui", "--listen", "--out", str(tmp_path / "o")]
    done = CliRunner().invoke(main, options, env={"VIDSPARSE_AUTH": auth})
    assert done.exit_code == 2
    assert "needs a password" in done.stderr or "must be USER:PASSWORD" in done.stderr
    done = CliRunner().invoke(main, [*options, "--auth", auth])
    assert done.exit_code == 2


def test_a_password_may_hold_colons() -> None:
    from vidsparse.apps.page.command import check_login

    assert check_login("anna:a:b", listen=True, share=False) == ("anna", "a:b")
    assert check_login(None, listen=False, share=False) is None


def test_without_gradio_the_extra_is_named(monkeypatch: Any, tmp_path: Path) -> None:
    from vidsparse.apps.page import command

    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    done = CliRunner().invoke(main, ["ui", "--out", str(tmp_path / "o")])
    assert done.exit_code == 2
    assert "pip install 'vidsparse[ui]'" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-steps", "0"], "limit of steps"),
        (["--model", "no-such-model"], "there is no model"),
        (["--device", "tpu"], "unknown device"),
        (["--dtype", "fp16", "--device", "cpu"], "fp16 does not run on the CPU"),
    ],
)
def test_bad_settings_of_the_host_are_found_at_once(
    options: list[str], words: str, tmp_path: Path
) -> None:
    pytest.importorskip("gradio")
    done = CliRunner().invoke(main, ["ui", "--out", str(tmp_path / "o"), *options])
    assert done.exit_code == 2
    assert words in done.stderr
