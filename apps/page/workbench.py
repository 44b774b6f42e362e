"""What one device of the page holds: a loaded model, and the dense videos made lately.

Only the device's own thread touches it, one job at a time.
"""

from __future__ import annotations

import gc
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from vidsparse.apps.page.estimates import Estimates, Memory, Took
from vidsparse.apps.page.queue import Cancelled, Job
from vidsparse.apps.runs.comparison import dense_side

if TYPE_CHECKING:
    from vidsparse.pipelines.generate import Attach, Generated
    from vidsparse.pipelines.models import LoadedPipeline
    from vidsparse.pipelines.request import GenerateRequest

# who tries a method's numbers compares with one dense video again and again: at the bundled
# model's default size these bytes are eighty videos, at 81 frames of 832x480 five.
DENSE_BYTES = 512 * 2**20
# of the videos that a model is warmed up with, in units of its smallest side.
WARM_UP_SIDES = (8, 16)

# diffusers loads into modules without memory by patching torch's module class meanwhile, which two
# devices' threads must not do at once.
_LOADING = threading.Lock()


class Workbench:
    """A device and what it has at hand.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: number format, or None for the device's own default.
        estimates: told what every video took; the page's devices share them.
    """

    def __init__(
        self, device: str, dtype: str | None = None, estimates: Estimates | None = None
    ) -> None:
        self.device = device
        self._estimates = Estimates() if estimates is None else estimates
        self._memory = Memory(device)
        self._dtype = dtype
        self._loaded: LoadedPipeline | None = None
        # with the job that made it.
        self._dense: OrderedDict[str, tuple[Generated, str]] = OrderedDict()
        self._decode_seconds: dict[tuple[Any, ...], float] = {}

    def load(self, model: str, *, image: bool = False) -> LoadedPipeline:
        """The model, loaded once and warmed up; another one makes room for it first.

        ``image`` loads it for videos that begin with a picture.

        Raises:
            VidsparseError: it cannot be loaded.
        """
        from vidsparse.pipelines.models import load

        has = self._loaded
        if has is None or (has.ref.name, has.takes_image) != (model, image):
            self._loaded = has = None
            self._dense.clear()
            self.free()
            with _LOADING:
                has = load(model, device=self.device, dtype=self._dtype, image=image)
            self._estimates.loaded(has, self._memory.now(), self._memory.room())
            self._warm_up(has)
            self._loaded = has
        return has

    def fit(self, request: GenerateRequest) -> GenerateRequest:
        """The request as this device will run it."""
        from vidsparse.pipelines.request import resolve

        here = replace(request, device=self.device, dtype=self._dtype)
        return resolve(here, self.load_for(request).defaults)

    def load_for(self, request: GenerateRequest) -> LoadedPipeline:
        """The model as ``request`` needs it."""
        return self.load(request.model, image=request.image is not None)

    def generate(
        self,
        request: GenerateRequest,
        job: Job[Workbench, Any],
        phase: str,
        attach: Attach | None = None,
        until: Callable[[], bool] | None = None,
    ) -> Generated:
        """Make one video and tell ``job`` about it.

        Args:
            request: what to make.
            job: told of the progress; its wish to stop is heard.
            phase: what the job says meanwhile.
            attach: given the handle of a sparse run.
            until: another reason to stop, asked after each step.

        Raises:
            Cancelled: it was stopped.
            VidsparseError: the request does not fit the model or the device.
        """
        from vidsparse.pipelines.generate import GenerationCancelled, generate

        job.check()
        job.say(f"loading {request.model}")
        request = self.fit(request)
        shape = (request.model, request.frames, request.width, request.height)
        job.expect_after_steps(self._decode_seconds.get(shape, 0.0))
        job.begin_part(phase)

        taken: list[float] = []
        self._memory.begin()

        def progress(step: int, steps: int, seconds: float) -> None:
            taken.append(seconds)
            job.advance(step, steps, seconds)
            if step == steps:
                job.say("decoding")

        made = None
        with suppress(GenerationCancelled):
            made = generate(
                self.load_for(request),
                request,
                progress,
                lambda: job.stopping() or (until is not None and until()),
                attach=attach,
            )
        if made is None:
            # not sooner: while the error is looked at, it holds what the run had in hand.
            self.free()
            raise Cancelled("cancelled")
        self._decode_seconds[shape] = made.record["times"]["decode"]
        self._estimates.add(request, _took(made.record["times"], taken, self._memory.most()))
        return made

    def dense(self, request: GenerateRequest, job: Job[Workbench, Any], phase: str) -> Generated:
        """The same request's video by dense attention, kept from before if there is one.

        The record of a video that an earlier job made says when, under ``kept``: its time was not
        taken beside what it is compared with.

        Raises:
            as ``generate``.
        """
        request = dense_side(self.fit(request))
        key = json.dumps([request.prompt, request.options()], sort_keys=True)
        found = self._dense.pop(key, None)
        if found is None:
            found = self.generate(request, job, phase), job.id
        else:
            job.begin_part(f"{phase}, kept from before")
        self._dense[key] = found
        while len(self._dense) > 1 and self._held() > DENSE_BYTES:
            self._dense.popitem(last=False)
        made, maker = found
        if maker == job.id:
            return made
        return replace(made, record={**made.record, "kept": _clock(made.record["began"])})

    def free(self) -> None:
        """Give back memory that nothing holds any more."""
        gc.collect()
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.empty_cache()

    def _held(self) -> int:
        return sum(made.frames.nbytes for made, _ in self._dense.values())

    def _warm_up(self, loaded: LoadedPipeline) -> None:
        # a process's first call pays for its set-up, which is nothing that a visitor should see.
        if loaded.takes_image:
            return
        from vidsparse.pipelines.generate import GenerationCancelled, generate
        from vidsparse.pipelines.request import GenerateRequest, resolve

        # a small video: set-up is the same for any size, and the visitor waits for this one.
        small, large = (side * loaded.defaults.size_factor for side in WARM_UP_SIDES)
        request = GenerateRequest(
            prompt="", model=loaded.ref.name, steps=2, dense_steps=1, width=small, height=small,
            frames=loaded.defaults.few_frames,
        )  # fmt: skip
        taken: list[float] = []
        made = generate(loaded, request, lambda _, __, seconds: taken.append(seconds))
        # the second step alone: the first one is the set-up.
        took = _took(made.record["times"], taken[1:], None)
        self._estimates.add(resolve(request, loaded.defaults), took, warm_up=True)
        # steps of a larger one tell how they grow. Its decoding would take longer than they do: it
        # is left out, and taken to grow with the picture.
        request = replace(request, width=large, height=large)
        taken = []
        with suppress(GenerationCancelled):
            generate(
                loaded,
                request,
                lambda _, __, seconds: taken.append(seconds),
                cancel=lambda: len(taken) == request.steps,
            )
        took = replace(took, step=taken[-1], beside=took.beside * (large / small) ** 2)
        self._estimates.add(resolve(request, loaded.defaults), took, warm_up=True)


def _took(times: Mapping[str, float], steps: Sequence[float], memory: int | None) -> Took:
    """What a video took, by its record's times and the seconds of its steps."""
    return Took(
        step=sum(steps) / len(steps) if steps else times["denoise"],
        beside=times["encode_text"] + times["decode"],
        memory=memory,
    )


def _clock(began: str) -> str:
    """A time of a record as a reader of the page reads it, by the host's clock."""
    then, now = datetime.fromisoformat(began).astimezone(), datetime.now().astimezone()
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%Y-%m-%d %H:%M}"
