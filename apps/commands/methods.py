"""``vidsparse methods``: what chooses the tiles, and its options."""

from __future__ import annotations

import click

from vidsparse.apps.terminal.console import Terminal, json_option, verbosity_options
from vidsparse.apps.terminal.tables import INDENT, print_pairs, print_paragraph


@click.command(
    epilog="""\b
Examples:
  vidsparse generate prompts.txt --method spargeattn --tau 0.95
  vidsparse compare prompts.txt --method fg-attn --top-p 0.8 --tile 32x32
"""
)
@json_option
@verbosity_options
@click.pass_obj
def methods(terminal: Terminal, /) -> None:
    """List the sparse attention methods: paper, what each does, and its options."""
    from vidsparse.apps.terminal.options import default_text
    from vidsparse.methods import METHODS

    if terminal.json:
        terminal.answer(
            [
                {
                    "name": name,
                    "title": method.title,
                    "summary": method.summary,
                    "paper": method.paper,
                    "options": [
                        {
                            "name": field.name,
                            "flag": field.metadata["flag"],
                            "help": field.metadata["help"],
                            "default": default_text(field),
                        }
                        for field in method.option_fields()
                    ],
                }
                for name, method in METHODS.items()
            ]
        )
        return
    for name, method in METHODS.items():
        click.secho(name, bold=True)
        print_paragraph(f"{method.title}: {method.summary}")
        if method.paper:
            print_paragraph(method.paper)
        print_pairs(
            (
                (
                    f"{field.metadata['flag']} {field.metadata['metavar']}",
                    f"{field.metadata['help']}  [default: {default_text(field)}]",
                )
                for field in method.option_fields()
            ),
            indent=2 * INDENT,
        )
        click.echo()
