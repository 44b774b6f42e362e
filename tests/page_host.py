"""A host and its form in tests, and the request that the command line would make."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from page_jobs import queue_of

from vidsparse.apps.page.host import Host, Limits
from vidsparse.apps.page.visits import Visits
from vidsparse.apps.terminal.options import build_request
from vidsparse.methods import METHODS, make_method
from vidsparse.pipelines.models import resolve_model
from vidsparse.pipelines.request import GenerateRequest, resolve
from vidsparse.presets import Preset

# those that need no calibrated numbers.
METHODS_OFFERED = [
    name for name, cls in METHODS.items() if not getattr(cls, "needs_numbers", False)
]


def host_of(tmp_path: Path, **limits: int) -> Host:
    """A host of the bundled model on the CPU."""
    return Host(
        models=(resolve_model("shapes"),),
        folder=tmp_path,
        devices=("cpu",),
        limits=Limits(**limits),
    )


def save_preset(path: Path, method: str = "spargeattn", layers: int | None = None) -> Path:
    """A preset for the bundled model, or for one like it with another number of layers."""
    (config,) = resolve_model("shapes").transformers
    own = {name: value for name, value in config.items() if not name.startswith("_")}
    if layers is not None:
        own["num_layers"] = layers
    fractions = torch.tensor([0.3, 0.6]).expand(1, config["num_layers"], 4, 2)
    tables = {
        "spargeattn": {"tau": torch.full((1, config["num_layers"], 4), 0.7)},
        "foresight": {"share": torch.full((1, config["num_layers"], 4), 0.2)},
        "bsfa": {
            "fraction": fractions,
            "threshold": torch.zeros(1, config["num_layers"], 4, 1, 2, 9),
        },
    }
    return Preset(
        method=method,
        options=make_method(method).options(),
        order="hilbert",
        tables=tables[method],
        model={
            "name": "shapes",
            "weights_hash": "0",
            "transformers": [{"class": config["_class_name"], "config": own}],
        },
        video={"frames": 17, "width": 128, "height": 96},
        grid=(5, 6, 8),
    ).save(path)


def form_of(host: Host) -> Any:
    """The host's form, in a page of its own."""
    gr = pytest.importorskip("gradio")
    from vidsparse.apps.page.form import Form

    with gr.Blocks():
        return Form(host)


def choices_of(host: Host) -> Any:
    """The host's ``desk``, its ``form``, the ``report`` beside it, and its ``choices``.

    The desk's queue is to be closed.
    """
    gr = pytest.importorskip("gradio")
    from vidsparse.apps.page.choices import Choices
    from vidsparse.apps.page.desk import Desk
    from vidsparse.apps.page.form import Form
    from vidsparse.apps.page.report_tab import ReportTab

    desk = Desk(host, queue_of(), Visits(host.folder))
    with gr.Blocks():
        form = Form(host)
        report = ReportTab(desk, form)
        choices = Choices(desk, form, report)
    return SimpleNamespace(desk=desk, form=form, report=report, choices=choices)


def values_of(form: Any, **changes: Any) -> dict[str, Any]:
    """What a form sends that nobody touched but for ``changes``."""
    values = {name: control.value for name, control in form.controls.items()}
    return {**values, "prompt": "a red ball", **changes}


def once_chosen(form: Any, method: str, **changes: Any) -> dict[str, Any]:
    """As ``values_of``, once a method was chosen, which brings its own schedule."""
    return {**values_of(form), **form.values_of(command_line(method=method)), **changes}


def command_line(**changes: Any) -> GenerateRequest:
    """The request that the command line makes of no options but ``changes``."""
    options: dict[str, Any] = {
        "model": "shapes", "frames": None, "size": None, "steps": None, "guidance": None,
        "negative_prompt": "", "preset": None, "image": None, "last_image": None, "seed": 0,
        "fps": None, "lora": None, "method": "fg-attn",
        "order": None, "dense_steps": None, "dense_last_steps": 0, "dense_layers": None,
        "dense_last_layers": None, "reuse": None, "refresh": None, "device": "cpu", "dtype": None,
        "offload": "none",
        "compile": False, "implementation": "auto", "speed": None,
    }  # fmt: skip
    request = build_request("a red ball", {**options, **changes})
    return resolve(request, resolve_model("shapes").defaults)
