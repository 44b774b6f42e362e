"""A quality study: one size of one model, dense videos once, then row after row against them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vidsparse.apps.results.row_file import Row, RowFile
from vidsparse.apps.studies.aim import find_density
from vidsparse.apps.studies.configurations import KNOBS, Aim, Configuration
from vidsparse.apps.studies.quality_rows import DenseVideos, PendingRow, meanings
from vidsparse.apps.studies.study_calls import RECORDED_PROMPTS, StudyCalls
from vidsparse.apps.studies.study_presets import PROMISED_FACTS, StudyPresets, own_order, unsettled
from vidsparse.apps.terminal.console import Terminal
from vidsparse.apps.terminal.progress import step_bar
from vidsparse.errors import OptionError, listed

if TYPE_CHECKING:
    from vidsparse.methods import SparseMethod
    from vidsparse.methods.studied import Knob
    from vidsparse.pipelines.generate import Generated
    from vidsparse.pipelines.models import LoadedPipeline, ModelRef
    from vidsparse.pipelines.request import GenerateRequest

# a dense run's calls can be far from a sparse one's: SpargeAttn keeps 0.43 of them at least, and
# 0.18 in its own videos.
AIM_TRIALS = 6

# rows whose metrics may still be computed while the device is at work on the next one; each holds
# a batch of videos in memory.
ROWS_IN_FLIGHT = 2

# rows whose seconds are what is asked for: metrics on the side would take the processor from them.
TIMED_STUDIES = ("seconds", "speeds")


class QualityStudy:
    """One size of one model: dense videos once, then row after row against them."""

    def __init__(
        self,
        *,
        terminal: Terminal,
        file: RowFile,
        model: ModelRef,
        requests: Sequence[GenerateRequest],
        prompts_hash: str,
        batch: int,
        ssim_every: int,
        presets: Path,
        commit: str,
        compile: bool = False,
        samples: int | None = None,
    ) -> None:
        self._terminal = terminal
        self._file = file
        self._model = model
        self._requests = requests
        self._prompts_hash = prompts_hash
        self._batch = batch
        self._ssim_every = ssim_every
        self._folder = presets
        self._compile = compile
        self._samples = samples
        self._prepared: dict[tuple[bool, str], LoadedPipeline] = {}
        self.commit = commit

    def known(self, configuration: Configuration) -> bool:
        """Whether the file holds this row already, measured on as many prompts."""
        return self._file.find(self._is(configuration)) is not None

    def _is(self, configuration: Configuration) -> Callable[[Row], bool]:
        from vidsparse.calibration import CALIBRATORS

        conditions, samples = self.conditions(), self._samples
        if configuration.promise is not None:
            samples = samples or CALIBRATORS[configuration.method].samples
        return lambda row: (
            all(row.get(name) == value for name, value in conditions.items())
            and configuration.describes(row)
            and (configuration.promise is None or row["promised"]["prompts"] == samples)
            # a speed says itself whether it compiles.
            and (configuration.speed is not None or bool(row.get("compile")) == self._compile)
        )

    @cached_property
    def _loaded(self) -> LoadedPipeline:
        from vidsparse.pipelines.models import load

        first = self._requests[0]
        self._terminal.say(f"Loading {first.model} on {first.device} ...")
        loaded = load(first.model, device=first.device, dtype=first.dtype)
        loaded.pipe.set_progress_bar_config(disable=True)
        return loaded

    def _with_parts(self, compile: bool, linear: str) -> LoadedPipeline:
        """The model with compiled blocks and rounded weights, which stay: a pipeline of its own."""
        from vidsparse.pipelines.models import load

        parts = compile, linear
        if parts == (False, "none"):
            return self._loaded
        if parts not in self._prepared:
            first = self._requests[0]
            self._prepared[parts] = load(
                first.model, device=first.device, dtype=first.dtype, compile=compile, linear=linear
            )
            self._prepared[parts].pipe.set_progress_bar_config(disable=True)
        return self._prepared[parts]

    def run_missing(
        self,
        wanted: Sequence[Configuration],
        *,
        limit: int | None = None,
        overwrite: bool = False,
    ) -> None:
        """Measure what the file lacks of ``wanted``, or all of it; at most ``limit`` rows.

        Raises:
            OptionError: the file has rows of something else.
        """
        self.check(self._file)
        todo = [one for one in wanted if overwrite or not self.known(one)]
        self._terminal.say(f"{len(wanted) - len(todo)} of {len(wanted)} rows are there already.")
        if todo[:limit]:
            self.run(todo[:limit])

    def run(self, todo: Sequence[Configuration]) -> None:
        """Measure ``todo`` and write each row as soon as its metrics are there."""
        # what cannot be measured is found before the first row.
        for one in todo:
            if one.by_card:
                self._carded(one)
        dense = DenseVideos.of(self._generate(self._requests, "dense"))
        self.head(self._file)
        pending: list[PendingRow] = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            try:
                for place, configuration in enumerate(todo, 1):
                    label = f"[{place}/{len(todo)}] {configuration}"
                    pending.append(self._measure(configuration, label, dense, pool))
                    kept = 0 if configuration.study in TIMED_STUDIES else ROWS_IN_FLIGHT
                    while len(pending) > kept or (pending and pending[0].measured_all):
                        self._finish(pending[0])
                        del pending[0]
                while pending:
                    self._finish(pending[0])
                    del pending[0]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                # a row's videos take minutes, and a calibration may lie between two rows.
                for each in pending:
                    if each.measured_all:
                        self._finish(each)
                raise

    def conditions(self) -> dict[str, Any]:
        """What every row of this study has in common."""
        first = self._requests[0]
        return {
            "model": first.model,
            "size": f"{first.width}x{first.height}",
            "frames": first.frames,
            "steps": first.steps,
            "seed": first.seed,
            "prompts": len(self._requests),
        }

    def check(self, file: RowFile, *, calls: bool = False) -> None:
        """Check that the rows of ``file`` are of this study's hardware, weights, prompts and SSIM.

        Nothing is loaded. ``calls`` says that they are of single calls, whose rows may also be of
        ``recorded_prompts``.

        Raises:
            OptionError: they are not.
        """
        from vidsparse.pipelines.models import weights_of
        from vidsparse.pipelines.records import recorded_device

        if not file.rows:
            return
        first, count = self._requests[0], len(self._requests)
        assert first.device is not None
        # files of earlier versions do not say which prompts they are of, only of how many: other
        # prompts of that number are taken for the same.
        counts = {row["prompts"] for row in file.rows if row.get("prompts")}
        fitting = {count, self.recorded_prompts} if calls else {count}
        if counts and "prompts_hash" not in file.header and not counts & fitting:
            known = listed([str(each) for each in sorted(counts)])
            raise OptionError(
                f"{file.path} holds rows of {known} prompts and does not say which, so that rows "
                f"of {count} cannot stand beside them. Hint: name another file."
            )
        origin = {
            "hardware": recorded_device(first.device),
            "dtype": first.dtype,
            "model": {"weights_hash": weights_of(self._model)},
            "prompts_hash": self._prompts_hash,
        }
        file.check_origin(origin, self._unsaid)
        there = file.header.get("guidance", first.guidance)
        if there != first.guidance:
            raise OptionError(
                f"{file.path} holds rows of guidance {there:g}, not of {first.guidance:g}. "
                "Hint: name another file."
            )
        # one header says of all rows how SSIM was taken; single calls have none.
        here = self._meanings["ssim"]
        there = file.header.get("metrics", {}).get("ssim", here)
        if not calls and there != here:
            raise OptionError(
                f"{file.path} holds rows whose SSIM was taken otherwise: {there}, not {here}. "
                "Hint: give --ssim-every the number of those rows, or name another file."
            )

    def head(self, file: RowFile) -> None:
        """Put this study's header over the rows of ``file`` and those to come."""
        file.go_on(self.header(), self._unsaid)

    @property
    def _meanings(self) -> dict[str, str]:
        return meanings(self._ssim_every, self._requests[0].dense_steps)

    @property
    def _unsaid(self) -> dict[str, Any]:
        return {"prompts_hash": self._prompts_hash}

    def header(self) -> dict[str, Any]:
        """What the file says of all its rows: hardware, versions, what the numbers mean."""
        from vidsparse.pipelines.records import provenance

        first = self._requests[0]
        facts = provenance(self._loaded)
        return {
            "hardware": facts["device"],
            "versions": facts["versions"],
            "date": datetime.now(UTC).date().isoformat(),
            "model": facts["model"],
            "scheduler": facts["scheduler"]["class"],
            "dtype": first.dtype,
            "guidance": first.guidance,
            "prompts_hash": self._prompts_hash,
            "metrics": self._meanings,
        }

    def _generate(
        self,
        requests: Sequence[GenerateRequest],
        label: str,
        loaded: LoadedPipeline | None = None,
    ) -> list[Generated]:
        from vidsparse.pipelines.generate import generate_batch

        made: list[Generated] = []
        loaded = loaded or self._loaded
        with step_bar(self._terminal, label) as progress:
            for start in range(0, len(requests), self._batch):
                made += generate_batch(
                    loaded, requests[start : start + self._batch], progress=progress
                )
        return made

    def _measure(
        self,
        configuration: Configuration,
        label: str,
        dense: DenseVideos,
        pool: ThreadPoolExecutor,
    ) -> PendingRow:
        """Make one configuration's videos and hand them to the pool; the metrics come later."""
        if configuration.speed is not None:
            row, made = self._at_speed(configuration.speed, label)
        elif configuration.promise is not None:
            row, made = self._promised(configuration, configuration.promise, label)
        else:
            row, made = self._configured(configuration, label)
        row["batch"] = self._batch
        if self._compile:
            row.setdefault("compile", True)
        return PendingRow.begin(configuration, row, dense, made, pool, ssim_every=self._ssim_every)

    def _finish(self, pending: PendingRow) -> None:
        row, words = pending.finish(self.conditions(), self.commit)
        self._file.put(row, self._is(pending.configuration))
        self._terminal.say(words)

    def _configured(
        self, configuration: Configuration, label: str
    ) -> tuple[dict[str, Any], list[Generated]]:
        """Videos by a method with options or an aim, and what the row says of it."""
        from vidsparse.methods import make_method

        order = configuration.order or own_order(configuration.method, self.order)
        if configuration.by_card:
            configuration = self._carded(configuration)
        if configuration.aim is None:
            options = dict(configuration.options)
            made = self._make(configuration, options, order, label)
        else:
            options, made = self._aimed(configuration, configuration.aim, order, label)
        method: Any = make_method(configuration.method, **options)
        settled = self.presets.of(configuration.method).tables if configuration.calibrated else {}
        row = {
            "options": {
                **method.options(),
                # each head has its own.
                **{name: None for name in method.options() if name in settled},
                "order": order,
                "reuse": configuration.reuse,
                "refresh": configuration.refresh,
                "dense_ends": configuration.dense_ends,
                "dense_steps": self._dense_steps(configuration),
            },
            "aim": configuration.aim and configuration.aim.density,
            "target": configuration.aim and configuration.aim.value,
        }
        if configuration.study == "orders":
            row.update(self._statistics(method, order))
        return row, made

    def _make(
        self,
        configuration: Configuration,
        options: Mapping[str, Any],
        order: str,
        label: str,
    ) -> list[Generated]:
        from vidsparse.methods import make_method

        preset = None
        if configuration.calibrated:
            preset = self.presets.of(configuration.method).source
        else:
            # all of them: what is left open would be the model's, whose presets have numbers too.
            options = make_method(configuration.method, **options).options()
        requests = [
            replace(
                request,
                method=configuration.method,
                method_options=options,
                order=order,
                reuse=configuration.reuse,
                refresh=configuration.refresh,
                dense_steps=self._dense_steps(configuration),
                preset=preset,
                dense_layers=configuration.dense_ends,
                dense_last_layers=configuration.dense_ends,
                dense_kernel="auto",
            )
            for request in self._requests
        ]
        return self._generate(requests, label, self._with_parts(self._compile, "none"))

    def _at_speed(self, speed: str, label: str) -> tuple[dict[str, Any], list[Generated]]:
        """Videos by a bundle as ``generate --speed`` makes them, and what the row says of it."""
        from vidsparse.pipelines.request import resolve

        wanted = [unsettled(request, speed=speed) for request in self._requests]
        requests = [resolve(request, self._loaded.ref.defaults) for request in wanted]
        first = requests[0]
        assert first.linear is not None
        parts = bool(first.compile), first.linear
        made = self._generate(requests, label, self._with_parts(*parts))
        # one that would miss what a model does leaves no step out, whatever was asked for.
        cached = any(step["kind"] == "cached" for one in made for step in one.record["steps"])
        row = {
            "method": first.method,
            "options": {
                **first.method_options,
                "order": first.order,
                "reuse": first.reuse,
                "refresh": first.refresh,
                "dense_ends": first.dense_layers,
                "dense_steps": first.dense_steps,
            },
            "aim": None,
            "target": None,
            "speed": speed,
            "compile": parts[0],
            "linear": parts[1],
            "cache": first.cache if cached else "none",
            "cache_threshold": first.cache_threshold if cached else None,
        }
        return row, made

    def _promised(
        self, configuration: Configuration, psnr: float, label: str
    ) -> tuple[dict[str, Any], list[Generated]]:
        """Videos by a preset made for ``psnr`` dB, and what the row says of it.

        Everything is as ``vidsparse calibrate --target-psnr`` and ``generate --preset`` have it
        where nothing else is asked for, steps, size and frames aside.
        """
        preset, seconds = self.presets.promising(configuration.method, psnr)
        requests = [unsettled(request, preset=preset.source) for request in self._requests]
        made = self._generate(requests, label, self._with_parts(self._compile, "none"))
        schedule = dict(preset.schedule)
        row = {
            "options": {
                **preset.options,
                "order": preset.order,
                "reuse": schedule["reuse"],
                "refresh": schedule["refresh"],
                "dense_ends": schedule["dense_layers"],
                "dense_steps": schedule["dense_steps"],
            },
            "aim": None,
            "target": None,
            "promise": psnr,
            "promised": {name: preset.measured[name] for name in PROMISED_FACTS},
            "calibration_seconds": seconds,
        }
        return row, made

    def _carded(self, configuration: Configuration) -> Configuration:
        """The configuration with what the model has for its method filled in."""
        from vidsparse.pipelines.request import resolve

        wanted = unsettled(self._requests[0], method=configuration.method)
        own = resolve(wanted, self._model.defaults, own_presets=False)
        assert own.reuse is not None
        assert own.refresh is not None
        ends = own.dense_layers
        # a configuration has one number for both ends, and rows are told apart by that.
        if not isinstance(ends, int) or ends != own.dense_last_layers or own.dense_last_steps:
            raise OptionError(
                f"{own.model} keeps {ends} first and {own.dense_last_layers} last "
                f"layers and {own.dense_last_steps} last steps dense, which the study over seconds "
                "cannot run. Hint: name other studies with --study."
            )
        return replace(
            configuration,
            options={**configuration.options, **own.method_options},
            reuse=own.reuse,
            refresh=own.refresh,
            dense_steps=own.dense_steps,
            dense_ends=ends,
        )

    def _dense_steps(self, configuration: Configuration) -> int | float | None:
        own = configuration.dense_steps
        return self._requests[0].dense_steps if own is None else own

    def _aimed(
        self,
        configuration: Configuration,
        aim: Aim,
        order: str,
        label: str,
    ) -> tuple[dict[str, Any], list[Generated]]:
        """The options whose videos come nearest to the aim, and those videos."""
        knob = configuration.knob or KNOBS[configuration.method]
        trials: dict[float, tuple[float, dict[str, Any], list[Generated]]] = {}

        def measure(place: float) -> float:
            number = knob.at(place)
            if number not in trials:
                options = {**configuration.options, knob.name: number}
                made = self._make(configuration, options, order, label)
                density = fmean(one.record[aim.density] for one in made)
                trials[number] = (density, options, made)
            return trials[number][0]

        find_density(
            measure,
            aim.value,
            start=self._guess(configuration, knob, aim, order),
            tolerance=aim.tolerance,
            trials=AIM_TRIALS,
        )
        _, options, made = min(trials.values(), key=lambda trial: abs(trial[0] - aim.value))
        return options, made

    @cached_property
    def presets(self) -> StudyPresets:
        """The presets of this study's rows."""
        return StudyPresets(
            self._terminal,
            self._loaded,
            self._requests[0],
            self._folder,
            self._batch,
            self._samples,
        )

    @cached_property
    def calls(self) -> StudyCalls:
        """The attention calls of this study's dense runs."""
        return StudyCalls(self._loaded, self._requests, self._batch)

    @property
    def recorded_prompts(self) -> int:
        """How many prompts ``calls.recorded`` is of; nothing is loaded to say it."""
        return min(RECORDED_PROMPTS, len(self._requests))

    @property
    def order(self) -> str:
        """The model's own token order."""
        order = self._requests[0].order
        assert order is not None
        return order

    @property
    def device(self) -> str:
        """Where the model runs."""
        return self._loaded.device

    def _guess(self, configuration: Configuration, knob: Knob, aim: Aim, order: str) -> float:
        """The place of the knob that meets ``aim`` on the recorded calls of a dense run."""
        from vidsparse.calls import mean_densities
        from vidsparse.methods import make_method

        # every second call is enough for a first place.
        calls = self.calls.recorded[::2]
        low, high = 0.0, 1.0
        for _ in range(8):
            middle = (low + high) / 2
            options = {**configuration.options, knob.name: knob.at(middle)}
            method: Any = make_method(configuration.method, **options)
            if mean_densities(calls, method, order)[aim.density] < aim.value:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def _statistics(self, method: SparseMethod, order: str) -> Iterator[tuple[str, float]]:
        from vidsparse.calls import measure_calls

        calls = self.calls.recorded
        measured = asdict(measure_calls(calls, method, order, self._requests[0].implementation))
        yield from ((name, measured[name]) for name in ("sim_q", "sim_k", "l1"))
        yield "sparsity", 1 - measured["selected"]
