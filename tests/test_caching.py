"""Step caches: what they leave out, that it is seen as it happens, and how plans age by it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from click.testing import CliRunner
from counting_backend import CountingBackend
from diffusers import FirstBlockCacheConfig
from diffusers.hooks import apply_first_block_cache
from family_checks import state_of
from support_matrix import LIMITS, VARIANTS
from tiny_families import TINY, latents
from tiny_parts import IMAGE
from tiny_pipelines import latents_of, save_tiny_wan, tiny_wan
from torch.utils._pytree import tree_leaves

from vidsparse.apps.cli import main
from vidsparse.apps.runs.report_page import schedule_cells, schedule_text
from vidsparse.engine import AttentionEngine
from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.grid import TokenGrid
from vidsparse.methods import make_method
from vidsparse.pipelines import is_sparse, restore, sparsify
from vidsparse.pipelines.caching import CACHES, StepCache, cache_warmup, open_cache
from vidsparse.pipelines.compilation import compile_blocks
from vidsparse.pipelines.families import FAMILIES
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.guidance_cache import GuidanceCache
from vidsparse.pipelines.lookup import find_adapter
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest, settings_hash
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 7
# so high that every step which may be left out is.
THRESHOLDS = {"first-block": 1e9, "taylorseer": 2}
CELLS = [
    (cache, name)
    for cache in THRESHOLDS
    for name in VARIANTS.values()
    if (cache, name) not in LIMITS
]


def blocks_of(pipe: Any) -> list[Any]:
    from vidsparse.pipelines.adapter import transformer_blocks

    return transformer_blocks(pipe.transformer, find_adapter(pipe))


class Outputs:
    """What a pipeline's transformer gives back, of video and sound, forward by forward."""

    def __init__(self, pipe: Any) -> None:
        self._all: list[list[torch.Tensor]] = []
        self._hook = pipe.transformer.register_forward_hook(self._take)

    def _take(self, module: Any, args: Any, output: Any) -> None:
        leaves = tree_leaves(output)
        self._all.append([one.clone() for one in leaves if isinstance(one, torch.Tensor)])

    def check_extrapolated(self, branches: int) -> None:
        """That steps 3 and 5 are on the line through the two that were run before."""
        self._hook.remove()
        # of a video's last section.
        last_run = self._all[-STEPS * branches :]
        for branch in range(branches):
            each = last_run[branch::branches]
            for left_out, last, before in ((3, 2, 1), (5, 4, 2)):
                for made, new, old in zip(each[left_out], each[last], each[before], strict=True):
                    line = new + (new - old) * (left_out - last) / (last - before)
                    torch.testing.assert_close(made, line, rtol=1e-4, atol=1e-4)


def check_equal(name: str, ours: torch.Tensor, stock: torch.Tensor) -> None:
    # Kandinsky 5 rounds queries and keys to 16 bits on the way.
    unit = torch.finfo(torch.bfloat16).eps if name.startswith("kandinsky5") else 1e-4
    torch.testing.assert_close(ours, stock, rtol=unit, atol=unit * float(stock.abs().max()))


@pytest.mark.parametrize(("cache", "name"), CELLS)
def test_what_a_cache_leaves_out_is_what_was_not_run(cache: str, name: str) -> None:
    pipe = TINY[name].build()
    expected = latents(name, pipe)
    blocks = blocks_of(pipe)
    with StepCache(pipe, cache, threshold=THRESHOLDS[cache]):
        stock = latents(name, pipe, num_inference_steps=STEPS)
    with sparsify(pipe, top_p=1.0, dense_steps=1) as handle:
        cached = StepCache(pipe, cache, threshold=THRESHOLDS[cache])
        outputs = Outputs(pipe)
        ours = latents(name, pipe, num_inference_steps=STEPS)
        # the attention of a block that is left out is not called.
        called = [
            (step, sum(value is not None for value in row) / len(blocks))
            for step, row in enumerate(handle.trace.density_map())
            if any(value is not None for value in row)
        ]
        shares, left_out = cached.blocks_run(), cached.share_left_out()
        work = handle.summary().work
        cached.remove()
    check_equal(name, ours, stock)
    # all pairs of the others were computed, and the run's are those of all steps.
    assert work is not None
    assert work.left_out == pytest.approx(left_out)
    assert left_out == pytest.approx(1 - sum(shares.values()) / STEPS)
    assert work.total == pytest.approx(1 - left_out, rel=0.02)
    assert list(shares) == list(range(STEPS))
    assert [(step, share) for step, share in shares.items() if share] == called
    if cache == "first-block":
        assert shares == {0: 1.0, **dict.fromkeys(range(1, STEPS), 1 / len(blocks))}
    else:
        # the first three, and from then on every other one.
        assert shares == {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0, 4: 1.0, 5: 0.0, 6: 1.0}
        outputs.check_extrapolated(len(TINY[name].branches))
    # nothing of it stays.
    assert not [block for block in blocks if "forward" in vars(block)]
    assert torch.equal(latents(name, pipe), expected)


# whose pipelines say nothing of their forwards, or whose blocks have classes of their own.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "name"),
    [
        ("taylorseer", "chronoedit"),
        ("taylorseer", "consisid"),
        ("taylorseer", "wan-animate"),
        ("first-block", "hunyuan-image"),
        ("first-block", "skyreels"),
        ("taylorseer", "framepack"),
    ],
)
def test_relatives_of_a_family_have_its_caches_too(cache: str, name: str) -> None:
    pipe = TINY[name].build()
    made = []
    for sparse in (False, True):
        with StepCache(pipe, cache, threshold=THRESHOLDS[cache]) as cached:
            with sparsify(pipe, top_p=1.0, dense_steps=1) if sparse else nullcontext():
                made.append(latents(name, pipe, num_inference_steps=STEPS))
            assert min(cached.blocks_run().values()) < 1
    check_equal(name, made[1], made[0])


@pytest.mark.parametrize("name", ["chronoedit", "consisid"])
def test_relatives_whose_blocks_first_block_does_not_know_are_refused(name: str) -> None:
    pipe = TINY[name].build()
    expected = latents(name, pipe)
    with pytest.raises(UnsupportedError, match=r"know the blocks of \w+Pipeline. Hint: use taylor"):
        StepCache(pipe, "first-block")
    assert torch.equal(latents(name, pipe), expected)


def test_a_cache_starts_anew_with_every_section_of_a_video() -> None:
    pipe = TINY["wan-animate"].build()
    more: dict[str, Any] = {"pose_video": [IMAGE] * 17, "face_video": [IMAGE] * 17}
    with StepCache(pipe, "taylorseer") as cached:
        latents("wan-animate", pipe, num_inference_steps=STEPS, **more)
        shares = cached.blocks_run()
    # of the last section.
    assert shares == {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0, 4: 1.0, 5: 0.0, 6: 1.0}


# the second one while the first steps are looked at for swings.
@pytest.mark.parametrize("warmup", [0, 5])
def test_a_cache_starts_anew_where_the_video_becomes_another_size(warmup: int) -> None:
    pipe = TINY["chronoedit"].build()
    more: dict[str, Any] = {"enable_temporal_reasoning": True, "num_temporal_reasoning_steps": 3}
    with StepCache(pipe, "taylorseer", warmup=warmup) as cached:
        assert bool(latents("chronoedit", pipe, num_inference_steps=STEPS, **more).isfinite().all())
        shares = cached.blocks_run()
    # without its middle frames from step 3 on, of which three are run again.
    assert shares == {**dict.fromkeys(range(6), 1.0), 6: 1.0 if warmup else 0.0}


@pytest.mark.parametrize("cache", list(THRESHOLDS))
def test_families_whose_blocks_a_cache_does_not_know_are_refused(cache: str) -> None:
    able = {each.name for each in FAMILIES if cache in each.caches}
    assert able == {family for family, v in VARIANTS.items() if (cache, v) not in LIMITS}
    for family, variant in VARIANTS.items():
        if family not in able:
            with pytest.raises(UnsupportedError, match=LIMITS[cache, variant].error):
                StepCache(TINY[variant].build(), cache)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("cache", list(THRESHOLDS))
def test_a_cache_goes_with_compiled_blocks(cache: str) -> None:
    pipe = tiny_wan(layers=3)
    with StepCache(pipe, cache, threshold=THRESHOLDS[cache]):
        expected = latents_of(pipe, num_inference_steps=STEPS)
    backend = CountingBackend()
    compile_blocks(pipe, backend=backend)
    calls = [block._compiled_call_impl for block in pipe.transformer.blocks]
    with StepCache(pipe, cache, threshold=THRESHOLDS[cache]) as cached:
        ours = latents_of(pipe, num_inference_steps=STEPS)
        assert min(cached.blocks_run().values()) < 1
    assert backend.graphs > 0
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert [block._compiled_call_impl for block in pipe.transformer.blocks] == calls


# under Python 3.13.0 with torch 2.10 or 2.11 nothing tells compiled code of a cache.
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_cache_on_a_transformer_compiled_before_leaves_steps_out_and_can_be_removed() -> None:
    pipe = tiny_wan()
    with StepCache(pipe, "taylorseer") as cached:
        expected, run = latents_of(pipe, num_inference_steps=STEPS), cached.blocks_run()
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    stock = latents_of(pipe, num_inference_steps=STEPS)
    with StepCache(pipe, "taylorseer") as cached:
        ours = latents_of(pipe, num_inference_steps=STEPS)
        assert cached.blocks_run() == run
    assert min(run.values()) == 0
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(latents_of(pipe, num_inference_steps=STEPS), stock)


@pytest.mark.parametrize("cache", list(THRESHOLDS))
@pytest.mark.parametrize("step", range(STEPS - 1))
def test_a_pipeline_may_become_sparse_before_a_step_that_its_cache_leaves_out(
    cache: str, step: int
) -> None:
    pipe = tiny_wan()

    def after_step(pipe: Any, at: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if at == step:
            sparsify(pipe, top_p=0.3, dense_steps=0)
        return {}

    with StepCache(pipe, cache, threshold=THRESHOLDS[cache]):
        latents_of(pipe, num_inference_steps=STEPS, callback_on_step_end=after_step)
    assert is_sparse(pipe)
    assert restore(pipe)


class Swinging:
    """Has the outputs of a transformer turn back at every step, in some videos of a batch."""

    def __init__(self, pipe: Any, videos: slice) -> None:
        self._videos, self._branches, self._calls = videos, 2, 0
        self._handle = pipe.transformer.proj_out.register_forward_hook(self._swing)

    def _swing(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        swung = output.clone()
        swung[self._videos] += 5 * (-1) ** (self._calls // self._branches)
        self._calls += 1
        return swung

    def stop(self) -> None:
        self._handle.remove()


def steady(pipe: Any) -> Any:
    """The pipeline with outputs that hardly differ between steps; random weights' do."""
    torch.nn.init.constant_(pipe.transformer.proj_out.bias, 20.0)
    return pipe


def test_taylorseer_leaves_no_step_out_of_a_run_that_swings() -> None:
    pipe = steady(tiny_wan(layers=3))
    expected = latents_of(pipe, num_inference_steps=STEPS)
    swinging = Swinging(pipe, slice(None))
    alone = latents_of(pipe, num_inference_steps=STEPS)
    swinging.stop()
    with StepCache(pipe, "taylorseer", warmup=4) as cached:
        swinging = Swinging(pipe, slice(None))
        ours = latents_of(pipe, num_inference_steps=STEPS)
        swung = [cached.swung]
        assert cached.blocks_run() == dict.fromkeys(range(STEPS), 1.0)
        assert torch.equal(ours, alone)
        swinging.stop()
        # the next run is judged by itself.
        latents_of(pipe, num_inference_steps=STEPS)
        swung.append(cached.swung)
        assert [step for step, share in cached.blocks_run().items() if not share] == [4, 6]
    assert swung == [True, False]
    assert not pipe.transformer.is_cache_enabled
    assert torch.equal(latents_of(pipe, num_inference_steps=STEPS), expected)


def test_one_swinging_video_takes_taylorseer_off_its_batch() -> None:
    pipe = steady(tiny_wan(layers=3))
    with StepCache(pipe, "taylorseer", warmup=4) as cached:
        latents_of(pipe, num_inference_steps=STEPS, num_videos_per_prompt=2)
        swung = [cached.swung]
        Swinging(pipe, slice(1, 2))
        latents_of(pipe, num_inference_steps=STEPS, num_videos_per_prompt=2)
        assert [*swung, cached.swung] == [False, True]


def test_a_record_says_that_a_run_swings(folder: Path) -> None:
    loaded = load(folder, device="cpu")
    steady(loaded.pipe)
    request = a_request(folder, cache="taylorseer", dense_steps=4)
    assert not [note for note in generate(loaded, request).record["notes"] if "swing" in note]
    Swinging(loaded.pipe, slice(None))
    record = generate(loaded, request).record
    assert {step["blocks"] for step in record["steps"]} == {1.0}
    assert [
        note for note in record["notes"] if note.startswith("without taylorseer: outputs swing")
    ]


def test_every_run_starts_with_an_empty_cache() -> None:
    pipe = tiny_wan(layers=3)
    with StepCache(pipe, "first-block", threshold=1e9) as cached:
        first = latents_of(pipe)
        shares = cached.blocks_run()
        again = latents_of(pipe)
        assert cached.blocks_run() == shares
    assert shares[0] == 1.0
    assert torch.equal(first, again)


@pytest.mark.parametrize("cache", list(THRESHOLDS))
def test_a_run_after_one_that_ended_in_its_first_step_starts_with_an_empty_cache(
    cache: str,
) -> None:
    pipe = tiny_wan()

    def interrupt(pipe: Any, at: int, t: Any, tensors: Any) -> Any:
        pipe._interrupt = True
        return tensors

    with StepCache(pipe, cache, threshold=THRESHOLDS[cache]) as cached:
        expected = latents_of(pipe, num_inference_steps=STEPS)
        shares = cached.blocks_run()
        latents_of(pipe, num_inference_steps=STEPS, callback_on_step_end=interrupt)
        again = latents_of(pipe, num_inference_steps=STEPS)
        assert cached.blocks_run() == shares
    assert torch.equal(again, expected)


def test_a_lora_of_the_last_projection_may_come_and_go_while_taylorseer_is_on() -> None:
    def run(pipe: Any) -> torch.Tensor:
        return latents_of(pipe, num_inference_steps=STEPS)

    donor = tiny_wan().transformer
    donor.add_adapter(peft.LoraConfig(r=2, target_modules=["proj_out"], init_lora_weights=False))
    state = peft.get_peft_model_state_dict(donor, adapter_name="default")
    weights = {f"transformer.{key}": value for key, value in state.items()}
    pipe = tiny_wan()
    expected = run(pipe)
    with StepCache(pipe, "taylorseer"):
        plain = run(pipe)
    pipe.load_lora_weights(dict(weights))
    with StepCache(pipe, "taylorseer"):
        styled = run(pipe)
        assert not torch.allclose(styled, plain, rtol=1e-2, atol=1e-2)
        pipe.unload_lora_weights()
        assert torch.equal(run(pipe), plain)
        pipe.load_lora_weights(dict(weights))
        assert torch.equal(run(pipe), styled)
    # nothing of it stays.
    pipe.unload_lora_weights()
    assert torch.equal(run(pipe), expected)


def test_a_second_cache_is_refused_and_the_first_one_stays() -> None:
    pipe = tiny_wan(layers=3)
    with StepCache(pipe, "first-block", threshold=1e9) as cached:
        with pytest.raises(UnsupportedError, match="has the cache FirstBlockCache already"):
            StepCache(pipe, "taylorseer")
        latents_of(pipe)
        assert cached.blocks_run()[1] == pytest.approx(1 / 3)
    assert not pipe.transformer.is_cache_enabled


def put_on_the_host(pipe: Any) -> None:
    """A cache that its transformer does not know of."""
    apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig())


@pytest.mark.parametrize(
    "first", [GuidanceCache, partial(StepCache, cache="taylorseer"), put_on_the_host]
)
@pytest.mark.parametrize("second", [GuidanceCache, partial(StepCache, cache="first-block")])
def test_two_caches_of_different_kinds_do_not_stand_on_each_other(first: Any, second: Any) -> None:
    pipe = tiny_wan(two_stage=True)
    first(pipe)
    before = state_of(pipe)
    with pytest.raises(UnsupportedError, match=r"has the cache \w+ already"):
        second(pipe)
    assert state_of(pipe) == before


# plans


def actions_at(steps: tuple[int, ...], reuse: int) -> list[tuple[int, str, int | None]]:
    """What an engine does in a run of ten steps of which ``steps`` are run."""
    grid = TokenGrid(3, 5, 7)
    schedule = Schedule(dense_steps=1, reuse=reuse)
    engine = AttentionEngine(make_method("fg-attn", top_p=0.5), schedule=schedule, layers=1)
    engine.begin_run(10)
    q = torch.randn(1, 2, grid.tokens, 16)
    for step in steps:
        site = CallSite(layer=0, step=step, timestep=0.0, grid=grid, branch="conditional")
        engine.attend(q, q, q, site)
    return [(cell.step, cell.action, cell.plan_step) for cell in engine.trace.cells]


def test_plans_age_by_the_steps_that_are_run() -> None:
    assert actions_at((0, 1, 4, 5, 9), reuse=2) == [
        (0, "dense", None),
        (1, "replan", 1),
        (4, "reuse", 1),
        (5, "replan", 5),
        (9, "reuse", 5),
    ]


def test_without_a_cache_plans_are_made_where_the_schedule_says() -> None:
    schedule = Schedule(dense_steps=1, reuse=3)
    done = actions_at(tuple(range(10)), reuse=3)
    assert [action for _, action, _ in done] == [
        schedule.decide(step, 10, 0, 1).value for step in range(10)
    ]


# commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_wan(tmp_path_factory.mktemp("models") / "tiny", layers=3)


def a_request(folder: Path, **changes: Any) -> GenerateRequest:
    small = {"frames": 5, "width": 32, "height": 32, "steps": STEPS, "model": str(folder)}
    return GenerateRequest(**{"prompt": "a red circle", **small, **changes})


def test_a_record_says_what_every_step_was(folder: Path) -> None:
    loaded = load(folder, device="cpu")
    request = a_request(folder, cache="first-block", cache_threshold=1e9, dense_steps=1, reuse=2)
    record = generate(loaded, request).record
    third = pytest.approx(1 / 3)
    assert record["steps"] == [
        {"kind": "dense", "blocks": 1.0},
        *({"kind": "cached", "blocks": third} for _ in range(STEPS - 1)),
    ]
    assert record["options"]["cache"] == "first-block"
    assert record["oldest_plan"] == 1
    # six of seven steps ran one block of three.
    work = record["work"]
    assert work["left_out"] == pytest.approx(6 / 7 * 2 / 3)
    assert work["dense_steps"] == pytest.approx(1 / 7)
    assert work["sparse"] == pytest.approx(6 / 7 / 3 * record["computed"])
    assert record["total"] == pytest.approx(work["dense_steps"] + work["sparse"])
    plain = generate(loaded, a_request(folder, dense_steps=2)).record
    assert [step["kind"] for step in plain["steps"]] == ["dense"] * 2 + ["sparse"] * (STEPS - 2)
    assert {step["blocks"] for step in plain["steps"]} == {1.0}
    assert not loaded.pipe.transformer.is_cache_enabled


# on a CPU a dense run is the stock pipeline, whose calls are not followed.
@pytest.mark.parametrize("cache", [*THRESHOLDS, "guidance"])
def test_a_dense_run_says_what_its_cache_left_out(folder: Path, cache: str) -> None:
    loaded = load(folder, device="cpu")
    most = THRESHOLDS.get(cache, 2)
    request = a_request(folder, method="dense", cache=cache, cache_threshold=most)
    record = generate(loaded, request).record
    run = sum(step["blocks"] for step in record["steps"]) / STEPS
    assert run < 1
    work = record["work"]
    assert (record["total"], work["dense_steps"]) == (pytest.approx(run), pytest.approx(run))
    assert work["left_out"] == pytest.approx(1 - run)
    # and as it is counted where calls are.
    with (
        sparsify(loaded.pipe, "dense") as handle,
        open_cache(loaded.pipe, cache, threshold=most, dense_steps=1, steps=STEPS) as cached,
    ):
        latents("wan", loaded.pipe, num_inference_steps=STEPS)
        followed = handle.summary().work
    assert followed is not None
    assert followed.left_out == pytest.approx(cached.share_left_out())
    assert followed.left_out > 0


def test_old_plans_are_told_of(folder: Path) -> None:
    loaded = load(folder, device="cpu")
    request = a_request(folder, cache="taylorseer", cache_threshold=2, dense_steps=1, reuse=3)
    # run are 0, 1, 2, 4 and 6, the first three in any case: the plan of 1 serves 2 and 4.
    record = generate(loaded, request).record
    assert [step["kind"] for step in record["steps"]] == [
        "dense", "sparse", "sparse", "cached", "sparse", "cached", "sparse",
    ]  # fmt: skip
    assert record["oldest_plan"] == 3


def test_at_most_a_third_of_the_steps_is_left_out() -> None:
    for steps in range(3, 101):
        others = steps - cache_warmup(0.1, steps)
        assert -(-others // 2) <= steps / 3


def test_another_cache_is_another_video(folder: Path) -> None:
    variants: list[dict[str, Any]] = [
        {}, {"cache": "none"}, {"cache": "first-block"}, {"cache": "taylorseer"},
        {"cache": "first-block", "cache_threshold": 0.1},
    ]  # fmt: skip
    hashes = [settings_hash(a_request(folder, **each)) for each in variants]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4
    default: dict[str, Any] = {"cache": "first-block", "cache_threshold": CACHES["first-block"]}
    assert settings_hash(a_request(folder, **default)) == hashes[2]


def test_steps_are_drawn_as_most_runs_had_them() -> None:
    def run(*kinds: str) -> dict[str, Any]:
        shares = {"dense": 1.0, "sparse": 1.0, "cached": 0.25}
        return {"steps": [{"kind": kind, "blocks": shares[kind]} for kind in kinds]}

    cells = schedule_cells([run("dense", "sparse", "cached"), run("dense", "cached", "cached"), {}])
    assert [cell["kind"] for cell in cells] == ["dense", "sparse", "cached"]
    assert cells[1]["label"] == "step 2: sparse in 1 of 2 runs"
    assert cells[2]["label"] == "step 3: cached, 25.0% of the blocks run"
    assert schedule_text(cells) == "1 dense, 1 sparse, 1 cached"
    assert schedule_cells([{}]) == []


# beyond the reach of a refresh a plan ages as it does without one.
@pytest.mark.parametrize(
    ("more", "oldest", "drawn"),
    [
        ((), 3, "1 dense, 4 sparse, 2 cached"),
        (
            ("--method", "foresight", "--refresh", "1", "--reach", "1", "--reuse", "5"),
            6,
            "4 sparse, 2 cached",
        ),
    ],
    ids=["plain", "reach"],
)
def test_compare_draws_the_steps_and_tells_of_old_plans(
    folder: Path, tmp_path: Path, more: tuple[str, ...], oldest: int, drawn: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n", encoding="utf-8")
    small = ("--frames", "9", "--size", "32x32", "--steps", str(STEPS), "--device", "cpu")
    cache = ("--cache", "taylorseer", "--dense-steps", "1", "--reuse", "3")
    arguments = ["compare", str(prompts), "--model", str(folder), *small, *cache, *more]
    result = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "out").glob("*/report.json")
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["settings"]["cache_threshold"] == 2
    sides = report["prompts"][0]
    assert {step["kind"] for step in sides["dense"]["steps"]} == {"dense"}
    assert [step["kind"] for step in sides["sparse"]["steps"]].count("cached") == 2
    assert [note for note in report["notes"] if note.startswith("2 of the sparse side's 7 steps")]
    work = report["summary"]["work"]
    assert work["left_out"] == pytest.approx(2 / 7)
    parts = ("dense_steps", "dense_layers", "dense_fallback", "refresh", "sparse")
    assert report["summary"]["total"] == pytest.approx(sum(work[name] for name in parts))
    said = f"still served {oldest} steps after its own"
    assert [note for note in report["notes"] if said in note]
    page = file.with_suffix(".html").read_text(encoding="utf-8")
    assert drawn in page
    assert page.count('<rect class="cached"') == 2
    assert "and 28.6% left out by the step cache" in page


def test_a_command_refuses_a_cache_that_does_not_know_the_family(tmp_path: Path) -> None:
    pipe = TINY["ltx2"].build()
    pipe.save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n", encoding="utf-8")
    arguments = ["generate", str(prompts), "--model", str(tmp_path / "model")]
    result = CliRunner().invoke(main, [*arguments, "--cache", "first-block", "--device", "cpu"])
    assert result.exit_code == 2
    words = " ".join(result.output.split())
    assert "diffusers' cache first-block does not know the blocks of LTX-2" in words
    assert "Hint: use taylorseer" in words


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": "teacache"}, "unknown cache 'teacache'. Hint: choose from none, first-block"),
        ({"cache_threshold": 0.1}, "without a cache. Hint: add --cache first-block"),
        ({"cache": "first-block", "cache_threshold": 0}, "must be above 0, got 0"),
        ({"cache": "first-block", "cache_threshold": float("nan")}, "must be above 0, got nan"),
        ({"cache": "taylorseer", "cache_threshold": 1}, "whole number of steps from 2, got 1"),
        ({"cache": "taylorseer", "cache_threshold": 2.5}, "from 2, got 2.5"),
    ],
)
def test_bad_caches_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        GenerateRequest(prompt="", **changes)
