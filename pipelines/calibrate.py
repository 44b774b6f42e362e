"""Calibration runs: a few prompts are denoised with a calibrator looking on."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vidsparse.calibration import CALIBRATORS, Calibrator, Extent, Pass
from vidsparse.calibration.base import DENSE_VIDEO
from vidsparse.engine import AttentionEngine
from vidsparse.errors import OptionError, OutputError
from vidsparse.files import clear_partial, write_whole
from vidsparse.logs import logger
from vidsparse.methods import SparseMethod, make_method
from vidsparse.order import token_order
from vidsparse.pipelines.alone import LayersAlone
from vidsparse.pipelines.generate import decoded, denoise
from vidsparse.pipelines.handle import (
    SparseHandle,
    attention_shape,
    sparsify,
    transformer_configs,
)
from vidsparse.pipelines.image import image_hash
from vidsparse.pipelines.models import LoadedPipeline
from vidsparse.pipelines.request import GenerateRequest, resolve
from vidsparse.presets import Preset, preset_files
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

Progress = Callable[[str, int, int], None]
"""Told what is being done, the steps that are done and all steps."""


_STATE: Final = 7
"""Version of what calibrators keep; progress of another is not taken up."""

_ENDING: Final = ".safetensors"


def calibrate(
    loaded: LoadedPipeline,
    request: GenerateRequest,
    prompts: Sequence[str],
    out: Path,
    *,
    settings: dict[str, Any] | None = None,
    batch: int = 1,
    progress: Progress | None = None,
) -> Preset:
    """Calibrate ``request.method`` on ``prompts`` and write the preset ``out``.

    Each pass denoises the prompts once: densely, to look at the attention calls (their q, k and v
    are never kept), or to finished videos, to look at these. Numbers found by finished videos hold
    for the dense steps and layers that they were found with; with methods whose calibration finds
    how much each layer needs, no layer is dense. After each batch everything known is on disk
    beside ``out``, each dense video in a file of its own; when a call was interrupted, the same
    call goes on from there.

    Args:
        loaded: the model.
        request: frames, size, steps, seed, order and the method's options; its prompt is not used.
            Prompt i starts from the noise of ``seed + i``. No step cache runs: one that is named
            is refused.
        prompts: what to denoise; at least one.
        out: the preset's path.
        settings: settings of the method's calibrator, such as ``{"l1": 0.05}``.
        batch: prompts denoised at once, for a GPU with room.
        progress: called after each denoising step.

    Raises:
        OptionError: the method cannot be calibrated, or a setting is not valid.
        OutputError: the files cannot be written.

    Returns:
        The preset, as it was written.
    """
    if not prompts:
        raise OptionError("calibration needs at least one prompt")
    # a step cache that a card or a speed brings stays off; one asked for by name is refused.
    request = replace(request, model=loaded.ref.name, cache=request.cache or "none")
    request = resolve(request, loaded.defaults, own_presets=False)
    run = _Run(loaded, request, settings or {}, len(prompts))
    file = _ProgressFile(out, _fingerprint(loaded, request, prompts, settings))
    number, done = file.restore(run)
    # of the pass, counted from the first of all prompts.
    # finishing a pass may add another.
    while number < len(run.calibrator.passes):
        one = run.calibrator.passes[number]
        run.number, run.one = number, one
        span = one.span(len(prompts))
        done = max(done, span.start)
        with run.attached(one) as handle:
            while done < span.stop:
                some = range(done, min(done + batch, span.stop))
                tell = None
                if progress is not None:
                    tell = _telling(progress, run, some, len(prompts))
                run.look(handle, {place: prompts[place] for place in some}, tell)
                done = some.stop
                file.save(run, number, done)
        run.calibrator.finish(number)
        number, done = number + 1, 0
        file.save(run, number, done)
    preset = run.preset(len(prompts))
    preset.save(out)
    file.remove()
    return preset


def check_calibration(
    request: GenerateRequest, steps: int, settings: dict[str, Any], prompts: int = 1
) -> Calibrator:
    """Make a calibrator for one layer and head, to see whether method and settings are valid.

    Raises:
        OptionError: they are not, one of so many ``prompts`` has no seed, or the last steps are to
            be dense, which no preset says of its schedule.
    """
    if request.dense_last_steps:
        raise OptionError(
            f"calibration has no dense last steps, got {request.dense_last_steps}: a preset does "
            "not hold them, so that it would promise what runs without them do not keep. "
            "Hint: leave --dense-last-steps out; it can be given beside the preset."
        )
    if request.seed + prompts > 2**63:
        raise OptionError(
            f"prompt {2**63 - request.seed + 1} of {prompts} has no seed: they count up from "
            f"{request.seed}, and the last there is is 2^63 - 1. Hint: --seed {2**63 - prompts}."
        )
    extent = Extent(parts=1, layers=1, heads=1, window=_window(request, steps))
    return _calibrator(request, extent, settings)


def _schedule(request: GenerateRequest) -> Schedule:
    assert request.dense_steps is not None
    return Schedule(
        dense_steps=request.dense_steps,
        dense_last_steps=request.dense_last_steps,
        refresh=request.refresh or 0,
    )


def _window(request: GenerateRequest, steps: int) -> range:
    window = _schedule(request).sparse_window(steps)
    if not window:
        raise OptionError(
            f"all {steps} steps are dense: there is nothing to calibrate. Hint: --dense-steps 0.24."
        )
    return window


def progress_file(out: Path) -> Path:
    """The file beside the preset ``out`` that holds what is known before it is finished."""
    return preset_files(out)[0].with_suffix(f".progress{_ENDING}")


def is_progress(path: Path) -> bool:
    """Whether a file has the name of some calibration's progress, or of a dense video beside it."""
    return re.fullmatch(rf".*\.progress(-\d+)?{re.escape(_ENDING)}", path.name) is not None


def _calibrator(request: GenerateRequest, extent: Extent, settings: dict[str, Any]) -> Calibrator:
    if request.method not in CALIBRATORS:
        raise OptionError(
            f"{request.method} is not calibrated. Hint: choose from {', '.join(CALIBRATORS)}."
        )
    if request.cache not in (None, "none"):
        # a call that a cache leaves out cannot be looked at.
        bundle = "" if request.speed is None else f" with --speed {request.speed}"
        raise OptionError(
            "calibration runs every step in full and takes no step cache, got "
            f"{request.cache}{bundle}. Hint: --cache none; the preset can be used with one."
        )
    method = make_method(request.method, **request.method_options)
    assert isinstance(method, SparseMethod)
    return CALIBRATORS[request.method](method=method, extent=extent, **settings)


def _fingerprint(
    loaded: LoadedPipeline, request: GenerateRequest, prompts: Sequence[str], settings: Any
) -> str:
    options = request.options()
    # pictures are what they show, not where they lie.
    options |= {name: image_hash(path) for name, path in request.images().items()}
    del options["offload"], options["model"], options["keyframes"]
    if request.lora is not None:
        options["lora"] = loaded.lora_hash
    text = json.dumps(
        [_STATE, loaded.weights_hash, loaded.dtype, options, list(prompts), settings],
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(text.encode()).hexdigest()


class _Run:
    """One calibration: the calibrator, and what the calls showed of the model on the way."""

    def __init__(
        self,
        loaded: LoadedPipeline,
        request: GenerateRequest,
        settings: dict[str, Any],
        prompts: int,
    ) -> None:
        assert request.steps is not None
        assert request.order is not None
        self._loaded, self._request, self._order = loaded, request, request.order
        parts, layers, heads = attention_shape(loaded.pipe)
        extent = Extent(
            parts=parts,
            layers=layers,
            heads=heads,
            window=_window(request, request.steps),
            refresh_steps=_schedule(request).refresh_steps(request.steps),
            prompts=prompts,
        )
        self.calibrator = _calibrator(request, extent, settings)
        self._schedule: dict[str, Any] = {}
        if self.calibrator.searches or self.calibrator.settles_schedule:
            assert request.dense_steps is not None
            ends = not self.calibrator.divides_layers
            self._schedule = {
                "dense_steps": request.dense_steps,
                "dense_layers": request.dense_layers if ends else 0,
                "dense_last_layers": request.dense_last_layers if ends else 0,
                "reuse": request.reuse,
                "refresh": request.refresh,
            }
        self.number = 0
        self.one = self.calibrator.passes[0]
        self._grid = torch.zeros(3, dtype=torch.int64)
        self._timesteps = torch.full((request.steps,), torch.nan, dtype=torch.float64)
        self.calibrator.timesteps = self._timesteps

    @property
    def request_steps(self) -> int:
        """Denoising steps of a video."""
        assert self._request.steps is not None
        return self._request.steps

    @contextmanager
    def attached(self, one: Pass) -> Iterator[SparseHandle]:
        """The pipeline as a pass wants it."""
        schedule: dict[str, Any] = {}
        if isinstance(one.method, SparseMethod):
            last = self._request.dense_last_steps
            schedule = {**self._schedule, **one.schedule}
            schedule.update(dense_last_steps=last, order=self._order)
            schedule["implementation"] = self._request.implementation
        kernel = self._request.dense_kernel
        with sparsify(
            self._loaded.pipe, one.method or "dense", dense_kernel=kernel, **schedule
        ) as handle:
            for engine in handle.engines:
                engine.observer = partial(self._observe, engine)
            if one.forwards:
                LayersAlone(handle, one.forwards, partial(self.calibrator.compare, self.number))
            yield handle

    def look(
        self,
        handle: SparseHandle,
        prompts: Mapping[int, str],
        tell: Callable[[int, int, float], None] | None,
    ) -> None:
        """Denoise prompts at once, by their places in the list, for the current pass."""
        dense = replace(self._request, method="dense", method_options={})
        some = [
            replace(dense, prompt=prompt, seed=self._request.seed + place)
            for place, prompt in prompts.items()
        ]
        if self.one.last_step is not None:
            denoise(self._loaded, some, self.one.last_step, tell)
            return
        took: dict[int, float] = {}

        def clocked(step: int, steps: int, seconds: float) -> None:
            took[step - 1] = seconds
            if tell is not None:
                tell(step, steps, seconds)

        videos = decoded(self._loaded, some, clocked)
        work = handle.summary().work
        total = 1.0 if work is None else work.total
        seconds = self._seconds(took) / len(some)
        for place, video in zip(prompts, videos, strict=True):
            self.calibrator.watch(self.number, place, video, total, seconds)

    def _seconds(self, took: Mapping[int, float]) -> float:
        """What denoising took by its steps, without what was made beside them."""
        beside = {*self.one.forwards, *self.calibrator.extent.refresh_steps}
        plain = [seconds for step, seconds in took.items() if step not in beside]
        if not self.one.forwards or not plain:
            return math.fsum(took.values())
        return math.fsum(plain) / len(plain) * len(took)

    def _observe(
        self, engine: AttentionEngine, q: Tensor, k: Tensor, v: Tensor, site: CallSite
    ) -> None:
        """Show a call to the calibrator where it wants to see it."""
        grid = site.grid
        # of a forward that is made again, calls were seen before.
        if grid.tokens != q.shape[2] or engine.only:
            return
        self._grid = torch.tensor([grid.frames, grid.height, grid.width])
        self._timesteps[site.step] = site.timestep
        if site.step in self.one.steps:
            order = token_order(self._order, grid, q.device)
            # autocast would round scores to 16 bits.
            with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
                self.calibrator.observe(
                    self.number, order.apply(q), order.apply(k), order.apply(v), site
                )

    def state(self) -> dict[str, Tensor]:
        """Everything known so far."""
        own = {"run.grid": self._grid, "run.timesteps": self._timesteps}
        return {**self.calibrator.state(), **own}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a ``state()``."""
        self._grid, self._timesteps = state["run.grid"], state["run.timesteps"]
        self.calibrator.timesteps = self._timesteps
        self.calibrator.restore(state)

    def preset(self, prompts: int) -> Preset:
        """What was found."""
        request, loaded, calibrator = self._request, self._loaded, self.calibrator
        if not bool(self._grid.all()):
            raise OptionError(
                f"{loaded.ref.name} cannot be calibrated: none of its attention calls had a token "
                "grid that sparse attention knows. Hint: please report it with the model's name."
            )
        frames, height, width = self._grid.tolist()
        return Preset(
            method=request.method,
            options={**request.method_options, **calibrator.options()},
            order=self._order,
            edges=calibrator.edges,
            tables=calibrator.tables(),
            model={
                "name": loaded.ref.name,
                "weights_hash": loaded.weights_hash,
                "transformers": json.loads(
                    json.dumps(transformer_configs(loaded.pipe), default=str)
                ),
            },
            video={name: getattr(request, name) for name in ("frames", "width", "height")},
            grid=(frames, height, width),
            schedule={**self._schedule, **calibrator.schedule()},
            measured={
                "prompts": prompts,
                "seed": request.seed,
                "guidance": request.guidance,
                "denoising_steps": request.steps,
                "sampled_steps": [sorted({*one.steps, *one.forwards}) for one in calibrator.passes],
                "lora": request.lora,
                "lora_hash": loaded.lora_hash,
                "device": loaded.device,
                "dtype": loaded.dtype,
                "settings": json.loads(json.dumps(calibrator.settings())),
                **calibrator.measured(),
            },
        )


class _ProgressFile:
    """What is known so far, beside the preset: one file that is there whole or not at all.

    It names the dense videos that it builds on. These are most of the bytes and never change, so
    that each is in a file of its own, written once, before the file that names it.
    """

    def __init__(self, out: Path, fingerprint: str) -> None:
        self._path = progress_file(out)
        self._fingerprint = fingerprint
        self._there: set[str] = set()
        # a calibration that was killed while it wrote one of them left a part of it.
        names = [file.name for file in (self._path, *preset_files(out))]
        clear_partial(self._path.parent, *names)

    def save(self, run: _Run, number: int, done: int) -> None:
        """Keep the state after ``done`` prompts of pass ``number``."""
        from safetensors.torch import save

        facts = {"for": self._fingerprint, "pass": str(number), "done": str(done)}
        state = {name: value.contiguous() for name, value in run.state().items()}
        videos = {name: state.pop(name) for name in list(state) if name.startswith(DENSE_VIDEO)}
        path = self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for name in videos:
                if name not in self._there:
                    path = self._path_of(name)
                    write_whole(path, save({name: videos[name]}, metadata={"for": facts["for"]}))
            path = self._path
            write_whole(path, save(state, metadata=facts | {"videos": " ".join(videos)}))
            self._there |= videos.keys()
        except OSError as error:
            raise OutputError(
                f"{path} cannot be written: {error.strerror or error}. "
                "Hint: give another place with --out."
            ) from None

    def restore(self, run: _Run) -> tuple[int, int]:
        """Bring ``run`` to where it was; the pass and the prompts done, 0 and 0 at the start.

        A file of other settings, or one that cannot be read, counts as none.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path, framework="pt") as file:
                facts = file.metadata() or {}
                if facts.get("for") != self._fingerprint:
                    return 0, 0
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            videos = facts.get("videos", "").split()
            for name in videos:
                with safe_open(self._path_of(name), framework="pt") as file:
                    if (file.metadata() or {}).get("for") != self._fingerprint:
                        return 0, 0
                    state[name] = file.get_tensor(name)
            run.restore(state)
        except (OSError, SafetensorError):
            return 0, 0
        self._there = set(videos)
        number, done = int(facts["pass"]), int(facts["done"])
        logger.info("going on with pass %d after %d prompts", number + 1, done)
        return number, done

    def remove(self) -> None:
        """The preset is there: nothing is left to go on with, nor of other settings."""
        stem, ending = (re.escape(text) for text in (self._stem, _ENDING))
        whole = rf"{stem}-\d+{ending}"
        videos = re.compile(rf"{whole}|\.{whole}\.[0-9a-f]{{8}}\.tmp")
        # the large ones first: a run that is killed here leaves little. The preset is whole by now.
        with suppress(OSError):
            for path in list(self._path.parent.iterdir()):
                if videos.fullmatch(path.name):
                    path.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    @property
    def _stem(self) -> str:
        return self._path.name.removesuffix(_ENDING)

    def _path_of(self, video: str) -> Path:
        """The file of a dense video, by its name in the state."""
        number = int(video.removeprefix(DENSE_VIDEO))
        return self._path.with_name(f"{self._stem}-{number}{_ENDING}")


def _telling(
    progress: Progress, run: _Run, some: range, prompts: int
) -> Callable[[int, int, float], None]:
    """A denoising callback that speaks of the whole calibration, as far as it is known."""
    passes, number = run.calibrator.passes, run.number
    lasts = [one.last_step for one in passes]
    lengths = [run.request_steps if last is None else last + 1 for last in lasts]
    spans = [one.span(prompts) for one in passes]
    steps = [length * len(span) for length, span in zip(lengths, spans, strict=True)]
    before = sum(steps[:number]) + lengths[number] * (some.start - spans[number].start)
    total = sum(steps)
    last = f"-{some.stop}" if len(some) > 1 else ""
    what = f"{passes[number].title}, prompt {some.start + 1}{last} of {spans[number].stop}"

    def tell(step: int, steps: int, seconds: float) -> None:
        progress(what, before + step * len(some), total)

    return tell
