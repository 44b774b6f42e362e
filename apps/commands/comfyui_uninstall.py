"""``vidsparse comfyui uninstall``: the nodes out of a ComfyUI."""

from __future__ import annotations

from pathlib import Path

import click

from vidsparse.apps.comfyui.folder import remove_folder
from vidsparse.apps.terminal.console import Terminal, json_option, verbosity_options


@click.command(
    epilog="""\b
Example:
  vidsparse comfyui uninstall ~/ComfyUI
"""
)
@click.argument("path", type=click.Path(path_type=Path))
@json_option
@verbosity_options
@click.pass_obj
def comfyui_uninstall(terminal: Terminal, /, path: Path) -> None:
    """Remove the folder that `vidsparse comfyui install PATH` wrote, and nothing else."""
    folder = remove_folder(path)
    kept = folder.exists()
    terminal.answer({"folder": str(folder), "removed": not kept})
    terminal.say(
        f"{folder} is removed" + (" but for files that others put there." if kept else ".")
    )
