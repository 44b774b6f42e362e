"""What the host of a page decides: models and presets, where files go, how much one may ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vidsparse.errors import OptionError
from vidsparse.logs import logger

if TYPE_CHECKING:
    from vidsparse.pipelines.models import ModelRef
    from vidsparse.pipelines.request import GenerateRequest
    from vidsparse.presets import Preset


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The most that one request, one visitor and one upload may take.

    Args:
        frames: of a video.
        side: pixels of a video's width, and of its height.
        steps: denoising steps.
        prompts: of a report.
        settings: of a report's curve.
        waiting: jobs in the queue, of all visitors together.
        upload: megabytes of an uploaded file.
        away: seconds that jobs go on without anybody who has the page open.

    Raises:
        OptionError: one of them is below 1.
    """

    frames: int = 161
    side: int = 1280
    steps: int = 100
    prompts: int = 50
    settings: int = 8
    waiting: int = 32
    upload: int = 10
    away: int = 120

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) < 1:
                raise OptionError(f"the limit of {limit.name} must be at least 1")

    def check(self, request: GenerateRequest) -> None:
        """Refuse a request, its defaults filled in, that asks for more.

        Raises:
            OptionError: it does.
        """
        self.check_counts(
            **{name: getattr(request, name) for name in ("frames", "width", "height", "steps")}
        )

    def check_counts(self, **asked_for: int) -> None:
        """Refuse any of frames, width, height and steps that is more than allowed.

        Raises:
            OptionError: one is.
        """
        for name, asked in asked_for.items():
            most = self.side if name in ("width", "height") else getattr(self, name)
            if asked > most:
                raise OptionError(
                    f"{name} can be at most {most:,} on this page, got {asked:,}. "
                    "Hint: the host of the page sets this limit."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPreset:
    """A calibrated method that visitors may choose, by its name.

    Args:
        name: of its file, without the folder.
        path: of its file.
        preset: what it says.
        models: names of the page's models that it may fit; the weights are compared when one runs.
    """

    name: str
    path: str
    preset: Preset
    models: tuple[str, ...]


def read_presets(
    paths: Sequence[str], models: Sequence[ModelRef], limits: Limits
) -> tuple[HostPreset, ...]:
    """The presets to offer: those that models bring, and those in ``paths``.

    Args:
        paths: files, and folders, of which all presets are taken that can be offered.
        models: of the page.
        limits: of the page.

    Raises:
        OptionError: a file is no preset, fits no model or exceeds the limits, a folder holds none
            that can be offered, or two have one name.
    """
    from vidsparse.presets import preset_files

    found: dict[str, HostPreset] = {}
    for given in dict.fromkeys(paths):
        folder = Path(given)
        if not folder.is_dir():
            _add(found, _read_preset(given, models, limits))
            continue
        before = len(found)
        for file in sorted(folder.glob("*.json")):
            # other JSON files may lie there as well.
            if not preset_files(file)[1].is_file():
                continue
            try:
                _add(found, _read_preset(str(file), models, limits))
            except OptionError as error:
                logger.warning("not offered: %s", error)
        if len(found) == before:
            raise OptionError(
                f"there is no preset in {given} for the models of this page. "
                "Hint: `vidsparse calibrate` makes them."
            )
    # after the host's own choice, which a method then begins with.
    for model in models:
        for method, path in model.defaults.presets.items():
            try:
                own = _read_preset(path, [model], limits)
            except OptionError as error:
                logger.warning("not offered: %s", error)
            else:
                # a folder's names tell its own presets apart, and several models are on one page.
                _add(found, replace(own, name=f"{Path(model.name).name}-{method}"))
    return tuple(found.values())


def _add(found: dict[str, HostPreset], preset: HostPreset) -> None:
    other = found.setdefault(preset.name, preset)
    if other is not preset:
        raise OptionError(
            f"{other.path} and {preset.path} have one name, {preset.name}. Hint: rename one."
        )


def _read_preset(path: str, models: Sequence[ModelRef], limits: Limits) -> HostPreset:
    from vidsparse.presets import load_preset, preset_files

    preset = load_preset(path)
    fits = tuple(model.name for model in models if preset.may_fit(model.transformers))
    if not fits:
        names = ", ".join(model.name for model in models)
        raise OptionError(
            f"the preset {path} was calibrated for {preset.model.get('name')}, and this page has "
            f"{names}. Hint: offer that model with --model."
        )
    try:
        limits.check_counts(**preset.video)
    except OptionError as error:
        raise OptionError(f"the preset {path} cannot be offered: {error}") from None
    file = preset_files(path)[0]
    return HostPreset(name=file.stem, path=str(file), preset=preset, models=fits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The page's own settings.

    Args:
        models: to choose from, at least one.
        folder: where the page's files go and the only one that is served.
        limits: of what a visitor may ask.
        devices: one job at a time runs on each.
        dtype: number format, or None for each device's own default.
        presets: to choose from.
    """

    models: tuple[ModelRef, ...]
    folder: Path
    devices: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    dtype: str | None = None
    presets: tuple[HostPreset, ...] = ()

    def model(self, name: object) -> ModelRef:
        """The model of that name.

        Raises:
            OptionError: it is not one of this page's.
        """
        for model in self.models:
            if model.name == name:
                return model
        names = ", ".join(model.name for model in self.models)
        raise OptionError(f"this page has no model {name!r}. Hint: choose from {names}.")

    def presets_of(self, model: ModelRef) -> tuple[HostPreset, ...]:
        """The presets that fit a model."""
        return tuple(each for each in self.presets if model.name in each.models)

    def preset(self, name: object, model: ModelRef) -> HostPreset:
        """The preset of that name for a model.

        Raises:
            OptionError: it is not one of this page's, or does not fit.
        """
        for each in self.presets:
            if each.name == name:
                if model.name in each.models:
                    return each
                raise OptionError(
                    f"the preset {name} was made for {' and '.join(each.models)}, not for "
                    f"{model.name}. Hint: choose that model."
                )
        names = ", ".join(each.name for each in self.presets_of(model)) or "none"
        raise OptionError(
            f"this page has no preset {name!r}. Hint: those for {model.name} are: {names}."
        )
