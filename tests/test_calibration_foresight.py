"""Foresight's calibration: what layers are worth, who gets which share, and the promise."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from budget import random_qkv
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tiny_pipelines import latents_of

import vidsparse
from vidsparse import TokenGrid
from vidsparse.apps.cli import main
from vidsparse.calibration import Extent, ForesightCalibrator
from vidsparse.calibration.base import Video
from vidsparse.calibration.foresight import LEAST, allocate
from vidsparse.calibration.target import Search
from vidsparse.methods import Foresight, Numbers
from vidsparse.pipelines import calibrate as calibrating
from vidsparse.pipelines.alone import LayersAlone
from vidsparse.pipelines.calibrate import calibrate
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.handle import sparsify
from vidsparse.pipelines.models import LoadedPipeline, load
from vidsparse.pipelines.request import GenerateRequest, resolve, runs_as_calibrated
from vidsparse.presets import load_preset
from vidsparse.site import CallSite

pytestmark = pytest.mark.usefixtures("one_thread")

WORTH = (0.7, 0.05, 0.15, 0.1)
STEEPNESS = 1.2


# ---- dividing pairs ----


@given(
    st.lists(st.floats(1e-3, 1), min_size=2, max_size=40),
    st.floats(0.3, 4),
    st.floats(LEAST, 1),
)
def test_shares_have_the_mean_asked_for_and_none_could_be_moved_with_gain(
    worth: list[float], steepness: float, mean: float
) -> None:
    of = torch.tensor(worth, dtype=torch.float64)
    # every second falls more steeply.
    power = torch.tensor([steepness, 1.5 * steepness] * len(worth), dtype=torch.float64)
    power = power[: len(worth)]
    shares = allocate(of, power, 0.2, mean)
    assert float(shares.mean()) == pytest.approx(mean, abs=1e-6)
    assert float(shares.min()) >= LEAST - 1e-9
    assert float(shares.max()) <= 1
    # one more pair helps alike in all layers that are not at an end.
    slope = power * of * (shares / 0.2) ** -power / shares
    inside = (shares > LEAST + 1e-9) & (shares < 1 - 1e-9)
    if bool(inside.any()):
        torch.testing.assert_close(slope[inside], slope[inside][:1].expand(int(inside.sum())))
        assert bool((slope[shares >= 1 - 1e-9] >= slope[inside].max() * (1 - 1e-6)).all())
        assert bool((slope[shares <= LEAST + 1e-9] <= slope[inside].min() * (1 + 1e-6)).all())


# ---- a world whose videos err as the model says ----


def calibrator(prompts: int = 3, **settings: Any) -> ForesightCalibrator:
    extent = Extent(parts=1, layers=len(WORTH), heads=2, window=range(2, 10), prompts=prompts)
    return ForesightCalibrator(method=Foresight(share=0.2), extent=extent, **settings)


def watched(
    subject: ForesightCalibrator, prompts: int = 3, odd: Sequence[int] = ()
) -> ForesightCalibrator:
    """Show it videos until it asks for no more; of ``odd`` prompts layers are worth otherwise."""
    number = 0
    while number < len(subject.passes):
        one = subject.passes[number]
        for prompt in one.span(prompts):
            worth = WORTH[::-1] if prompt in odd else WORTH
            for _ in one.forwards:
                subject.compare(number, 0, worth)
            if one.last_step is None:
                method = None if one.dense else one.method
                shares = shares_of(method) if isinstance(method, Foresight) else [1.0]
                total = sum(shares) / len(shares)
                subject.watch(number, prompt, video_of(method, prompt, worth), total, 1.0)
        subject.finish(number)
        number += 1
    return subject


def shares_of(method: Foresight) -> list[float]:
    grid = TokenGrid(1, 1, 1)
    sites = [CallSite(layer, 5, 0.0, grid) for layer in range(len(WORTH))]
    # of ten thousand chunks.
    listed = [method.listed(10_000, one, 2, torch.device("cpu")) for one in sites]
    return [float(each.double().mean()) / 1e4 for each in listed]


def video_of(method: Any, prompt: int, worth: Sequence[float] = WORTH) -> Video:
    """Gray for dense attention, and noise of the deviation that the shares of ``method`` leave."""
    still = np.full((4, 64, 64, 3), 128, dtype=np.uint8)
    if not isinstance(method, Foresight):
        return still
    error = 0.0
    for of_layer, share in zip(worth, shares_of(method), strict=True):
        error += of_layer * (share / 0.2) ** -STEEPNESS
    # some prompts are harder than others.
    deviation = 18 * math.sqrt(error) * (1 + 0.3 * prompt)
    noise = np.random.default_rng(prompt).standard_normal(still.shape)
    return (still + deviation * noise).round().clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("look", ["forwards", "videos"])
def test_it_finds_what_layers_are_worth(look: str) -> None:
    measured = watched(calibrator(look=look)).measured()
    if look == "videos":
        # and how steeply errors fall.
        assert measured["steepness"] == pytest.approx(STEEPNESS, abs=0.05)
    assert measured["worth"] == pytest.approx(list(WORTH), abs=0.02)
    assert sum(measured["layers"]) / len(WORTH) == pytest.approx(0.2, abs=1e-3)
    assert max(measured["layers"]) == measured["layers"][0]


def test_heads_whose_means_err_get_the_pairs_of_those_whose_means_are_exact() -> None:
    grid = TokenGrid(4, 16, 16)
    q, k, v = random_qkv(grid.tokens, 32, torch.float32, heads=2)
    # the first head attends to all alike, which means say exactly; the second to single keys.
    q[:, 0] = 0
    q[:, 1] *= 4
    subject = calibrator()
    for layer in range(len(WORTH)):
        for branch in ("conditional", "unconditional"):
            given = (q, k, v) if branch == "conditional" else (v, q, k)
            subject.observe(0, *given, CallSite(layer, 5, 0.0, grid, branch))
    found = watched(subject).measured()
    for first, second in found["heads"]:
        assert LEAST <= first < 0.5 * second
    assert sum(found["layers"]) / len(WORTH) == pytest.approx(0.2, abs=1e-3)
    # the worth of a layer is its own, whatever its heads are.
    assert found["worth"] == pytest.approx(list(WORTH), abs=0.02)
    table = subject.tables()["share"]
    assert table.shape == (1, len(WORTH), 2)
    assert not Foresight(numbers=Numbers({"share": table}, None)).equal_heads
    assert Foresight(numbers=Numbers({"share": table[..., :1]}, None)).equal_heads


@pytest.mark.parametrize("where", [{"text_first": True}, {"lead": 40}, {"lead": 20}])
def test_heads_are_weighed_alike_wherever_a_models_text_stands(where: dict[str, Any]) -> None:
    # a calibrator sees tokens in order, text last.
    last, first = (TokenGrid(4, 8, 8, text=40, **place) for place in ({}, where))
    qkv = random_qkv(last.tokens, 32, torch.float32, heads=2)
    found = []
    for grid in (last, first):
        subject = calibrator()
        subject.observe(0, *qkv, CallSite(1, 5, 0.0, grid))
        found.append(subject.found(None)["share"])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_what_heads_err_is_known_again_after_a_stop() -> None:
    grid = TokenGrid(4, 16, 16)
    subject, again = calibrator(), calibrator()
    site = CallSite(1, 5, 0.0, grid)
    subject.observe(0, *random_qkv(grid.tokens, 32, torch.float32, heads=2), site)
    again.restore(subject.state())
    shares = again.found(None)["share"]
    torch.testing.assert_close(shares, subject.found(None)["share"])
    assert len(shares[0, 1].unique()) == 2
    # of the other layers nothing was seen.
    assert len(shares[0, 0].unique()) == 1


@pytest.mark.parametrize("look", ["forwards", "videos"])
def test_the_division_beats_one_share_for_all(look: str) -> None:
    subject = watched(calibrator(look=look))
    numbers = Numbers(subject.tables(), None)
    divided, alike = (
        np.square(video_of(method, 0).astype(float) - 128).mean()
        for method in (Foresight(numbers=numbers), Foresight(share=0.2))
    )
    assert divided < 0.85 * alike


@pytest.mark.parametrize("look", ["forwards", "videos"])
@pytest.mark.parametrize(("odd", "divided"), [((), True), ((0, 1), False), ((2,), False)])
def test_layers_stay_alike_where_other_prompts_are_no_better_for_a_division(
    odd: Sequence[int], divided: bool, look: str
) -> None:
    subject = watched(calibrator(look=look), odd=odd)
    measured = subject.measured()
    assert (len(set(measured["layers"])) > 1) == divided
    checks = {what: sum(found) for what, found in measured["checks"].items()}
    assert (checks["divided"] > checks["alike"]) == divided
    assert sum(measured["layers"]) / len(WORTH) == pytest.approx(0.2, abs=1e-3)


def test_without_prompts_to_check_it_by_a_division_is_believed() -> None:
    measured = watched(calibrator(), prompts=2).measured()
    assert measured["checks"] == {"divided": [], "alike": []}
    assert measured["worth"] == pytest.approx(list(WORTH), abs=0.02)


def test_with_one_prompt_layers_are_looked_at_and_no_video_is_made() -> None:
    subject = watched(calibrator(prompts=1), prompts=1)
    assert subject.measured()["worth"] == pytest.approx(list(WORTH), abs=0.02)
    assert "psnr" not in subject.measured()
    # one dense video, and that to the last step that is looked at.
    assert [len(one.span(1)) for one in subject.passes] == [1, 0, 0, 0]
    assert subject.passes[0].last_step == max(subject.passes[0].forwards) < 9


def test_steps_that_are_looked_at_go_by_a_plan_and_take_no_more_forwards_than_a_video() -> None:
    for layers, most in ((2, 4), (4, 2), (8, 1), (40, 1)):
        extent = Extent(
            parts=1, layers=layers, heads=1, window=range(2, 12), refresh_steps=(1, 4, 7)
        )
        subject = ForesightCalibrator(method=Foresight(), extent=extent)
        looked_at = subject.passes[0].forwards
        assert len(looked_at) == most
        assert set(looked_at) <= set(extent.window) - set(extent.refresh_steps)


def test_where_every_step_is_a_refresh_there_is_nothing_to_look_at() -> None:
    extent = Extent(parts=1, layers=4, heads=1, window=range(1, 4), refresh_steps=(0, 1, 2, 3))
    subject = watched(ForesightCalibrator(method=Foresight(share=0.2), extent=extent))
    assert [one.dense for one in subject.passes] == [True, False]
    assert subject.measured()["layers"] == [0.2] * 4


def test_layers_of_a_transformer_that_was_not_looked_at_count_as_alike() -> None:
    extent = Extent(parts=2, layers=2, heads=1, window=range(4), prompts=1)
    subject = ForesightCalibrator(method=Foresight(share=0.2), extent=extent)
    subject.compare(0, 1, [3.0, 1.0])
    subject.finish(0)
    assert subject.measured()["worth"] == pytest.approx([0.25, 0.25, 0.375, 0.125])


@pytest.mark.parametrize("look", ["forwards", "videos", "none"])
@pytest.mark.parametrize("target", [22.0, 25.0, 28.0])
def test_a_target_is_met_and_little_more(target: float, look: str) -> None:
    measured = watched(calibrator(target_psnr=target, look=look)).measured()
    assert target + 0.1 <= measured["psnr"] <= target + 0.7
    assert measured["psnr_worst"] < measured["psnr"]
    assert len(measured["tries"]) <= 5


@pytest.mark.parametrize("wrong", [4, 61, math.nan, "32", True])
def test_targets_that_mean_nothing_are_refused(wrong: Any) -> None:
    with pytest.raises(vidsparse.OptionError, match="target_psnr must lie between 5 and 60 dB"):
        calibrator(target_psnr=wrong)


@pytest.mark.parametrize(
    ("look", "made"), [("forwards", 8 + 2 * 2), ("videos", 8 + 2 * (len(WORTH) + 2) + 2 * 2)]
)
def test_videos_of_a_search_are_few(look: str, made: int) -> None:
    subject = watched(calibrator(target_psnr=25.0, look=look, prompts=8), prompts=8)
    assert subject.measured()["met"]
    # dense ones, by videos two prompts for each layer and twice for all, two others divided and
    # alike, and one or two tries: the second is whole since its first two prompts said that it is
    # as wanted.
    tries = sum(len(one.span(8)) for one in subject.passes) - made
    assert tries in (8, 8 + 2 + 6)
    # the first was foretold from the prompts of the check, which are easier than the other ones.
    first = Foresight(numbers=Numbers(subject.found(subject.search.tried[0]), None))
    of_checks = [vidsparse.metrics.psnr(video_of(None, p), video_of(first, p)) or 0 for p in (2, 3)]
    # a search aims 0.4 dB above its target.
    assert sum(of_checks) / 2 == pytest.approx(25.4, abs=0.9)


def test_a_share_of_one_leaves_nothing_to_divide() -> None:
    extent = Extent(parts=1, layers=2, heads=2, window=range(2, 10))
    with pytest.raises(vidsparse.OptionError, match="so there is nothing to calibrate"):
        ForesightCalibrator(method=Foresight(share=1.0), extent=extent)


# ---- on a pipeline ----

PROMPTS = ["a red circle", "a blue square that moves left", "a red square"]


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> LoadedPipeline:
    return load(tiny_model, device="cpu")


def a_request(**changes: Any) -> GenerateRequest:
    return GenerateRequest(
        prompt="", method="foresight", frames=9, width=64, height=64, steps=4, guidance=3.0,
        dense_steps=2, device="cpu", method_options={"share": 0.4}, **changes,
    )  # fmt: skip


def test_a_preset_brings_its_own_dense_steps_and_no_dense_layers(
    loaded: LoadedPipeline, tmp_path: Path
) -> None:
    made = calibrate(
        loaded, a_request(dense_layers=1), PROMPTS[:2], tmp_path / "p", settings={"probes": 1}
    )
    assert made.order == "hilbert"
    request = GenerateRequest(prompt="a red circle", preset=str(tmp_path / "p"), device="cpu")
    assert (request.dense_steps, request.dense_layers, request.dense_last_layers) == (2, 0, 0)
    request = replace(request, model=loaded.ref.location, steps=4, guidance=3.0)
    video = generate(loaded, request)
    assert video.record["work"]["dense_layers"] == 0
    work = video.record["work"]
    # the second of two dense steps is a refresh, with a plan beside it.
    assert work["dense_steps"] == pytest.approx(0.25)
    assert 0.25 < work["refresh"] < 0.5
    with sparsify(loaded.pipe, preset=tmp_path / "p") as handle:
        assert handle.engine.schedule.dense_steps == 2
    # what was measured is what runs.
    promised = load_preset(tmp_path / "p").measured
    assert video.record["total"] == pytest.approx(promised["total"], abs=1e-3)


@pytest.mark.slow
def test_a_target_far_below_takes_fewer_refreshes_and_the_preset_brings_them(
    loaded: LoadedPipeline, tmp_path: Path
) -> None:
    request = replace(a_request(refresh=2), dense_steps=1)
    told: list[str] = []
    made = calibrate(
        loaded, request, PROMPTS[:2], tmp_path / "p",
        settings={"probes": 1, "target_psnr": 6.0}, progress=lambda what, *_: told.append(what),
    )  # fmt: skip
    tries = made.measured["tries"]
    assert list(dict.fromkeys(one.get("refresh") for one in tries)) == [None, 1, 0]
    assert made.measured["total"] == min(one["total"] for one in tries) < tries[0]["total"]
    assert made.schedule["refresh"] == 0
    assert any(" refresh 1, prompt 1 of 2" in what for what in told)
    asked = GenerateRequest(prompt=PROMPTS[0], preset=str(tmp_path / "p"), device="cpu")
    video = generate(loaded, replace(asked, model=loaded.ref.location, steps=4, guidance=3.0))
    assert video.record["work"].get("refresh", 0) == 0
    assert video.record["total"] == pytest.approx(made.measured["total"], abs=1e-3)


@pytest.fixture(scope="module")
def preset(loaded: LoadedPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preset") / "p"
    calibrate(loaded, a_request(), PROMPTS[:2], path, settings={"probes": 1})
    return path


def test_compare_sets_the_promise_beside_what_it_measured(
    preset: Path, loaded: LoadedPipeline, tmp_path: Path
) -> None:
    promised = load_preset(preset).measured["psnr"]
    (tmp_path / "one.txt").write_text(PROMPTS[2], encoding="utf-8")

    def compared(*more: str) -> str:
        asked = ["--preset", str(preset), "--out", str(tmp_path / "out"), "--steps", "4"]
        asked += ["--model", loaded.ref.location, "--device", "cpu", "--guidance", "3", *more]
        result = CliRunner().invoke(main, ["compare", str(tmp_path / "one.txt"), *asked])
        assert result.exit_code == 0, result.output
        return result.output

    assert re.search(
        rf"promised +{promised:.2f} ± \d\.\d\d dB with .* over 2 prompts .* in 4 steps", compared()
    )
    # nothing is known of other videos.
    assert "promised" not in compared("--reuse", "2")


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"seed": 7, "fps": 8}, True),
        ({"steps": 5}, False),
        ({"guidance": 4.0}, False),
        ({"dense_steps": 0}, False),
        ({"dense_last_steps": 1}, False),
        ({"dense_layers": 1}, False),
        ({"reuse": 2}, False),
        ({"linear": "int8"}, False),
        ({"cache": "first-block"}, False),
        ({"method_options": {"rows": 32}}, False),
    ],
)
def test_a_promise_is_of_the_settings_that_it_was_measured_with(
    preset: Path, loaded: LoadedPipeline, changes: dict[str, Any], holds: bool
) -> None:
    asked: dict[str, Any] = {"steps": 4, "guidance": 3.0, **changes}
    request = GenerateRequest(prompt="", preset=str(preset), device="cpu", dtype="fp32", **asked)
    resolved = resolve(request, loaded.ref.defaults)
    assert runs_as_calibrated(resolved, load_preset(preset)) is holds


def test_a_promise_with_a_lora_is_another(
    preset: Path, loaded: LoadedPipeline, tmp_path: Path
) -> None:
    (tmp_path / "style.safetensors").write_bytes(b"weights")
    request = GenerateRequest(
        prompt="", preset=str(preset), device="cpu", steps=4, guidance=3.0,
        lora=str(tmp_path / "style.safetensors"),
    )  # fmt: skip
    assert not runs_as_calibrated(resolve(request, loaded.ref.defaults), load_preset(preset))


def test_every_layer_lists_its_own_share(loaded: LoadedPipeline) -> None:
    table = torch.tensor([0.3, 1.0]).view(1, 2, 1).expand(1, 2, 2).contiguous()
    method = Foresight(numbers=Numbers({"share": table}, (3, 4, 4)))
    with sparsify(loaded.pipe, method, dense_steps=0) as handle:
        latents_of(loaded.pipe)
        cells = [cell for cell in handle.trace.cells if cell.sparse]
    selected = [
        torch.stack([c.selected for c in cells if c.layer == layer and c.selected is not None])
        for layer in (0, 1)
    ]
    assert bool((selected[1] == 1).all())
    assert float(selected[0].max()) < 0.5


@pytest.mark.parametrize("refresh", [0, 2])
def test_a_layer_alone_errs_as_in_a_run_where_no_other_is_sparse(
    loaded: LoadedPipeline, refresh: int
) -> None:
    pipe, looked_at, found = loaded.pipe, 3, []
    call = {"num_inference_steps": 5}
    stock = latents_of(pipe, **call)

    def sparse() -> Any:
        return sparsify(pipe, Foresight(share=0.3), dense_steps=1, refresh=refresh)

    with sparse() as handle:
        LayersAlone(handle, [looked_at], lambda *told: found.append(told))
        # what runs again leaves no trace.
        torch.testing.assert_close(latents_of(pipe, **call), stock)
        assert not any(cell.action in ("replan", "reuse") for cell in handle.trace.cells)
        assert len(handle.trace.cells) == 5 * 2 * 2
    ((part, errors),) = found
    assert (part, len(errors)) == (0, 2)

    def outputs(only: tuple[int, ...]) -> torch.Tensor:
        """What the step's first forward gives back where these layers go by plans from then on."""
        given: list[torch.Tensor] = []

        def begins(pipe: Any, step: int, timestep: Any, tensors: Any) -> Any:
            if step == looked_at - 1:
                handle.engine.only = only
            return tensors

        with sparse() as handle:
            handle.engine.only = ()
            handle.watch(lambda one, out, _: given.append(out) if one.site.step == looked_at else 0)
            latents_of(pipe, **call, callback_on_step_end=begins)
        return given[0]

    dense = outputs(())
    for layer, error in enumerate(errors):
        expected = float((outputs((layer,)).double() - dense.double()).square().mean())
        assert error == pytest.approx(expected, rel=1e-3)
        assert error > 0


def test_a_dense_video_takes_as_long_as_its_steps_that_are_not_looked_at(
    loaded: LoadedPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, kept = calibrating.decoded, []

    def clocked(loaded: Any, some: Any, tell: Any) -> Any:
        # of six steps the first is a refresh beside which there are plans, and two are looked at
        # layer by layer.
        return decoded(
            loaded,
            some,
            lambda step, steps, _: tell(step, steps, 9.0 if step in (1, 3, 5) else 1.0),
        )

    monkeypatch.setattr(calibrating, "decoded", clocked)
    keep = Search.keep

    def noted(search: Search, prompt: int, video: Any, seconds: float) -> None:
        kept.append(seconds)
        keep(search, prompt, video, seconds)

    monkeypatch.setattr(Search, "keep", noted)
    request = replace(a_request(refresh=1), dense_steps=1, steps=6)
    calibrate(loaded, request, PROMPTS[:2], tmp_path / "p", settings={"probes": 1})
    made = load_preset(tmp_path / "p").measured
    # from 0 there.
    assert made["sampled_steps"][0] == [2, 4]
    assert kept == [6.0, 30.0]


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 9, 30])
def test_a_killed_calibration_makes_no_video_twice(
    after: int, loaded: LoadedPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if done == after:
            raise Killed

    settings = {"probes": 1, "target_psnr": 30.0}
    decoded, runs = calibrating.decoded, 0

    def counted(*arguments: Any) -> Any:
        nonlocal runs
        made = decoded(*arguments)
        runs += 1
        return made

    monkeypatch.setattr(calibrating, "decoded", counted)
    straight = calibrate(loaded, a_request(), PROMPTS[:2], tmp_path / "s", settings=settings)
    whole, runs = runs, 0
    with pytest.raises(Killed):
        calibrate(
            loaded, a_request(), PROMPTS[:2], tmp_path / "p", settings=settings, progress=progress
        )
    again = calibrate(loaded, a_request(), PROMPTS[:2], tmp_path / "p", settings=settings)
    assert runs == whole
    assert torch.equal(again.tables["share"], straight.tables["share"])
    assert again.measured == straight.measured
