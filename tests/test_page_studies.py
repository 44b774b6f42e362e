"""The page of studies shows the committed rows, and brings their settings into the form."""

from __future__ import annotations

import dataclasses
import json
import re
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from page_host import form_of, host_of, values_of

from vidsparse.apps.page.studies import FILE, settings_link, studies_page
from vidsparse.apps.studies.digest import digest
from vidsparse.pipelines.request import GenerateRequest

COMMITTED = sorted(Path(__file__).parents[1].glob("docs/benchmarks/quality-*.json"))
STUDIES = json.loads(FILE.read_text(encoding="utf-8"))["studies"]
POINTS = [
    (study["study"], name, point)
    for study in STUDIES
    for name, line in study["lines"].items()
    for point in line
]


def test_what_the_page_shows_is_what_is_committed() -> None:
    made = json.loads(json.dumps(digest(COMMITTED)))
    assert made == json.loads(FILE.read_text(encoding="utf-8")), (
        "rows have changed. Hint: python -m vidsparse.apps.studies.digest "
        "docs/benchmarks/quality-*.json apps/page/studies.json"
    )


def test_every_study_that_compares_all_methods_is_there() -> None:
    found = {study["study"] for study in STUDIES}
    assert found >= {"seconds", "curves"}
    for study in STUDIES:
        if study["study"] == "seconds":
            assert study["dense_seconds"] > 0
            assert {"fg-attn", "spargeattn", "xattention", "foresight"} <= set(study["lines"])


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return form_of(host_of(tmp_path_factory.mktemp("studies"), frames=49, side=512))


def _linked(link: str | None) -> dict[str, Any]:
    assert link is not None
    where, _, text = link.partition("#settings=")
    # relative, so that it holds behind a proxy that gives the page another path.
    assert where == "./"
    values = json.loads(urllib.parse.unquote(text))
    assert isinstance(values, dict)
    return values


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(point["settings"], id=f"{study}-{name}-{point['set_to']}")
        for study, name, point in POINTS
        if point["settings"] is not None and point["settings"]["model"] == "shapes"
    ],
)
def test_a_row_s_link_makes_the_row_s_run(form: Any, settings: dict[str, Any]) -> None:
    values = _linked(settings_link(form, settings, {"shapes"}))
    # as its row was measured, whatever the model's own step cache.
    assert values["cache"] == "none"
    request, _ = form.request(values_of(form, **values))
    wanted = GenerateRequest(prompt="a red ball", **settings)
    for field in dataclasses.fields(GenerateRequest):
        if field.name in settings and field.name != "method_options":
            assert getattr(request, field.name) == getattr(wanted, field.name), field.name
    assert {name: request.method_options[name] for name in wanted.method_options} == dict(
        wanted.method_options
    )


def test_rows_that_this_page_cannot_run_have_no_link(tmp_path: Path) -> None:
    settings = next(point["settings"] for _, _, point in POINTS if point["settings"])
    small = form_of(host_of(tmp_path, side=128))
    assert settings_link(small, settings, {"shapes"}) is None
    assert settings_link(small, settings, {"another"}) is None
    assert settings_link(small, None, {"shapes"}) is None


def test_every_point_is_drawn_inside_of_its_chart_and_listed(form: Any) -> None:
    html = studies_page(form)
    for study in STUDIES:
        points = [point for line in study["lines"].values() for point in line]
        assert f"The {len(points)} rows as a table" in html
    places = [
        float(text.partition("%")[0])
        for part in html.split('class="dot')[1:]
        for text in part.split("left: ")[1:2] + part.split("top: ")[1:2]
    ]
    charts = sum(2 if study["dense_seconds"] else 1 for study in STUDIES)
    assert html.count("<figure") == charts
    assert len(places) >= 2 * len(POINTS)
    assert min(places) >= 0
    assert max(places) <= 100


def test_no_two_lines_of_a_chart_look_alike(form: Any) -> None:
    charts = studies_page(form).split("<figure")[1:]
    looks = [re.findall(r'<path class="line (c\d[^"]*)"', chart) for chart in charts]
    named = [re.findall(r'<span><i class="(c\d[^"]*)"', chart) for chart in charts]
    assert looks == named
    assert [len(set(each)) for each in looks] == [len(each) for each in looks]
    # more than there are colours.
    assert max(map(len, looks)) > 7


def test_no_axis_goes_below_zero_and_its_ticks_differ(form: Any) -> None:
    for chart in studies_page(form).split("<figure")[1:]:
        for side in "xy":
            labels = re.findall(rf'class="tick {side}"[^>]*>(-?[\d.]+)', chart)
            numbers = [float(label) for label in labels]
            assert len(numbers) >= 3
            assert min(numbers) >= 0
            assert len(set(numbers)) == len(numbers)
