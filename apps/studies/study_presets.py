"""Presets that a study's rows go by: from a folder, or made when a row first asks for them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vidsparse.apps.small_model.prompts import CALIBRATION_SEED, calibration_prompts
from vidsparse.apps.terminal.console import Terminal
from vidsparse.apps.terminal.progress import plain_bar
from vidsparse.errors import OptionError

if TYPE_CHECKING:
    from vidsparse.pipelines.models import LoadedPipeline
    from vidsparse.pipelines.request import GenerateRequest
    from vidsparse.presets import Preset

PROMISED_FACTS: Final = ("psnr", "psnr_worst", "total", "met", "prompts")
"""What a preset that was made for a quality says of the videos it was made on."""

# what a study settles for all its rows; everything else follows from the method or the preset.
_OF_THE_STUDY: Final = (
    "prompt", "model", "frames", "width", "height", "steps", "guidance", "seed", "device",
    "dtype", "implementation",
)  # fmt: skip


def own_order(method: str, order: str) -> str:
    """The token order that a method runs in by itself on a model whose own is ``order``."""
    from vidsparse.methods import METHODS

    return METHODS[method].token_order or order


def unsettled(request: GenerateRequest, **changes: Any) -> GenerateRequest:
    """A request for the same video with what a study settles alone, and ``changes``."""
    from vidsparse.pipelines.request import GenerateRequest

    return GenerateRequest(**{name: getattr(request, name) for name in _OF_THE_STUDY}, **changes)


class StudyPresets:
    """The presets of a study.

    Args:
        terminal: told what is made.
        loaded: the study's model.
        request: for a dense video of the study.
        folder: where presets lie.
        batch: prompts that are denoised at once.
        samples: calibration prompts of a preset that is made for a PSNR; None is the method's
            number.
    """

    def __init__(
        self,
        terminal: Terminal,
        loaded: LoadedPipeline,
        request: GenerateRequest,
        folder: Path,
        batch: int = 1,
        samples: int | None = None,
    ) -> None:
        self._terminal = terminal
        self._loaded = loaded
        self._request = request
        self._folder = folder
        self._batch = batch
        self._samples = samples
        self._known: dict[str, Preset] = {}

    def of(self, method: str) -> Preset:
        """The calibrated numbers of a method as it is published.

        Raises:
            OptionError: what lies there cannot be read, or was made for another model.
        """
        from vidsparse.methods import SPARSE_METHODS

        if method not in self._known:
            order = self._request.order
            assert order is not None
            request = replace(
                self._request,
                method=method,
                method_options=SPARSE_METHODS[method].as_published,
                order=own_order(method, order),
            )
            self._known[method], _ = self._made(request)
        return self._known[method]

    def promising(self, method: str, psnr: float) -> tuple[Preset, float | None]:
        """The preset that ``vidsparse calibrate --target-psnr`` makes of a method.

        Returns:
            It, and the seconds that took; None where it lay there.

        Raises:
            OptionError: what lies there cannot be read, or was made for another model or of another
                number of prompts.
        """
        from vidsparse.calibration import CALIBRATORS

        request = unsettled(self._request, method=method)
        usual, ending = CALIBRATORS[method].samples, f"-{psnr:g}dB"
        samples = self._samples or usual
        if samples != usual:
            ending += f"-{samples}"
        settings = {"target_psnr": psnr}
        preset, seconds = self._made(request, ending=ending, settings=settings, samples=samples)
        if (found := preset.measured["prompts"]) != samples:
            # its row would be told apart by that number, and never be found under the other.
            raise OptionError(
                f"{preset.source} was made of {found} prompts, not of {samples}. "
                f"Hint: give --samples {found} and a name that ends in dB-{found}, or remove it."
            )
        return preset, seconds

    def _made(
        self,
        request: GenerateRequest,
        *,
        ending: str = "",
        settings: Mapping[str, Any] | None = None,
        samples: int | None = None,
    ) -> tuple[Preset, float | None]:
        from vidsparse.calibration import CALIBRATORS
        from vidsparse.pipelines.calibrate import calibrate
        from vidsparse.pipelines.handle import transformer_configs
        from vidsparse.presets import load_preset, preset_files

        method, seconds = request.method, None
        video = f"{request.width}x{request.height}x{request.frames}-{request.steps}"
        path = self._folder / f"{Path(request.model).name}-{method}-{video}{ending}"
        if not preset_files(path)[0].exists():
            self._terminal.say(f"Calibrating {method} ...")
            began = time.perf_counter()
            with plain_bar(self._terminal, f"Calibrating {method}") as progress:
                calibrate(
                    self._loaded,
                    replace(request, seed=CALIBRATION_SEED),
                    calibration_prompts(self._loaded.ref, samples or CALIBRATORS[method].samples),
                    path,
                    settings=dict(settings or {}),
                    batch=self._batch,
                    progress=progress,
                )
            seconds = time.perf_counter() - began
        preset = load_preset(path)
        preset.check_model(transformer_configs(self._loaded.pipe), self._loaded.weights_hash)
        return preset, seconds
