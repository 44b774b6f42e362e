"""The branches of guidance attend by one plan, so that guidance does not magnify how they err."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import random_qkv
from tiny_families import TINY, latents
from torch import Tensor

from vidsparse import sparsify
from vidsparse.engine import AttentionEngine
from vidsparse.errors import OptionError
from vidsparse.grid import TokenGrid
from vidsparse.grouping import MERGES
from vidsparse.masks import unpack_bits
from vidsparse.methods import SPARSE_METHODS, Foresight, make_method
from vidsparse.pipelines.layout import Layout
from vidsparse.plan import SparsePlan, make_plan
from vidsparse.planning import Ordered, plan_attention
from vidsparse.ring import own_rows
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

GRID = TokenGrid(3, 8, 11)
BRANCHES = ("conditional", "unconditional")

pytestmark = pytest.mark.usefixtures("one_thread")


def engine_of(plans: str = "shared", **schedule: Any) -> AttentionEngine:
    engine = AttentionEngine(
        make_method("fg-attn", topk=0.3, plans=plans),
        schedule=Schedule(**{"dense_steps": 1, **schedule}),
        layers=1,
    )
    engine.begin_run(4)
    return engine


def attend(engine: AttentionEngine, step: int, branch: str, seed: int, **where: Any) -> Tensor:
    q, k, v = random_qkv(GRID.tokens, 64, torch.float32, seed=seed)
    return engine.attend(q, k, v, CallSite(0, step, 1.0, GRID, branch, **where))


def actions(engine: AttentionEngine) -> list[tuple[int, str, str]]:
    return [(cell.step, cell.branch, cell.action) for cell in engine.trace.cells if cell.step]


def test_two_videos_are_no_branches_in_a_loop_of_one_s_own_after_a_guided_call() -> None:
    pipe = TINY["cogvideox"].build()
    source = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 3, 4, 8, 8, generator=source)
    text = torch.randn(2, 16, 32, generator=source)

    def loop(which: slice) -> Tensor:
        video = noise[which]
        pipe.scheduler.set_timesteps(3)
        turned = pipe._prepare_rotary_positional_embeddings(64, 64, 3, "cpu")
        for step in pipe.scheduler.timesteps:
            told = pipe.transformer(
                hidden_states=video,
                encoder_hidden_states=text[which],
                timestep=step.expand(len(video)),
                image_rotary_emb=turned,
            ).sample
            video = pipe.scheduler.step(told, step, video).prev_sample
        return video

    with sparsify(pipe, "foresight", tile="16x16", share=0.1, dense_steps=0, refresh=0):
        latents("cogvideox", pipe)
        with torch.no_grad():
            together = loop(slice(0, 2))
            alone = torch.cat([loop(slice(0, 1)), loop(slice(1, 2))])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["cogvideox", "ltx"])
def test_another_pipeline_of_the_same_transformer_has_no_guidance_of_the_first_one_s(
    name: str,
) -> None:
    first = TINY[name].build()
    second = type(first)(**first.components)
    second.set_progress_bar_config(disable=True)
    with sparsify(first, "foresight", tile="16x16", share=0.1, dense_steps=0, refresh=0):
        before = latents(name, second, guidance_scale=1.0)
        latents(name, first)
        after = latents(name, second, guidance_scale=1.0)
    assert torch.equal(before, after)


@pytest.mark.parametrize("reuse", [1, 2])
@pytest.mark.parametrize("refresh", [0, 2])
def test_the_second_branch_of_a_step_attends_by_the_first_one_s_plan(
    reuse: int, refresh: int
) -> None:
    shared, own = (engine_of(plans, reuse=reuse, refresh=refresh) for plans in ("shared", "own"))
    planned: dict[AttentionEngine, list[tuple[int, str]]] = {shared: [], own: []}
    for engine, made_for in planned.items():
        make = engine.planner

        def planner(
            *args: Any, made_for: list[tuple[int, str]] = made_for, make: Any = make
        ) -> Ordered:
            made_for.append((args[3].step, args[3].branch))
            return make(*args)

        engine.planner = planner
        for step in range(4):
            for seed, branch in enumerate(BRANCHES):
                attend(engine, step, branch, seed)
    # the last dense step is the first refresh; of two, the other comes later.
    steps = [0, 2] if refresh else [1, 3] if reuse == 2 else [1, 2, 3]
    assert planned[shared] == [(step, "conditional") for step in steps]
    assert planned[own] == [(step, branch) for step in steps for branch in BRANCHES]
    # both counted with what they attend by.
    first, second = (
        [c.computed for c in shared.trace.cells if c.branch == one and c.computed is not None]
        for one in BRANCHES
    )
    assert all(map(torch.equal, first, second))
    made = [cell.plan_step for cell in shared.trace.cells if cell.branch == BRANCHES[1]]
    assert made == [cell.plan_step for cell in shared.trace.cells if cell.branch == BRANCHES[0]]


def test_a_branch_that_comes_again_in_its_step_and_another_window_plan_anew() -> None:
    engine = engine_of()
    for branch in BRANCHES:
        attend(engine, 0, branch, 0)
    attend(engine, 1, "conditional", 1)
    attend(engine, 1, "conditional", 2)
    attend(engine, 1, "conditional 2", 3, window=2)
    attend(engine, 1, "unconditional 2", 4, window=2)
    assert [action for _, _, action in actions(engine)] == ["replan", "replan", "replan", "reuse"]


@pytest.mark.parametrize("small", [True, False])
def test_lists_of_a_short_video_s_plan_are_made_once_for_all_calls_that_it_serves(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr("vidsparse.kept._SMALL", 0)
    engine, fresh = engine_of(reuse=3), engine_of(reuse=3)
    made: list[int] = []
    of = SparsePlan.list_keys

    def list_keys(plan: SparsePlan, *, by_kernel: bool) -> Tensor:
        made.append(1)
        return of(plan, by_kernel=by_kernel)

    monkeypatch.setattr(SparsePlan, "list_keys", list_keys)
    counted = []
    for step in (1, 2, 3):
        for branch in BRANCHES:
            out = attend(engine, step, branch, seed=step)
            counted.append(len(made))
            # one that keeps none gives the same.
            for kept in fresh._plans.values():
                kept.lists.clear()
            assert torch.equal(out, attend(fresh, step, branch, seed=step))
            made.clear()
    # the first two calls plan: from the second branch on it is known that another follows.
    assert counted == ([1, 0, 0, 0, 0, 0] if small else [1] * 6)


def test_no_plan_waits_where_there_is_no_other_branch() -> None:
    engine = engine_of()
    for step in range(4):
        attend(engine, step, "conditional", step)
    assert engine._plans == {}


def test_what_guidance_makes_of_the_branches_errs_less_by_a_shared_plan() -> None:
    g = 5.0
    base = random_qkv(GRID.tokens, 64, torch.float32, seed=0)
    noise = random_qkv(GRID.tokens, 64, torch.float32, seed=1)
    # what a prompt changes is small beside what both branches are about.
    other = [x + 0.1 * y for x, y in zip(base, noise, strict=True)]
    operands = {"conditional": base, "unconditional": other}
    errors = {}
    for plans in ("shared", "own"):
        engine = engine_of(plans)
        for step in range(2):
            out = {
                branch: engine.attend(q, k, v, CallSite(0, step, 1.0, GRID, branch))
                for branch, (q, k, v) in operands.items()
            }
            if step == 0:
                dense = out
        lacks = {branch: dense[branch] - out[branch] for branch in BRANCHES}
        guided = g * lacks["conditional"] - (g - 1) * lacks["unconditional"]
        errors[plans] = float(guided.norm() / dense["conditional"].norm())
    assert errors["shared"] < 0.9 * errors["own"]


def test_branches_that_stand_in_one_batch_attend_by_the_last_one_s_plan() -> None:
    engine = engine_of(dense_steps=0)
    halves = [random_qkv(GRID.tokens, 64, torch.float32, batch=2, seed=seed) for seed in (0, 1)]
    q, k, v = (torch.cat(pair) for pair in zip(*halves, strict=True))
    out = engine.attend(q, k, v, CallSite(0, 0, 1.0, GRID, stacked=2))
    alone = engine_of(dense_steps=0)
    last = alone.attend(*halves[1], CallSite(0, 0, 1.0, GRID))
    assert torch.equal(out[2:], last)
    # the first half by the same plan, kept for the next step.
    alone = engine_of(dense_steps=0, reuse=2)
    alone.attend(*halves[1], CallSite(0, 0, 1.0, GRID))
    assert torch.equal(out[:2], alone.attend(*halves[0], CallSite(0, 1, 1.0, GRID)))


@pytest.mark.parametrize(("guidance", "stacked"), [(1.0, 1), (4.0, 2)])
def test_a_pipeline_says_whether_branches_stand_in_one_batch(guidance: float, stacked: int) -> None:
    pipe = TINY["cogvideox"].build()
    seen = set()
    with sparsify(pipe, "fg-attn", dense_steps=0) as handle:
        for engine in handle.engines:
            engine.observer = lambda q, k, v, site: seen.add((q.shape[0], site.stacked))
        latents("cogvideox", pipe, guidance_scale=guidance)
    assert seen == {(stacked, stacked)}


def with_all_text(video: Tensor, grid: TokenGrid, tile: tuple[int, int]) -> Tensor:
    """A mask of whole tiles of the video, and beside it every tile that holds text or is short."""
    tiles = [-(-grid.tokens // size) for size in tile]
    mask = torch.ones(*video.shape[:2], *tiles, dtype=torch.bool)
    mask[:, :, : video.shape[2], : video.shape[3]] = video
    return mask


def pairs_of(plan: SparsePlan) -> Tensor:
    """The pairs of tokens that a plan computes, bool ``[B, H, S, S]``; none of them twice."""
    rows, keys = plan.tile
    tiles = [-(-plan.tokens // size) for size in plan.tile]
    batch, heads, blocks, _ = plan.q_tiles.shape
    seen = torch.zeros(batch, heads, *tiles, dtype=torch.int32)
    listed = unpack_bits(plan.kv_bits, tiles[1])
    assert torch.equal(listed.sum(-1, dtype=torch.int32), plan.kv_count)
    for place in itertools.product(range(batch), range(heads), range(blocks)):
        for tile in plan.q_tiles[place].tolist():
            if tile >= 0:
                seen[place[0], place[1], tile] += listed[place].int()
    assert seen.max() <= 1
    pairs = seen.bool().repeat_interleave(rows, 2).repeat_interleave(keys, 3)
    return pairs[..., : plan.tokens, : plan.tokens]


@settings(deadline=None, max_examples=60)
@given(
    video=st.integers(40, 330),
    texts=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    tile=st.sampled_from([(16, 16), (32, 16), (64, 64), (128, 16)]),
    merge=st.sampled_from(sorted(MERGES)),
    seed=st.integers(0, 999),
)
def test_a_plan_for_another_text_keeps_the_video_s_choice_and_computes_all_text(
    video: int, texts: tuple[int, int], tile: tuple[int, int], merge: str, seed: int
) -> None:
    grids = [TokenGrid(1, 1, video, text) for text in texts]
    whole = [video // size for size in tile]
    chosen = torch.rand(2, 3, *whole, generator=torch.Generator().manual_seed(seed)) < 0.3
    made, wanted = (
        make_plan(with_all_text(chosen, grid, tile), tile, grid.tokens, merge, block_rows=64)
        for grid in grids
    )
    fitted = made.with_text(video, grids[1].tokens)
    pairs = pairs_of(fitted)
    # blocks of several tiles compute what any of them wants; which share one was settled before.
    mask = with_all_text(chosen, grids[1], tile)
    least = mask.repeat_interleave(tile[0], 2).repeat_interleave(tile[1], 3)
    assert bool((pairs | ~least[..., : fitted.tokens, : fitted.tokens]).all())
    if tile[0] >= 64:
        assert torch.equal(pairs, pairs_of(wanted))
    if texts[0] or not any(video % size for size in tile):
        share = pairs.double().mean((2, 3)).float()
        torch.testing.assert_close(fitted.computed, share, atol=1e-6, rtol=0)
        torch.testing.assert_close(fitted.selected, wanted.selected, atol=1e-6, rtol=0)
    assert fitted.tokens == wanted.tokens
    # in a ring each process has the same of its own rows.
    cut = whole[0] // 2
    tiles = [-(-grid.tokens // tile[0]) for grid in grids]
    stretches = [(range(cut), range(cut)), (range(cut, tiles[0]), range(cut, tiles[1]))]
    for before, after in stretches:
        own = own_rows(made, before, merge).with_text(video, grids[1].tokens, before)
        its = pairs[:, :, after.start * tile[0] : after.stop * tile[0]]
        assert torch.equal(pairs_of(own)[:, :, : its.shape[2]], its)
        assert torch.equal(own.computed, fitted.computed)
    # which goes back to where it came from.
    again = pairs_of(fitted.with_text(video, grids[0].tokens))
    assert torch.equal(again | pairs_of(made), again)


@pytest.mark.parametrize("texts", [(40, 9), (9, 40), (16, 16), (0, 33)])
@pytest.mark.parametrize("tile", [(16, 16), (64, 16), (128, 32)], ids=str)
def test_a_plan_whose_text_chose_keys_too_has_the_right_shares_with_another_text(
    texts: tuple[int, int], tile: tuple[int, int]
) -> None:
    grids = [TokenGrid(3, 11, 13, text=text) for text in texts]
    q, k, v = random_qkv(grids[0].tokens, 16, torch.float32)
    method = Foresight(share=0.2, tile=tile, text_rows="sparse")
    made = plan_attention(method, q, k, CallSite(0, 0, 1.0, grids[0]), v=v)
    fitted = made.with_text(grids[0].video, grids[1].tokens, text_rows="sparse")
    pairs = pairs_of(fitted)
    assert fitted.tokens == grids[1].tokens
    # its own rows have everything: they did not choose.
    assert bool(pairs[:, :, grids[0].video // tile[0] * tile[0] :].all())
    if texts[0]:
        share = pairs.double().mean((2, 3)).float()
        torch.testing.assert_close(fitted.computed, share, atol=1e-6, rtol=0)
        torch.testing.assert_close(fitted.selected, share, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["fg-attn", "foresight", "sol-attn"])
@pytest.mark.parametrize("refresh", [0, 2])
def test_branches_whose_text_differs_in_length_attend_by_one_plan(name: str, refresh: int) -> None:
    method = make_method(name)
    engine = AttentionEngine(
        method, schedule=Schedule(dense_steps=1, reuse=2, refresh=refresh), layers=1
    )
    engine.begin_run(4)
    texts = {"conditional": 37, "unconditional": 5}
    q, k, v = random_qkv(GRID.video + 37, 64, torch.float32, seed=0)
    for step in range(4):
        for branch, text in texts.items():
            grid = replace(GRID, text=text)
            few = few_of(q, k, v, text)
            engine.attend(*few, CallSite(0, step, 1.0, grid, branch))
    cells = engine.trace.cells
    assert {c.branch for c in cells if c.action == "replan"} <= {"conditional"}
    assert {c.action for c in cells if c.branch == "unconditional"} <= {"reuse", "dense", "refresh"}
    # what is chosen of the video is the same: by the plan of its own a branch computes as much.
    own = AttentionEngine(method, schedule=Schedule(dense_steps=0), layers=1)
    own.begin_run(4)
    own.attend(*few_of(q, k, v, 5), CallSite(0, 0, 1.0, replace(GRID, text=5)))
    shares = [c.computed for c in (cells[-1], own.trace.cells[-1])]
    assert all(share is not None for share in shares)
    torch.testing.assert_close(*shares, atol=0.03, rtol=0)


def few_of(q: Tensor, k: Tensor, v: Tensor, text: int) -> tuple[Tensor, Tensor, Tensor]:
    of = slice(GRID.video + text)
    return q[:, :, of], k[:, :, of], v[:, :, of]


@pytest.mark.parametrize("name", ["allegro", "easyanimate", "consisid"])
def test_pipelines_that_do_not_name_it_have_both_branches_in_one_batch(name: str) -> None:
    pipe = TINY[name].build()
    seen = set()
    with sparsify(pipe, "fg-attn", dense_steps=0) as handle:
        for engine in handle.engines:
            engine.observer = lambda q, k, v, site: seen.add((q.shape[0], site.stacked))
        latents(name, pipe, guidance_scale=4.0)
        latents(name, pipe, guidance_scale=1.0)
    assert seen == {(2, 2), (1, 1)}


def test_branches_of_one_batch_whose_text_differs_attend_one_after_the_other_by_one_plan() -> None:
    pipe = TINY["mochi"].build()
    with sparsify(pipe, "fg-attn", dense_steps=1) as handle:
        latents("mochi", pipe, guidance_scale=4.0)
        cells = [c for c in handle.trace.cells if c.layer == 0]
    assert len({c.pairs for c in cells}) == 2
    first = [("conditional", "dense"), ("unconditional", "dense")]
    assert [(c.branch, c.action) for c in cells] == first + 2 * [
        ("conditional", "replan"),
        ("unconditional", "reuse"),
    ]


def calls(layout: Layout, batch: int, stacked: int, *texts: tuple[int, ...]) -> list[Any]:
    site = CallSite(0, 0, 1.0, layout.grid, stacked=stacked)
    made = layout.calls(batch, site, texts)
    return [(rows, cut, where.branch, where.stacked, where.samples) for rows, cut, where in made]


def test_samples_run_together_that_have_equally_much_text_in_every_branch() -> None:
    grid = TokenGrid(1, 2, 2, text=10)
    whole = slice(0, 2)
    assert calls(Layout(grid), 2, 1) == [(whole, 0, "conditional", 1, ())]
    # the prompts differ, and what stands for no prompt does not: samples run apart in both.
    with_prompt, without = (4, 7), (3, 3)
    first, second = slice(0, 1), slice(1, 2)
    assert calls(Layout(grid, without), 2, 1, with_prompt, without) == [
        (first, 7, "conditional", 1, (0,)),
        (second, 7, "conditional", 1, (1,)),
    ]
    # in one batch the half with the prompt comes first, which plans for the other.
    assert calls(Layout(grid, without + with_prompt), 4, 2, without, with_prompt) == [
        (slice(2, 3), 6, "conditional", 1, (0,)),
        (slice(3, 4), 3, "conditional", 1, (1,)),
        (first, 7, "unconditional", 1, (0,)),
        (second, 7, "unconditional", 1, (1,)),
    ]
    assert calls(Layout(grid, (4, 4, 7, 7)), 4, 2, (4, 4), (7, 7)) == [
        (slice(2, 4), 3, "conditional", 1, ()),
        (whole, 6, "unconditional", 1, ()),
    ]
    assert calls(Layout(grid, (4, 7, 4)), 3, 1, (4, 7, 4)) == [
        ([0, 2], 6, "conditional", 1, (0, 2)),
        (second, 3, "conditional", 1, (1,)),
    ]
    # of equally much text all samples run at once.
    assert calls(Layout(grid, (4,) * 4), 4, 2, (4, 4)) == [(slice(0, 4), 6, "conditional", 2, ())]
    assert Layout(grid, (4, 7, 4, 7)).new_texts(2, []) == [(4, 7)]
    assert Layout(grid, (4, 7)).new_texts(2, [(4,)]) == [(7,)]


def test_samples_of_other_prompts_never_share_a_plan_or_what_it_lacks() -> None:
    engine = engine_of(dense_steps=0, reuse=2)
    q, k, v = random_qkv(GRID.video + 9, 64, torch.float32, seed=0)
    for step in range(2):
        for samples, text in enumerate((5, 9)):
            where = CallSite(0, step, 1.0, replace(GRID, text=text), samples=(samples,))
            engine.attend(*few_of(q, k, v, text), where)
    assert [c.action for c in engine.trace.cells] == ["replan", "replan", "reuse", "reuse"]
    assert {kept.plan.tokens - GRID.video for kept in engine._plans.values()} == {5, 9}
    assert not any(kept.fitted for kept in engine._plans.values())


def test_papers_plan_for_every_branch() -> None:
    for name, cls in SPARSE_METHODS.items():
        if cls.as_published:
            assert cls.as_published["plans"] == "own", name
            assert make_method(name).options()["plans"] == "shared"
    with pytest.raises(OptionError, match="plans must be one of shared, own, got 'both'"):
        make_method("fg-attn", plans="both")
