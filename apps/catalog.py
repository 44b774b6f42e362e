"""``vidsparse methods`` and ``vidsparse models``: what there is to choose from."""

from __future__ import annotations

import textwrap

import click

from vidsparse.apps.console import verbosity_options

_INDENT = "  "
_WIDTH = 96


def _write(text: str, indent: str = _INDENT) -> None:
    click.echo(textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent))


@click.command(
    epilog="""\b
Examples:
  vidsparse generate prompts.txt --method spargeattn --tau 0.95
  vidsparse compare prompts.txt --method fg-attn --top-p 0.8 --tile 32x32
"""
)
@verbosity_options
def methods() -> None:
    """List the sparse attention methods: paper, what each does, and its options."""
    from vidsparse.apps.options import default_text
    from vidsparse.methods import METHODS

    for name, method in METHODS.items():
        click.secho(name, bold=True)
        _write(f"{method.title}: {method.summary}")
        if method.paper:
            _write(method.paper)
        fields = method.option_fields()
        rows = [(f"{f.metadata['flag']} {f.metadata['metavar']}", f) for f in fields]
        width = max((len(flag) for flag, _ in rows), default=0)
        for flag, field in rows:
            click.echo(
                f"{_INDENT * 2}{flag:<{width}}  {field.metadata['help']}  "
                f"[default: {default_text(field)}]"
            )
        click.echo()


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
        _write(facts["description"])
        click.echo(
            f"{_INDENT}defaults: {facts['frames']} frames of {facts['size']}, {facts['steps']} "
            f"steps, guidance {facts['guidance']}, {facts['fps']} frames a second, "
            f"{facts['order']} order"
        )
        click.echo(f"{_INDENT}license: {facts['license']}")
        click.echo(f"{_INDENT}words it knows:")
        _write(", ".join(facts["vocabulary"]), _INDENT * 2)
        click.echo(f"{_INDENT}prompts to try:")
        for prompt in facts["example_prompts"]:
            click.echo(f"{_INDENT * 2}{prompt}")
        click.echo()
    click.secho("any other model", bold=True)
    _write(
        "--model takes a folder in diffusers format or a hub id of one of these families; "
        "docs/models.md names their checkpoints. sparsify in Python takes all their pipelines:"
    )
    for family in FAMILIES:
        defaults = family.defaults
        own = make_method(method, **defaults.method_options.get(method, {})).options()
        options = ", ".join(f"{name} {own[name]}" for name in ("top_p", "tile"))
        click.echo(f"{_INDENT * 2}{family.name}")
        _write(", ".join(family.pipelines), _INDENT * 3)
        _write(
            f"defaults: {defaults.frames} frames ({defaults.frame_factor}k+1) of "
            f"{defaults.width}x{defaults.height}, {defaults.steps} steps; "
            f"dense steps {defaults.dense_steps}, "
            f"dense layers {defaults.dense_layers} first and {defaults.dense_last_layers} last, "
            f"a plan for {defaults.reuse} step{'s' if defaults.reuse > 1 else ''}, "
            f"{defaults.order} order, {method} with {options} ({defaults.source})",
            _INDENT * 3,
        )
