"""``vidsparse models``: bundled models, and the families that run beside them."""

from __future__ import annotations

import click

from vidsparse.apps.terminal.console import verbosity_options
from vidsparse.apps.terminal.tables import INDENT, print_paragraph


@click.command(
    epilog="""\b
Examples:
  vidsparse generate prompts.txt --model shapes
  vidsparse generate prompts.txt --model path/to/diffusers/folder --device cuda
"""
)
@verbosity_options
def models() -> None:
    """List bundled models with their words and example prompts, and the supported families."""
    from vidsparse.methods import METHODS, make_method
    from vidsparse.pipelines.families import FAMILIES
    from vidsparse.pipelines.models import MODELS, describe

    method = next(iter(METHODS))

    for name in MODELS:
        facts = describe(name)
        click.secho(name, bold=True)
        print_paragraph(facts["description"])
        print_paragraph(
            f"defaults: {facts['frames']} frames of {facts['size']}, {facts['steps']} "
            f"steps, guidance {facts['guidance']}, {facts['fps']} frames a second, "
            f"{facts['order']} order"
        )
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
        print_paragraph(
            f"defaults: {defaults.frames} frames ({defaults.frame_factor}k+1) of "
            f"{defaults.width}x{defaults.height}, {defaults.steps} steps; "
            f"dense steps {defaults.dense_steps}, "
            f"dense layers {defaults.dense_layers} first and {defaults.dense_last_layers} last, "
            f"a plan for {defaults.reuse} step{'s' if defaults.reuse > 1 else ''}, "
            f"{defaults.order} order, {method} with {options} ({defaults.source})",
            indent=3 * INDENT,
        )
