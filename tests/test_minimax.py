"""MiniMax-H3: which rows of its packed sequence are exact, and where its video stands in it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from counting_backend import CountingBackend
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3AudioReference, MiniMaxH3ImageReference
from family_checks import check_within_twice_the_stock_error, first_forward, forward
from tiny_families import TINY, latents
from tiny_minimax import minimax_h3
from tiny_parts import IMAGE, noise
from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.grid import TokenGrid
from vidsparse.kernels.attention.reference import token_mask
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.minimax_h3 import ADAPTER

pytestmark = pytest.mark.usefixtures("one_thread")

KEYFRAMES = "minimax-keyframes"
LOW: dict[str, Any] = {"top_p": 0.1, "dense_steps": 0}
FEW: dict[str, Any] = {"share": 0.1, "dense_steps": 0}


def attention_outputs(transformer: Any, arguments: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """What the first layer's attention makes of the packed sequence, ``[B, S, C]``."""
    seen: list[Tensor] = []
    hook = transformer.transformer_blocks[0].attn.register_forward_hook(
        lambda module, args, out: seen.append(out)
    )
    forward(transformer, arguments, dtype)
    hook.remove()
    return seen[0]


# which rows are exact


@pytest.mark.parametrize(
    ("method", "options"),
    [("fg-attn", LOW), ("sol-attn", {"dense_steps": 0}), ("foresight", {**FEW, "refresh": 0})],
)
def test_rows_of_text_keyframes_and_sound_are_exact_at_a_low_density(
    method: str, options: dict[str, Any]
) -> None:
    pipe = TINY[KEYFRAMES].build()
    arguments = first_forward(KEYFRAMES, pipe)
    exact = copy.deepcopy(pipe.transformer).double()
    truth = attention_outputs(exact, arguments, torch.float64)
    stock = attention_outputs(pipe.transformer, arguments, torch.float32)
    with sparsify(pipe, method, **options) as handle:
        ours = attention_outputs(pipe.transformer, arguments, torch.float32)
        video = handle._session._layout.grid.video
        assert handle.summary().notes == ()
    rest = slice(0, -video)
    # text and image, two keyframes of 16 rows, two channels of sound.
    assert ours[:, rest].shape[1] == 9 + 2 * 16 + 2 * 207
    check_within_twice_the_stock_error(ours[:, rest], stock[:, rest], truth[:, rest])
    moved = (ours - truth).abs().amax(2)[0]
    assert moved[-video:].median() > 100 * moved[rest].max()


def test_sound_of_one_layer_is_the_stock_sound_at_a_low_density() -> None:
    pipe = TINY["minimax"].build()
    del pipe.transformer.transformer_blocks[1:]
    arguments = first_forward("minimax", pipe)

    def both() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            video, sound = pipe.transformer(**arguments)
        return video, sound

    video, sound = both()
    with sparsify(pipe, **LOW):
        sparse_video, same_sound = both()
    torch.testing.assert_close(same_sound, sound, rtol=1e-5, atol=1e-6)
    assert (sparse_video - video).abs().max() > 1e-3


def test_every_row_attends_and_is_attended_by_all_that_is_no_video() -> None:
    pipe = TINY[KEYFRAMES].build()
    masks: list[Tensor] = []
    with sparsify(pipe, **LOW) as handle:
        plan_as_ever = handle.engine.planner

        def watch(*args: Any, **kwargs: Any) -> Any:
            made = plan_as_ever(*args, **kwargs)
            plan = made.plan
            lists = plan.q_tiles, plan.kv_count, plan.list_keys(by_kernel=False)
            masks.append(token_mask(*lists, plan.tile, plan.tokens))
            return made

        handle.engine.planner = watch
        latents(KEYFRAMES, pipe)
        video = handle._session._layout.grid.video
    assert len(masks) == 2 * 3
    for mask in masks:
        assert bool(mask[:, :, video:].all())
        assert bool(mask[..., video:].all())
        assert mask[:, :, :video, :video].float().mean() < 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_forwards_are_the_stock_ones_in_either_format(dtype: torch.dtype) -> None:
    pipe = TINY["minimax"].build()
    pipe.transformer.to(dtype)
    arguments = first_forward("minimax", pipe, size=TINY["minimax"].odd)
    stock = forward(pipe.transformer, arguments, dtype)
    with sparsify(pipe, "dense"):
        assert torch.equal(forward(pipe.transformer, arguments, dtype), stock)


def test_a_batch_of_two_equals_two_single_forwards() -> None:
    # the pipeline takes one prompt; the transformer takes more that share a layout.
    pipe = TINY["minimax"].build()
    pipe.transformer.double()
    arguments = first_forward("minimax", pipe, size=TINY["minimax"].odd)
    names = ("hidden_states", "audio_hidden_states", "encoder_hidden_states")
    pairs = {
        name: torch.cat([arguments[name], noise(seed, *arguments[name].shape)])
        for seed, name in enumerate(names)
    }
    with sparsify(pipe, top_p=0.5, dense_steps=0):
        both = forward(pipe.transformer, {**arguments, **pairs}, torch.float64)
        for sample in range(2):
            one = {name: pair[sample : sample + 1] for name, pair in pairs.items()}
            single = forward(pipe.transformer, {**arguments, **one}, torch.float64)
            torch.testing.assert_close(both[sample : sample + 1], single)


# where the video stands


def layout_of(**changes: Any) -> Any:
    name = KEYFRAMES
    arguments = first_forward(name, TINY[name].build(), size=TINY[name].odd)
    return ADAPTER.layout(None, {**arguments, **changes})


def test_the_grid_is_of_the_generated_video_alone() -> None:
    # 141 frames are 42 of the latent. two keyframes of 3 x 5, 235 moments of sound in stereo.
    layout = layout_of()
    assert layout.grid == TokenGrid(42, 3, 5, 9 + 2 * 15 + 2 * 235, text_first=True)
    assert layout.valid == ()


def test_rows_in_another_order_are_no_grid_and_run_dense() -> None:
    name = "minimax"
    pipe = TINY[name].build()
    arguments = first_forward(name, pipe)
    video, sound = arguments["video_indices"], arguments["audio_indices"]
    video_first = torch.arange(len(video) + len(sound)) + len(arguments["text_indices"])
    positions = arguments["position_ids"].clone()
    positions[video_first] = positions[torch.cat([video, sound])]
    moved = {
        "video_indices": video_first[: len(video)],
        "audio_indices": video_first[len(video) :],
        "position_ids": positions,
    }
    tags = {0: moved["video_indices"], 2: moved["audio_indices"]}
    moved["token_tags"] = arguments["token_tags"].clone()
    for tag, rows in tags.items():
        moved["token_tags"][rows] = tag
    stock = forward(pipe.transformer, {**arguments, **moved}, torch.float32)
    with sparsify(pipe, **LOW) as handle:
        ours = forward(pipe.transformer, {**arguments, **moved}, torch.float32)
        summary = handle.summary()
    assert torch.equal(ours, stock)
    assert summary.notes == ("dense: the sequence does not end with whole frames of one size",)
    assert summary.calls == 2


def test_frames_of_several_sizes_are_no_grid() -> None:
    name = "minimax"
    arguments = first_forward(name, TINY[name].build())
    positions = arguments["position_ids"].clone()
    positions[-1, 1] += 1
    none = "the sequence does not end with whole frames of one size"
    assert ADAPTER.layout(None, {**arguments, "position_ids": positions}) == none
    # one row less.
    shorter = {
        "position_ids": arguments["position_ids"][:-1],
        "video_indices": arguments["video_indices"][:-1],
    }
    assert ADAPTER.layout(None, {**arguments, **shorter}) == none


def reference_call(steps: int = 3) -> dict[str, Any]:
    sound = noise(3, 2, 320).clamp(-1, 1)
    return {
        "references": [
            MiniMaxH3ImageReference(image=IMAGE),
            MiniMaxH3AudioReference(audio=sound, sample_rate=160),
        ],
        **{name: value(1) for name, value in TINY["minimax"].call.items()},
        "height": 128,
        "width": 128,
        "num_frames": 124,
        "num_inference_steps": steps + 1,
        "output_type": "pt",
    }


def test_references_are_exact_and_dense_runs_are_bit_for_bit() -> None:
    pipe = minimax_h3("ref2va")
    pipe.update_components(reference_image_short_edge=64)

    def run() -> tuple[Tensor, Tensor]:
        made = pipe(**reference_call(), generator=torch.Generator().manual_seed(0))
        return made.get("latents"), made.get("audio")

    stock = run()
    with sparsify(pipe, "dense"):
        assert all(torch.equal(a, b) for a, b in zip(run(), stock, strict=True))
    with sparsify(pipe, top_p=0.3, dense_steps=1) as handle:
        video, sound = run()
        grid = handle._session._layout.grid
        # the image's 2 x 3 patches, two seconds of sound, and sound beside the video.
        assert grid == TokenGrid(37, 4, 4, 9 + 2 * 3 + 2 * 80 + 2 * 207, text_first=True)
        assert [c.action for c in handle.trace.cells if c.layer == 0] == [
            "dense",
            "replan",
            "replan",
        ]
    assert bool(video.isfinite().all() and sound.isfinite().all())
    assert not torch.equal(video, stock[0])
    assert all(torch.equal(a, b) for a, b in zip(run(), stock, strict=True))


def test_both_partitions_are_sparse_where_both_are_loaded() -> None:
    pipe = minimax_h3(None)
    pipe.update_components(reference_image_short_edge=64)
    with sparsify(pipe, dense_steps=0) as handle:
        assert len(handle.engines) == 2
        latents("minimax", pipe)
        assert {cell.action for cell in handle.trace.cells} == {"replan"}
        pipe(**reference_call())
        assert {cell.action for cell in handle.trace.cells} == {"replan"}
        assert len(handle.trace.cells) == 2 * 3


# what is refused, and what compiles


def test_a_mask_of_somebody_s_own_is_refused() -> None:
    pipe = TINY["minimax"].build()
    attention = pipe.transformer.transformer_blocks[0].attn
    with sparsify(pipe), pytest.raises(UnsupportedError, match="with an attention mask"):
        attention(torch.zeros(1, 4, 48), None, torch.ones(4, 4))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_transformer_compiled_in_place_stays_one_graph() -> None:
    name = "minimax"
    expected = latents(name, TINY[name].build(), num_inference_steps=2)
    pipe, backend = TINY[name].build(), CountingBackend()
    with sparsify(pipe, top_p=1.0, dense_steps=1) as handle:
        pipe.transformer.compile(fullgraph=True, backend=backend)
        ours = latents(name, pipe, num_inference_steps=2)
        assert handle.summary().dense_step_share == 0.5
    assert backend.graphs > 0
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
