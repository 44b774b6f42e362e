"""Presets: a method with numbers calibrated for one model at one size, kept in two files.

``NAME.json`` says everything in words and small numbers, ``NAME.safetensors`` beside it holds the
tables; nothing is ever pickled. The JSON names the tables' SHA-256, so a pair that does not belong
together is refused, and each file appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vidsparse._version import __version__
from vidsparse.errors import OptionError, OutputError, listed
from vidsparse.files import finite_json, parse_json, write_whole
from vidsparse.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor

    from vidsparse.methods import SparseMethod

SCHEMA: Final = 1
"""Version of the files' form; others are refused."""

_FIELDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "method": str,
    "options": dict,
    "order": str,
    "edges": list,
    "model": dict,
    "video": dict,
    "grid": list,
    "measured": dict,
    "tables": dict,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Preset:
    """A calibrated method, what it was calibrated on, and what was measured.

    Args:
        method: the method's name.
        options: its options as JSON values; those that the tables replace keep their defaults.
        order: token order in which tiles were cut.
        edges: timesteps that separate the groups of steps, from high to low.
        tables: by name, ``[P, L, H, ...]`` fp32 on the CPU.
        model: ``name``, ``weights_hash`` and ``transformers``: the class and configuration of each.
        video: ``frames``, ``width`` and ``height`` of the videos.
        grid: frames, height and width in tokens.
        schedule: the schedule that the numbers hold for, by the names of ``sparsify``'s arguments;
            empty if they hold for any.
        measured: what calibration measured, as JSON values.
        source: name of the file, for error messages.
        digest: SHA-256 of both files' contents; empty for a preset that was not read from files.
    """

    method: str
    options: Mapping[str, Any]
    order: str
    tables: Mapping[str, Tensor]
    model: Mapping[str, Any]
    video: Mapping[str, int]
    grid: tuple[int, int, int]
    edges: tuple[float, ...] = ()
    schedule: Mapping[str, int | float] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    source: str = "this preset"
    digest: str = ""

    def make_method(self, **overrides: Any) -> SparseMethod:
        """The method with its calibrated numbers.

        Args:
            **overrides: options that may be changed without new calibration: the method's
                ``free_options``.

        Raises:
            OptionError: an option that is not free, or a value that is not valid.
        """
        from vidsparse.methods import METHODS, Numbers, SparseMethod, make_method

        given = make_method(self.method, **{**self.options, **overrides})
        free = METHODS[self.method].free_options
        for name, value in given.options().items():
            if name not in free and value != self.options[name]:
                per_head = name in self.tables
                settled = "a number for each head" if per_head else self.options[name]
                others = f"; only {listed(free)} can be changed" if free else ""
                raise OptionError(
                    f"{self.source} sets {name} ({settled}), got {value}. Hint: leave it out or "
                    f"calibrate again{others}."
                )
        assert isinstance(given, SparseMethod)
        numbers = Numbers(self.tables, self.grid, self.edges, self.source)
        made = given.with_numbers(numbers)
        made.check_numbers()
        return made

    def check_model(
        self, transformers: Sequence[Mapping[str, Any]], weights_hash: str | None = None
    ) -> None:
        """Raise an ``OptionError`` unless the model is the one that was calibrated.

        ``transformers`` is as in ``model``. Without a ``weights_hash``, which a pipeline loaded
        elsewhere does not have, weights are not compared.
        """
        name = self.model["name"]
        if _canonical(list(transformers)) != _canonical(self.model["transformers"]):
            raise OptionError(
                f"{self.source} was calibrated for {name}, and this model has another transformer: "
                f"{_difference(self.model['transformers'], transformers)}. "
                "Hint: calibrate for this model."
            )
        if weights_hash is not None and weights_hash != self.model["weights_hash"]:
            raise OptionError(
                f"{self.source} was calibrated for {name} with other weights than these. "
                "Hint: calibrate for this model."
            )

    def may_fit(self, configs: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a model that is not loaded yet may be the one that was calibrated.

        ``configs`` is the content of each transformer's ``config.json``, which may leave defaults
        out and says nothing of the weights. ``check_model`` decides once the model is loaded.
        """
        made = self.model["transformers"]
        return len(made) == len(configs) and all(
            one.get("class") == given.get("_class_name")
            and all(
                _canonical(one.get("config", {})[name]) == _canonical(value)
                for name, value in given.items()
                if name in one.get("config", {})
            )
            for one, given in zip(made, configs, strict=True)
        )

    def check_order(self, order: str) -> None:
        """Raise an ``OptionError`` unless ``order`` is the one that was calibrated."""
        if order != self.order:
            raise OptionError(
                f"{self.source} was calibrated in {self.order} order, not in {order}. "
                "Hint: leave the order out, or calibrate with it."
            )

    def check_video(self, **video: int) -> None:
        """Raise an ``OptionError`` unless frames, width and height are the calibrated ones."""
        if dict(video) != dict(self.video):
            asked, made = (
                "{frames} frames of {width}x{height}".format(**v) for v in (video, self.video)
            )
            raise OptionError(
                f"{self.source} was calibrated on {made}, not on {asked}. "
                "Hint: leave frames and size out, or calibrate with them."
            )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write ``path``.json and ``path``.safetensors; ``path`` may end in ``.json`` itself.

        Raises:
            OutputError: the folder cannot be written to.
        """
        from safetensors.torch import save

        target, tables = preset_files(path)
        data = save({name: table.contiguous() for name, table in self.tables.items()})
        text = {
            "schema": SCHEMA,
            "vidsparse": __version__,
            "method": self.method,
            "options": dict(self.options),
            "order": self.order,
            "edges": list(self.edges),
            "model": dict(self.model),
            "video": dict(self.video),
            "grid": list(self.grid),
            **({"schedule": dict(self.schedule)} if self.schedule else {}),
            "measured": finite_json(self.measured),
            "tables": {
                "file": tables.name,
                "sha256": hashlib.sha256(data).hexdigest(),
                "shapes": {name: list(table.shape) for name, table in self.tables.items()},
            },
        }
        _write(tables, data)
        _write(target, (json.dumps(text, indent=1, ensure_ascii=False) + "\n").encode())
        return target


def preset_files(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The two files of a preset, given with or without ``.json``."""
    text = os.fspath(path)
    stem = text.removesuffix(".json").removesuffix(".safetensors")
    return Path(f"{stem}.json"), Path(f"{stem}.safetensors")


def load_preset(path: str | os.PathLike[str]) -> Preset:
    """Read a preset.

    Raises:
        OptionError: ``path`` is no file name; a file is missing, damaged, has another schema, or
            belongs to another preset.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    from vidsparse.methods import METHODS

    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"a preset must be the name of a file, got {path!r}")
    target, tables_file = preset_files(path)
    text = _read(target)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise OptionError(f"the preset {target} is no JSON file: {error}") from None
    if not isinstance(value, dict) or "schema" not in value:
        raise OptionError(f"{target} is no preset. Hint: `vidsparse calibrate` makes them.")
    if value["schema"] != SCHEMA:
        raise OptionError(
            f"the preset {target} has schema {repr(value['schema'])[:60]}, and this version reads "
            f"{SCHEMA}. Hint: calibrate again."
        )
    for name, kind in _FIELDS.items():
        if not isinstance(value.get(name), kind):
            raise OptionError(f"the preset {target} is damaged: {name} is missing or mistyped")
    if value["method"] not in METHODS:
        raise OptionError(
            f"the preset {target} is for an unknown method {value['method']!r}. "
            f"Hint: this version knows {', '.join(METHODS)}."
        )
    data = _read(tables_file)
    if hashlib.sha256(data).hexdigest() != value["tables"].get("sha256"):
        raise OptionError(
            f"{tables_file} does not belong to {target.name}: it was changed, cut short, or comes "
            "from another calibration. Hint: copy both files together."
        )
    try:
        tables = load(data)
        _check_parts(value, tables)
        return Preset(
            method=value["method"],
            options=_options(value["method"], value["options"]),
            order=value["order"],
            edges=tuple(float(edge) for edge in value["edges"]),
            tables=tables,
            model={**value["model"], "transformers": list(value["model"]["transformers"])},
            video={name: int(value["video"][name]) for name in ("frames", "width", "height")},
            grid=_three(value["grid"]),
            schedule=_schedule(value.get("schedule", {})),
            measured=value["measured"],
            source=str(target),
            digest=hashlib.sha256(text + data).hexdigest(),
        )
    except (
        KeyError, TypeError, ValueError, OverflowError, OptionError, SafetensorError,
    ) as error:  # fmt: skip
        raise OptionError(f"the preset {target} is damaged: {f'{error}'[:200]}") from None


def _options(method: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a preset: what the version that made it did not know has its default.

    Where that has changed since, it is what that version did: it left skipped keys out, and made a
    plan for every branch of guidance.
    """
    from vidsparse.methods import make_method

    options = make_method(method).options()
    before = {"means": None, "plans": "own"}
    options |= {name: value for name, value in before.items() if name in options}
    return {**options, **written}


def _check_parts(value: Mapping[str, Any], tables: Mapping[str, Tensor]) -> None:
    """Raise a ``ValueError`` where a part has not the form that calibration writes."""
    from vidsparse.methods import METHODS

    unknown = set(value["options"]) - {f.name for f in METHODS[value["method"]].option_fields()}
    if unknown:
        raise ValueError(f"{value['method']} has no option {listed(sorted(unknown))}")
    model = value["model"]
    if not all(isinstance(model[name], str) for name in ("name", "weights_hash")):
        raise ValueError("the model's name and weights_hash must be text")
    for one in model["transformers"]:
        if not isinstance(one, dict) or not isinstance(one.get("config", {}), dict):
            raise ValueError("a transformer must be described by an object")
    counts = [*(value["video"][name] for name in ("frames", "width", "height")), *value["grid"]]
    if not all(type(count) is int and 0 < count < 2**31 for count in counts):
        raise ValueError("frames, sizes and grid must be whole numbers from 1")
    if not all(isinstance(edge, (int, float)) for edge in value["edges"]):
        raise ValueError("edges must be numbers")
    if len({table.shape[:3] for table in tables.values()}) != 1:
        raise ValueError("the tables must all be of the same transformers, layers and heads")
    if not all(table.ndim >= 3 and table.is_floating_point() for table in tables.values()):
        raise ValueError("the tables must hold numbers by transformer, layer and head")


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise OptionError(
            f"there is no preset file {path}. Hint: a preset is a .json and a .safetensors file "
            "side by side; `vidsparse calibrate` makes them."
        ) from None
    except OSError as error:
        raise OptionError(f"the preset file {path} cannot be read: {error.strerror}") from None
    except ValueError:
        # a zero byte, or half a character.
        raise OptionError(f"a preset must be the name of a file, got {os.fspath(path)!r}") from None


def _schedule(value: Any) -> dict[str, int | float]:
    """A preset's schedule, as far as it says one.

    Raises:
        ValueError: an amount that is none.
    """
    given = dict(value)
    settled = {"dense_steps", "dense_layers", "dense_last_layers", "reuse", "refresh"}
    if not given.keys() <= settled:
        raise ValueError(f"schedule has {', '.join(given)}")
    Schedule(**given)
    return given


def _three(values: Sequence[Any]) -> tuple[int, int, int]:
    frames, height, width = (int(value) for value in values)
    return frames, height, width


def _canonical(value: Any) -> str:
    """Equal for configurations that are equal once written as JSON."""
    return json.dumps(value, sort_keys=True, default=str)


def _difference(made: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> str:
    if len(made) != len(given):
        return f"{len(given)} of them instead of {len(made)}"
    for one, other in zip(made, given, strict=True):
        if one.get("class") != other.get("class"):
            return f"a {other.get('class')} instead of a {one.get('class')}"
        ours, theirs = one.get("config", {}), other.get("config", {})
        for name in sorted({*ours, *theirs}):
            if _canonical(ours.get(name)) != _canonical(theirs.get(name)):
                return f"{name} {theirs.get(name)} instead of {ours.get(name)}"
    return "it differs"
