"""The nodes for ComfyUI against a stand-in that calls them as ComfyUI does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import comfyui_host as host
import pytest
import torch
from torch import Tensor

from vidsparse.apps.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from vidsparse.apps.comfyui.layout import ForwardLayout, read_layout
from vidsparse.apps.comfyui.nodes import read_options
from vidsparse.apps.comfyui.report import NOTHING
from vidsparse.apps.comfyui.session import KEY, NodeSession, session_of
from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.grid import TokenGrid

SPARSE, REPORT = NODE_CLASS_MAPPINGS["VidsparseModel"], NODE_CLASS_MAPPINGS["VidsparseReport"]


def loaded(transformer: Any = None, **form: Any) -> host.ModelPatcher:
    """A model as a loader hands it on; ``form`` is how it calls attention."""
    transformer = transformer or host.WanModel()
    transformer.newer = form.pop("newer", False)
    transformer.form = form
    return host.ModelPatcher(host.BaseModel(transformer))


def sparse(model: host.ModelPatcher, **changes: Any) -> host.ModelPatcher:
    settings = {
        "method": "fg-attn", "quality": 0.5, "tile": "auto", "means": "auto",
        "start_percent": 0.0, "end_percent": 1.0, "min_tokens": 0,
    }  # fmt: skip
    return SPARSE().run(model, **{**settings, **changes})[0]


def session(model: host.ModelPatcher) -> NodeSession:
    found = session_of(model)
    assert found is not None
    return found


def cells(model: host.ModelPatcher) -> list[Any]:
    return session(model).engine.trace.cells


def report(model: host.ModelPatcher) -> str:
    text: str = REPORT().run({"samples": host.latent()}, model)["result"][1]
    return text


def actions(model: host.ModelPatcher) -> set[str]:
    return {cell.action for cell in cells(model)}


# ---- what it computes ----

FORMS = [
    {},
    {"positional": True},
    {"skip_reshape": True},
    {"skip_reshape": True, "skip_output_reshape": True},
    {"skip_output_reshape": True},
    {"mask": None, "attn_precision": None},
    {"newer": True, "preferred_attention": None, "low_precision_attention": False},
    {"newer": True, "skip_reshape": True, "scale": host.DIM**-0.5},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
@pytest.mark.parametrize("together", [True, False])
def test_at_full_mask_a_run_is_the_stock_one(form: dict[str, Any], together: bool) -> None:
    model = loaded(**form)
    stock = host.sample(model, together=together)
    ours = sparse(model, quality=1.0)
    torch.testing.assert_close(host.sample(ours, together=together), stock, rtol=1e-5, atol=1e-6)
    assert {cell.computed.mean().item() for cell in cells(ours)} == {1.0}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
def test_less_than_all_is_computed_in_every_form(form: dict[str, Any]) -> None:
    model = loaded(**form)
    ours = sparse(model, quality=0.3, tile="16x16")
    assert not torch.equal(host.sample(ours), host.sample(model))
    assert all(cell.sparse for cell in cells(ours))
    assert all(cell.computed.mean() < 1 for cell in cells(ours))


@pytest.mark.parametrize("newer", [True, False])
def test_layers_and_steps_are_told_apart(newer: bool) -> None:
    ours = sparse(loaded(host.WanModel(blocks=3), newer=newer))
    host.sample(ours, steps=4)
    assert [(c.step, c.layer) for c in cells(ours)] == [(s, n) for s in range(4) for n in range(3)]
    assert {cell.branch for cell in cells(ours)} == {"unconditional+conditional"}


def test_guidance_branches_apart_are_told_apart() -> None:
    ours = sparse(loaded())
    host.sample(ours, together=False)
    assert {cell.branch for cell in cells(ours)} == {"conditional", "unconditional"}


def packed() -> dict[str, Any]:
    """A run of video and sound whose latents are packed into one."""
    frames, height, width = host.MiniMaxH3Model.video
    shape = (1, 4, frames, 2 * height, 2 * width)
    video = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    sound = torch.ones(1, 8, 2, 9)
    x = torch.cat([video.flatten(1), sound.flatten(1)], 1)[:, None]
    return {"x": x, "latent_shapes": [tuple(video.shape), tuple(sound.shape)]}


@pytest.mark.parametrize("newer", [True, False])
def test_a_run_of_minimax_h3_at_full_mask_is_the_stock_one(newer: bool) -> None:
    model = loaded(host.MiniMaxH3Model(), newer=newer, skip_reshape=True)
    stock = host.sample(model, together=False, **packed())
    ours = sparse(model, quality=1.0)
    made = host.sample(ours, together=False, **packed())
    torch.testing.assert_close(made, stock, rtol=1e-5, atol=1e-6)
    assert {cell.computed.mean().item() for cell in cells(ours)} == {1.0}


def test_what_stands_before_the_video_of_minimax_h3_is_exact_both_ways() -> None:
    model = loaded(host.MiniMaxH3Model(blocks=1), skip_reshape=True)
    beside = host.MiniMaxH3Model.beside
    host.sample(model, steps=1, guided=False, **packed())
    stock = model.model.diffusion_model.hidden
    ours = sparse(model, quality=0.01, tile="16x16")
    host.sample(ours, steps=1, guided=False, **packed())
    hidden = model.model.diffusion_model.hidden
    (cell,) = cells(ours)
    assert cell.sparse
    torch.testing.assert_close(hidden[:, :beside], stock[:, :beside], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(hidden[:, beside:], stock[:, beside:], rtol=1e-3, atol=1e-3)


def test_text_behind_the_video_is_exact_both_ways() -> None:
    model = loaded(host.HunyuanVideo(blocks=1))
    x = torch.randn(1, 4, 6, 16, 20, generator=torch.Generator().manual_seed(4))
    video = 6 * 8 * 10
    host.sample(model, steps=1, guided=False, x=x)
    stock = model.model.diffusion_model.hidden
    ours = sparse(model, quality=0.01, tile="16x16")
    host.sample(ours, steps=1, guided=False, x=x)
    hidden = model.model.diffusion_model.hidden
    (cell,) = cells(ours)
    assert cell.sparse
    torch.testing.assert_close(hidden[:, video:], stock[:, video:], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(hidden[:, :video], stock[:, :video], rtol=1e-3, atol=1e-3)


class Compiled(torch.nn.Module):
    """What ``torch.compile`` makes of a transformer."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self._orig_mod = transformer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


@pytest.mark.parametrize("first", ["compiled", "ours"])
def test_a_model_that_another_node_compiles_is_read_as_it_is(first: str) -> None:
    # with tokens of text beside the video's, which its class alone tells.
    model = loaded(host.HunyuanVideo(blocks=2))

    def compiles(executor: Any, *args: Any, **kwargs: Any) -> Any:
        owner, whole = executor.class_obj, executor.class_obj.diffusion_model
        owner.diffusion_model = Compiled(whole)
        try:
            return executor(*args, **kwargs)
        finally:
            owner.diffusion_model = whole

    if first == "compiled":
        model.add_wrapper_with_key("apply_model", "torch.compile", compiles)
    ours = sparse(model, quality=0.3, tile="16x16")
    if first == "ours":
        ours.add_wrapper_with_key("apply_model", "torch.compile", compiles)
    host.sample(ours)
    assert cells(ours)
    assert all(cell.sparse for cell in cells(ours))
    assert session(ours).engine.layers == 2


# ---- what stays dense, and why ----


def test_forwards_that_are_dealt_to_several_gpus_stay_dense() -> None:
    model = loaded()
    ours = sparse(model, quality=0.3, tile="16x16")
    host.sample(ours)
    assert torch.equal(host.sample(ours, worker="cuda:1"), host.sample(model, worker="cuda:1"))
    assert "forwards that ComfyUI deals to several GPUs, which stay dense" in report(ours)
    assert not cells(ours)
    # and the next one is as before.
    host.sample(ours)
    assert all(cell.sparse for cell in cells(ours))
    assert "several GPUs" not in report(ours)


def test_sigmas_that_are_copied_for_every_forward_are_one_run() -> None:
    ours = sparse(loaded(), quality=0.3, tile="16x16")
    begin, told = session(ours)._begin, []

    def copied(model: Any, conditions: Any, options: Any) -> Any:
        options = {**options, "sample_sigmas": options["sample_sigmas"].clone()}
        told.append(options)
        return begin(model, conditions, options)

    session(ours)._begin = copied  # type: ignore[method-assign]
    host.sample(ours, steps=4)
    assert len(told) == 4
    assert {cell.step for cell in cells(ours)} == set(range(4))


def test_cross_attention_stays_dense_and_is_counted_beside() -> None:
    ours = sparse(loaded())
    host.sample(ours, steps=3)
    assert dict(session(ours).others) == {"cross-attention, which stays dense": 3 * 2}
    assert "beside it, dense: 6 calls: cross-attention" in report(ours)


def test_steps_outside_the_window_are_dense_and_bit_for_bit_the_stock_ones() -> None:
    model = loaded()
    ours = sparse(model, start_percent=1.0)
    assert torch.equal(host.sample(ours), host.sample(model))
    ours = sparse(model, start_percent=0.4, end_percent=0.7)
    host.sample(ours, steps=10)
    assert {cell.step for cell in cells(ours) if cell.sparse} == {4, 5, 6, 7}
    text = report(ours)
    assert "step before start_percent 0.4" in text
    assert "step after end_percent 0.7" in text


@pytest.mark.parametrize("middle", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"s_churn": 4.0}, {"s_churn": 40.0}, {"s_churn": 40.0, "s_tmin": 0.2, "s_tmax": 0.7}],
)
def test_steps_are_counted_where_a_sampler_raises_sigma(
    options: dict[str, float], middle: bool
) -> None:
    # by so much that in a schedule like this a step's sigma is above those before.
    sigmas = torch.cat([torch.linspace(0, -2, 12).exp(), torch.zeros(1)])
    ours = sparse(loaded(), start_percent=0.0)
    host.sample(ours, sigmas=sigmas, guided=False, sampler=host.Sampler(middle=middle, **options))
    firsts = [cell.step for cell in cells(ours) if cell.layer == 0]
    if middle:
        assert len(firsts) == 2 * 12 - 1
        # what is between two steps is either's.
        assert {b - a for a, b in zip(firsts[::2], firsts[1::2], strict=False)} <= {0, 1}
        firsts = firsts[::2]
    assert firsts == list(range(12))


def test_forwards_that_another_node_leaves_out_are_the_runs() -> None:
    class Cached(host.WanModel):
        """As under a node that caches steps: every second one does not run the model."""

        forwards = 0

        def __call__(self, x: Tensor, context: Tensor, transformer_options: Any) -> Tensor:
            self.forwards += 1
            left_out = self.forwards % 2 == 0
            return x * 0.9 if left_out else super().__call__(x, context, transformer_options)

    ours = sparse(loaded(Cached()), start_percent=1.0)
    host.sample(ours, steps=5)
    work = session(ours).engine.trace.summary().work
    assert work is not None
    assert work.total == pytest.approx(3 / 5)
    assert work.left_out == pytest.approx(2 / 5)
    assert "computed of all pairs, dense calls included: 60.0%" in report(ours)


def test_steps_are_counted_where_sigmas_rise() -> None:
    # as ComfyUI's FlipSigmas has them, to turn a video back into noise.
    sigmas = torch.linspace(1, 0, 11).flip(0)
    sigmas[0] = 1e-4
    ours = sparse(loaded(), start_percent=0.4, end_percent=0.7)
    host.sample(ours, sigmas=sigmas)
    assert [c.step for c in cells(ours) if c.layer == 0] == list(range(10))
    # from sigma 0.3 to 0.6, as where they fall.
    assert {cell.step for cell in cells(ours) if cell.sparse} == {3, 4, 5, 6}
    text = report(ours)
    # three steps of two layers at either end.
    for why in ("step after end_percent 0.7", "step before start_percent 0.4"):
        assert re.search(rf"dense: 6 calls, [\d.]+ s: {why}", text)


def test_with_a_four_step_lora_the_first_step_alone_is_dense() -> None:
    ours = sparse(loaded(), start_percent=0.2)
    host.sample(ours, steps=4, guided=False)
    assert {cell.step for cell in cells(ours) if not cell.sparse} == {0}


def test_a_mask_keeps_a_call_dense_and_exact() -> None:
    tokens = TokenGrid(*host.VIDEO).video
    mask = torch.zeros(1, 1, tokens, tokens)
    mask[..., 5:9] = -torch.inf
    model = loaded(mask=mask)
    ours = sparse(model)
    assert torch.equal(host.sample(ours), host.sample(model))
    assert actions(ours) == {"dense: it has an attention mask"}


def test_another_scale_keeps_a_call_dense_and_exact() -> None:
    model = loaded(scale=0.1)
    ours = sparse(model)
    assert torch.equal(host.sample(ours), host.sample(model))
    assert actions(ours) == {"dense: its scale is 0.1, not 1/sqrt(D)"}


def test_short_sequences_stay_dense() -> None:
    ours = sparse(loaded(), min_tokens=1000)
    host.sample(ours)
    assert actions(ours) == {"dense: 60 tokens are fewer than min_tokens, 1000"}


def test_text_as_long_as_the_video_is_not_taken_for_it() -> None:
    model = loaded()
    ours = sparse(model)
    assert torch.equal(host.sample(ours, text=60), host.sample(model, text=60))
    assert not cells(ours)
    assert "cannot be told from cross-attention" in report(ours)


def test_tokens_that_are_not_the_videos_keep_a_call_dense() -> None:
    class Unknown:
        patch_size = 2

    # a class that is not known to have text behind its video.
    layout = read_layout(Unknown(), torch.empty(1, 4, 3, 8, 10), {})
    assert isinstance(layout, ForwardLayout)
    assert layout.grid(60) == TokenGrid(3, 4, 5)
    assert layout.grid(67) == "67 tokens are not the video's 3x4x5"


def test_an_image_model_stays_dense() -> None:
    model = loaded()
    ours = sparse(model)
    frames = host.latent()
    x = frames[:, :, :1]
    layout = read_layout(host.WanModel(), x[:, :, 0], {})
    assert layout == "the latent is no video"
    assert host.sample(ours, x=x).shape == x.shape


def test_sigmas_that_nobody_tells_keep_a_run_dense() -> None:
    model = loaded()
    ours = sparse(model)
    options = {**ours.options, "wrappers": ours.wrappers}
    context = torch.randn(1, 11, host.HEADS * host.DIM)
    given = (host.latent(), torch.ones(1), context)
    out = ours.model.apply_model(*given, transformer_options=options)
    assert torch.equal(out, model.model.apply_model(*given, transformer_options={}))
    assert actions(ours) == {"dense: ComfyUI did not say which step this is"}


# ---- the grid ----


@pytest.mark.parametrize(
    ("tokens", "beside", "grid"),
    [
        (60, "nothing", TokenGrid(3, 4, 5)),
        (67, "text after", TokenGrid(3, 4, 5, text=7)),
        # a reference, or guides that were cut off: whole frames.
        (80, "frames", TokenGrid(4, 4, 5)),
        (40, "frames", TokenGrid(2, 4, 5)),
        (61, "frames", "61 tokens are not the video's 3x4x5"),
        (40, "text after", "40 tokens are not the video's 3x4x5"),
    ],
)
def test_the_grid_follows_from_the_latent(tokens: int, beside: str, grid: object) -> None:
    assert ForwardLayout((3, 4, 5), beside).grid(tokens) == grid


def test_a_grid_that_the_model_names_comes_first() -> None:
    layout = ForwardLayout((3, 4, 5), "nothing")
    assert layout.grid(60, torch.Size([3, 5, 4])) == TokenGrid(3, 5, 4)


def test_sizes_that_are_no_multiple_of_a_patch_are_padded() -> None:
    layout = read_layout(host.WanModel(), torch.empty(1, 4, 3, 9, 11), {})
    assert isinstance(layout, ForwardLayout)
    assert layout.video == (3, 5, 6)


def test_packed_video_and_audio_have_the_videos_grid_and_no_frames_beside() -> None:
    shapes = [(1, 4, 3, 8, 10), (1, 8, 20, 16)]
    layout = read_layout(host.WanModel(), torch.empty(1, 1, 99), {"latent_shapes": shapes})
    assert isinstance(layout, ForwardLayout)
    assert layout.grid(60) == TokenGrid(3, 4, 5)
    # audio as long as a frame.
    assert layout.grid(20) == "20 tokens are not the video's 3x4x5"


def test_a_reference_in_front_of_hunyuan_video_is_a_frame() -> None:
    x, reference = torch.empty(1, 4, 3, 8, 10), torch.empty(1, 4, 1, 8, 10)
    layout = read_layout(host.HunyuanVideo(), x, {"ref_latent": reference})
    assert isinstance(layout, ForwardLayout)
    assert layout.grid(87) == TokenGrid(4, 4, 5, text=7)


def test_a_model_that_names_no_patch_stays_dense() -> None:
    assert read_layout(object(), torch.empty(1, 4, 3, 8, 10), {}) == (
        "object does not say how it cuts a video into tokens"
    )


# ---- beside other nodes ----


def doubled(stock: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Another node's override, which shows in the output."""
    out: Tensor = stock(*args, **kwargs) * 2
    return out


def test_an_override_that_is_there_serves_the_dense_calls() -> None:
    model = loaded()
    model.options["optimized_attention_override"] = doubled
    ours = sparse(model, start_percent=1.0)
    assert torch.equal(host.sample(ours), host.sample(model))


def test_an_override_that_a_later_node_sets_is_chained_too() -> None:
    later = sparse(loaded()).clone()
    later.options["optimized_attention_override"] = doubled
    host.sample(later)
    assert all(cell.sparse for cell in cells(later))
    assert later.options["optimized_attention_override"] is doubled


def test_the_model_that_came_in_is_left_as_it_was() -> None:
    model = loaded()
    before = host.sample(model)
    ours = sparse(model)
    host.sample(ours)
    assert torch.equal(host.sample(model), before)
    assert (model.options, model.wrappers, model.attachments) == ({}, {}, {})
    assert ours.options == {}


def test_a_second_node_takes_the_place_of_the_first() -> None:
    twice = sparse(sparse(loaded(), quality=0.3), quality=1.0)
    host.sample(twice)
    assert [len(each) for each in twice.wrappers["apply_model"].values()] == [1]
    assert session(twice).engine.trace.summary().computed == 1.0


def test_two_models_do_not_share_what_they_did() -> None:
    model = loaded()
    high, low = sparse(model), sparse(model)
    host.sample(high, steps=2)
    assert cells(high)
    assert not cells(low)


def test_an_error_leaves_no_trace_in_the_next_run() -> None:
    ours = sparse(loaded())
    first = host.sample(ours)
    engine = session(ours).engine
    kernel = engine.kernel

    def out_of_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    engine.kernel = out_of_memory
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        host.sample(ours)
    engine.kernel = kernel
    assert torch.equal(host.sample(ours), first)
    assert len(cells(ours)) == 5 * 2


def test_options_that_somebody_kept_run_stock_attention() -> None:
    ours = sparse(loaded())
    host.sample(ours)
    q = torch.randn(1, 60, host.HEADS * host.DIM)
    out = session(ours).attend(host.attention_pytorch, q, q, q, heads=host.HEADS)
    assert torch.equal(out, host.attention_pytorch(q, q, q, heads=host.HEADS))


def test_a_comfyui_without_wrappers_is_refused() -> None:
    class Old:
        def clone(self) -> Old:
            return self

    with pytest.raises(UnsupportedError, match=r"update it, to 0\.3\.60"):
        sparse(Old())  # type: ignore[arg-type]


# ---- the inputs ----


@pytest.mark.parametrize("method", ["fg-attn", "spargeattn", "xattention", "foresight"])
def test_quality_is_the_share_that_a_method_keeps(method: str) -> None:
    name = {"fg-attn": "top_p", "foresight": "share"}.get(method, "tau")
    assert read_options(method, quality=0.6) == {name: 0.6}


def test_tile_means_and_further_options_are_read() -> None:
    given = read_options("fg-attn", tile="32x32", means="64", text="topk=0.3, merge=xor")
    assert given == {"tile": (32, 32), "means": 64, "topk": 0.3, "merge": "xor"}


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"method": "fast"}, "unknown method 'fast'"),
        ({"method": "sol-attn", "quality": 0.5}, "has no share to keep, so quality must be 0"),
        ({"options": "topk"}, "options are written name=value, got 'topk'"),
        ({"options": "topk=much"}, "topk cannot be 'much'"),
        ({"options": "tau=0.5"}, "fg-attn has no option 'tau'"),
        ({"options": "top_p=0.5"}, "top_p is given twice"),
        ({"start_percent": 0.5, "end_percent": 0.2}, "the first no larger, got 0.5 and 0.2"),
        ({"min_tokens": -1}, "min_tokens and part must be from 0"),
        ({"preset": "nowhere.json"}, "there is no preset file nowhere.json"),
        ({"method": "bsfa", "quality": 0.0}, "calibrated numbers"),
    ],
)
def test_bad_inputs_are_one_sentence(inputs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        sparse(loaded(), **inputs)


def test_every_input_has_a_default_that_runs() -> None:
    described = {**SPARSE.INPUT_TYPES()["required"], **SPARSE.INPUT_TYPES()["optional"]}
    del described["model"]
    defaults = {
        name: more["default"] if "default" in more else kind[0]
        for name, (kind, more) in described.items()
    }
    (ours,) = SPARSE().run(loaded(), **defaults)
    host.sample(ours)
    assert "fewer than min_tokens" in report(ours)


# ---- the report ----


def test_the_report_counts_calls_and_says_why_they_were_dense() -> None:
    ours = sparse(loaded(), start_percent=0.2)
    host.sample(ours, steps=5)
    text = report(ours)
    assert "video self-attention: 10 calls" in text
    assert "sparse: 8 calls" in text
    assert "dense: 2 calls" in text
    assert NOTHING not in text


def test_a_run_without_a_sparse_call_says_so_first(caplog: pytest.LogCaptureFixture) -> None:
    ours = sparse(loaded(), min_tokens=1000)
    host.sample(ours)
    assert report(ours).startswith(f"{NOTHING}: 60 tokens are fewer than min_tokens")
    assert any(NOTHING in record.message for record in caplog.records)


def test_a_model_that_was_not_sampled_and_one_without_the_node_say_so() -> None:
    assert report(sparse(loaded())).startswith(f"{NOTHING}: no attention call came")
    assert "did not come through the node" in report(loaded())


@pytest.mark.parametrize("ran", [True, False])
def test_the_report_is_a_picture_too(ran: bool) -> None:
    ours = sparse(loaded())
    if ran:
        host.sample(ours)
    latent = {"samples": host.latent()}
    out = REPORT().run(latent, ours)
    passed, text, picture = out["result"]
    assert passed is latent
    assert out["ui"] == {"text": (text,)}
    assert (picture.shape[0], picture.shape[3], picture.dtype) == (1, 3, torch.float32)
    assert 0 <= picture.min() < picture.max() <= 1
    # the map of densities stands below the text.
    assert (picture.shape[1] > 400) == ran


# ---- starting ----


def fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_comfyui_starts_with_it_quickly_and_without_diffusers() -> None:
    code = (
        "import time, sys; began = time.process_time(); "
        "from vidsparse.apps.comfyui import NODE_CLASS_MAPPINGS; took = time.process_time() - began"
        "; print(took, [m for m in ('torch', 'diffusers', 'numpy', 'PIL') if m in sys.modules])"
    )
    took, loaded_modules = min(fresh(code) for _ in range(3)).split(" ", 1)
    assert float(took) < 0.2
    assert loaded_modules == "[]"


def test_running_the_nodes_loads_neither_diffusers_nor_transformers() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); import test_comfyui as t, comfyui_host as host; "
        "ours = t.sparse(t.loaded()); host.sample(ours, steps=1); t.report(ours); "
        "print([m for m in ('diffusers', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "[]", done.stderr


def test_both_nodes_have_names_to_show() -> None:
    assert NODE_CLASS_MAPPINGS.keys() == NODE_DISPLAY_NAME_MAPPINGS.keys()
    assert json.dumps(SPARSE.INPUT_TYPES())
    assert KEY == "vidsparse"
