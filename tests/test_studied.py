"""What methods declare of themselves, and that studies and benchmarks follow it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from vidsparse.apps.bench.masks import CASES
from vidsparse.apps.studies import ablation_plots
from vidsparse.apps.studies.ablation_tables import tables
from vidsparse.apps.studies.call_ablations import CALL_ABLATIONS
from vidsparse.apps.studies.configurations import ABLATIONS, CALIBRATED, KNOBS, configurations
from vidsparse.calibration import CALIBRATORS
from vidsparse.calibration.base import setting_fields
from vidsparse.methods import METHODS, SPARSE_METHODS, SparseMethod, make_method
from vidsparse.methods.studied import Ablation, Knob

DECLARED = [(name, one) for name, cls in SPARSE_METHODS.items() for one in cls.ablations]


def row_of(method: str, own: dict[str, Any]) -> dict[str, Any]:
    return {
        "method": method,
        "options": {**make_method(method, **own).options(), "order": "hilbert"},
        "size": "256x256",
        "frames": 33,
        "model": "shapes",
        "selected": 0.3,
        "computed": 0.4,
        "dense_step_share": 0.25,
        "psnr_mean": 30.0,
        "psnr_std": 1.0,
        "ssim_mean": 0.9,
        "prompts": 24,
        "identical": 0,
    }


@pytest.mark.parametrize("name", SPARSE_METHODS)
def test_every_declared_setting_is_one_that_the_method_takes(name: str) -> None:
    cls = SPARSE_METHODS[name]
    ablated = (one for each in cls.ablations for some in each.lines.values() for one in some)
    called = (own for each in cls.call_ablations for own in each.settings.values())
    for own in (*cls.compared, *cls.masks, *cls.eight_bits, *ablated, *called):
        make_method(name, **own)
    for knob in (*cls.knobs, *(knob for each in cls.ablations for knob in each.knobs)):
        for place in (0.1, 0.9):
            make_method(name, **{knob.name: knob.at(place)})


@pytest.mark.parametrize("name", SPARSE_METHODS)
def test_a_method_has_a_mask_to_time_or_needs_numbers_first(name: str) -> None:
    cls = SPARSE_METHODS[name]
    assert [own for method, own in CASES if method == name] == list(cls.masks)
    assert cls.masks or cls.needs_numbers


@pytest.mark.parametrize("name", SPARSE_METHODS)
def test_every_method_has_a_curve(name: str) -> None:
    points = [one for one in configurations(("curves",)) if one.method == name]
    cls = SPARSE_METHODS[name]
    # as its paper has it.
    assert {tuple(one.options.items()) for one in points} == {
        tuple({**cls.as_published, **own}.items()) for own in cls.compared
    }
    for one in points:
        assert (one.aim is not None) == (name in KNOBS)
        assert one.calibrated == SPARSE_METHODS[name].needs_numbers


@pytest.mark.parametrize("name", SPARSE_METHODS)
def test_a_method_with_8_bit_products_is_compared_with_16_bits(name: str) -> None:
    cls = SPARSE_METHODS[name]
    assert bool(cls.eight_bits) == any(one.name == "quantize" for one in cls.option_fields())
    rows = [one for one in configurations(("precision",)) if one.method == name]
    assert len(rows) == 3 * len(cls.eight_bits)
    assert {one.options["quantize"] for one in rows} <= {"none", "int8", "fp8"}


def test_what_can_be_calibrated_has_a_calibrator_with_its_bound_among_the_settings() -> None:
    assert set(CALIBRATORS) == {n for n, cls in SPARSE_METHODS.items() if cls.calibratable()}
    assert set(CALIBRATED) == {
        name
        for name, calibrator in CALIBRATORS.items()
        if not SPARSE_METHODS[name].needs_numbers and not calibrator.needs_target
    }
    for name, calibrator in CALIBRATORS.items():
        assert calibrator.calibrates is METHODS[name]
        settings = {field.name for field in setting_fields(calibrator)}
        assert calibrator.bound is None or calibrator.bound in settings


def test_tables_of_single_calls_have_names_of_their_own_and_what_they_are_measured_by() -> None:
    declared = [one for cls in SPARSE_METHODS.values() for one in cls.call_ablations]
    assert [*(one.name for one in declared), "held-out"] == list(CALL_ABLATIONS)
    assert len({*ABLATIONS, *CALL_ABLATIONS}) == len(ABLATIONS) + len(CALL_ABLATIONS)
    for one in declared:
        assert len(one.settings) == {"difference": 2, "recall": 2}.get(one.measured, 0)
        assert bool(one.option) == (one.measured == "skipped")


def test_ablations_have_names_of_their_own() -> None:
    names = Counter(one.name for _, one in DECLARED)
    assert set(names.values()) == {1}
    assert tuple(names) == ABLATIONS[:-1]


@pytest.mark.parametrize(
    ("method", "ablation"), DECLARED, ids=lambda value: getattr(value, "name", value)
)
def test_a_declared_ablation_is_measured_and_gets_a_table_and_a_picture(
    method: str, ablation: Ablation
) -> None:
    measured = list(configurations((ablation.name,)))
    settings = sum(map(len, ablation.lines.values()))
    assert len(measured) == settings * len(ablation.orders) * max(1, len(ablation.knobs))
    assert {one.method for one in measured} == {method}
    rows = []
    for one in measured:
        own = dict(one.options)
        if one.knob is not None:
            own[one.knob.name] = one.knob.at(0.5)
        rows.append({**row_of(method, own), "study": ablation.name})
    table = tables(rows, [])[ablation.name]
    assert len(table.splitlines()) == 2 + len(rows)
    studies, label = ablation_plots.LINES[ablation.name]
    assert studies == (ablation.name,)
    assert all(map(label, rows))


def test_a_row_is_a_point_of_the_line_that_its_options_are_of() -> None:
    ablation = Ablation(
        name="gates",
        lines={"open": ({"gate": None, "keep": 0.5},), "shut": ({"gate": -5.0}, {"gate": -6.0})},
        orders=(None, "random"),
    )
    assert ablation.line_of({"gate": None, "keep": 0.5, "order": "hilbert"}) == "open hilbert order"
    assert ablation.line_of({"gate": -6.0, "keep": 0.1, "order": "random"}) == "shut random order"
    assert ablation.line_of({"gate": None, "keep": 0.1, "order": "random"}) == ""
    # an option that a row lacks is not one that is None.
    assert ablation.line_of({"keep": 0.5, "order": "random"}) == ""


def test_ways_to_select_are_lines_by_their_knobs() -> None:
    ablation = Ablation(name="ways", lines={"": ({},)}, knobs=(Knob("a", 0, 1), Knob("b", 0, 1)))
    assert ablation.line_of({"a": None, "b": 0.3}) == "b"


def test_a_method_that_declares_nothing_is_compared_as_it_is_and_its_mask_timed() -> None:
    assert (SparseMethod.compared, SparseMethod.masks) == (({},), ({},))
    assert (SparseMethod.knobs, SparseMethod.ablations) == ((), ())
    assert (SparseMethod.eight_bits, SparseMethod.call_ablations) == ((), ())
