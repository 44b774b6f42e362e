"""Speeds: what each stands for, that every part can be overridden, and that it is said."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from diffusers.hooks import FirstBlockCacheConfig, HookRegistry, ModelHook
from page_host import save_preset
from tiny_hunyuan import hunyuan_image_to_video
from tiny_pipelines import latents_of, save_tiny_wan, tiny_wan
from tiny_relatives import wan_animate

from vidsparse.apps.cli import main
from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.pipelines import accelerate, is_sparse
from vidsparse.pipelines.branches import HOOK as BRANCHES_HOOK
from vidsparse.pipelines.caching import StepCache
from vidsparse.pipelines.families import FAMILIES, HUNYUAN_VIDEO, WAN
from vidsparse.pipelines.guidance_cache import GuidanceCache
from vidsparse.pipelines.models import load, resolve_model
from vidsparse.pipelines.request import GenerateRequest, resolve, runs_as_measured, settings_hash
from vidsparse.pipelines.speed import SPEEDS, bundle_for, described, measured, speed_reaching

pytestmark = pytest.mark.usefixtures("one_thread")

CPU: dict[str, Any] = {"device": "cpu", "dtype": "fp32"}


def settled(speed: str | None, **changes: Any) -> GenerateRequest:
    # a hub id: no card says which method it has.
    request = GenerateRequest(prompt="", model="owner/wan", speed=speed, device="cpu", **changes)
    return resolve(request, WAN.defaults)


def test_exact_leaves_nothing_out() -> None:
    one = settled("exact")
    assert (one.method, one.linear, one.cache, one.compile) == ("dense", "none", "none", False)


@pytest.mark.parametrize("cpu", ["bf16_cpu", "plain_cpu"])
def test_high_is_the_default_where_the_card_chose_the_method(
    request: pytest.FixtureRequest, cpu: str
) -> None:
    request.getfixturevalue(cpu)
    own: dict[str, Any] = {"prompt": "", "device": "cpu", "model": "shapes"}
    defaults = resolve_model("shapes").defaults
    high, plain = (resolve(GenerateRequest(speed=s, **own), defaults) for s in ("high", None))
    assert high.options() == {**plain.options(), "speed": "high"}
    assert plain.linear == ("bf16" if cpu == "bf16_cpu" else "none")
    # so that a folder of finished videos serves both.
    hashes = {settings_hash(GenerateRequest(speed=s, **own)) for s in (None, "high")}
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("changes", "cache", "threshold"),
    [
        ({}, "guidance", 2),
        ({"cache": "none"}, "none", None),
        ({"cache": "first-block"}, "first-block", 0.05),
        ({"guidance": 1.0}, "none", None),
        ({"method": "fg-attn"}, "none", None),
        ({"method": "dense"}, "none", None),
        ({"speed": "balanced", "guidance": 1.0}, "none", None),
        ({"speed": "balanced", "guidance": 1.0, "cache": "guidance"}, "guidance", 2),
    ],
)
def test_a_card_s_cache_is_on_where_its_method_and_guidance_are(
    changes: dict[str, Any], cache: str, threshold: float | None
) -> None:
    own: dict[str, Any] = {"prompt": "", "device": "cpu", "model": "shapes", "method": "foresight"}
    defaults = resolve_model("shapes").defaults
    one = resolve(GenerateRequest(**{**own, **changes}), defaults)
    assert (one.cache, one.cache_threshold) == (cache, threshold)
    assert resolve(one, defaults) == one


def test_a_preset_s_promise_is_kept_by_leaving_the_card_s_cache_out(tmp_path: Path) -> None:
    preset = tmp_path / "p.json"
    save_preset(preset, "foresight")
    request = GenerateRequest(prompt="", device="cpu", model="shapes", preset=str(preset))
    assert resolve(request, resolve_model("shapes").defaults).cache == "none"


def test_without_a_speed_a_card_s_method_alone_brings_no_cache() -> None:
    own = replace(WAN.defaults, method="foresight")
    request = GenerateRequest(prompt="", device="cpu", steps=50)
    assert resolve(request, own).cache == "none"
    assert resolve(replace(request, speed="high"), own).cache == "guidance"


@pytest.mark.parametrize("speed", [None, "high", "fast"])
def test_in_few_steps_a_card_s_cache_is_off(speed: str | None) -> None:
    request = GenerateRequest(prompt="", device="cpu", model="shapes", speed=speed)
    defaults = resolve_model("shapes").defaults
    caches = {n: resolve(replace(request, steps=n), defaults).cache for n in (8, 9)}
    assert caches == {8: "none", 9: "guidance"}


@pytest.mark.usefixtures("bf16_cpu")
def test_without_a_speed_a_family_keeps_the_settings_of_its_source() -> None:
    plain = settled(None)
    assert (plain.method, plain.dense_steps, plain.refresh) == ("fg-attn", 0.24, 0)
    assert plain.linear == "none"


GUIDED = (
    "Wan", "SkyReels-V2", "HunyuanVideo 1.5", "Helios", "Cosmos", "Kandinsky 5", "Motif-Video",
)  # fmt: skip
"""Families without sound whose guidance takes two forwards a step."""

UNCACHED = ("LTX-2", "Cosmos 3", "Kandinsky 6")
"""Families whose guidance takes two forwards or samples a step, and which have no step cache."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_faster_speeds_keep_less_and_have_the_cache_that_fits_the_family(family: Any) -> None:
    made = {speed: bundle_for(speed, family.defaults, steps=50, **CPU) for speed in SPEEDS}
    assert [made[s].method for s in SPEEDS] == ["dense", *["foresight"] * 3]
    one = family.name in ("HunyuanVideo", "AnyFlow", "MiniMax-H3")
    # one forward a step: each step of fast computes less. No step cache: fewer steps are dense.
    uncached = not one and made["fast"].cache == "none"
    assert uncached == (family.name in UNCACHED)
    shares = [None, None, 0.11, 0.09 if one else 0.11]
    assert [made[s].method_options.get("share") for s in SPEEDS] == shares
    quick = 0.08 if one else 0.12, 0.08
    fast = (0.08, 0.06) if one else (0.08, 0.08) if uncached else quick
    schedules = [dict(zip(("dense_steps", "refresh"), each, strict=True)) for each in (quick, fast)]
    assert [made[s].schedule for s in SPEEDS] == [{}, {"dense_steps": 0.12}, *schedules]
    caches = {speed: made[speed].cache for speed in SPEEDS}
    guided = family.name in GUIDED
    skips = "taylorseer" if "taylorseer" in family.caches and not family.sound else "none"
    own = "guidance" if guided else "none"
    cached = {"high": own, "balanced": own, "fast": own if guided else skips}
    assert caches == {"exact": "none", **cached}
    thresholds = {speed: made[speed].cache_threshold for speed in SPEEDS}
    assert thresholds == {**dict.fromkeys(SPEEDS), "fast": 3 if guided else None}


@pytest.mark.parametrize("guidance", ["distilled", "two forwards", "none"])
def test_what_a_step_s_forwards_are_is_read_from_the_model(guidance: str) -> None:
    family = HUNYUAN_VIDEO if guidance == "distilled" else WAN
    defaults = family.defaults
    if guidance == "two forwards":
        # such a transformer without an input for the scale.
        defaults = HUNYUAN_VIDEO.defaults.for_transformer({"guidance_embeds": False})
    elif guidance == "none":
        defaults = replace(defaults, guidance=1.0)
    assert defaults.one_forward == (guidance != "two forwards")
    two = guidance == "two forwards"
    made = bundle_for("balanced", defaults, steps=50, **CPU)
    assert made.schedule["dense_steps"] == (0.12 if two else 0.08)
    assert made.cache == ("guidance" if two else "none")
    assert bundle_for("fast", defaults, steps=50, **CPU).cache_threshold == (3 if two else None)


def test_a_speed_goes_by_the_guidance_that_is_asked_for() -> None:
    alone = settled("balanced", guidance=1.0)
    assert (alone.cache, alone.dense_steps) == ("none", 0.08)
    assert settled("fast", guidance=1.0).cache == "taylorseer"
    anyflow = next(family for family in FAMILIES if family.name == "AnyFlow").defaults
    request = GenerateRequest(prompt="", speed="balanced", device="cpu", steps=50, guidance=4.0)
    assert resolve(request, anyflow).dense_steps == 0.12


def test_fg_attn_asked_for_keeps_less_at_the_faster_speeds() -> None:
    joint = resolve_model("shapes-joint").defaults
    kept = {
        speed: bundle_for(speed, joint, steps=25, method="fg-attn", **CPU).method_options
        for speed in SPEEDS
    }
    assert kept == {"exact": {}, "high": {}, "balanced": {"top_p": 0.7}, "fast": {"top_p": 0.7}}


CARD: dict[str, Any] = {
    "method": "foresight",
    "method_options": {"foresight": {"share": 0.2}},
    "schedules": {"foresight": {"dense_steps": 2, "refresh": 3}},
    "speeds": {
        "high": {"psnr": 36.04, "prompts": 24},
        "fast": {"method_options": {"share": 0.1}, "schedule": {"refresh": 1}, "cache": "none"},
    },
}


def test_a_model_s_own_bundles_are_its_card_s() -> None:
    own = replace(WAN.defaults, **CARD)
    request = GenerateRequest(prompt="", method="foresight", speed="fast", device="cpu")
    one = resolve(request, own)
    assert one.method_options["share"] == 0.1
    assert (one.dense_steps, one.refresh, one.cache) == (2, 1, "none")
    # parts that are asked for come before the card's, and another method has none of its numbers.
    one = resolve(replace(request, refresh=0, method_options={"share": 0.3}), own)
    assert (one.method_options["share"], one.refresh) == (0.3, 0)
    one = resolve(replace(request, method="spargeattn", method_options={}), own)
    assert (one.dense_steps, one.refresh) == (WAN.defaults.dense_steps, 0)
    more: dict[str, Any] = {
        "fast": {"schedule": {"dense_steps": 5}},
        "balanced": {"psnr": 30.0, "prompts": 24},
    }
    other = replace(request, method="spargeattn", method_options={})
    one = resolve(other, replace(own, speeds=more))
    assert one.dense_steps == WAN.defaults.dense_steps
    # a card that measured a speed has it with its own method.
    plain = bundle_for("balanced", replace(WAN.defaults, speeds=more), steps=50, **CPU)
    assert (plain.method, plain.method_options) == ("fg-attn", {"top_p": 0.8})
    # what the card does not change is the method's schedule there.
    one = resolve(replace(request, speed="balanced"), own)
    assert (one.method_options["share"], one.dense_steps, one.refresh) == (0.2, 2, 3)


@pytest.mark.parametrize(
    ("steps", "dense", "refresh", "share", "cache"),
    [(8, 1, 1, 0.3, "none"), (9, 0.12, 0.08, 0.11, "guidance")],
)
def test_few_steps_leave_none_out(
    steps: int, dense: float, refresh: float, share: float, cache: str
) -> None:
    one = settled("fast", steps=steps)
    assert (one.dense_steps, one.refresh, one.cache) == (dense, refresh, cache)
    assert one.method_options["share"] == share


@pytest.mark.usefixtures("plain_cpu")
def test_8_bits_and_compilation_are_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(capability: tuple[int, int], dtype: str = "bf16") -> tuple[str, bool]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        made = bundle_for("balanced", WAN.defaults, steps=50, device="cuda", dtype=dtype)
        return made.linear, made.compile

    assert on((9, 0)) == ("fp8", True)
    assert on((8, 0)) == ("int8", True)
    # 16 bits are quick where there are fp8 units.
    assert on((9, 0), "fp16") == ("none", True)
    assert on((9, 0), "fp32") == ("int8", True)
    assert on((8, 0), "fp16") == ("int8", True)
    made = bundle_for("fast", WAN.defaults, steps=50, **CPU)
    assert (made.linear, made.compile) == ("none", False)


@pytest.mark.parametrize(
    ("config", "linear"),
    [
        ({"num_attention_heads": 40, "attention_head_dim": 128}, "fp8"),
        ({"num_attention_heads": 24, "attention_head_dim": 128}, "fp8"),
        ({"num_attention_heads": 12, "attention_head_dim": 128}, "none"),
        ({"model_dim": 4096}, "fp8"),
        ({"model_dim": 1792}, "none"),
        ({}, "fp8"),
    ],
)
def test_layers_too_narrow_to_gain_by_8_bits_stay(
    config: dict[str, int], linear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    defaults = WAN.defaults.for_transformer(config)
    made = bundle_for("balanced", defaults, steps=50, device="cuda", dtype="bf16")
    assert made.linear == linear


@pytest.mark.parametrize("model", ["shapes", "shapes-joint", "scenes"])
def test_the_bundled_models_keep_their_layers_on_a_gpu(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    defaults = resolve_model(model).defaults
    on_gpu: dict[str, Any] = {"steps": defaults.steps, "device": "cuda", "dtype": "bf16"}
    assert {bundle_for(speed, defaults, **on_gpu).linear for speed in SPEEDS} == {"none"}


@pytest.mark.usefixtures("bf16_cpu")
def test_layers_in_bf16_are_for_cpus_that_gain_and_models_in_fp32() -> None:
    def formats(**machine: Any) -> list[str]:
        return [bundle_for(s, WAN.defaults, steps=50, **machine).linear for s in SPEEDS]

    assert formats(**CPU) == ["none", "bf16", "bf16", "bf16"]
    assert formats(device="cpu", dtype="bf16") == ["none"] * 4
    assert settled("high", dtype="bf16").linear == "none"
    assert settled("high", linear="none").linear == "none"


@pytest.mark.usefixtures("bf16_cpu")
@pytest.mark.parametrize(
    "changes",
    [{"method": "dense"}, {"method": "fg-attn"}, {"linear": "none"}, {"dtype": "bf16"}],
)
def test_a_model_s_layers_stay_without_a_speed_where_it_does_not_run_as_high(
    changes: dict[str, Any],
) -> None:
    request = GenerateRequest(prompt="", model="shapes", device="cpu", **changes)
    assert resolve(request, resolve_model("shapes").defaults).linear == "none"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"method": "spargeattn"}, {"method": "spargeattn", "cache": "guidance"}),
        ({"dense_steps": 3}, {"dense_steps": 3}),
        ({"cache": "none"}, {"cache": "none", "cache_threshold": None}),
        ({"cache": "first-block"}, {"cache": "first-block", "cache_threshold": 0.05}),
        ({"cache": "taylorseer", "cache_threshold": 3}, {"cache_threshold": 3}),
        ({"linear": "int8"}, {"linear": "int8"}),
        ({"compile": True}, {"compile": True}),
    ],
)
def test_every_part_can_be_overridden(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    one = settled("fast", **changes).options()
    assert {name: one[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "cache", "threshold"),
    [
        ({}, "guidance", 3),
        ({"cache_threshold": 2, "cache": "guidance"}, "guidance", 2),
        # another cache, or the same by name, has a threshold of its own.
        ({"cache": "guidance"}, "guidance", 2),
        ({"cache": "first-block"}, "first-block", 0.05),
        ({"cache": "none"}, "none", None),
        # another method takes none of the card's numbers.
        ({"method": "fg-attn"}, "guidance", 3),
        ({"method": "fg-attn", "guidance": 1.0}, "taylorseer", 2),
    ],
)
def test_a_card_may_say_how_much_a_cache_leaves_out(
    changes: dict[str, Any], cache: str, threshold: float | None
) -> None:
    own = resolve_model("shapes").defaults
    fast = {**own.speeds["fast"], "cache": "guidance", "cache_threshold": 3}
    own = replace(own, speeds={**own.speeds, "fast": fast})
    request = GenerateRequest(prompt="", model="shapes", device="cpu", speed="fast", **changes)
    one = resolve(request, own)
    assert (one.cache, one.cache_threshold) == (cache, threshold)
    assert resolve(one, own) == one
    assert runs_as_measured(one, own) == (not changes)
    if not changes:
        assert described(one.options()).endswith("step cache guidance 3")
        assert described({**one.options(), "cache_threshold": 2}).endswith("step cache guidance")


@pytest.mark.parametrize(
    ("options", "method"),
    [({"share": 0.2}, "foresight"), ({"top_p": 0.5}, "fg-attn"), ({"topk": 0.3}, "fg-attn")],
)
def test_a_methods_own_numbers_choose_it_and_override_the_bundles(
    options: dict[str, Any], method: str
) -> None:
    one = settled("balanced", method_options=options)
    assert one.method == method
    assert {name: one.method_options[name] for name in options} == options


def test_resolving_twice_changes_nothing() -> None:
    for speed in SPEEDS:
        one = settled(speed)
        assert resolve(one, WAN.defaults) == one


def test_an_unknown_speed_is_refused() -> None:
    with pytest.raises(OptionError, match=r"unknown speed 'ludicrous'\. Hint: choose from exact"):
        GenerateRequest(prompt="", speed="ludicrous")


@pytest.mark.usefixtures("plain_cpu")
def test_what_is_measured_is_said_and_what_is_not() -> None:
    own = replace(WAN.defaults, **CARD)
    assert measured("shapes", "exact", own) == "nothing is left out"
    assert "was not measured" in measured("Wan-AI/Wan2.1", "fast", own)
    assert "36.0 dB on shapes, mean of 24 prompts" in measured("shapes", "high", own)
    assert measured("shapes", "high", own, changed=True).startswith("by itself 36.0 dB on shapes")
    assert "not measured with these settings" in measured("shapes", "high", own, changed=True)
    for linear in ("bf16", "fp8"):
        rounded = measured("shapes", "high", own, linear=linear)
        assert rounded.endswith(f"at its default size before linear layers were in {linear}")
    own = replace(own, speeds={"high": {**own.speeds["high"], "linear": "bf16"}})
    assert measured("shapes", "high", own, linear="bf16").endswith("at its default size")
    for linear in ("none", "fp8"):
        told = measured("shapes", "high", own, linear=linear)
        assert told.endswith("at its default size with linear layers in bf16")
    one = settled("fast").options()
    assert described(one).startswith("foresight (share 0.11")
    assert described(one).endswith("dense steps 0.12, refresh 0.08, step cache guidance 3")
    # what is left as the model has it is not told.
    everything = {**one, "linear": "fp8", "compile": True, "cache": "none"}
    ends = "dense steps 0.12, refresh 0.08, linear layers in fp8, compiled blocks"
    assert described(everything).endswith(ends)


@pytest.mark.parametrize(
    ("psnr", "speed"), [(1, "fast"), (33.5, "fast"), (33.51, "balanced"), (36, "high")]
)
def test_the_fastest_speed_that_reaches_a_quality_is_taken(psnr: float, speed: str) -> None:
    known = {"high": {"psnr": 36.0}, "balanced": {"psnr": 34.0}, "fast": {"psnr": 33.5}}
    assert speed_reaching(psnr, "shapes", replace(WAN.defaults, speeds=known)) == speed


def test_a_quality_that_no_speed_has_is_refused_with_the_nearest() -> None:
    known = replace(WAN.defaults, speeds={"high": {"psnr": 36.0}, "fast": {}})
    with pytest.raises(OptionError, match=r"give 40 dB on shapes; high is nearest with 36\.0"):
        speed_reaching(40, "shapes", known)
    with pytest.raises(OptionError, match=r"no speed was measured on wan.*--target-psnr 30"):
        speed_reaching(30, "wan", WAN.defaults)
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(OptionError, match="above 0"):
            speed_reaching(wrong, "shapes", known)


@pytest.mark.parametrize("asked", ["33dB", "33 db", "33.0DB"])
def test_a_quality_on_the_command_line_is_a_speed(asked: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n", encoding="utf-8")
    given = ["generate", str(prompts), "--device", "cpu", "--out", str(tmp_path / "out")]
    # refused late, by what stands beside it.
    result = CliRunner().invoke(main, [*given, "--speed", asked, "--frames", "10"])
    assert result.exit_code == 2
    assert "frames" in result.output
    result = CliRunner().invoke(main, [*given, "--speed", "50dB"])
    assert result.exit_code == 2
    assert "no speed was measured to give 50 dB on shapes" in " ".join(result.output.split())


# running


def test_a_command_says_its_bundle_and_records_it(tmp_path: Path) -> None:
    folder = save_tiny_wan(tmp_path / "tiny", layers=3)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n", encoding="utf-8")
    small = ("--frames", "5", "--size", "32x32", "--steps", "9", "--device", "cpu")
    arguments = ["generate", str(prompts), "--model", str(folder), *small, "--speed", "fast"]
    result = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "speed fast: foresight (share 0.11" in words
    assert "its quality was not measured on this model" in words
    assert words.index("speed fast") < words.index("Loading")
    (file,) = (tmp_path / "out").rglob("*.json")
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["options"]["speed"] == "fast"
    assert "cached" in {step["kind"] for step in record["steps"]}


def test_accelerate_runs_the_bundle_and_takes_off_what_can_be() -> None:
    pipe = tiny_wan(layers=3)
    expected = latents_of(pipe, num_inference_steps=9)
    with accelerate(pipe, "fast", steps=9) as fast:
        latents_of(pipe, num_inference_steps=9)
        assert fast.sparse.summary().computed is not None
        assert min(fast.cache.blocks_run().values()) == 0.5
        assert str(fast).startswith("speed fast: foresight (share 0.11), dense steps 0.12")
    assert fast.linear is None
    assert torch.equal(latents_of(pipe, num_inference_steps=9), expected)


@pytest.mark.parametrize(
    ("condition", "guidance", "dense_steps"),
    [
        ("token_replace", None, 0.08),
        ("token_replace", 6.0, 0.08),
        # a scale is no input of its transformer, and its call has none unless asked.
        ("latent_concat", None, 0.08),
        ("latent_concat", 6.0, 0.12),
    ],
)
def test_accelerate_reads_from_the_transformer_whether_guidance_is_in_it(
    condition: str, guidance: float | None, dense_steps: float
) -> None:
    pipe = hunyuan_image_to_video(condition)
    with accelerate(pipe, "balanced", guidance=guidance) as fast:
        assert fast.bundle.schedule["dense_steps"] == dense_steps


def test_accelerate_goes_by_the_guidance_of_the_runs_to_come() -> None:
    def cache_of(pipe: Any, speed: str = "fast", **options: Any) -> str:
        with accelerate(pipe, speed, steps=50, **options) as held:
            return held.bundle.cache

    pipe = tiny_wan()
    assert cache_of(pipe) == "guidance"
    assert cache_of(pipe, guidance=1.0) == "taylorseer"
    # its call has no guidance by itself.
    animate = wan_animate()
    assert cache_of(animate, "balanced") == "none"
    assert cache_of(animate, "balanced", guidance=5.0) == "guidance"
    refused: tuple[Any, ...] = (-1, True, "5", math.nan, math.inf)
    for wrong in refused:
        with pytest.raises(OptionError, match="guidance must be a number from 0"):
            accelerate(pipe, "fast", guidance=wrong)


@pytest.mark.parametrize("cache", [None, "guidance", "first-block", "taylorseer"])
@pytest.mark.parametrize("own", ["guidance", "taylorseer", "first-block", "by diffusers"])
def test_accelerate_on_a_pipeline_that_has_a_cache_changes_nothing(
    wide_model: Path, own: str, cache: str | None
) -> None:
    pipe = load(wide_model, device="cpu").pipe
    expected = latents_of(pipe)
    if own == "guidance":
        remove = GuidanceCache(pipe).remove
    elif own == "by diffusers":
        pipe.transformer.enable_cache(FirstBlockCacheConfig())
        remove = pipe.transformer.disable_cache
    else:
        remove = StepCache(pipe, own).remove
    weights = [weight.data_ptr() for weight in pipe.transformer.parameters()]
    with pytest.raises(UnsupportedError, match=r"has the cache \w+ already"):
        accelerate(pipe, "balanced", linear="int8", cache=cache, compile=True)
    assert not is_sparse(pipe)
    assert [weight.data_ptr() for weight in pipe.transformer.parameters()] == weights
    assert not any(block._compiled_call_impl for block in pipe.transformer.blocks)
    remove()
    assert torch.equal(latents_of(pipe), expected)


def test_accelerate_puts_no_cache_where_branches_are_apart() -> None:
    pipe = tiny_wan()
    registry = HookRegistry.check_if_exists_or_initialize(pipe.transformer)
    registry.register_hook(ModelHook(), BRANCHES_HOOK)
    for speed in ("high", "fast"):
        with accelerate(pipe, speed, steps=9) as held:
            assert (held.bundle.cache, held.cache) == ("none", None)
    # who asks for one by name hears why not.
    with pytest.raises(UnsupportedError, match="where guidance branches run in different"):
        accelerate(pipe, "high", steps=9, cache="guidance")
    assert not is_sparse(pipe)


def test_accelerate_exact_is_the_stock_video() -> None:
    pipe = tiny_wan()
    expected = latents_of(pipe)
    with accelerate(pipe, "exact"):
        assert torch.equal(latents_of(pipe), expected)


def test_accelerate_refused_leaves_the_pipeline_as_it_was() -> None:
    pipe = tiny_wan()
    expected = latents_of(pipe)
    # two blocks of narrow layers: none that 8 bits are for.
    with pytest.raises(UnsupportedError, match="no linear layer"):
        accelerate(pipe, "balanced", linear="int8")
    assert torch.equal(latents_of(pipe), expected)
    with pytest.raises(OptionError, match="unknown speed"):
        accelerate(pipe, "warp")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": "no"}, "compile must be True or False, got 'no'"),
        ({"linear": ""}, "unknown linear ''"),
        ({"cache": ""}, "unknown cache ''"),
        ({"method": ""}, "unknown method ''"),
        ({"method": []}, r"method must be the name of one, got \[\]"),
    ],
)
def test_accelerate_takes_no_word_for_a_default(options: dict[str, Any], message: str) -> None:
    pipe = tiny_wan()
    with pytest.raises(OptionError, match=message):
        accelerate(pipe, "balanced", **options)
    assert not is_sparse(pipe)


@pytest.mark.parametrize(
    ("speed", "changes", "holds"),
    [
        ("fast", {}, True),
        # what does not change how far sparse and dense videos are apart.
        ("fast", {"seed": 7, "fps": 8, "negative_prompt": "a cat"}, True),
        ("fast", {"method": "fg-attn", "method_options": {"top_p": 0.05}}, False),
        ("fast", {"method_options": {"share": 0.01}}, False),
        ("fast", {"steps": 3}, False),
        ("fast", {"frames": 5}, False),
        ("fast", {"width": 64}, False),
        ("fast", {"cache": "none"}, False),
        ("fast", {"linear": "int8"}, False),
        # what is said tells the two apart.
        ("fast", {"linear": "none"}, True),
        ("fast", {"linear": "bf16"}, True),
        ("exact", {"linear": "bf16"}, False),
        ("high", {"dense_steps": 1}, False),
        ("high", {"dense_last_steps": 1}, False),
        # other kernels round, merge and skip in their own way.
        ("fast", {"implementation": "reference"}, False),
        ("high", {"method": "spargeattn", "method_options": {"quantize": "int8"}}, False),
        ("high", {"lora": "style.safetensors"}, False),
        ("exact", {}, True),
        ("exact", {"steps": 3, "frames": 5}, True),
        ("exact", {"implementation": "reference"}, True),
        ("exact", {"method": "fg-attn", "method_options": {"top_p": 0.1}}, False),
        ("exact", {"cache": "first-block"}, False),
    ],
)
@pytest.mark.usefixtures("bf16_cpu")
def test_a_speed_s_quality_is_that_of_what_was_measured(
    speed: str, changes: dict[str, Any], holds: bool
) -> None:
    defaults = resolve_model("shapes").defaults
    request = GenerateRequest(prompt="a ball", model="shapes", speed=speed, device="cpu", **changes)
    assert runs_as_measured(resolve(request, defaults), defaults) is holds


def test_the_smaller_videos_that_a_cpu_makes_were_not_measured() -> None:
    defaults = resolve_model("scenes").defaults
    request = GenerateRequest(prompt="a ball", model="scenes", speed="fast", device="cpu")
    assert not runs_as_measured(resolve(request, defaults), defaults)
