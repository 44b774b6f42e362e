"""How long a video will take and how much memory: told from those that were made here before.

A device's benches note what every video took. A request is told from the one most like it: seconds
of a step grow with its tokens and, by attention, with their square, and double where guidance runs
a second branch; what comes before and after the steps, and memory beside the model, grow with its
tokens. What a method's numbers, its schedule or a step cache change is measured, not told: videos
that differ in them are of different kinds.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vidsparse.schedule import share_or_count

if TYPE_CHECKING:
    from vidsparse.pipelines.family import Defaults
    from vidsparse.pipelines.models import LoadedPipeline
    from vidsparse.pipelines.request import GenerateRequest

Basis = Literal["alike", "other", "warm-up"]

# kinds of videos that are remembered: more than a page's visitors tell apart.
_MOST_KINDS = 500

# how many times as long a step of the larger video of a warm-up takes, at the least, where its
# products are what takes time: where it hardly takes longer, it waits for their launches.
_LONGER = 1.5

# of a new measurement in the mean: what else a machine does meanwhile changes.
_NEW = 0.5

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True, slots=True)
class Took:
    """What a video took.

    Args:
        step: seconds of one denoising step.
        beside: seconds before the first step and after the last.
        memory: bytes at the most, those of the model included, None where it cannot be told.
    """

    step: float
    beside: float
    memory: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What videos will take.

    Args:
        seconds: of all of them.
        memory: bytes at the most, None where it cannot be told yet.
        room: bytes that the device has, None where that cannot be told.
        basis: whether a video of such a size was made here, another one, or the warm-up's alone.
        size: of the video that it is told from, in words.
    """

    seconds: float
    memory: int | None
    room: int | None
    basis: Basis
    size: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """Videos that take the same: of one model, size and method, and of the same settings.

    Args:
        model: its name.
        method: its name.
        frames: of the video.
        width: pixels.
        height: pixels.
        guided: whether guidance is on.
        cache: the step cache and its threshold.
        settings: what else changes the time of a step, each as text.
    """

    model: str
    method: str
    frames: int
    width: int
    height: int
    guided: bool
    cache: tuple[str, float | None]
    settings: tuple[str, ...]

    def tokens(self, defaults: Defaults) -> float:
        groups = defaults.frame_groups(self.frames)
        return groups * self.width * self.height / defaults.size_factor**2

    def unlike(self, other: _Kind) -> tuple[bool, bool, bool, int]:
        """How far from another of its size, what changes the time most first."""
        pairs = zip(self.settings, other.settings, strict=True)
        return (
            self.cache != other.cache,
            self.method != other.method,
            self.guided != other.guided,
            sum(one != another for one, another in pairs),
        )

    def told(self, asked: _Kind) -> str:
        """What it is, in words, beside what was asked for."""
        text = f"{self.frames} frames of {self.width}x{self.height}, {self.method}"
        if self.cache != asked.cache:
            name, threshold = self.cache
            number = "" if threshold is None else f" {threshold:g}"
            text += ", no step cache" if name == "none" else f", cache {name}{number}"
        if self.guided != asked.guided:
            text += f", {'with' if self.guided else 'without'} guidance"
        return text

    @classmethod
    def of(cls, request: GenerateRequest) -> _Kind:
        assert request.frames is not None
        assert request.width is not None
        assert request.height is not None
        return cls(
            model=request.model,
            method=request.method,
            frames=request.frames,
            width=request.width,
            height=request.height,
            guided=(request.guidance or 0) > 1,
            cache=(request.cache or "none", request.cache_threshold),
            settings=tuple(_settings(request)),
        )


def _settings(request: GenerateRequest) -> list[str]:
    """What of a request changes the time of a step, beside its size, guidance and cache."""
    found = [
        getattr(request, name) for name in ("linear", "compile", "offload", "lora", "dense_kernel")
    ]
    sparse = [
        dict(request.method_options), request.preset, request.order, request.implementation,
        request.reuse, request.dense_layers, request.dense_last_layers,
        *(_share(request, name) for name in ("dense_steps", "dense_last_steps", "refresh")),
    ]  # fmt: skip
    # a dense video is the same whatever a method would have done.
    found += [None] * len(sparse) if request.method == "dense" else sparse
    return [json.dumps(each, sort_keys=True, default=str) for each in found]


def _share(request: GenerateRequest, name: str) -> float:
    """The share of the steps that an amount stands for, in tenths: 1 of 2 is not 1 of 40."""
    assert request.steps is not None
    amount = getattr(request, name)
    return round(share_or_count(amount or 0, request.steps, name) / request.steps, 1)


class Estimates:
    """What was measured on the page's devices. Benches write from their threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._took: OrderedDict[_Kind, tuple[Took, bool]] = OrderedDict()
        # by model: tokens at which its attention takes as long as all else, forwards of a step with
        # guidance, and bytes of the model and of the device.
        self._even: dict[str, float] = {}
        self._branches: dict[str, int] = {}
        self._held: dict[str, int | None] = {}
        self._room: int | None = None

    def loaded(self, has: LoadedPipeline, held: int | None, room: int | None) -> None:
        """Note a model that has been loaded.

        Args:
            has: the model.
            held: bytes in use once it was there.
            room: bytes that the device has.
        """
        with self._lock:
            self._even[has.ref.name] = _even_tokens(has)
            self._branches[has.ref.name] = _branches(has)
            self._held[has.ref.name], self._room = held, room

    def add(self, request: GenerateRequest, took: Took, *, warm_up: bool = False) -> None:
        """Note what a video took."""
        kind = _Kind.of(request)
        with self._lock:
            before = self._took.pop(kind, None)
            if before is not None and before[1] == warm_up:
                took = _mean(before[0], took)
            self._took[kind] = took, warm_up
            while len(self._took) > _MOST_KINDS:
                self._took.popitem(last=False)

    def of(self, requests: Sequence[GenerateRequest], defaults: Defaults) -> Estimate | None:
        """What videos of one model and size will take, made one after the other.

        Args:
            requests: their settings, filled in.
            defaults: of the model, for its units.

        Returns:
            None while nothing was measured of the model.
        """
        told = [self._one(request, defaults) for request in requests]
        found = [each for each in told if each is not None]
        if not found or len(found) < len(told):
            return None
        # the least sure of them says what it is told from.
        least = max(found, key=lambda each: ("alike", "other", "warm-up").index(each.basis))
        memory = [each.memory for each in found if each.memory is not None]
        return Estimate(
            seconds=sum(each.seconds for each in found),
            memory=max(memory, default=None),
            room=least.room,
            basis=least.basis,
            size=least.size,
        )

    def _one(self, request: GenerateRequest, defaults: Defaults) -> Estimate | None:
        asked = _Kind.of(request)
        with self._lock:
            same = {kind: took for kind, took in self._took.items() if kind.model == asked.model}
            even = self._even.get(asked.model)
            held, room = self._held.get(asked.model), self._room
            branches = self._branches.get(asked.model, 1)
        if not same or even is None:
            return None
        tokens = asked.tokens(defaults)

        def unlike(kind: _Kind) -> tuple[bool, float, tuple[bool, bool, bool, int]]:
            ratio = kind.tokens(defaults) / tokens
            return same[kind][1], max(ratio, 1 / ratio), kind.unlike(asked)

        # of those that are as far, the one that was made last.
        nearest = min(reversed(same), key=unlike)
        took, warm_up = same[nearest]
        from_tokens = nearest.tokens(defaults)
        share = tokens / from_tokens

        def products(tokens: float) -> float:
            return tokens * (1 + tokens / even)

        step = took.step * products(tokens) / products(from_tokens)
        if warm_up:
            # then videos of the warm-up are all there is, two of them or one.
            small, *_, large = sorted([*same, nearest], key=lambda kind: kind.tokens(defaults))
            few, many = products(small.tokens(defaults)), products(large.tokens(defaults))
            short, long = same[small][0].step, same[large][0].step
            if few < many and _LONGER * short <= long <= short * many / few:
                # along the line through both: a part of a step is the same for any size.
                step = long + (long - short) / (many - few) * (products(tokens) - many)
        if asked.guided != nearest.guided and branches > 1:
            step *= branches if asked.guided else 1 / branches
        memory = None
        # what a process sets up first is more than a small video needs: the warm-up tells nothing.
        if took.memory is not None and held is not None and not warm_up:
            memory = round(held + max(0, took.memory - held) * share)
        assert request.steps is not None
        return Estimate(
            seconds=step * request.steps + took.beside * share,
            memory=memory,
            room=room,
            basis="warm-up" if warm_up else "alike" if nearest == asked else "other",
            size=nearest.told(asked),
        )


def _mean(before: Took, now: Took) -> Took:
    known = [each for each in (before.memory, now.memory) if each is not None]
    return Took(
        step=_NEW * now.step + (1 - _NEW) * before.step,
        beside=_NEW * now.beside + (1 - _NEW) * before.beside,
        memory=max(known, default=None),
    )


def _branches(has: LoadedPipeline) -> int:
    """Forwards of a step with guidance, by themselves or as one of so many videos."""
    return 1 if has.ref.defaults.embedded else 2


def _even_tokens(has: LoadedPipeline) -> float:
    """Tokens at which attention multiplies as much as all other layers of the transformer.

    A token takes 2 products for each parameter, and 4 for each other token, layer and channel.
    """
    transformer = getattr(has.pipe, "transformer", None) or getattr(has.pipe, "transformer_2", None)
    config: dict[str, Any] = dict(has.ref.transformers[0]) if has.ref.transformers else {}
    heads, width, *layered = (
        int(config.get(name) or 0)
        for name in ("num_attention_heads", "attention_head_dim", "num_layers", "num_single_layers")
    )
    channels, layers = heads * width, sum(layered)
    if transformer is None or not channels or not layers:
        # all families come near to this: 12 parameters for each pair of channels and layer.
        return 6.0 * (channels or 1024)
    parameters = sum(each.numel() for each in transformer.parameters())
    return float(parameters) / (2 * channels * layers)


class Memory:
    """How much of a device's memory is in use, and the most since it was last asked to begin.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``. On a CPU it is the process's, which Linux tells.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def begin(self) -> None:
        """Count the most from now on."""
        if self._on_gpu():
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with suppress(OSError):
            # 5 sets the most that was resident back to what is now.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def now(self) -> int | None:
        """Bytes in use."""
        if self._on_gpu():
            import torch

            return int(torch.cuda.memory_allocated(self._device))
        return _resident("VmRSS")

    def most(self) -> int | None:
        """The most bytes that were in use since ``begin``."""
        if self._on_gpu():
            import torch

            return int(torch.cuda.max_memory_allocated(self._device))
        return _resident("VmHWM")

    def room(self) -> int | None:
        """Bytes that the device has."""
        if self._on_gpu():
            import torch

            return int(torch.cuda.mem_get_info(self._device)[1])
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return None

    def _on_gpu(self) -> bool:
        return self._device.startswith("cuda")


def _resident(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text("ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
