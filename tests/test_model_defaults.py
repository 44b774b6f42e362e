"""Settings that a request leaves open: the family's, those of the model's files, its card's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from saved_families import Opened, a_request
from tiny_families import TINY, cogvideox, wan_per_token_timesteps

from vidsparse.errors import ModelError, OptionError
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.families import FAMILIES
from vidsparse.pipelines.family import Family
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.models import describe, resolve_model
from vidsparse.pipelines.request import GenerateRequest, resolve

pytest_plugins = ["saved_families"]
pytestmark = pytest.mark.usefixtures("one_thread")


def test_defaults_follow_the_files_of_a_model(tmp_path: Path) -> None:
    cogvideox(version="1.5").save_pretrained(tmp_path / "cog")
    defaults = resolve_model(tmp_path / "cog").defaults
    assert (defaults.frames, defaults.width, defaults.height, defaults.fps) == (9, 128, 128, 16)
    wan_per_token_timesteps("WanPipeline").save_pretrained(tmp_path / "wan")
    defaults = resolve_model(tmp_path / "wan").defaults
    assert (defaults.frames, defaults.width, defaults.height, defaults.fps) == (121, 1280, 704, 24)


def test_sparse_settings_are_the_familys_unless_asked_for(
    folders: Callable[[str], Path], opened: Opened
) -> None:
    loaded = opened("hunyuan")
    steps = {"steps": 10, "guidance": 1.0}
    assert generate(loaded, a_request(**steps)).record["dense_step_share"] == pytest.approx(0.1)
    asked = generate(loaded, a_request(**steps, dense_steps=5)).record
    assert asked["dense_step_share"] == 0.5
    assert asked["options"]["method_options"]["top_p"] == 0.9
    assert describe(str(folders("hunyuan")))["dense_steps"] == 0.1


def test_a_card_may_bring_sparse_settings(folders: Callable[[str], Path], tmp_path: Path) -> None:
    TINY["wan"].build().save_pretrained(tmp_path)
    card = {
        "dense_steps": 2, "dense_layers": 1, "dense_last_layers": 2, "reuse": 3,
        "order": "rowmajor",
    }  # fmt: skip
    (tmp_path / "vidsparse.json").write_text(json.dumps(card))
    request = resolve(a_request(), resolve_model(tmp_path).defaults)
    assert {name: getattr(request, name) for name in card} == card


def test_whether_guidance_is_in_the_weights_is_read_from_the_files(
    folders: Callable[[str], Path],
) -> None:
    found = {name: resolve_model(folders(name)).defaults.embedded for name in ("hunyuan", "wan")}
    assert found == {"hunyuan": True, "wan": False}


def test_a_card_names_a_format_of_linear_layers_that_there_is(tmp_path: Path) -> None:
    TINY["wan"].build().save_pretrained(tmp_path)
    card = {"speeds": {"high": {"psnr": 40.0, "prompts": 24, "linear": "fp9"}}}
    (tmp_path / "vidsparse.json").write_text(json.dumps(card))
    with pytest.raises(ModelError, match=r"linear of high in .* one of none, fp8, int8 and bf16"):
        resolve_model(tmp_path)


def test_the_method_of_a_request_is_the_card_s_or_the_one_whose_options_are_given(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    TINY["wan"].build().save_pretrained(tmp_path)
    card = {"method": "foresight", "schedules": {"foresight": {"dense_steps": 1, "refresh": 2}}}
    (tmp_path / "vidsparse.json").write_text(json.dumps(card))

    def made(model: Path | str, **options: Any) -> GenerateRequest:
        return GenerateRequest(prompt="", model=str(model), device="cpu", **options)

    defaults = resolve_model(tmp_path).defaults
    one = resolve(made(tmp_path), defaults)
    assert (one.method, one.dense_steps, one.refresh) == ("foresight", 1, 2)
    # its schedule is for that method alone.
    other = resolve(made(tmp_path, method="spargeattn"), defaults)
    assert (other.method, other.dense_steps, other.refresh) == ("spargeattn", 0.24, 0)
    assert made(tmp_path, method_options={"top_p": 0.5}).method == "fg-attn"
    assert made(tmp_path, speed="exact").method == "dense"
    assert made(folders("wan")).method == made("owner/model").method == "fg-attn"
    # of several that have it one must be chosen.
    with pytest.raises(OptionError, match="foresight has no option 'tau': it belongs to sparge"):
        made(tmp_path, method_options={"tau": 0.5})
    card["method"] = "nearest"
    (tmp_path / "vidsparse.json").write_text(json.dumps(card))
    with pytest.raises(OptionError, match="unknown method 'nearest'"):
        made(tmp_path)


def test_a_family_may_set_options_of_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    from vidsparse.pipelines import wan

    defaults = replace(wan.WAN.defaults, method_options={"fg-attn": {"top_p": 0.5}}, dense_layers=1)
    defaults = replace(defaults, dense_last_layers=1, reuse=2)
    request = resolve(GenerateRequest(prompt="", method="fg-attn"), defaults)
    assert request.method_options["top_p"] == 0.5
    assert (request.dense_layers, request.dense_last_layers, request.reuse) == (1, 1, 2)
    other = resolve(GenerateRequest(prompt="", method_options={"top_p": 0.7}), defaults)
    assert other.method_options["top_p"] == 0.7
    assert "top_p" not in resolve(GenerateRequest(prompt="", method="dense"), defaults).options()
    adapter = replace(wan.ADAPTER, family=replace(wan.WAN, defaults=defaults))
    monkeypatch.setattr(wan, "ADAPTER", adapter)
    pipe = TINY["wan"].build()
    with sparsify(pipe) as handle:
        assert handle.method.options()["top_p"] == 0.5
        schedule = handle.engine.schedule
        assert (schedule.dense_layers, schedule.dense_last_layers, schedule.reuse) == (1, 1, 2)
    own: dict[str, Any] = {"dense_layers": 0, "dense_last_layers": 0, "reuse": 1}
    with sparsify(pipe, top_p=0.7, **own) as handle:
        assert handle.method.options()["top_p"] == 0.7
        assert {name: getattr(handle.engine.schedule, name) for name in own} == own


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_familys_own_settings_are_valid(family: Any) -> None:
    request = resolve(GenerateRequest(prompt="", method=family.defaults.method), family.defaults)
    assert request.options()["method_options"]["tile"] == "16x16"
    assert family.defaults.source


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_fewer_frames_are_a_number_that_the_family_makes(family: Family) -> None:
    defaults = family.defaults
    factor, rest = defaults.frame_factor, defaults.frame_rest
    assert [defaults.frames_within(most) for most in (0, rest + factor - 1)] == [rest, rest]
    assert defaults.frames_within(rest + factor + 0.5) == defaults.few_frames == rest + factor
