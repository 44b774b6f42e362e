"""The page's one control for quality and speed: the names of ``--speed``, as the form's values.

A choice fills the controls by hand, so that what runs is what they show. Compilation and the
format of linear layers belong to the model that is loaded, which the page's visitors share: it
leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vidsparse.apps.page.form import Form, schedule_values
from vidsparse.apps.page.offers import BY_HAND, first_method
from vidsparse.apps.page.values import amount_text
from vidsparse.errors import OptionError
from vidsparse.methods import METHODS
from vidsparse.pipelines.models import ModelRef
from vidsparse.pipelines.speed import SPEEDS, Bundle, bundle_for, described, measured


def bundle_of(form: Form, model: ModelRef, speed: str) -> Bundle:
    """What ``speed`` stands for on the page's first device, in the model's own number of steps."""
    return bundle_for(
        speed, model.defaults, steps=model.defaults.steps, device=form.host.devices[0], dtype="fp32"
    )


def values_of_speed(form: Form, model: ModelRef, speed: str) -> dict[str, Any]:
    """The values of the form's controls that ``speed`` stands for."""
    bundle, own = bundle_of(form, model, speed), form.defaults_of(model)
    names = form.options_of(bundle.method)
    return {
        "method": bundle.method,
        "preset": BY_HAND,
        **form.beside(model, bundle.method),
        "cache": bundle.cache,
        "cache_threshold": amount_text(bundle.cache_threshold),
        **schedule_values(bundle.schedule),
        **{control: own[control] for control in names.values()},
        **{names[option]: value for option, value in bundle.method_options.items()},
    }


def speed_of(form: Form, model: ModelRef, values: Mapping[str, Any]) -> str:
    """The speed whose values all are in ``values``, or "by hand"."""
    held = _settled(form, model, values)
    for speed in SPEEDS:
        wanted = _settled(form, model, values_of_speed(form, model, speed))
        if wanted.items() <= held.items():
            return speed
    return BY_HAND


def first_speed(form: Form, model: ModelRef) -> str:
    """The speed whose values the model brings, or "by hand"."""
    own = {"method": first_method(model), "preset": BY_HAND}
    return speed_of(form, model, {**form.defaults_of(model), **own})


def _settled(form: Form, model: ModelRef, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with what the method makes of the refreshes and options that are left to it."""
    method = values["method"]
    settled = {**values, "refresh": values["refresh"] or amount_text(METHODS[method].refresh)}
    # what it cannot read is no speed's.
    with suppress(OptionError):
        settled |= form.values_of_options(model, method, values)
    return settled


def speed_text(form: Form, model: ModelRef, speed: str) -> str:
    """What ``speed`` stands for here and what is known of its quality, in a line."""
    if speed == BY_HAND:
        return "The numbers under By hand are what runs."
    bundle = bundle_of(form, model, speed)
    parts = {
        "method": bundle.method,
        "method_options": {**_own(form, model, bundle.method), **bundle.method_options},
        **bundle.schedule,
        "linear": "none",
        "compile": False,
        "cache": bundle.cache,
        "cache_threshold": bundle.cache_threshold,
    }
    return f"{speed}: {described(parts)}. Quality: {measured(model.name, speed, model.defaults)}."


def _own(form: Form, model: ModelRef, method: str) -> dict[str, Any]:
    """The first of the method's options, which says how much is kept, as the model has it."""
    own, names = form.defaults_of(model), form.options_of(method)
    return {option: own[control] for option, control in list(names.items())[:1]}
