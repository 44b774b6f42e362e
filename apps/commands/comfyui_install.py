"""``vidsparse comfyui install``: the nodes into a ComfyUI."""

from __future__ import annotations

from pathlib import Path

import click

from vidsparse.apps.comfyui.folder import EXAMPLES, write_folder
from vidsparse.apps.terminal.console import Terminal, json_option, verbosity_options


@click.command(
    epilog="""\b
Example:
  vidsparse comfyui install ~/ComfyUI
"""
)
@click.argument("path", type=click.Path(path_type=Path))
@json_option
@verbosity_options
@click.pass_obj
def comfyui_install(terminal: Terminal, /, path: Path) -> None:
    """Write the nodes' folder into PATH/custom_nodes, where PATH is ComfyUI's folder.

    It imports this package, which the Python that runs ComfyUI must have as well.
    """
    folder = write_folder(path)
    terminal.show(str(folder))
    terminal.answer({"folder": str(folder), "workflows": str(folder / EXAMPLES)})
    terminal.say(
        f"Restart ComfyUI; the nodes are under 'vidsparse', and {EXAMPLES}/ has workflows."
    )
