"""``--speed``: everything that trades quality for time, as four named bundles.

A bundle follows from the model's own defaults, so that every family and every card has its own
four, and from the machine: 8-bit layers and compilation are for GPUs, layers in bf16 for CPUs, each
where it gains.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from vidsparse.errors import OptionError
from vidsparse.pipelines.caching import CACHES
from vidsparse.pipelines.families import FAMILIES
from vidsparse.pipelines.family import DEFAULT_METHOD, Defaults
from vidsparse.pipelines.placement import linear_bf16_reason, linear_fp8_reason

SPEEDS: Final = ("exact", "high", "balanced", "fast")
"""From the slowest to the fastest."""

FEW_STEPS: Final = 8
"""A model distilled to so many steps changes too much in each to leave any out."""

SPEED_METHOD: Final = "foresight"
"""What sparse bundles run on a model whose card chooses no method: at equal work it is nearest to
the dense run on every model that was measured (``BENCHMARKS.md``)."""

_SHARES: Final[Mapping[str, float]] = {"balanced": 0.11, "fast": 0.11}
_SCHEDULES: Final[Mapping[str, Mapping[str, int | float]]] = {
    "high": {"dense_steps": 0.12},
    "balanced": {"dense_steps": 0.12, "refresh": 0.08},
    "fast": {"dense_steps": 0.12, "refresh": 0.08},
}
"""Its numbers there. What is absent is the method's own."""

_ONE_FORWARD_SHARES: Final[Mapping[str, float]] = {"balanced": 0.11, "fast": 0.09}
_ONE_FORWARD_SCHEDULES: Final[Mapping[str, Mapping[str, int | float]]] = {
    "high": {"dense_steps": 0.12},
    "balanced": {"dense_steps": 0.08, "refresh": 0.08},
    "fast": {"dense_steps": 0.08, "refresh": 0.06},
}
"""Its numbers where a step is one forward. Guidance makes errors larger than they are in either
branch: without it these come from 2 dB less near to 5 dB nearer than ``balanced`` does with it, and
compute less (``BENCHMARKS.md``)."""

_UNCACHED_SCHEDULES: Final = {**_SCHEDULES, "fast": _ONE_FORWARD_SCHEDULES["balanced"]}
"""Where a step has both branches of guidance and none can be left out, ``fast`` has fewer dense
steps. A refresh fewer and a smaller share would cost 3 dB more, for a thirtieth of LTX-2's time."""

_FAST_EVERY: Final = 3
"""Of so many steps ``fast`` runs the unconditional branch in one, ``balanced`` in every second."""

_FEW_SHARE: Final = 0.3
_FEW_SCHEDULE: Final[Mapping[str, int]] = {"refresh": 1}
"""Its numbers in few steps, which are far apart: what the dense one leaves is worth most there."""

_WIDE: Final = 3072
"""Features from which 8-bit layers are worth what they err by: on an H200 blocks' layers in fp8
take 0.63 of bf16's time with 5,120 features and 0.69 to 0.74 with 3,072, and with 2,048 or fewer
0.86, where the error is the same (docs/speed.md)."""

_LESS: Final = 0.1
"""How much less of the pooled attention the faster bundles of fg-attn keep than the model's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """The settings of a speed on one model and one machine.

    Args:
        speed: its name.
        method: ``dense``, the model's own or ``foresight``.
        method_options: options of that method that differ from the model's.
        schedule: dense steps and refreshes that differ from the model's.
        linear: number format of the large linear layers.
        compile: whether blocks are compiled.
        cache: step cache.
        cache_threshold: its threshold; None: its own.
    """

    speed: str
    method: str
    method_options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, int | float] = field(default_factory=dict)
    linear: str = "none"
    compile: bool = False
    cache: str = "none"
    cache_threshold: float | None = None


def speed_method(speed: str, method: str, speeds: Collection[str]) -> str:
    """The method that ``speed`` runs on a model, where nobody asks for another.

    Args:
        speed: its name.
        method: the model's own.
        speeds: those that the model's card has numbers for.
    """
    if speed == "exact":
        return "dense"
    return method if method != DEFAULT_METHOD or speed in speeds else SPEED_METHOD


def bundle_for(
    speed: str,
    defaults: Defaults,
    *,
    steps: int,
    device: str,
    dtype: str,
    method: str | None = None,
) -> Bundle:
    """The bundle of ``speed`` for a model with ``defaults`` that takes ``steps`` on ``device``.

    Another ``method`` than the bundle's own takes none of its numbers.
    """
    few = steps <= FEW_STEPS
    quick = speed in ("balanced", "fast")
    own_method = speed_method(speed, defaults.method, defaults.speeds)
    method = own_method if method is None else method
    own: Mapping[str, Any] = {}
    if method == own_method != "dense":
        own = defaults.speeds.get(speed, {})
        if own_method != defaults.method:
            shares, schedules = _SHARES, _SCHEDULES
            if defaults.one_forward:
                shares, schedules = _ONE_FORWARD_SHARES, _ONE_FORWARD_SCHEDULES
            elif _cache("fast", defaults, guidance=True)[0] == "none":
                # where no step can be left out, the fastest speed is so by fewer dense steps.
                schedules = _UNCACHED_SCHEDULES
            share = _FEW_SHARE if few else shares.get(speed)
            own = {
                "method_options": {} if share is None else {"share": share},
                "schedule": _FEW_SCHEDULE if few else schedules[speed],
            }
    options = dict(own.get("method_options", {}))
    if quick and method == DEFAULT_METHOD and "method_options" not in own:
        top_p = defaults.method_options.get(method, {}).get("top_p", _default_top_p())
        options["top_p"] = round(top_p - _LESS, 4)
    if few:
        cache, threshold = "none", None
    elif "cache" in own:
        cache, threshold = own["cache"], own.get("cache_threshold")
    else:
        # a card's quality was measured with the cache that it names, or without one for guidance.
        carded = method == defaults.method and speed in defaults.speeds
        cache, threshold = _cache(speed, defaults, guidance=not carded)
    schedule = dict(own.get("schedule", {}))
    if few and speed != "exact":
        schedule["dense_steps"] = 1
    return Bundle(
        speed=speed,
        method=method,
        method_options=options,
        schedule=schedule,
        linear=_linear(speed, defaults, device, dtype),
        compile=device != "cpu",
        cache=cache,
        cache_threshold=threshold,
    )


def runs_as_high(method: str, defaults: Defaults) -> bool:
    """Whether ``method`` on a model with ``defaults`` is at ``high`` where no speed is asked for.

    It is where the model's card chose what that runs; its blocks are compiled at a speed alone.
    """
    return method == defaults.method == speed_method("high", method, defaults.speeds) != "dense"


def own_cache(defaults: Defaults, steps: int) -> tuple[str, float | None]:
    """The step cache, and its threshold, of a model with ``defaults`` where no speed is asked for.

    It is what the model's card names for ``high``; the model runs as at ``high`` (see
    ``runs_as_high``) in ``steps``.
    """
    known = {} if steps <= FEW_STEPS else defaults.speeds.get("high", {})
    return known.get("cache", "none"), known.get("cache_threshold")


def measured(
    model: str, speed: str, defaults: Defaults, *, changed: bool = False, linear: str = "none"
) -> str:
    """What is known of the quality of a speed on a model with ``defaults``, in words.

    Args:
        model: its name.
        speed: the name of the speed.
        defaults: the model's.
        changed: whether other settings were given beside the speed, which nobody measured.
        linear: number format of the linear layers that it runs with.
    """
    known = defaults.speeds.get(speed, {})
    if speed == "exact":
        told = "nothing is left out"
    elif "psnr" in known:
        told = (
            f"{known['psnr']:.1f} dB on {model}, mean of {known['prompts']} prompts at its default "
            "size"
        )
        if linear != (own := known.get("linear", "none")):
            told += (
                f" before linear layers were in {linear}"
                if own == "none"
                else f" with linear layers in {own}"
            )
    else:
        return "its quality was not measured on this model; `vidsparse compare` does"
    if changed:
        return f"by itself {told}; not measured with these settings, `vidsparse compare` does"
    return told


def quality_of(text: str) -> float | None:
    """The dB of a quality written as ``33dB``, or nothing where ``text`` is no such quality."""
    written = re.fullmatch(r"(\d+(?:\.\d*)?) ?db", text.strip(), re.IGNORECASE)
    return float(written[1]) if written else None


def speed_reaching(psnr: float, model: str, defaults: Defaults) -> str:
    """The fastest speed that was measured to give ``psnr`` dB or more on a model with ``defaults``.

    Raises:
        OptionError: none was, or that is no number of decibels.
    """
    if not 0 < psnr < math.inf:
        raise OptionError(f"a quality must be a number of dB above 0, got {psnr:g}. Hint: 33dB.")
    known = {name: own["psnr"] for name, own in defaults.speeds.items() if "psnr" in own}
    for speed in reversed(SPEEDS):
        if known.get(speed, 0.0) >= psnr:
            return speed
    nearest = max(known, key=lambda speed: known[speed], default=None)
    why = (
        f"no speed was measured on {model}, so none can be chosen for {psnr:g} dB"
        if nearest is None
        else f"no speed was measured to give {psnr:g} dB on {model}; {nearest} is nearest with "
        f"{known[nearest]:.1f}"
    )
    raise OptionError(
        f"{why}. Hint: exact leaves nothing out, and `vidsparse calibrate --target-psnr {psnr:g}` "
        "finds numbers for it."
    )


def described(values: Mapping[str, Any]) -> str:
    """A bundle's parts in one line, from the fields of a ``Bundle`` or of a settled request.

    What it leaves as it is in the model is not told.
    """
    options = ", ".join(
        f"{name} {value}" for name, value in values["method_options"].items() if value is not None
    )
    scheduled = [] if values["method"] == "dense" else ["dense_steps", "refresh"]
    cache = cache_text(values["cache"], values.get("cache_threshold"))
    parts = [
        values["method"] + (f" ({options})" if options else ""),
        *(
            f"{name.replace('_', ' ')} {values[name]}"
            for name in scheduled
            if values.get(name) is not None and (values[name] or name != "refresh")
        ),
        *([f"linear layers in {values['linear']}"] if values["linear"] != "none" else []),
        *(["compiled blocks"] if values["compile"] else []),
        *([f"step cache {cache}"] if cache != "none" else []),
    ]
    return ", ".join(parts)


def cache_text(cache: str, threshold: float | None) -> str:
    """A step cache's name, and its threshold where that is not its own."""
    own = cache == "none" or threshold in (None, CACHES[cache])
    return cache if own else f"{cache} {threshold:g}"


def _cache(speed: str, defaults: Defaults, *, guidance: bool) -> tuple[str, float | None]:
    """The step cache of ``speed`` and its threshold, where a model's card names none.

    ``guidance`` says whether it may be that one.
    """
    family = next(family for family in FAMILIES if family.name == defaults.family)
    # nobody has heard what is left of a sound whose steps were left out.
    if speed == "exact" or family.sound:
        return "none", None
    if guidance and "guidance" in family.caches and not defaults.one_forward:
        return "guidance", _FAST_EVERY if speed == "fast" else None
    return ("taylorseer" if speed == "fast" and "taylorseer" in family.caches else "none"), None


def _default_top_p() -> float:
    from vidsparse.methods import make_method

    top_p: float = make_method(DEFAULT_METHOD).options()["top_p"]
    return top_p


def _linear(speed: str, defaults: Defaults, device: str, dtype: str) -> str:
    """The format that gains on ``device`` at ``speed``.

    On a CPU that is bf16, whose error the video hardly shows; int8 products are slow there.
    """
    if speed == "exact":
        return "none"
    if device == "cpu":
        return "none" if linear_bf16_reason(device, dtype) else "bf16"
    if speed == "high" or importlib.util.find_spec("torchao") is None:
        return "none"
    if defaults.features is not None and defaults.features < _WIDE:
        return "none"
    reason = linear_fp8_reason(device, dtype)
    if reason is None:
        return "fp8"
    # 16 bits are quick on a GPU with fp8 units: on an H200 int8 takes 0.9 to 1.3 of bf16's time.
    return "none" if reason.startswith("dtype") and dtype == "fp16" else "int8"
