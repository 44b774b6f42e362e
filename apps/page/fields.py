"""The form's kinds of fields: a number, a method's own option, an upload, and folds around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import gradio as gr

from vidsparse.apps.page.values import typed

IMAGES = {"image": "First frame", "last_image": "Last frame"}


def control_for(field: dataclasses.Field[Any], value: Any) -> Any:
    """The control of a method's own option, by its declaration."""
    facts = field.metadata
    # as the command line and the records spell it.
    label, info = field.name, facts["help"]
    # what it will be where it is left blank.
    blank = typed(value)
    if isinstance(field.default, bool):
        return gr.Checkbox(value=value, label=label, info=info)
    if facts.get("choices"):
        return gr.Dropdown(list(facts["choices"]), value=typed(value), label=label, info=info)
    if isinstance(field.default, int):
        return gr.Number(value=value, label=label, info=info, step=1, placeholder=blank)
    if isinstance(field.default, float):
        # no step of its own: a number that is in range should never be called invalid.
        return gr.Number(value=value, label=label, info=info, step=0.05, placeholder=blank)
    return gr.Textbox(value=blank, label=label, info=info, placeholder=blank)


def holds(words: Sequence[str]) -> list[str]:
    """Classes of a fold that say which fields are in it, by the words of errors."""
    return [f"vs-holds-{word}" for word in words]


def upload(name: str, shown: bool) -> gr.File:
    """Where a picture is handed in, ``name`` one of ``IMAGES``."""
    return gr.File(
        label=f"{IMAGES[name]}: PNG, JPEG or WebP",
        file_types=[".png", ".jpg", ".jpeg", ".webp"],
        type="filepath",
        height=96,
        min_width=150,
        visible=shown,
        elem_id=name.replace("_", "-"),
    )


def number_field(label: str, value: int, step: int = 1) -> gr.Number:
    """A number of the form's own."""
    # no bounds: gradio would complain of a number without saying which. No precision either: it
    # would round without a word.
    return gr.Number(
        value=value,
        label=label,
        step=step,
        min_width=90,
        # what it will be where it is left blank.
        placeholder=str(value),
    )
