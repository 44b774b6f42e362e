"""Calibrators: crafted calls with known answers, and numbers that the kernels then keep to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from budget import random_qkv
from numpy.typing import NDArray
from quick import slow_but
from torch import Tensor

import vidsparse
from vidsparse.calibration import (
    CALIBRATORS,
    BsfaCalibrator,
    Calibrator,
    Extent,
    SaleCalibrator,
    SpargeCalibrator,
    XAttentionCalibrator,
)
from vidsparse.calibration.bands import bands
from vidsparse.calibration.bsfa import block_maxima
from vidsparse.calibration.spargeattn import LAMBDAS, PAIRS, PIECE
from vidsparse.calibration.sweep import masked_errors, selected_share
from vidsparse.calibration.xattention import best_adjustments
from vidsparse.engine import AttentionEngine
from vidsparse.files import parse_json
from vidsparse.grid import TokenGrid
from vidsparse.methods import (
    Bsfa,
    Numbers,
    Sale,
    SpargeAttn,
    SparseMethod,
    XAttention,
    make_method,
)
from vidsparse.methods.bsfa import FRACTION, THRESHOLD
from vidsparse.presets import Preset
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

pytestmark = pytest.mark.usefixtures("one_thread")

GRID = TokenGrid(4, 10, 14)  # 560 tokens: 5 query blocks of 128, 9 key blocks of 64, the last short
HEADS = 2


def extent(**changes: Any) -> Extent:
    return Extent(**{"parts": 1, "layers": 1, "heads": HEADS, "window": range(2, 10), **changes})


def site(step: int = 2, grid: TokenGrid = GRID, layer: int = 0) -> CallSite:
    return CallSite(layer, step, 1000.0 - 100 * step, grid)


def call(seed: int, spread: float = 2.0, grid: TokenGrid = GRID) -> tuple[Tensor, Tensor, Tensor]:
    """q and k whose neighbours are alike, so that blocks differ."""
    q, k, v = random_qkv(grid.tokens, 64, torch.float32, heads=HEADS, spread=1.0, seed=seed)

    def smooth(x: Tensor) -> Tensor:
        flat = F.avg_pool1d(x.flatten(0, 1).mT, 49, 1, 24, count_include_pad=False).mT
        return (flat / flat.std() * spread).view_as(x)

    return smooth(q), smooth(k), v


def run(calibrator: Calibrator, calls: list[tuple[Tensor, Tensor, Tensor]]) -> Numbers:
    for number, one in enumerate(calibrator.passes):
        for q, k, v in calls:
            for step in one.steps:
                calibrator.observe(number, q, k, v, site(step))
        calibrator.finish(number)
    return Numbers(calibrator.tables(), (GRID.frames, GRID.height, GRID.width))


def one_head(call: tuple[Tensor, Tensor, Tensor], head: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x[:, head : head + 1] for x in call)
    return q, k, v


def outcome(
    method: SparseMethod, q: Tensor, k: Tensor, v: Tensor, step: int = 2
) -> tuple[Tensor, AttentionEngine]:
    """Relative L1 of every head ``[B, H]``, and the engine that ran."""
    engine = AttentionEngine(method, schedule=Schedule(dense_steps=0), order="rowmajor", layers=1)
    engine.begin_run(10)
    out = engine.attend(q, k, v, site(step))
    dense = F.scaled_dot_product_attention(q, k, v)
    return (out - dense).abs().sum((2, 3)) / dense.abs().sum((2, 3)), engine


def video(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)


OF_CALLS = ("spargeattn", "xattention", "sale", "bsfa")
OF_VIDEOS = ("fg-attn", "sol-attn", "foresight")
# what a calibrator has nothing to find without.
NEEDED = {name: {"target_psnr": 30.0} for name, cls in CALIBRATORS.items() if cls.needs_target}


def test_every_calibrator_looks_at_calls_or_at_videos() -> None:
    assert {*OF_CALLS, *OF_VIDEOS} == {*CALIBRATORS}


@pytest.mark.gpu
@pytest.mark.parametrize("name", OF_CALLS)
def test_a_gpu_sees_what_the_cpu_sees(name: str) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        method = make_method(name)
        assert isinstance(method, SparseMethod)
        calibrator = CALIBRATORS[name](method=method, extent=extent())
        calls = ((x.to(device) for x in call(seed)) for seed in (0, 1))
        run(calibrator, [(q, k, v) for q, k, v in calls])
        found[device] = calibrator.state()
        assert {table.device.type for table in calibrator.tables().values()} == {"cpu"}
    torch.testing.assert_close(found["cuda"], found["cpu"], atol=2e-3, rtol=2e-3)


# ---- what calibrators measure with ----


@pytest.mark.parametrize("tile", [(128, 64), (64, 32)])
def test_bands_answer_for_any_mask(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    # two tiles at a time, so that bands have seams.
    monkeypatch.setitem(vidsparse.calibration.bands.BAND_BYTES, "cpu", 2 * 2**20)
    q, k, v = (x[0, 0] for x in call(0))
    rows, keys = (-(-GRID.tokens // size) for size in tile)
    masks = torch.rand(5, rows, keys, generator=torch.Generator().manual_seed(0)) < 0.5
    masks[..., 0] = True
    for c in range(5):
        pairs = masks[c].repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
        pairs = pairs[: GRID.tokens, : GRID.tokens]
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=pairs)
        found = [
            band.outputs(masks[:, band.tiles])[c].flatten(0, 1)
            for band in bands(q, k, v, *tile, 1 / 8)
        ]
        assert len(found) > 1
        torch.testing.assert_close(torch.cat(found)[: GRID.tokens], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tile", [(128, 64), (64, 32)])
def test_errors_and_shares_are_those_of_the_kernels(tile: tuple[int, int]) -> None:
    q, k, v = call(0)
    # blocks of 64 rows on a CPU: no tiles are merged.
    method = make_method("fg-attn", top_p=0.5, tile=tile, means=None)
    assert isinstance(method, SparseMethod)
    mask = method.select(q, k, site())
    errors, kept = masked_errors(mask.unsqueeze(0), tile, q, k, v)
    expected, engine = outcome(method, q, k, v)
    torch.testing.assert_close(errors[..., 0], expected, rtol=1e-3, atol=1e-5)
    (cell,) = engine.trace.cells
    assert cell.selected is not None
    torch.testing.assert_close(kept[..., 0], cell.selected)
    assert torch.equal(kept[..., 0], selected_share(mask, tile, GRID.tokens))


def test_steps_are_spread_over_the_window() -> None:
    assert extent(window=range(5, 20)).spread(5) == (6, 9, 12, 15, 18)
    assert extent(window=range(3, 5)).spread(5) == (3, 4)


# ---- spargeattn ----


@pytest.mark.parametrize("quantize", slow_but(["none"], ["none", "int8"]))
@pytest.mark.parametrize("gate_rows", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_spargeattn_keeps_least_under_its_bounds(gate_rows: int, quantize: str) -> None:
    calls = [call(seed) for seed in range(3)]
    method = SpargeAttn(gate_rows=gate_rows, quantize=quantize, means=None)
    calibrator = SpargeCalibrator(method=method, extent=extent(), l1=0.1, l2=0.14, steps=1)
    numbers = run(calibrator, calls)
    calibrated = method.with_numbers(numbers)
    results = [outcome(calibrated, *one) for one in calls]
    worst = torch.stack([errors.amax(0) for errors, _ in results]).amax(0)
    assert bool((worst < 0.14).all())
    # the first stage, by brute force: no pair with every error under l1 keeps less.
    for head in range(HEADS):
        kept = {}
        for theta, tau in PAIRS:
            single = SpargeAttn(tau=tau, theta=theta, quantize="none", means=None)
            found = [outcome(single, *one_head(one, head)) for one in calls]
            if max(errors.max().item() for errors, _ in found) < 0.1:
                shares = [engine.trace.summary().selected or 0 for _, engine in found]
                kept[theta, tau] = sum(shares) / len(shares)
        chosen = (
            round(numbers.tables["theta"][0, 0, head].item(), 4),
            round(numbers.tables["tau"][0, 0, head].item(), 4),
        )
        assert kept[chosen] == pytest.approx(min(kept.values()), abs=1e-6)
    # what it says it measured is what the kernel counts.
    summaries = [engine.trace.summary() for _, engine in results]
    measured = calibrator.measured()
    for name in ("selected", "skipped", "sparsity"):
        mean = sum(getattr(one, name) for one in summaries) / len(summaries)
        assert measured[name] == pytest.approx(mean, abs=2e-3)
    assert measured["skipped"] > 0
    # the next lambda would have gone over l2.
    for head in range(HEADS):
        place = LAMBDAS.index(round(numbers.tables["lambda_"][0, 0, head].item(), 2))
        if place:
            tables = {**numbers.tables, "lambda_": numbers.tables["lambda_"].clone()}
            tables["lambda_"][0, 0, head] = LAMBDAS[place - 1]
            bolder = method.with_numbers(Numbers(tables, numbers.video))
            assert max(outcome(bolder, *one)[0][:, head].max().item() for one in calls) >= 0.14


def test_a_head_that_nothing_satisfies_keeps_all() -> None:
    q, k, v = call(0)
    # values that cancel: any key left out shows.
    v = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    q = q * 0.01
    calibrator = SpargeCalibrator(
        method=SpargeAttn(), extent=extent(layers=2), l1=1e-6, l2=1e-6, steps=1
    )
    numbers = run(calibrator, [(q, k, v)])
    assert "lambda_" not in numbers.tables
    measured = calibrator.measured()
    assert (measured["selected"], measured["heads_that_keep_all"]) == (1, 4)
    # layer 1 was never seen: it keeps all whatever its empty statistics say.
    assert numbers.tables["tau"][0, 1].tolist() == [1, 1]


def test_the_gates_pieces_are_as_in_the_paper() -> None:
    assert PIECE == 64
    with pytest.raises(vidsparse.OptionError, match="128 queries by 64 or 128 keys, got 64x64"):
        SpargeCalibrator(method=SpargeAttn(tile=(64, 64)), extent=extent())


# ---- bsfa ----


def test_bsfas_threshold_is_the_mean_kth_largest_block_maximum() -> None:
    calls = [call(seed, spread=1.0) for seed in range(2)]
    calibrator = BsfaCalibrator(
        method=Bsfa(), extent=extent(), fractions=(0.3, 0.6), groups=2, per_group=1
    )
    assert calibrator.starts == (6,)
    assert calibrator.passes[0].steps == (4, 8)
    numbers = run(calibrator, calls)
    table = numbers.tables[THRESHOLD]
    assert table.shape == (1, 1, HEADS, 2, 2, 5)
    assert numbers.tables[FRACTION][0, 0, 1].tolist() == pytest.approx([0.3, 0.6])
    expected = torch.zeros(HEADS, 2, 5)
    for q, k, _ in calls:
        scores = (q @ k.mT)[0] / 8
        for head, row in itertools.product(range(HEADS), range(5)):
            band = scores[head, row * 128 : row * 128 + 128]
            judged = [
                band[:, c * 64 : c * 64 + 64].max().item()
                for c in range(9)
                if c not in (2 * row, 2 * row + 1)
            ]
            judged.sort(reverse=True)
            for f, fraction in enumerate((0.3, 0.6)):
                # the last row's neighbourhood is one block, so it judges eight.
                kept = round(fraction * len(judged))
                expected[head, f, row] += judged[kept - 1] / 2
    for group in range(2):
        torch.testing.assert_close(table[0, 0, :, group], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", [0, 40])
def test_bsfas_density_is_predicted_to_the_block(text: int) -> None:
    grid = TokenGrid(4, 10, 14, text=text)
    q, k, v = call(0, spread=1.0, grid=grid)
    method = Bsfa(keep=0.3)
    calibrator = BsfaCalibrator(
        method=method, extent=extent(), fractions=(0.3,), groups=1, per_group=1
    )
    (one,) = calibrator.passes
    calibrator.observe(0, q, k, v, site(one.steps[0], grid))
    numbers = Numbers(calibrator.tables(), (4, 10, 14))
    engine = AttentionEngine(
        method.with_numbers(numbers), schedule=Schedule(dense_steps=0), order="rowmajor", layers=1
    )
    engine.begin_run(10)
    engine.attend(q, k, v, site(one.steps[0], grid))
    # on the very input that the thresholds are from, just k blocks pass.
    skipped = engine.trace.summary().skipped
    assert skipped is not None
    predicted = calibrator.measured()["predicted_density"]["0.3"]
    assert 1 - skipped == pytest.approx(predicted, abs=0.01)
    assert 0.3 < predicted < 0.7


def test_bsfas_density_is_what_the_means_so_far_keep() -> None:
    calls = [call(0, spread=1.0), call(1, spread=2.0)]
    method = Bsfa(keep=0.3)
    calibrator = BsfaCalibrator(
        method=method, extent=extent(), fractions=(0.3,), groups=1, per_group=1
    )
    ((step,),) = (one.steps for one in calibrator.passes)
    kept = []
    for q, k, v in calls:
        calibrator.observe(0, q, k, v, site(step))
        numbers = Numbers(calibrator.tables(), (GRID.frames, GRID.height, GRID.width))
        _, engine = outcome(method.with_numbers(numbers), q, k, v, step)
        skipped = engine.trace.summary().skipped
        assert skipped is not None
        kept.append(1 - skipped)
    predicted = calibrator.measured()["predicted_density"]["0.3"]
    # the second call met a mean of two, and counts twice.
    assert predicted == pytest.approx((kept[0] + 2 * kept[1]) / 3, abs=1e-3)
    assert abs(kept[0] - kept[1]) > 0.02


def test_block_maxima_of_a_short_sequence() -> None:
    q, k, _ = call(0)
    whole = (q @ k.mT) / 8
    maxima = block_maxima(q, k, (128, 64))
    assert maxima.shape == (1, HEADS, 5, 9)
    torch.testing.assert_close(maxima[0, 1, 4, 8], whole[0, 1, 512:, 512:].max())
    torch.testing.assert_close(maxima.amax((2, 3)), whole.amax((2, 3)))


@pytest.mark.parametrize("bad", [(), (0.1, 0.1), (0.0,), (1.5,)])
def test_fractions_are_different_shares(bad: tuple[float, ...]) -> None:
    with pytest.raises(vidsparse.OptionError, match="fraction"):
        BsfaCalibrator(method=Bsfa(), extent=extent(), fractions=bad)


# ---- sale ----


@pytest.mark.parametrize("quantize", ["none", "int8", "fp8"])
def test_sale_halves_until_every_call_is_under_the_bound(quantize: str) -> None:
    calls = [call(seed, spread=1.0) for seed in range(3)]
    method = Sale(local=64, quantize=quantize, merge="consecutive", means=None)
    calibrator = SaleCalibrator(method=method, extent=extent(), error=0.05, tau0=0.5, steps=1)
    numbers = run(calibrator, calls)
    tau = numbers.tables["tau"][0, 0]
    assert calibrator.measured()["halvings"][0] < HEADS
    for head in range(HEADS):
        halvings = round(torch.log2(0.5 / tau[head]).item())
        assert tau[head].item() == pytest.approx(0.5 / 2**halvings)

        def worst(value: float, head: int = head) -> float:
            single = Sale(tau=value, local=64, quantize=quantize, means=None)
            found = [outcome(single, *one_head(one, head)) for one in calls]
            return max(errors.max().item() for errors, _ in found)

        assert worst(tau[head].item()) < 0.05
        if halvings:
            assert worst(2 * tau[head].item()) >= 0.05


# ---- xattention ----


def test_adjustments_save_as_much_density_as_brute_force_would() -> None:
    generator = torch.Generator().manual_seed(0)

    def rising(*shape: int) -> Tensor:
        made = torch.rand(*shape, generator=generator).cumsum(-1).double()
        return made - made[:, :1]

    for _ in range(40):
        errors, saved = rising(4, 4), rising(4, 4)
        most = 2.0

        def both(made: Iterable[int], errors: Tensor = errors, saved: Tensor = saved) -> Tensor:
            at = torch.tensor(list(made)).unsqueeze(1)
            return torch.stack([table.gather(1, at).sum() for table in (errors, saved)])

        every = torch.stack([both(made) for made in itertools.product(range(4), repeat=4)])
        best = every[every[:, 0] <= most, 1].max()
        cost, found = both(best_adjustments(errors, 1 - saved, most).tolist())
        assert cost <= most
        # never further off than one step of one head.
        assert best - saved.diff(dim=1).max() <= found <= best + 1e-9


def test_density_counts_and_not_the_number_of_adjustments() -> None:
    # three cheap adjustments of the first head save less than one of the second.
    errors = torch.tensor([[0.0, 0.1, 0.2, 0.3], [0.0, 0.3, 0.6, 0.9]])
    densities = torch.tensor([[0.9, 0.89, 0.88, 0.87], [0.9, 0.4, 0.39, 0.38]])
    assert best_adjustments(errors, densities, 0.35).tolist() == [0, 1]
    # what is left of the bound is not given away.
    assert best_adjustments(errors, densities, 0.55).tolist() == [2, 1]


def test_heads_stay_where_they_must_not_go() -> None:
    errors = torch.tensor([[0.1, torch.inf], [0.1, 0.2]])
    densities = torch.tensor([[0.9, 0.1], [0.9, 0.8]])
    assert best_adjustments(errors, densities, 1.0).tolist() == [0, 1]


def test_nothing_is_adjusted_where_the_start_is_too_bad() -> None:
    errors = torch.tensor([[1.0, 2.0], [1.0, 3.0]])
    assert best_adjustments(errors, 1 / errors, 0.5).tolist() == [0, 0]


def test_xattention_lowers_thresholds_while_the_mean_error_allows() -> None:
    calls = [call(seed, spread=2.5) for seed in range(2)]
    method = XAttention(merge="consecutive", means=None)
    calibrator = XAttentionCalibrator(
        method=method, extent=extent(), error=0.2, adjustments=12, steps=1
    )
    numbers = run(calibrator, calls)
    results = [outcome(method.with_numbers(numbers), *one) for one in calls]
    of_heads = torch.cat([errors for errors, _ in results]).mean(0)
    mean = of_heads.mean().item()
    measured = calibrator.measured()
    # not one head for the sake of the other either.
    assert of_heads.max() <= 0.2 + 1e-4
    assert measured["error"] == pytest.approx(mean, abs=1e-3)
    assert measured["selected"] < measured["selected_before"]
    adjusted = torch.log(numbers.tables["tau"] / 0.9) / torch.log(torch.tensor(0.9))
    torch.testing.assert_close(adjusted, adjusted.round(), rtol=0, atol=1e-3)
    with pytest.raises(vidsparse.OptionError, match="xattention does not use tau"):
        XAttentionCalibrator(method=XAttention(topk=0.3), extent=extent())


# ---- all ----


def fresh(name: str, **more: Any) -> Iterator[Calibrator]:
    method = make_method(name)
    assert isinstance(method, SparseMethod)
    while True:
        yield CALIBRATORS[name](method=method, extent=extent(), **{**NEEDED.get(name, {}), **more})


@pytest.mark.parametrize(
    ("name", "more"),
    [*((name, {}) for name in CALIBRATORS), *((name, {"target_ssim": 0.5}) for name in OF_CALLS)],
)
def test_a_restored_calibrator_goes_on_as_if_nothing_had_happened(
    name: str, more: dict[str, Any]
) -> None:
    calibrators = fresh(name, **more)
    straight, broken = next(calibrators), next(calibrators)
    calls = [call(0), call(1)]
    number = 0
    while number < len(straight.passes):
        now = straight.passes[number]
        for prompt, (q, k, v) in enumerate(calls):
            for one in (straight, broken):
                if now.steps:
                    one.observe(number, q, k, v, site(3))
                if now.last_step is None:
                    one.watch(number, prompt, video(2 * number + prompt), 0.5, 1.0)
            state = {key: value.clone() for key, value in broken.state().items()}
            broken = next(calibrators)
            broken.restore(state)
        straight.finish(number)
        broken.finish(number)
        number += 1
    expected, got = straight.tables(), broken.tables()
    assert got.keys() == expected.keys()
    for key, table in expected.items():
        assert torch.equal(got[key], table), key
    assert broken.measured() == straight.measured()


@pytest.mark.parametrize("name", CALIBRATORS)
@pytest.mark.parametrize("setting", ["error", "l1", "steps", "groups", "adjustments", "tau0"])
def test_settings_are_checked(name: str, setting: str) -> None:
    method = make_method(name)
    assert isinstance(method, SparseMethod)
    known = CALIBRATORS[name](method=method, extent=extent(), **NEEDED.get(name, {})).settings()
    if setting in known:
        with pytest.raises(vidsparse.OptionError, match="must"):
            CALIBRATORS[name](method=method, extent=extent(), **{setting: 0})


# ---- calls that are not finite ----


@pytest.mark.parametrize("name", ["spargeattn", "xattention", "sale"])
def test_a_call_that_is_not_finite_makes_no_head_sparser(name: str, tmp_path: Path) -> None:
    grid = TokenGrid(4, 16, 16)
    extent = Extent(parts=1, layers=1, heads=2, window=range(4), prompts=1)
    tables = []
    for broken in (False, True):
        method: Any = make_method(name)
        made = CALIBRATORS[name](method=method, extent=extent)
        q, k, v = random_qkv(grid.tokens, 64, torch.float32, heads=2)
        # nearly equal scores, so that sale's first threshold is too coarse.
        q *= 0.1
        for number in range(len(made.looks)):
            made.observe(number, q, k, v, CallSite(0, 0, 1.0, grid))
            if broken:
                # the second head's values alone.
                bad = v.clone()
                bad[:, 1, 5] = torch.inf
                made.observe(number, q, k, bad, CallSite(0, 1, 1.0, grid))
            made.conclude(number)
        tables.append(made.found(None)["tau"][0, 0])
        preset = Preset(
            method=name,
            options=made.method.options(),
            order="hilbert",
            tables=made.found(None),
            model={},
            video={},
            grid=(4, 16, 16),
            measured=made.seen(),
        )
        # JSON knows no number that is not finite.
        assert parse_json(preset.save(tmp_path / f"{name}-{broken}").read_bytes())
    whole, seen = tables
    assert (seen[1] >= whole[1]) if name != "sale" else (seen[1] <= whole[1])
