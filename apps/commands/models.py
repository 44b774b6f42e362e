"""``vidsparse models``: bundled models, and the families that run beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from vidsparse.apps.terminal.console import Terminal, json_option, verbosity_options
from vidsparse.apps.terminal.tables import INDENT, print_paragraph

if TYPE_CHECKING:
    from vidsparse.pipelines.models import ModelRef


@click.command(
    epilog="""\b
Examples:
  vidsparse generate prompts.txt --model shapes
  vidsparse generate prompts.txt --model path/to/diffusers/folder --device cuda
"""
)
@json_option
@verbosity_options
@click.pass_obj
def models(terminal: Terminal, /) -> None:
    """List bundled models with their words and example prompts, and the supported families."""
    from vidsparse.methods import METHODS, make_method
    from vidsparse.pipelines.families import FAMILIES
    from vidsparse.pipelines.models import MODELS, describe, resolve_model

    method = next(iter(METHODS))
    if terminal.json:
        bundled = [
            {**describe(name), "speeds": dict(_speeds(resolve_model(name)))} for name in MODELS
        ]
        families = [
            {
                "name": family.name,
                "pipelines": list(family.pipelines),
                "defaults": asdict(family.defaults),
            }
            for family in FAMILIES
        ]
        terminal.answer({"bundled": bundled, "families": families})
        return

    for name in MODELS:
        facts = describe(name)
        click.secho(name, bold=True)
        print_paragraph(facts["description"])
        print_paragraph(
            f"defaults: {facts['frames']} frames of {facts['size']}, {facts['steps']} "
            f"steps, guidance {facts['guidance']}, {facts['fps']} frames a second, "
            f"{facts['order']} order"
        )
        if facts["on_cpu"]:
            small = "{frames} frames of {width}x{height}".format(**facts["on_cpu"])
            print_paragraph(f"on a CPU: {small}")
        for speed, text in _speeds(resolve_model(name)):
            print_paragraph(f"--speed {speed}: {text}")
        print_paragraph(f"license: {facts['license']}")
        print_paragraph("words it knows:")
        print_paragraph(", ".join(facts["vocabulary"]), indent=2 * INDENT)
        print_paragraph("prompts to try:")
        for prompt in facts["example_prompts"]:
            print_paragraph(prompt, indent=2 * INDENT)
        click.echo()
    click.secho("any other model", bold=True)
    print_paragraph(
        "--model takes a folder in diffusers format or a hub id of one of these families; "
        "docs/models.md names their checkpoints. sparsify in Python takes all their pipelines:"
    )
    for family in FAMILIES:
        defaults = family.defaults
        own = make_method(method, **defaults.method_options.get(method, {})).options()
        options = ", ".join(f"{name} {own[name]}" for name in ("top_p", "tile"))
        print_paragraph(family.name, indent=2 * INDENT)
        print_paragraph(", ".join(family.pipelines), indent=3 * INDENT)
        frames = f"{defaults.frame_factor}k+{defaults.frame_rest}"
        print_paragraph(
            f"defaults: {defaults.frames} frames ({frames}) of "
            f"{defaults.width}x{defaults.height}, {defaults.steps} steps; "
            f"dense steps {defaults.dense_steps}, "
            f"dense layers {defaults.dense_layers} first and {defaults.dense_last_layers} last, "
            f"a plan for {defaults.reuse} step{'s' if defaults.reuse > 1 else ''}, "
            f"{defaults.order} order, {method} with {options} ({defaults.source})",
            indent=3 * INDENT,
        )


def _speeds(ref: ModelRef) -> Iterator[tuple[str, str]]:
    """Each speed, what it stands for on a model on a CPU, and its quality there."""
    from vidsparse.pipelines.request import GenerateRequest, resolve
    from vidsparse.pipelines.speed import SPEEDS, described, measured

    for speed in SPEEDS:
        request = GenerateRequest(prompt="", model=ref.name, speed=speed, device="cpu")
        options = resolve(request, ref.defaults).options()
        known = measured(ref.name, speed, ref.defaults, linear=options["linear"])
        yield speed, f"{described(options)}; {known}"
