"""Presets: what is written comes back, and what does not fit is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import vidsparse
from vidsparse.grid import TokenGrid
from vidsparse.methods import FgAttn, Numbers, SpargeAttn, SparseMethod
from vidsparse.presets import SCHEMA, Preset, load_preset, preset_files
from vidsparse.site import CallSite

TRANSFORMER = {"class": "WanTransformer3DModel", "config": {"num_layers": 2, "patch": [1, 2, 2]}}


def a_preset(**changes: Any) -> Preset:
    return Preset(
        **{
            "method": "spargeattn",
            "options": SpargeAttn().options(),
            "order": "rowmajor",
            "edges": (700.0, 300.0),
            "tables": {
                "tau": torch.tensor([[[0.5, 0.7], [0.9, 1.0]]]),
                "theta": torch.full((1, 2, 2), 0.3),
            },
            "model": {"name": "tiny", "weights_hash": "abc", "transformers": [TRANSFORMER]},
            "video": {"frames": 9, "width": 64, "height": 32},
            "grid": (3, 2, 4),
            "measured": {"sparsity": 0.5},
            **changes,
        }
    )


def test_a_preset_comes_back_as_it_was(tmp_path: Path) -> None:
    made = a_preset()
    path = made.save(tmp_path / "new" / "folder" / "mine")
    assert path == tmp_path / "new" / "folder" / "mine.json"
    read = load_preset(path)
    for name in ("method", "options", "order", "edges", "model", "video", "grid", "measured"):
        assert getattr(read, name) == getattr(made, name)
    assert read.tables.keys() == made.tables.keys()
    assert all(torch.equal(read.tables[name], made.tables[name]) for name in made.tables)
    assert read.digest == load_preset(tmp_path / "new" / "folder" / "mine").digest
    assert sorted(os.listdir(path.parent)) == ["mine.json", "mine.safetensors"]


def test_options_that_an_older_version_did_not_have_are_at_their_defaults(tmp_path: Path) -> None:
    path = a_preset().save(tmp_path / "p")
    text = json.loads(path.read_text(encoding="utf-8"))
    del text["options"]["means"]
    path.write_text(json.dumps(text), encoding="utf-8")
    assert load_preset(path).make_method().means is None


def test_both_spellings_name_the_same_files() -> None:
    assert preset_files("a/b.v1") == preset_files("a/b.v1.json")
    assert preset_files("a/b.v1")[1] == Path("a/b.v1.safetensors")


def test_the_digest_follows_the_contents(tmp_path: Path) -> None:
    def digest(**changes: Any) -> str:
        return load_preset(a_preset(**changes).save(tmp_path / "p")).digest

    assert digest() == digest()
    tables = {**a_preset().tables, "theta": torch.zeros(1, 2, 2)}
    assert len({digest(), digest(tables=tables), digest(order="random")}) == 3


def test_the_method_has_the_numbers() -> None:
    method = a_preset().make_method(quantize="fp8")
    assert isinstance(method, SpargeAttn)
    assert method.quantize == "fp8"
    site = CallSite(1, 0, 500.0, TokenGrid(3, 2, 4))
    assert method.number("tau", site, torch.device("cpu")).tolist() == pytest.approx([0.9, 1.0])
    assert method.numbers is not None
    assert [method.numbers.group(dataclasses.replace(site, timestep=t)) for t in (700, 699, 5)] == [
        0, 1, 2,
    ]  # fmt: skip


def test_options_that_the_numbers_settle_cannot_be_changed() -> None:
    with pytest.raises(
        vidsparse.OptionError, match=r"sets tau .*each head.*quantize and merge can"
    ):
        a_preset().make_method(tau=0.8)
    with pytest.raises(vidsparse.OptionError, match="this preset sets tile"):
        a_preset().make_method(tile="64x64")
    # the same value is no change.
    assert a_preset().make_method(tile="128x64") == SpargeAttn()


def test_a_preset_of_a_method_without_free_options_says_what_it_sets() -> None:
    preset = a_preset(method="fg-attn", options=FgAttn().options(), tables={})
    with pytest.raises(vidsparse.OptionError, match=r"sets top_p \(0.9\), got 0.5.*again\.$"):
        preset.make_method(top_p=0.5)


def test_a_method_without_numbers_takes_none() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Everything(SparseMethod):
        name: ClassVar[str] = "everything"
        tile: tuple[int, int] = (16, 16)
        merge: str = "consecutive"

        def select(self, q: Any, k: Any, site: Any, *, v: Any = None) -> Any:
            raise AssertionError("nobody asks")

    with pytest.raises(vidsparse.OptionError, match="everything takes no calibrated numbers"):
        Everything().with_numbers(Numbers({}, (1, 1, 1)))


def test_another_model_is_refused_with_the_difference() -> None:
    preset = a_preset()
    preset.check_model([TRANSFORMER], "abc")
    preset.check_model([TRANSFORMER])
    with pytest.raises(vidsparse.OptionError, match="tiny with other weights"):
        preset.check_model([TRANSFORMER], "abd")
    deeper = {**TRANSFORMER, "config": {"num_layers": 3, "patch": [1, 2, 2]}}
    with pytest.raises(vidsparse.OptionError, match="num_layers 3 instead of 2"):
        preset.check_model([deeper], "abc")
    with pytest.raises(vidsparse.OptionError, match="2 of them instead of 1"):
        preset.check_model([TRANSFORMER, TRANSFORMER])
    with pytest.raises(vidsparse.OptionError, match="a Other instead of a Wan"):
        preset.check_model([{**TRANSFORMER, "class": "Other"}])


@pytest.mark.parametrize(
    ("files", "fits"),
    [
        ([{"_class_name": "WanTransformer3DModel", "num_layers": 2, "patch": [1, 2, 2]}], True),
        # a file leaves out what has a default, and holds more than a configuration.
        ([{"_class_name": "WanTransformer3DModel", "_diffusers_version": "1", "new": 1}], True),
        ([{"_class_name": "WanTransformer3DModel", "num_layers": 3}], False),
        ([{"_class_name": "Other", "num_layers": 2}], False),
        ([{"_class_name": "WanTransformer3DModel"}] * 2, False),
        ([], False),
    ],
)
def test_files_tell_which_models_it_may_fit(files: list[dict[str, Any]], fits: bool) -> None:
    assert a_preset().may_fit(files) == fits


def test_another_size_or_order_is_refused() -> None:
    preset = a_preset()
    preset.check_video(frames=9, width=64, height=32)
    with pytest.raises(vidsparse.OptionError, match="9 frames of 64x32, not on 9 frames of 32x64"):
        preset.check_video(frames=9, width=32, height=64)
    with pytest.raises(vidsparse.OptionError, match="in rowmajor order, not in hilbert"):
        preset.check_order("hilbert")


def rewrite(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": SCHEMA + 1}, rf"schema {SCHEMA + 1}, and this version reads {SCHEMA}"),
        ({"method": "magic"}, "unknown method 'magic'"),
        ({"order": None}, "damaged: order"),
        ({"options": []}, "damaged: options"),
        ({"grid": [3, 2]}, "damaged"),
        ({"video": {"frames": 9}}, "damaged"),
        ({"model": {}}, "damaged"),
        ({"edges": ["x"]}, "damaged"),
        ({"tables": {}}, "does not belong"),
    ],
)
def test_a_damaged_preset_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = a_preset().save(tmp_path / "p")
    rewrite(path, **changes)
    with pytest.raises(vidsparse.OptionError, match=message):
        load_preset(path)


ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2.5, 1e300, 10**400, "", "x", [], {}, [[]], [None], ["x"], [{}]),
    *({"a": {}}, {"name": 1}, [1, 2, 3, 4], [1, 2, -3], {"frames": "9"}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, (dict, list)):
            yield from places(each, (*path, key))


def test_a_preset_of_any_wrong_form_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = a_preset().save(tmp_path / "p")
    whole = json.loads(path.read_text())
    tried, said = 0, []
    for place in places(whole):
        for odd in (*ODD, "missing", "extra"):
            value = copy.deepcopy(whole)
            inner = value
            for key in place[:-1]:
                inner = inner[key]
            if odd == "missing":
                del inner[place[-1]]
            elif odd == "extra":
                if isinstance(inner, dict):
                    inner["extra"] = 1
            else:
                inner[place[-1]] = odd
            path.write_text(json.dumps(value))
            tried += 1
            try:
                preset = load_preset(path)
                preset.make_method()
                preset.check_order("hilbert")
                preset.check_video(frames=9, width=32, height=64)
                preset.may_fit([{"_class_name": "WanTransformer3DModel", "num_layers": 2}])
                preset.check_model([{"class": "X", "config": {}}])
            except vidsparse.OptionError as error:
                said.append(str(error))
    assert len(said) > tried / 2
    assert [text for text in said if "\n" in text or len(text) > 2000] == []


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": 1e400}', '{"schema": NaN}'])
def test_a_preset_that_no_reader_can_hold_is_refused(tmp_path: Path, text: str) -> None:
    path = a_preset().save(tmp_path / "p")
    path.write_text(text)
    with pytest.raises(vidsparse.OptionError, match="is no JSON file"):
        load_preset(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", "\xff"])
def test_other_json_is_no_preset(tmp_path: Path, text: str) -> None:
    path = a_preset().save(tmp_path / "p")
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(vidsparse.OptionError, match=r"no JSON file|is no preset"):
        load_preset(path)


def test_tables_cut_short_or_swapped_are_refused(tmp_path: Path) -> None:
    a_preset().save(tmp_path / "p")
    a_preset(tables={"tau": torch.zeros(1, 2, 2)}).save(tmp_path / "q")
    tables = tmp_path / "p.safetensors"
    whole = tables.read_bytes()
    for data in (whole[:-1], b"", (tmp_path / "q.safetensors").read_bytes()):
        tables.write_bytes(data)
        with pytest.raises(vidsparse.OptionError, match=r"p\.safetensors does not belong to p\.j"):
            load_preset(tmp_path / "p")


@pytest.mark.parametrize("missing", ["p.json", "p.safetensors"])
def test_a_missing_file_says_what_a_preset_is(tmp_path: Path, missing: str) -> None:
    a_preset().save(tmp_path / "p")
    (tmp_path / missing).unlink()
    with pytest.raises(vidsparse.OptionError, match=rf"no preset file .*{missing}.*side by side"):
        load_preset(tmp_path / "p")


@pytest.mark.parametrize("name", ["half \ud800", "zero \x00"])
def test_what_can_be_no_file_s_name_is_no_preset(name: str) -> None:
    with pytest.raises(vidsparse.OptionError, match="a preset must be the name of a file, got"):
        load_preset(name)


def test_a_failed_write_keeps_the_old_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = a_preset().save(tmp_path / "p")
    before = load_preset(path).digest

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vidsparse.files.os.replace", full)
    with pytest.raises(vidsparse.OutputError, match=r"p\.safetensors cannot be written: No space"):
        a_preset(tables={"tau": torch.zeros(1, 2, 2)}).save(tmp_path / "p")
    monkeypatch.undo()
    assert load_preset(path).digest == before
    assert sorted(os.listdir(tmp_path)) == ["p.json", "p.safetensors"]
