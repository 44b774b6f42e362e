"""``sparsify`` on tiny pipelines of every family: what it computes, and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from family_checks import (
    check_full_mask,
    first_forward,
    forward,
    state_of,
    transformers_of,
)
from quick import slow_but
from support_matrix import VARIANTS
from tiny_families import PROMPTS, TINY, Tiny, latents
from tiny_kandinsky import kandinsky5
from tiny_motif import motif
from tiny_parts import IMAGE, TWO, noise, prompt_mask
from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.grid import TokenGrid
from vidsparse.pipelines import accelerate, restore, sparsify
from vidsparse.pipelines.compilation import compile_blocks
from vidsparse.pipelines.families import FAMILIES
from vidsparse.pipelines.handle import attention_shape
from vidsparse.pipelines.layout import Layout

pytestmark = pytest.mark.usefixtures("one_thread")

EVERY = pytest.mark.parametrize("name", list(TINY))
# the families differ little in it.
ONE = pytest.mark.parametrize("name", slow_but(["wan", "hunyuan"], TINY))
GUIDANCE = pytest.mark.parametrize("guidance", slow_but([3.0], [1.0, 3.0]))


def prompts_of(tiny: Tiny) -> list[str]:
    """Two of different lengths, where the pipeline takes two."""
    return PROMPTS if tiny.batch else PROMPTS[1:]


# what it computes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY
def test_full_mask_stays_within_twice_the_stock_error(name: str, dtype: torch.dtype) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    arguments = first_forward(name, pipe, prompts=prompts_of(tiny), size=tiny.odd)
    if name.startswith("easyanimate"):
        # two hundred padded tokens alike are rounded alike, and in another order of the keys that
        # does not even out: ten times the error on some processors, PyTorch's own kernel included.
        arguments["encoder_hidden_states"] = noise(5, *arguments["encoder_hidden_states"].shape)
    check_full_mask(pipe, arguments, dtype)


@EVERY
def test_dense_calls_are_the_stock_ones(name: str) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    stock = latents(name, pipe, prompts=prompts_of(tiny))
    with sparsify(pipe, "dense"):
        ours = latents(name, pipe, prompts=prompts_of(tiny))
    if tiny.exact:
        assert torch.equal(ours, stock)
    else:
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


@GUIDANCE
@EVERY
def test_a_small_top_p_skips_work_and_changes_the_video(name: str, guidance: float) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    stock = latents(name, pipe, guidance=guidance)
    with sparsify(pipe, top_p=0.3, dense_steps=0) as handle:
        sparse = latents(name, pipe, guidance=guidance)
        summary = handle.summary()
    assert summary.selected is not None
    assert summary.selected < 0.9
    assert summary.notes == ()
    assert bool(sparse.isfinite().all())
    assert not torch.equal(sparse, stock)


@GUIDANCE
@pytest.mark.parametrize("name", [name for name, tiny in TINY.items() if tiny.batch])
def test_a_batch_of_two_equals_two_single_runs(name: str, guidance: float) -> None:
    # in fp64, so that a sum's rounding, which batches change, decides over no tile.
    pipe = TINY[name].build().to(torch.float64)
    options: dict[str, Any] = {"guidance": guidance, "size": TINY[name].odd}
    with sparsify(pipe, top_p=0.5, dense_steps=1):
        both = latents(name, pipe, prompts=PROMPTS, **options)
        first = latents(name, pipe, prompts=PROMPTS[:1], seeds=(0,), **options)
    torch.testing.assert_close(both[:1], first, rtol=1e-4, atol=1e-4)


def test_samples_with_equally_much_text_run_together() -> None:
    grid = TokenGrid(1, 2, 2, text=10)
    assert Layout(grid).groups(3) == [(slice(0, 3), 0)]
    assert Layout(grid, (10, 10)).groups(2) == [(slice(0, 2), 0)]
    assert Layout(grid, (4, 4)).groups(2) == [(slice(0, 2), 6)]
    assert Layout(grid, (4, 4, 0, 10)).groups(4) == [
        (slice(0, 2), 6),
        (slice(2, 3), 10),
        (slice(3, 4), 0),
    ]
    assert Layout(grid, (4, 0, 4)).groups(3) == [([0, 2], 6), (slice(1, 2), 10)]


def test_samples_apart_and_without_any_text_equal_the_stock_ones() -> None:
    pipe = TINY["mochi"].build()
    arguments = first_forward("mochi", pipe, prompts=PROMPTS)
    arguments["encoder_attention_mask"] = prompt_mask(4, 16, 7, 0, 7, 16)
    stock = forward(pipe.transformer, arguments, torch.float32)
    with sparsify(pipe, top_p=1.0, dense_steps=0) as handle:
        ours = forward(pipe.transformer, arguments, torch.float32)
        # two layers, three groups.
        assert handle.summary().calls == 6
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


def test_padding_in_front_of_mochis_text_is_refused() -> None:
    pipe = TINY["mochi"].build()
    arguments = first_forward("mochi", pipe)
    arguments["encoder_attention_mask"] = arguments["encoder_attention_mask"].flip(1)
    with sparsify(pipe), pytest.raises(UnsupportedError, match="padding at the end"):
        forward(pipe.transformer, arguments, torch.float32)


@pytest.mark.parametrize("name", [name for family in FAMILIES for name in family.refused])
def test_pipelines_that_attend_otherwise_are_refused_with_the_reason(name: str) -> None:
    cls = getattr(diffusers, name)
    with pytest.raises(UnsupportedError, match=f"{name} .*, which sparse attention does not do"):
        sparsify(cls.__new__(cls))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"causal_block_size": 3}, "not in causal blocks"),
        ({"ar_step": 1}, "needs all frames at the same denoising step"),
    ],
)
def test_skyreels_frames_that_do_not_go_together_are_refused(
    asked: dict[str, Any], reason: str
) -> None:
    name = "skyreels-v2-forcing"
    pipe = TINY[name].build()
    with sparsify(pipe), pytest.raises(UnsupportedError, match=reason):
        latents(name, pipe, **asked)


def test_a_noisy_image_and_a_long_video_of_diffusion_forcing_keep_their_steps() -> None:
    name = "skyreels-v2-forcing-image"
    pipe = TINY[name].build()
    # two segments. frames that are given are told a timestep between those of two steps, or one of
    # them, and their noise is torch's own.
    long: dict[str, Any] = {"size": (17, 64, 64), "base_num_frames": 9, "overlap_history": 5}
    pipe.scheduler.set_timesteps(3)
    for noised in (20, int(pipe.scheduler.timesteps[1])):
        made = []
        for sparse in (False, True):
            torch.manual_seed(0)
            if not sparse:
                made.append(latents(name, pipe, **long, addnoise_condition=noised))
                continue
            with sparsify(pipe, top_p=1.0, dense_steps=1) as handle:
                made.append(latents(name, pipe, **long, addnoise_condition=noised))
                assert handle.summary().notes == ()
                seen = [(c.step, c.action) for c in handle.trace.cells if c.layer == 0]
        torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-4)
        # of the last segment.
        by_branch = [("dense", "dense"), *[("replan", "reuse")] * 2]
        assert seen == [(step, one) for step, both in enumerate(by_branch) for one in both]


def test_diffusion_forcing_on_several_processes_is_refused() -> None:
    name = "skyreels-v2-forcing"
    pipe = TINY[name].build()
    with sparsify(pipe):
        vars(pipe.transformer)["_parallel_config"] = object()
        with pytest.raises(UnsupportedError, match="is not dealt to several processes"):
            latents(name, pipe)


def test_kandinskys_own_sparse_attention_is_refused() -> None:
    windows: dict[str, Any] = {f"attention_w{axis}": 3 for axis in "THW"}
    pipe = kandinsky5(attention_type="nabla", attention_P=0.9, **windows)
    with sparsify(pipe), pytest.raises(UnsupportedError, match="sparse attention of their own"):
        latents("kandinsky5", pipe, size=(9, 128, 128))


def test_motifs_blocks_that_see_the_video_twice_run_dense_and_the_trace_says_so() -> None:
    pipe = motif(num_single_layers=3, num_decoder_layers=1)
    arguments = first_forward("motif", pipe, prompts=PROMPTS)
    stock = forward(pipe.transformer, arguments, torch.float32)
    with sparsify(pipe, top_p=1.0, dense_steps=0) as handle:
        ours = forward(pipe.transformer, arguments, torch.float32)
        (note,) = handle.summary().notes
        assert {cell.layer for cell in handle.trace.cells if cell.selected is None} == {3}
    assert note.startswith("dense: a grid of 3x4x4 video and 16 text tokens does not match 96")
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


def test_motifs_text_needs_no_mask() -> None:
    pipe = motif()
    arguments = first_forward("motif", pipe) | {"encoder_attention_mask": None}
    stock = forward(pipe.transformer, arguments, torch.float32)
    with sparsify(pipe, top_p=1.0, dense_steps=0) as handle:
        ours = forward(pipe.transformer, arguments, torch.float32)
        assert handle.summary().notes == ()
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


def test_a_new_segment_of_wan_animate_is_a_run_of_its_own() -> None:
    pipe = TINY["wan-animate"].build()
    more: dict[str, Any] = {"pose_video": [IMAGE] * 17, "face_video": [IMAGE] * 17}
    expected = latents("wan-animate", pipe, **more)
    with sparsify(pipe, top_p=1.0, dense_steps=1) as handle:
        ours = latents("wan-animate", pipe, **more)
        actions = [(c.step, c.action) for c in handle.trace.cells if c.layer == 0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    # of the last segment.
    by_branch = [("dense", "dense"), *[("replan", "reuse")] * 2]
    assert actions == [(step, one) for step, both in enumerate(by_branch) for one in both]


def test_chronoedit_may_drop_its_middle_frames_half_way() -> None:
    pipe = TINY["chronoedit"].build()
    more: dict[str, Any] = {"enable_temporal_reasoning": True, "num_temporal_reasoning_steps": 2}
    expected = latents("chronoedit", pipe, **more)
    with sparsify(pipe, top_p=1.0, dense_steps=0, reuse=3) as handle:
        ours = latents("chronoedit", pipe, **more)
        assert handle.summary().notes == ()
        actions = [c.action for c in handle.trace.cells if c.layer == 0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    # a plan of the whole video is none of what is left of it.
    assert actions == ["replan", "reuse", "reuse", "reuse", "replan", "reuse"]


@pytest.mark.parametrize(
    ("name", "video", "text"), [("hunyuan", 3 * 4 * 4, 32), ("hunyuan15", 3 * 8 * 8, 16 + 12 + 9)]
)
def test_padding_is_cut_and_no_mask_of_all_pairs_is_built(
    name: str, video: int, text: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.models import attention_dispatch

    pipe = TINY[name].build()
    seen: list[tuple[int, Any]] = []
    dispatch = attention_dispatch.dispatch_attention_fn

    def watch(query: Tensor, *args: Any, attn_mask: Any = None, **kwargs: Any) -> Tensor:
        seen.append((query.shape[1], attn_mask))
        out: Tensor = dispatch(query, *args, attn_mask=attn_mask, **kwargs)
        return out

    monkeypatch.setattr(attention_dispatch, "dispatch_attention_fn", watch)
    with sparsify(pipe, "dense"):
        latents(name, pipe, prompts=PROMPTS, guidance=1.0)
    assert {mask for _, mask in seen} == {None}
    lengths = {tokens for tokens, _ in seen}
    # two prompts, neither as long as there is room.
    assert len(lengths) == 2
    assert all(video < tokens < video + text for tokens in lengths)


@pytest.mark.parametrize("arguments", ["positional", "named"])
def test_arguments_are_found_however_they_are_passed(arguments: str) -> None:
    pipe = TINY["hunyuan"].build()
    given = first_forward("hunyuan", pipe)
    order = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask")
    positional = [given.pop(name) for name in order] if arguments == "positional" else []
    with sparsify(pipe, dense_steps=0) as handle, torch.no_grad():
        pipe.transformer(*positional, **given)
        assert handle.summary().notes == ()
        assert handle.summary().selected is not None


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_cut_padding_has_the_stock_gradient_compiled_too() -> None:
    found = []
    for ours in (False, True):
        pipe = TINY["hunyuan"].build()
        arguments = first_forward("hunyuan", pipe, prompts=PROMPTS)
        if ours:
            sparsify(pipe, "dense")
            compile_blocks(pipe, backend="aot_eager")
        with torch.enable_grad():
            torch.autograd.backward(pipe.transformer(**arguments)[0].sum())
        found.append({name: one.grad for name, one in pipe.transformer.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", slow_but(["helios"], VARIANTS.values()))
def test_no_attention_over_all_of_the_video_goes_past_the_engine(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = TINY[name].build()
    attend = F.scaled_dot_product_attention
    depth = 0
    strays: list[tuple[int, int]] = []

    def watch(*args: Any, **kwargs: Any) -> Tensor:
        q, k = (args[0], args[1]) if args else (kwargs["query"], kwargs["key"])
        layout = handle._session._layout
        if layout is not None and not depth:
            assert isinstance(layout, Layout)
            queries, keys = q.shape[-2], k.shape[-2]
            if min(queries, keys) >= layout.grid.video:
                strays.append((queries, keys))
        out: Tensor = attend(*args, **kwargs)
        return out

    def counted(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal depth
            depth += 1
            try:
                return own(*args, **kwargs)
            finally:
                depth -= 1

        return run

    with sparsify(pipe, top_p=0.5, dense_steps=0) as handle:
        for engine in handle.engines:
            monkeypatch.setattr(engine, "attend", counted(engine.attend))
        monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
        latents(name, pipe)
        assert handle.summary().calls > 0
    assert strays == []


# where a call stands


def test_a_scheduler_that_counts_no_steps_is_followed_by_its_timesteps() -> None:
    pipe = TINY["cogvideox-dpm"].build()
    arguments = first_forward("cogvideox-dpm", pipe)
    # a loop of one's own, outside any call of the pipeline.
    pipe._current_timestep = None
    pipe.scheduler.set_timesteps(4)
    with sparsify(pipe, dense_steps=2) as handle:
        for t in pipe.scheduler.timesteps:
            arguments["timestep"] = t.expand(2)
            forward(pipe.transformer, arguments, torch.float32)
        steps = [(c.step, c.action) for c in handle.trace.cells if c.layer == 0]
        assert steps == [(0, "dense"), (1, "dense"), (2, "replan"), (3, "replan")]
        arguments["timestep"] = torch.full((2,), -7)
        with pytest.raises(UnsupportedError, match="CogVideoXDPMScheduler does not say"):
            forward(pipe.transformer, arguments, torch.float32)


def test_a_pipeline_that_says_how_many_steps_it_runs_but_not_which_counts_its_own() -> None:
    pipe = TINY["easyanimate-inpaint"].build()
    with sparsify(pipe, dense_steps=1) as handle:
        latents("easyanimate-inpaint", pipe, num_inference_steps=4, strength=0.5)
    steps = [(c.step, c.action) for c in handle.trace.cells if c.layer == 0]
    assert steps == [(0, "dense"), (1, "replan")]


@ONE
def test_the_trace_names_every_step_and_layer(name: str) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    with sparsify(pipe, dense_steps=1) as handle:
        latents(name, pipe)
    calls = [(c.step, c.layer, c.branch, c.action) for c in handle.trace.cells]
    layers = max(layer for _, layer, _, _ in calls) + 1
    assert {step for step, *_ in calls} == {0, 1, 2}
    assert all((action == "dense") == (step == 0) for step, _, _, action in calls)
    branches = tiny.attending or tiny.branches
    assert {branch for *_, branch, _ in calls} == set(branches)
    # the last layer passes its values on where LTX-2 perturbs it.
    perturbed = 3 if "uncond_stg" in tiny.branches else 0
    assert len(set(calls)) == 3 * layers * len(branches) - perturbed


@ONE
def test_a_second_run_starts_afresh(name: str) -> None:
    pipe = TINY[name].build()
    with sparsify(pipe, top_p=0.5, dense_steps=0, reuse=100) as handle:
        first = latents(name, pipe)
        calls = handle.summary().calls
        assert torch.equal(latents(name, pipe), first)
        assert handle.summary().calls == calls


@pytest.mark.slow
@EVERY
def test_what_the_refreshes_of_a_speed_keep_serves_every_layer_and_branch(name: str) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    with accelerate(pipe, "balanced", steps=3) as fast:
        assert bool(latents(name, pipe).isfinite().all())
        cells = fast.sparse.trace.cells
        experts = len(fast.sparse.engines)
    actions = {(cell.step, cell.action) for cell in cells}
    # the second of two experts has nothing of the first's.
    later = {(1, "refresh"), (2, "reuse")} if experts > 1 else {(1, "reuse"), (2, "reuse")}
    assert actions == {(0, "refresh"), *later}
    assert {cell.branch for cell in cells} == set(tiny.attending or tiny.branches)


@ONE
def test_tokens_that_are_no_grid_run_dense_and_the_trace_says_so(name: str) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    stock = latents(name, pipe)
    with sparsify(pipe, top_p=0.1, dense_steps=0) as handle:
        session = handle._session
        read = session.adapter.layout

        def one_frame_more(transformer: Any, arguments: Any) -> Any:
            layout = read(transformer, arguments)
            assert isinstance(layout, Layout)
            grid = replace(layout.grid, frames=layout.grid.frames + 1)
            return replace(layout, grid=grid)

        session.adapter = replace(session.adapter, layout=one_frame_more)
        ours = latents(name, pipe)
        assert handle.summary().dense_call_share == 1.0
        (note,) = {n.split(" video")[0][:20] for n in handle.summary().notes}
        assert note == "dense: a grid of " + note[17:]
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


def test_a_forward_that_is_no_video_s_runs_dense_and_the_trace_says_so() -> None:
    pipe = TINY["wan"].build()
    stock = latents("wan", pipe)
    with sparsify(pipe, top_p=0.1, dense_steps=0) as handle:
        session = handle._session
        session.adapter = replace(session.adapter, layout=lambda transformer, arguments: None)
        assert torch.equal(latents("wan", pipe), stock)
        cells, summary = handle.trace.cells, handle.summary()
    assert {(c.step, c.branch) for c in cells} == {(s, b) for s in range(3) for b in TWO}
    assert summary.notes == ("dense: the arguments of this forward are not those of a video",)
    assert "all calls dense" in str(summary)


@pytest.mark.parametrize(("name", "heads"), [("wan", 2), ("kandinsky5", 2), ("cosmos3", 4)])
def test_calibration_counts_the_heads_by_whatever_name_they_have(name: str, heads: int) -> None:
    assert attention_shape(TINY[name].build()) == (1, 2, heads)


# no trace left


@EVERY
def test_removal_restores_the_pipeline_bit_for_bit(name: str) -> None:
    pipe = TINY[name].build()
    stock = latents(name, pipe)
    before = state_of(pipe)
    handle = sparsify(pipe, top_p=0.3, dense_steps=0)
    assert state_of(pipe) != before
    latents(name, pipe)
    handle.remove()
    assert state_of(pipe) == before
    assert torch.equal(latents(name, pipe), stock)
    sparsify(pipe)
    assert restore(pipe)
    assert state_of(pipe) == before


@EVERY
def test_only_video_self_attention_is_replaced(name: str) -> None:
    pipe = TINY[name].build()
    with sparsify(pipe):
        for transformer in transformers_of(pipe):
            for path, module in transformer.named_modules():
                processor = getattr(module, "processor", None)
                if processor is None:
                    continue
                ours = type(processor).__module__.startswith("vidsparse")
                parts = path.split(".")
                video = parts[-1] in ("attn1", "attn") and "token_refiner" not in parts
                # Kandinsky's text, sound and video have blocks of the same make.
                video |= parts[-1] == "self_attention" and parts[0].startswith("visual")
                video |= parts[-1] == "self_attn"
                video &= "audio_dec_block" not in parts and "text_transformer" not in parts[0]
                assert ours == video, path
