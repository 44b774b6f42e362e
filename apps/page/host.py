"""What the host of a page decides: which models, where files go, and how much a visitor may ask."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from vidsparse.errors import OptionError

if TYPE_CHECKING:
    from vidsparse.pipelines.models import ModelRef
    from vidsparse.pipelines.request import GenerateRequest


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

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) < 1:
                raise OptionError(f"the limit of {limit.name} must be at least 1")

    def check(self, request: GenerateRequest) -> None:
        """Refuse a request, its defaults filled in, that asks for more.

        Raises:
            OptionError: it does.
        """
        for name, most in (
            ("frames", self.frames),
            ("width", self.side),
            ("height", self.side),
            ("steps", self.steps),
        ):
            asked = getattr(request, name)
            if asked > most:
                raise OptionError(
                    f"{name} can be at most {most:,} on this page, got {asked:,}. "
                    "Hint: the host of the page sets this limit."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The page's own settings.

    Args:
        models: to choose from, at least one.
        folder: where the page's files go and the only one that is served.
        limits: of what a visitor may ask.
        devices: one job at a time runs on each.
        dtype: number format, or None for each device's own default.
    """

    models: tuple[ModelRef, ...]
    folder: Path
    devices: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    dtype: str | None = None

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
