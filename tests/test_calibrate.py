"""Calibration runs on a tiny pipeline: presets that fit, resuming, and the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from tiny_families import TINY
from tiny_parts import IMAGE, LAST_IMAGE
from tiny_pipelines import latents_of, save_tiny_wan, tiny_wan

import vidsparse
from vidsparse.apps.cli import main
from vidsparse.apps.commands.calibrate import not_met, psnr_of_others
from vidsparse.apps.results.held_file import held_file
from vidsparse.calibration import CALIBRATORS, SpargeCalibrator
from vidsparse.pipelines import calibrate as calibrating
from vidsparse.pipelines.calibrate import calibrate
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.handle import is_sparse, sparsify
from vidsparse.pipelines.models import LoadedPipeline, load
from vidsparse.pipelines.request import GenerateRequest, resolve, settings_hash
from vidsparse.presets import Preset, load_preset

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["a red circle", "a blue square that moves left", "a red square"]


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> LoadedPipeline:
    return load(tiny_model, device="cpu")


def a_request(method: str, **changes: Any) -> GenerateRequest:
    given = {
        "prompt": "",
        "method": method,
        "frames": 9,
        "width": 64,
        "height": 64,
        "steps": 4,
        "guidance": 3.0,
        "dense_steps": 1,
        "order": "rowmajor",
        "device": "cpu",
    }
    return GenerateRequest(**{**given, **changes})


# settings that make something happen at 48 tokens.
LOOSE: dict[str, dict[str, Any]] = {
    "fg-attn": {"target_psnr": 30.0},
    "sol-attn": {"target_psnr": 30.0},
    "spargeattn": {"l1": 0.5, "l2": 0.6},
    "xattention": {"error": 0.5},
    "sale": {},
    "bsfa": {"groups": 2, "fractions": (0.3, 1.0)},
    "foresight": {"probes": 1},
}


@pytest.fixture(scope="module", params=CALIBRATORS)
def made(
    request: pytest.FixtureRequest, loaded: LoadedPipeline, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Preset, Path]:
    name = request.param
    path = tmp_path_factory.mktemp("presets") / name
    preset = calibrate(loaded, a_request(name), PROMPTS[:2], path, settings=LOOSE[name])
    return preset, path


def test_a_preset_says_what_it_is_for(made: tuple[Preset, Path], loaded: LoadedPipeline) -> None:
    preset = load_preset(made[1])
    assert preset.grid == (3, 4, 4)
    assert preset.video == {"frames": 9, "width": 64, "height": 64}
    assert preset.model["weights_hash"] == loaded.weights_hash
    assert preset.order == "rowmajor"
    assert preset.measured["prompts"] == 2
    for table in preset.tables.values():
        assert table.shape[:3] == (1, 2, 2)
    assert not is_sparse(loaded.pipe)
    assert [path.suffix for path in sorted(made[1].parent.iterdir())] == [".json", ".safetensors"]


def test_generating_takes_everything_from_the_preset(
    made: tuple[Preset, Path], loaded: LoadedPipeline
) -> None:
    preset, path = made
    request = GenerateRequest(
        prompt="a red circle", model=loaded.ref.location, preset=str(path), steps=4, guidance=3.0,
        dense_steps=1, device="cpu",
    )  # fmt: skip
    assert (request.method, request.order, request.frames) == (preset.method, "rowmajor", 9)
    video = generate(loaded, request)
    assert video.record["preset"] == load_preset(path).digest
    assert video.record["options"]["preset"] == str(path)
    assert json.loads(json.dumps(video.record)) == video.record
    with sparsify(loaded.pipe, preset=path, dense_steps=1) as handle:
        latents_of(loaded.pipe)
        summary = handle.summary()
    assert handle.method.name == preset.method
    assert summary.selected == pytest.approx(video.record["selected"])
    assert summary.computed == pytest.approx(video.record["computed"])


def test_the_settings_hash_follows_the_presets_contents(
    made: tuple[Preset, Path], loaded: LoadedPipeline, tmp_path: Path
) -> None:
    def hashed(path: Path) -> str:
        return settings_hash(
            GenerateRequest(prompt="", model=loaded.ref.location, preset=str(path), device="cpu")
        )

    preset = load_preset(made[1])
    for suffix in (".json", ".safetensors"):
        copy = tmp_path / f"{made[1].name}{suffix}"
        copy.write_bytes(made[1].with_name(f"{made[1].name}{suffix}").read_bytes())
    assert hashed(tmp_path / made[1].name) == hashed(made[1])
    changed = {name: table + 0.125 for name, table in preset.tables.items()}
    if preset.method != "bsfa":
        replace(preset, tables=changed).save(tmp_path / made[1].name)
        assert hashed(tmp_path / made[1].name) != hashed(made[1])


@pytest.fixture
def sparge(loaded: LoadedPipeline, tmp_path: Path) -> Path:
    calibrate(loaded, a_request("spargeattn"), PROMPTS[:1], tmp_path / "s", settings={"steps": 1})
    return tmp_path / "s"


def test_another_model_is_refused(sparge: Path, tmp_path: Path) -> None:
    with pytest.raises(vidsparse.OptionError, match="num_layers 3 instead of 2"):
        sparsify(tiny_wan(layers=3), preset=sparge)
    other = load(save_tiny_wan(tmp_path / "other", seed=1), device="cpu")
    request = GenerateRequest(prompt="", model=other.ref.location, preset=str(sparge), device="cpu")
    with pytest.raises(vidsparse.OptionError, match="other weights than these"):
        generate(other, request)


def test_what_a_preset_settles_is_not_given_beside_it(sparge: Path) -> None:
    for given, message in (
        ({"method": "bsfa"}, "is for spargeattn, not for bsfa"),
        ({"method": "fg-attn"}, "is for spargeattn, not for fg-attn"),
        ({"order": "hilbert"}, "in rowmajor order, not in hilbert"),
        ({"frames": 13}, "calibrated on 9 frames of 64x64, not on 13"),
        ({"method_options": {"tau": 0.5}}, "sets tau"),
    ):
        with pytest.raises(vidsparse.OptionError, match=message):
            GenerateRequest(prompt="", preset=str(sparge), **given)
    pipe = tiny_wan()
    with pytest.raises(vidsparse.OptionError, match="is for spargeattn, not for fg-attn"):
        sparsify(pipe, "fg-attn", preset=sparge)
    with pytest.raises(vidsparse.OptionError, match="in rowmajor order"):
        sparsify(pipe, preset=sparge, order="hilbert")
    assert not is_sparse(pipe)


def test_another_size_of_video_is_refused_in_the_first_step(
    sparge: Path, loaded: LoadedPipeline
) -> None:
    with (
        sparsify(loaded.pipe, preset=sparge),
        pytest.raises(vidsparse.OptionError, match="token grid of 3x4x4, and this video has 2x4x4"),
    ):
        latents_of(loaded.pipe, num_frames=5)


class Killed(Exception):
    pass


def killing(after: int) -> Callable[[str, int, int], None]:
    """Progress that dies at the ``after``-th step of the whole calibration."""

    def progress(what: str, done: int, total: int) -> None:
        if done == after:
            raise Killed

    return progress


@pytest.mark.parametrize(
    "after", [6, *(pytest.param(calls, marks=pytest.mark.slow) for calls in (1, 11, 17, 22))]
)
def test_a_killed_calibration_goes_on(
    after: int, loaded: LoadedPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, settings = a_request("spargeattn"), {"steps": 2, **LOOSE["spargeattn"]}
    straight = calibrate(loaded, request, PROMPTS, tmp_path / "straight", settings=settings)
    with pytest.raises(Killed):
        calibrate(
            loaded, request, PROMPTS, tmp_path / "p", settings=settings, progress=killing(after)
        )
    assert not is_sparse(loaded.pipe)
    assert not (tmp_path / "p.json").exists()
    # two passes of three prompts and four steps each.
    finished = (after - 1) // 4
    assert (tmp_path / "p.progress.safetensors").exists() == (finished > 0)
    runs = denoised(monkeypatch)
    again = calibrate(loaded, request, PROMPTS, tmp_path / "p", settings=settings)
    assert runs == (PROMPTS * 2)[finished:]
    assert again.tables.keys() == straight.tables.keys()
    assert all(torch.equal(again.tables[name], straight.tables[name]) for name in again.tables)
    assert again.measured == straight.measured
    assert not (tmp_path / "p.progress.safetensors").exists()


def test_a_calibration_from_a_picture_does_not_go_on_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TINY["wan-image"].build().save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model", device="cpu", image=True)
    picture = tmp_path / "first.png"
    IMAGE.save(picture)
    request = GenerateRequest(
        prompt="x", model=str(tmp_path / "model"), method="sale", frames=5, width=64, height=64,
        steps=4, image=str(picture), guidance=1.0,
    )  # fmt: skip
    with pytest.raises(Killed):
        calibrate(loaded, request, PROMPTS, tmp_path / "p", progress=killing(5))
    assert (tmp_path / "p.progress.safetensors").exists()
    LAST_IMAGE.save(picture)
    runs = denoised(monkeypatch)
    calibrate(loaded, request, PROMPTS, tmp_path / "p")
    assert runs == PROMPTS


def denoised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts whose videos calibrations denoise from now on."""
    runs: list[str] = []
    denoise = calibrating.denoise

    def counted(*arguments: Any) -> Any:
        runs.extend(request.prompt for request in arguments[1])
        return denoise(*arguments)

    monkeypatch.setattr(calibrating, "denoise", counted)
    return runs


# of a calibration that was killed in the first try, after three dense videos.
IN_A_TRY = 18
TARGET: dict[str, Any] = {"look": "none", "target_psnr": 30.0}


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], list[str]]]:
    """Prompts of the videos that are made, and names of the files that are written."""
    made: list[str] = []
    written: list[str] = []
    decoded, write = calibrating.decoded, calibrating.write_whole

    def counted(*arguments: Any) -> Any:
        made.extend(request.prompt for request in arguments[1])
        return decoded(*arguments)

    def noted(path: Path, data: bytes) -> None:
        written.append(path.name)
        write(path, data)

    with monkeypatch.context() as changed:
        changed.setattr(calibrating, "decoded", counted)
        changed.setattr(calibrating, "write_whole", noted)
        yield made, written


@pytest.fixture
def in_a_try(loaded: LoadedPipeline, tmp_path: Path) -> list[Path]:
    """The dense videos that a calibration of ``p`` had made when it was killed."""
    request = a_request("foresight")
    with pytest.raises(Killed):
        calibrate(
            loaded, request, PROMPTS, tmp_path / "p", settings=TARGET, progress=killing(IN_A_TRY)
        )
    return [tmp_path / f"p.progress-{prompt}.safetensors" for prompt in range(3)]


@pytest.mark.slow
def test_dense_videos_are_written_once_and_a_killed_calibration_goes_on_from_them(
    in_a_try: list[Path], loaded: LoadedPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(path.stat().st_size > 10_000 for path in in_a_try)
    assert (tmp_path / "p.progress.safetensors").stat().st_size < 10_000
    request = a_request("foresight")
    with watched(monkeypatch) as (made, written):
        again = calibrate(loaded, request, PROMPTS, tmp_path / "p", settings=TARGET)
    assert made[:2] == PROMPTS[1:]
    assert not [name for name in written if name.startswith("p.progress-")]
    assert {path.name for path in tmp_path.iterdir()} == {"p.json", "p.safetensors"}
    with watched(monkeypatch) as (made, written):
        straight = calibrate(loaded, request, PROMPTS, tmp_path / "straight", settings=TARGET)
    assert [name for name in written if "progress-" in name] == [
        f"straight.progress-{prompt}.safetensors" for prompt in range(3)
    ]
    assert again.measured["tries"] == straight.measured["tries"]


@pytest.mark.parametrize("damage", ["cut", "missing", "of other settings"])
def test_a_calibration_begins_anew_where_a_dense_video_cannot_be_had(
    damage: str,
    in_a_try: list[Path],
    loaded: LoadedPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if damage == "cut":
        os.truncate(in_a_try[1], 500)
    elif damage == "missing":
        in_a_try[1].unlink()
    else:
        save_file(load_file(in_a_try[1]), in_a_try[1], metadata={"for": "others"})
    with watched(monkeypatch) as (made, written):
        calibrate(loaded, a_request("foresight"), PROMPTS, tmp_path / "p", settings=TARGET)
    assert made[:3] == PROMPTS
    assert [name for name in written if "progress-" in name] == [path.name for path in in_a_try]


def test_dense_videos_of_other_settings_go_when_the_preset_is_there(
    in_a_try: list[Path], loaded: LoadedPipeline, tmp_path: Path
) -> None:
    calibrate(loaded, a_request("foresight", seed=5), PROMPTS[:1], tmp_path / "p", settings=TARGET)
    assert {path.name for path in tmp_path.iterdir()} == {"p.json", "p.safetensors"}


def test_a_step_cache_of_the_model_s_own_stays_off(loaded: LoadedPipeline, tmp_path: Path) -> None:
    speeds = {"high": {"cache": "guidance", "cache_threshold": 2}}
    card = replace(loaded.defaults, method="foresight", speeds=speeds)
    request = a_request("foresight", method_options={"share": 0.3}, steps=12)
    assert resolve(request, card).cache == "guidance"
    cached = replace(loaded, ref=replace(loaded.ref, defaults=card))
    preset = calibrate(cached, request, PROMPTS[:1], tmp_path / "p", settings={"probes": 1})
    assert preset.method == "foresight"


def test_the_progress_of_other_settings_is_not_taken_up(
    loaded: LoadedPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        calibrate(loaded, a_request("sale"), PROMPTS, tmp_path / "p", progress=killing(5))
    runs = denoised(monkeypatch)
    calibrate(loaded, a_request("sale", seed=5), PROMPTS, tmp_path / "p")
    assert runs == PROMPTS


def test_what_a_killed_calibration_left_half_written_is_removed_and_nothing_else(
    loaded: LoadedPipeline, tmp_path: Path
) -> None:
    parts = [".p.json.0123abcd.tmp", ".p.progress.safetensors.abcd0123.tmp"]
    # of a calibration of more prompts.
    parts.append(".p.progress-7.safetensors.abcd0123.tmp")
    others = [".q.json.0123abcd.tmp", ".p.json.notes.tmp", ".pp.json.0123abcd.tmp"]
    others += ["p.progress-x.safetensors", "pp.progress-1.safetensors"]
    for name in parts + others:
        (tmp_path / name).write_bytes(b"half")
    calibrate(loaded, a_request("sale"), PROMPTS[:1], tmp_path / "p")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"p.json", "p.safetensors", *others}


@pytest.mark.parametrize("name", ["sale", "foresight"])
def test_prompts_at_once_give_what_they_give_one_by_one(
    name: str, loaded: LoadedPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**LOOSE[name], "target_psnr": 30.0}
    runs: list[int] = []
    for function in ("denoise", "decoded"):
        made = getattr(calibrating, function)

        def counted(loaded: Any, requests: Any, *more: Any, made: Any = made) -> Any:
            runs.append(len(requests))
            return made(loaded, requests, *more)

        monkeypatch.setattr(calibrating, function, counted)
    one = calibrate(loaded, a_request(name), PROMPTS, tmp_path / "one", settings=settings)
    assert set(runs) == {1}
    runs.clear()
    said: list[str] = []
    at_once = calibrate(
        loaded, a_request(name), PROMPTS, tmp_path / "batch", settings=settings, batch=2,
        progress=lambda what, done, total: said.append(what),
    )  # fmt: skip
    assert set(runs) == {1, 2}
    assert any(what.endswith("prompt 1-2 of 3") for what in said)
    for table, value in at_once.tables.items():
        torch.testing.assert_close(value, one.tables[table], rtol=1e-2, atol=1e-3)
    assert at_once.measured["psnr"] == pytest.approx(one.measured["psnr"], abs=0.05)
    assert at_once.measured["total"] == pytest.approx(one.measured["total"], abs=1e-3)


def test_calls_are_not_kept(loaded: LoadedPipeline, tmp_path: Path) -> None:
    """What a calibrator holds does not grow with what it sees."""
    sizes = []
    original = SpargeCalibrator.observe

    def watching(self: SpargeCalibrator, *call: Any) -> None:
        original(self, *call)
        sizes.append(sum(table.numel() for table in self.state().values()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpargeCalibrator, "observe", watching)
        calibrate(loaded, a_request("spargeattn"), PROMPTS, tmp_path / "p")
    # layers x branches x steps x prompts x passes.
    assert len(sizes) == 2 * 2 * 3 * 3 * 2
    assert len(set(sizes)) == 1


def test_two_transformers_have_numbers_of_their_own(tmp_path: Path) -> None:
    two = load(save_tiny_wan(tmp_path / "two", two_stage=True), device="cpu")
    request = a_request("xattention", dense_steps=0)
    preset = calibrate(two, request, PROMPTS[:1], tmp_path / "p", settings=LOOSE["xattention"])
    assert preset.tables["tau"].shape == (2, 2, 2)
    with sparsify(two.pipe, preset=tmp_path / "p", dense_steps=0) as handle:
        latents_of(two.pipe)
        assert handle.summary().dense_call_share == 0


# ---- the command ----


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS), encoding="utf-8")
    return path


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def test_the_command_writes_a_preset_that_generate_takes(
    tiny_model: Path, prompts: Path, tmp_path: Path
) -> None:
    size = ("--frames", "9", "--size", "64x64", "--steps", "3", "--device", "cpu")
    base = ("calibrate", "--model", str(tiny_model), "--prompts", str(prompts), *size)
    out = tmp_path / "b"
    result = invoke(
        *base, "--method", "bsfa", "--out", str(out), "--samples", "2", "--groups", "1",
        "--fractions", "0.3,0.6",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "predicted density" in result.output
    measured = load_preset(out).measured
    assert measured["settings"] == {"fractions": [0.3, 0.6], "groups": 1, "per_group": 2}
    assert measured["prompts"] == 2
    again = invoke(*base, "--method", "bsfa", "--out", str(out))
    assert again.exit_code == 2
    assert "--overwrite replaces it" in again.output
    generate = (
        "generate", str(prompts), "--model", str(tiny_model), "--device", "cpu", "--steps", "3",
    )  # fmt: skip
    result = invoke(
        *generate, "--preset", str(out), "--keep", "0.6", "--out", str(tmp_path / "videos")
    )
    assert result.exit_code == 0, result.output
    (run,) = (tmp_path / "videos").iterdir()
    assert run.name.startswith("prompts-bsfa-")
    record = json.loads(next(run.glob("0001*.json")).read_text())
    assert record["options"]["method_options"]["keep"] == 0.6
    assert record["selected"] == 1
    assert 0.5 <= record["computed"] <= 1


def test_what_was_measured_is_printed_in_words_a_try_a_line(
    tiny_model: Path, prompts: Path, tmp_path: Path
) -> None:
    result = invoke(
        "calibrate", "--model", str(tiny_model), "--prompts", str(prompts), "--samples", "2",
        "--frames", "9", "--size", "64x64", "--steps", "3", "--device", "cpu",
        "--method", "fg-attn", "--target-psnr", "20", "--out", str(tmp_path / "p"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    measured = load_preset(tmp_path / "p").measured
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "settings target psnr 20.0" in lines
    first, *others = [", ".join(f"{k.replace('_', ' ')} {v}" for k, v in one.items())
                      for one in measured["tries"]]  # fmt: skip
    assert f"tries {first}" in lines
    assert [line for line in lines if line in others] == others
    assert not any("{" in line or "None" in line for line in lines)
    # two means of two prompts each differ by as much as single prompts do.
    expected = f"{measured['psnr']:.1f} ± {measured['psnr_std']:.1f} (as many, like these"
    assert any(f"psnr of others {expected}" in line for line in lines)
    assert measured["met"]
    assert "not met" not in result.output


@pytest.mark.parametrize(("prompts", "off"), [(2, "3.0"), (8, "1.5"), (24, "0.9")])
def test_more_prompts_say_more_of_others(prompts: int, off: str) -> None:
    measured = {"psnr": 30.0, "psnr_std": 3.0, "prompts": prompts}
    assert psnr_of_others(measured).startswith(f"30.0 ± {off} (")


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"target": {"psnr": 60}, "psnr": 54.3}, "PSNR 60 dB was asked for, 54.3 dB is"),
        ({"target": {"ssim": 0.99}, "ssim": 0.97}, "SSIM 0.99 was asked for, 0.97 is"),
    ],
)
def test_the_nearest_is_told_in_the_target_s_own_unit(measured: Any, said: str) -> None:
    assert said in (not_met({**measured, "met": False}) or "")
    assert not_met({**measured, "met": True}) is None


def test_a_target_that_no_try_met_is_said(tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    result = invoke(
        "calibrate", "--model", str(tiny_model), "--prompts", str(prompts), "--samples", "1",
        "--frames", "5", "--size", "32x32", "--steps", "2", "--device", "cpu",
        "--method", "fg-attn", "--target-speed", "20", "--out", str(tmp_path / "p"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    measured = load_preset(tmp_path / "p").measured
    nearest = f"{measured['speed']:g} times is the nearest that was found."
    assert f"The target was not met: speed 20 times was asked for, {nearest}" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "say what to calibrate: --method fg-attn"),
        (("--method", "dense"), "dense is not calibrated"),
        (("--method", "fg-attn"), "calibrating fg-attn needs a target"),
        (("--method", "sale", "--batch", "0"), "batch must be at least 1"),
        (
            ("--method", "fg-attn", "--top-p", "none", "--topk", "0.3", "--target-psnr", "30"),
            "leave --topk out",
        ),
        (("--method", "spargeattn", "--topk", "0.3"), "leave --topk out"),
        (("--method", "spargeattn", "--lambda", "-5"), "leave --lambda out"),
        (("--method", "sale", "--target-psnr", "90"), "target_psnr must lie between 5 and 60 dB"),
        (("--method", "sale", "--target-ssim", "1"), "target_ssim must lie between 0.1 and 0.999"),
        (
            ("--method", "sale", "--target-psnr", "30", "--target-speed", "2"),
            "there can be one target, got target_psnr and target_speed",
        ),
        (("--method", "bsfa", "--l1", "0.1"), "--l1 is for spargeattn, not for bsfa"),
        (("--method", "spargeattn", "--l1", "x"), "--l1 cannot be 'x'"),
        (("--method", "spargeattn", "--l1", "0.2"), "l2 (0.06) must not be below l1 (0.2)"),
        (("--method", "spargeattn", "--tile", "64x64"), "128 queries by 64 or 128 keys"),
        (("--method", "bsfa", "--fractions", "0.1,2"), "every fraction must lie in (0, 1]"),
        (("--method", "sale", "--samples", "0"), "samples must be at least 1"),
        (("--method", "sale", "--dense-steps", "1.0"), "nothing to calibrate"),
        (("--method", "sale", "--dense-last-steps", "2"), "has no dense last steps, got 2"),
        (("--method", "sale", "--preset", "x"), "takes none"),
        (("--method", "sale", "--order", "spiral"), "unknown token order 'spiral'"),
        (
            ("--method", "sale", "--cache", "first-block"),
            "every step in full and takes no step cache, got first-block. Hint: --cache none",
        ),
        (
            ("--method", "foresight", "--speed", "fast", "--cache", "guidance"),
            "takes no step cache, got guidance with --speed fast. Hint: --cache none",
        ),
        (
            ("--method", "foresight", "--seed", str(2**63 - 2)),
            f"prompt 3 of 3 has no seed: they count up from {2**63 - 2}, and the last there is is "
            f"2^63 - 1. Hint: --seed {2**63 - 3}.",
        ),
    ],
)
def test_bad_input_ends_with_2_before_the_model_loads(
    args: tuple[str, ...], message: str, prompts: Path, tmp_path: Path
) -> None:
    result = invoke("calibrate", "--prompts", str(prompts), "--out", str(tmp_path / "p"), *args)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert "Loading" not in result.output


@pytest.fixture
def calibrating_to(
    tiny_model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Runs the command up to where it would load the model."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise vidsparse.OptionError("the model is loaded")

    monkeypatch.setattr("vidsparse.pipelines.models.load", refuse)
    base = ("calibrate", "--prompts", str(prompts), "--model", str(tiny_model), "--method", "sale")

    def run(out: Path | str, *options: str) -> Result:
        result = invoke(*base, "--samples", "1", "--device", "cpu", "--out", str(out), *options)
        assert result.exit_code == 2, result.output
        return result

    return run


@pytest.mark.parametrize("folder", ["", "transformer"])
def test_a_preset_is_no_part_of_its_models_weights(
    folder: str, calibrating_to: Callable[..., Result], tiny_model: Path
) -> None:
    result = calibrating_to(tiny_model / folder / "p")
    assert "would lie among the model's own files" in " ".join(result.output.split())
    # where models bring their presets they are told apart.
    assert "the model is loaded" in calibrating_to(tiny_model / "presets" / "p").output


@pytest.mark.parametrize("out", ["", ".", "..", "new/", "new/..", ".json"])
def test_a_preset_has_a_name(
    out: str, calibrating_to: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    said = calibrating_to(out).output
    assert f"--out {out!r} gives the preset no name. Hint: name a file" in " ".join(said.split())


@pytest.mark.parametrize("out", ["p.progress", "p.progress-0", "p.progress-12.json"])
def test_no_preset_has_the_name_of_another_one_s_progress(
    out: str, calibrating_to: Callable[..., Result], tmp_path: Path
) -> None:
    said = calibrating_to(tmp_path / out).output
    assert "is the name of what calibrations keep until they end" in " ".join(said.split())


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("p.progress", True), ("p.progress-12", True), ("p.progression", False), ("p-12", False)],
)
def test_progress_is_told_by_its_name(name: str, is_one: bool) -> None:
    assert calibrating.is_progress(Path("there") / f"{name}.safetensors") == is_one


@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_a_file_that_is_no_preset_s_is_not_replaced(
    options: tuple[str, ...], calibrating_to: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "style.safetensors").write_bytes(b"a LoRA")
    said = calibrating_to(tmp_path / "style", *options).output
    assert "style.safetensors is there without style.json, so that it is no preset's" in said
    # what a calibration that was killed as it wrote the second file leaves.
    (tmp_path / "style.progress.safetensors").write_bytes(b"")
    assert "the model is loaded" in calibrating_to(tmp_path / "style", *options).output


def test_a_preset_that_another_process_calibrates_is_refused(
    calibrating_to: Callable[..., Result], tmp_path: Path
) -> None:
    with held_file(tmp_path / "p.json", "calibrating", "name another"):
        said = calibrating_to(tmp_path / "p", "--overwrite").output
    assert "another process is calibrating into" in said
    assert "Hint: wait until it ends, or give another name with --out." in said
    assert not list(tmp_path.glob(".*"))


def test_a_preset_that_came_while_another_process_held_it_is_not_replaced(
    calibrating_to: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def after_another(path: Path, *words: str, make_folder: bool) -> Iterator[None]:
        path.write_text("what the other one found")
        yield

    monkeypatch.setattr("vidsparse.apps.commands.calibrate.held_file", after_another)
    assert "p.json is there already" in calibrating_to(tmp_path / "p").output


def test_the_lora_itself_is_not_replaced(
    calibrating_to: Callable[..., Result], tmp_path: Path
) -> None:
    for name in ("style.json", "style.safetensors"):
        (tmp_path / name).write_bytes(b"of a trainer")
    lora = ("--lora", f"{tmp_path}/../{tmp_path.name}/style.safetensors")
    said = calibrating_to(tmp_path / "style", *lora, "--overwrite").output
    assert "style.safetensors is the LoRA itself, which the preset would replace" in said
    assert "the model is loaded" in calibrating_to(tmp_path / "style", "--overwrite").output
    assert "the model is loaded" in calibrating_to(tmp_path / "other", *lora).output


def test_a_place_that_cannot_be_written_to_is_found_before_the_model_loads(
    calibrating_to: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    said = calibrating_to(tmp_path / "file" / "new" / "p").output
    assert "file/new/p.json cannot be written: Not a directory" in said
    (tmp_path / "p.safetensors").mkdir()
    assert "p.safetensors is a folder" in calibrating_to(tmp_path / "p", "--overwrite").output
    # one that can be made does not stay.
    assert "the model is loaded" in calibrating_to(tmp_path / "new" / "p").output
    assert not (tmp_path / "new").exists()
    assert "the model is loaded" in calibrating_to(tmp_path / "new" / "er" / "p").output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kernel", ["stock", "gluon"])
def test_the_dense_kernel_asked_for_runs_the_dense_calls(
    kernel: str, loaded: LoadedPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    made = calibrating.sparsify

    def watched(*arguments: Any, dense_kernel: str = "auto", **options: Any) -> Any:
        asked.append(dense_kernel)
        # the kernel itself needs a GPU.
        return made(*arguments, **options)

    monkeypatch.setattr(calibrating, "sparsify", watched)
    calibrate(loaded, a_request("sale", dense_kernel=kernel), PROMPTS[:1], tmp_path / "p")
    assert set(asked) == {kernel}


def test_a_method_that_needs_a_preset_says_so(tiny_model: Path, prompts: Path) -> None:
    model = ("--model", str(tiny_model), "--device", "cpu")
    result = invoke("generate", str(prompts), "--method", "bsfa", *model)
    assert result.exit_code == 2
    assert "vidsparse calibrate --method bsfa" in result.output


def test_compare_takes_a_preset(
    tiny_model: Path, prompts: Path, sparge: Path, tmp_path: Path
) -> None:
    result = invoke(
        "compare", str(prompts), "--model", str(tiny_model), "--device", "cpu", "--steps", "3",
        "--preset", str(sparge), "--out", str(tmp_path / "videos"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (run,) = (tmp_path / "videos").iterdir()
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    assert report["settings"]["method"] == "spargeattn"
    # the sparse side is sparse, and not by the method's own numbers.
    assert 0 < report["summary"]["selected"] <= 1
    assert report["settings"]["preset"] == str(sparge)


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_a_preset_of_another_model_ends_with_2_once_for_all_prompts(
    command: str, prompts: Path, sparge: Path, tmp_path: Path
) -> None:
    for model, message, loaded in (
        (save_tiny_wan(tmp_path / "deeper", layers=3), "has another transformer", False),
        (save_tiny_wan(tmp_path / "trained", seed=1), "with other weights than these", True),
    ):
        result = invoke(
            command, str(prompts), "--model", str(model), "--device", "cpu", "--preset", str(sparge)
        )
        assert result.exit_code == 2, result.output
        text = " ".join(result.output.split())
        assert text.count("was calibrated for") == 1
        assert message in text
        assert ("Loading" in text) == loaded
        assert "failed" not in text


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_a_preset_that_does_not_fit_ends_with_2(
    command: str, tiny_model: Path, prompts: Path, sparge: Path
) -> None:
    base = (command, str(prompts), "--model", str(tiny_model), "--device", "cpu", "--preset")
    for args, message in (
        ((f"{sparge}-not-there",), "there is no preset file"),
        ((str(sparge), "--method", "fg-attn"), "is for spargeattn, not for fg-attn"),
        ((str(sparge), "--tau", "0.5"), "sets tau (a number for each head), got 0.5"),
        ((str(sparge), "--size", "32x32"), "calibrated on 9 frames of 64x64"),
    ):
        result = invoke(*base, *args)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())
