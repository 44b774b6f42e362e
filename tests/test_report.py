"""The report as JSON, Markdown and a page: complete, strict, and without outside resources."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from vidsparse.apps.runs.curve import curve_points, nice_ticks
from vidsparse.apps.runs.report_page import ReportedSetting, SideBySide, render
from vidsparse.metrics import compare_videos
from vidsparse.report import Promise, PromptComparison, Report, RunFacts, headline, mean_density_map
from vidsparse.work import Work

HOSTILE = 'a <script>alert(1)</script> | "ball" & ünïcode'


def _facts(seconds: float, computed: float | None) -> RunFacts:
    return RunFacts(
        seconds={"denoise": seconds, "decode": 1.0, "total": seconds + 1, "load": None},
        selected=None if computed is None else computed / 2,
        computed=computed,
        dense_step_share=1.0 if computed is None else 0.25,
        implementation="torch",
        # a host's scheduler config may hold what JSON cannot.
        record={"scheduler": {"sigma_max": float("inf"), "nested": [float("nan"), 1.0]}},
        work=Work.all_dense()
        if computed is None
        else Work.of_schedule(dense_steps=0.25, dense_layers=0.25, computed=computed),
    )


def _report(kinds: str = "ds", frames: int = 4) -> Report:
    """One prompt per letter: d differs, p differs after a first exact frame, s is the same."""
    generator = np.random.default_rng(0)
    comparisons = []
    for number, kind in enumerate(kinds, 1):
        dense = generator.integers(0, 250, (frames, 16, 16, 3), dtype=np.uint8)
        sparse = dense.copy()
        if kind in "dp":
            sparse[kind == "p" :] += np.uint8(number)
        comparisons.append(
            PromptComparison(
                number=number,
                prompt=HOSTILE,
                seed=7,
                quality=compare_videos(dense, sparse),
                dense=_facts(4.0, None),
                sparse=_facts(2.0, 0.4),
            )
        )
    return Report(
        settings={"method": "fg-attn", "top_p": 0.9, "scheduler": {"shift": float("inf")}},
        environment={"device": "cpu", "triton": None},
        comparisons=comparisons,
        density_map=[[1.0, 1.0, None], [0.25, 0.5, None]],
        notes=["a note"],
        created="2026-01-02T03:04:05+00:00",
    )


def _page(report: Report) -> str:
    videos = [SideBySide(mp4=b"not really", width=48, height=16) for _ in report.comparisons]
    one = ReportedSetting(label="fg-attn", report=report, videos=videos)
    return render([one], model="shapes", method_title="FG-Attn", fps=16, gain=4)


def _strict(text: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_strict_and_says_identical() -> None:
    document = _strict(_report("ds").to_json_text())
    different, same = document["prompts"]
    assert (same["psnr"], same["identical"]) == (None, True)
    assert all(f == {"psnr": None, "ssim": 1.0, "identical": True} for f in same["frames"])
    assert not different["identical"]
    assert different["psnr"] == pytest.approx(10 * np.log10(255**2))
    assert document["summary"]["identical"] == 1
    assert document["summary"]["psnr"]["count"] == 1


def test_a_preset_s_promise_stands_beside_what_was_measured() -> None:
    promised = Promise(psnr=32.1, std=2.345, total=0.412, prompts=8, steps=25)
    report = replace(_report("ds"), promise=promised)
    text = "32.10 ± 2.35 dB with 41.2% computed, over 8 prompts of its calibration in 25 steps"
    assert str(replace(promised, std=None)) == text.replace(" ± 2.35", "")
    assert text in report.to_markdown()
    assert f"promised {text}" in _page(report)
    promise = _strict(report.to_json_text())["summary"]["promise"]
    assert promise == {"psnr": 32.1, "std": 2.345, "total": 0.412, "prompts": 8, "steps": 25}
    assert _strict(_report().to_json_text())["summary"]["promise"] is None


def test_the_worst_prompt_is_named_where_a_mean_would_hide_it() -> None:
    # the third differs most, and the second not at all.
    report = _report("dsd")
    third = report.comparisons[2].quality.psnr
    assert third is not None
    assert report.worst == (third, 3)
    assert _strict(report.to_json_text())["summary"]["worst"] == {"psnr": third, "prompt": 3}
    assert f"{third:.2f} dB, prompt 3" in report.to_markdown()
    assert f"worst {third:.2f} dB, prompt 3" in _page(report)
    assert _report("ss").worst is None
    assert _strict(_report("ss").to_json_text())["summary"]["worst"] is None
    # of one prompt the mean says all.
    assert "prompt 1" not in _report("d").to_markdown()


def test_json_of_only_identical_videos_has_no_mean() -> None:
    document = _strict(_report("ss").to_json_text())
    assert document["summary"]["psnr"] == {"mean": None, "std": None, "count": 0}
    assert document["summary"]["ssim"]["mean"] == 1.0


def test_json_keeps_host_values_that_json_lacks_as_null() -> None:
    document = _strict(_report().to_json_text())
    assert document["settings"]["scheduler"] == {"shift": None}
    assert document["prompts"][0]["dense"]["scheduler"]["nested"] == [None, 1.0]


def test_means_and_deviations_are_over_prompts() -> None:
    report = _report("ddd")
    values = [each.quality.psnr or 0.0 for each in report.comparisons]
    assert report.psnr.mean == pytest.approx(np.mean(values))
    assert report.psnr.std == pytest.approx(np.std(values, ddof=1))


def test_a_speed_is_said_with_its_range_or_not_at_all() -> None:
    report = _report("dd")
    assert report.speedup.why == "too short to time"
    assert "times as fast" not in headline(report)
    assert "| speed, dense over sparse | too short to time |" in report.to_markdown()
    assert "too short to time: 4.00 s dense, 2.00 s sparse" in _page(report)
    assert _strict(report.to_json_text())["summary"]["denoise_speedup"] is None

    on_gpu = {"device": {"kind": "cuda", "name": "a GPU"}}
    quick = [
        replace(each, sparse=replace(each.sparse, record=on_gpu)) for each in report.comparisons
    ]
    assert replace(report, comparisons=quick).speedup.ratio == 2.0

    long = [
        replace(each, dense=_facts(dense, None), sparse=_facts(4.0, 0.4))
        for each, dense in zip(report.comparisons, (8.0, 10.0), strict=True)
    ]
    timed = replace(report, comparisons=long)
    assert "denoising 2.25 times as fast (2.00 to 2.50 over 2 pairs)" in headline(timed)
    assert "<b>2.25x</b>" in _page(timed)
    assert _strict(timed.to_json_text())["summary"]["denoise_speedup"] == 2.25
    kept = replace(timed, comparisons=[long[0], replace(long[1], kept="14:05")])
    assert "times as fast" not in headline(kept)
    assert "dense kept from 14:05" in _page(kept)


def test_prompts_of_one_batch_are_one_timed_pair() -> None:
    report = _report("dd")
    together = [
        replace(
            each,
            dense=_facts(8.0, None),
            sparse=replace(_facts(4.0, 0.4), record={"batch": 2}),
        )
        for each in report.comparisons
    ]
    assert replace(report, comparisons=together).speedup.why == "timed once"


def test_markdown_says_the_same_and_survives_a_hostile_prompt() -> None:
    text = _report("ds").to_markdown()
    assert "identical" in text
    assert "40.0%" in text
    assert "<script" not in text
    rows = [line for line in text.splitlines() if "ünïcode" in line]
    # an unescaped bar in a prompt would add a column.
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 9 for row in rows)


def test_the_whole_run_comes_first_and_then_its_split() -> None:
    report = _report("d")
    # a quarter of the steps, a quarter of the layers in the rest, and 40 % of what is left.
    total = 0.25 + 0.75 * 0.25 + 0.75 * 0.75 * 0.4
    document = _strict(report.to_json_text())
    assert document["summary"]["total"] == pytest.approx(total)
    assert document["prompts"][0]["total"] == pytest.approx(total)
    work = document["summary"]["work"]
    assert sum(work[name] for name in ("dense_steps", "dense_layers", "sparse")) == pytest.approx(
        total
    )
    assert {"total", "work"} <= set(document["conventions"])
    assert "computing 66.2% of attention in the whole run" in headline(report)
    split = "25.0% dense steps, 18.8% dense layers, 22.5% sparse calls"
    for text in (report.to_markdown(), _page(report)):
        assert text.index("66.2%") < text.index("40.0%")
        assert split in text
        assert "not measured for this method" in text


def test_a_record_that_counts_no_work_is_still_reported() -> None:
    report = _report("d")
    (one,) = report.comparisons
    old = replace(report, comparisons=[replace(one, sparse=replace(one.sparse, work=None))])
    summary = _strict(old.to_json_text())["summary"]
    assert (summary["total"], summary["work"], summary["computed"]) == (None, None, 0.4)
    assert "whole run" not in headline(old)
    assert "| attention computed, whole run | - |" in old.to_markdown()
    assert "not counted in this record" in _page(old)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "poster", "data", "srcset", "action") and not (
                value or ""
            ).startswith(("#", "data:")):
                self.outside.append(f"{tag} {name}={value}")


def test_page_loads_nothing_from_outside() -> None:
    page = _page(_report("dps"))
    parser = _Links()
    parser.feed(page)
    assert parser.outside == []
    assert not {"link", "iframe", "object", "embed", "base"} & set(parser.tags)
    assert not re.search(r"https?://|@import|url\(", page)


def test_page_escapes_prompts() -> None:
    page = _page(_report("d"))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_page_has_a_video_and_two_plots_per_prompt_and_no_infinity() -> None:
    page = _page(_report("dps"))
    assert page.count("<video ") == 3
    assert page.count('class="plot psnr"') == page.count('class="plot ssim"') == 3
    assert not re.search(r"\b(inf|nan|Infinity|NaN|None)\b", page.split("<script>")[0])


def test_page_marks_dense_and_missing_cells_of_the_density_map() -> None:
    page = _page(_report("d"))
    assert "step 1, layer 2: dense" in page
    assert "step 2, layer 1: 25.0% computed" in page
    assert "layer 3" not in page


def test_page_of_single_frame_videos_draws_dots() -> None:
    page = _page(_report("d", frames=1))
    assert re.search(r'd="M0\.00000 [0-9.]+h0"', page)


def test_page_without_a_density_map_leaves_the_section_out() -> None:
    report = _report("s")
    bare = Report(
        settings=report.settings,
        environment=report.environment,
        comparisons=report.comparisons,
        density_map=[],
        notes=[],
        created=report.created,
    )
    assert "Where attention was sparse" not in _page(bare)


@pytest.mark.parametrize(
    ("low", "high"), [(30.0, 30.0), (31.2, 44.9), (0.91, 0.9987), (0.99999, 1.0), (-3.0, 60.0)]
)
def test_ticks_enclose_their_values(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert 3 <= len(ticks) <= 5
    assert ticks[0] <= low + 1e-9
    assert ticks[-1] >= high - 1e-9


def test_settings_that_come_to_the_same_share_one_name_on_the_curve() -> None:
    (each,) = _report("d").comparisons
    less = replace(each, sparse=_facts(2.0, 0.1))
    rows = [("share 0.1", each), ("share 0.3", each), ("share 0.9", less)]
    points = curve_points(rows, "shapes")
    assert points is not None
    names = [point["name"] for point in points["means"]]
    assert names == ["share 0.9", "share 0.1, 0.3", ""]


def test_density_maps_average_cell_by_cell_and_leave_out_none() -> None:
    maps: Any = [[[1.0, None], [0.2, None]], [[0.5, 0.4], [0.4, None]], [[0.0]]]
    assert mean_density_map(maps) == [
        [pytest.approx(0.75), pytest.approx(0.4)],
        [pytest.approx(0.3), None],
    ]
    assert mean_density_map([]) == []
