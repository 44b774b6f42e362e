"""``vidsparse doctor``: what this machine has, what will run on it, and why the rest will not."""

from __future__ import annotations

import click

from vidsparse.apps.runs.examination import examine
from vidsparse.apps.terminal.console import FAILED, Terminal, json_option, verbosity_options
from vidsparse.apps.terminal.tables import INDENT, print_pairs


@click.command(
    epilog="""\b
Exit code 0: `vidsparse generate` will work here. Exit code 1: it will not, and the last lines say
what is missing.

\b
Examples:
  vidsparse doctor
  vidsparse doctor > doctor.txt       attach this to a bug report
"""
)
@json_option
@verbosity_options
@click.pass_obj
def doctor(terminal: Terminal, /) -> int:
    """Check this machine: versions, devices, and which kernel will run on what."""
    findings = examine()
    if terminal.json:
        sections = {
            title: [{"name": name, "value": value} for name, value in rows]
            for title, rows in findings.sections
        }
        terminal.answer({"sections": sections, "problems": findings.problems})
        return FAILED if findings.problems else 0
    width = max(len(name) for _, rows in findings.sections for name, _ in rows)
    for title, rows in findings.sections:
        click.secho(title, bold=True)
        print_pairs(rows, indent=INDENT, first=width)
        click.echo()
    if not findings.problems:
        click.secho("generate will work here.", fg="green")
        return 0
    for problem in findings.problems:
        click.secho(f"Problem: {problem}", fg="red")
    return FAILED
