"""The folder in ComfyUI's ``custom_nodes`` that brings the nodes in: written, and removed again.

It imports the installed package, so that an update of the package is an update of the nodes. The
example workflows are copied: ComfyUI shows those that lie in a custom node's own folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from vidsparse.errors import OptionError
from vidsparse.files import unwritten, write_whole

NAME: Final = "vidsparse"
"""The folder's name in ``custom_nodes``."""

EXAMPLES: Final = "example_workflows"
"""Where ComfyUI looks for a custom node's workflows."""

_OURS: Final = "# Written by `vidsparse comfyui install`; `vidsparse comfyui uninstall` removes it."

_INIT: Final = f'''{_OURS}
"""Sparse attention for video models: the nodes of the installed package vidsparse."""

import sys

try:
    from vidsparse.apps.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
except ModuleNotFoundError as error:
    if error.name != "vidsparse":
        raise
    raise ModuleNotFoundError(
        f"vidsparse is not installed for the Python that runs ComfyUI, {{sys.executable}}. "
        "Hint: install it there with that Python's pip.",
        name="vidsparse",
    ) from None

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
'''


def write_folder(comfyui: Path) -> Path:
    """Write the folder into ``comfyui/custom_nodes``, in place of one written before.

    Returns:
        The folder.

    Raises:
        OptionError: ``comfyui`` is no ComfyUI, or something else has the folder's name.
        OutputError: it cannot be written.
    """
    folder = _place(comfyui)
    if folder.is_symlink() or folder.exists():
        _check_ours(folder)
    try:
        (folder / EXAMPLES).mkdir(parents=True, exist_ok=True)
        for name, data in _files().items():
            write_whole(folder / name, data)
    except OSError as error:
        raise unwritten(folder, error) from None
    return folder


def remove_folder(comfyui: Path) -> Path:
    """Remove the folder again; what somebody has put into it since stays, and so does the folder.

    Returns:
        The folder.

    Raises:
        OptionError: ``comfyui`` is no ComfyUI, or the folder is not there or not ours.
        OutputError: it cannot be removed.
    """
    folder = _place(comfyui)
    if not folder.is_symlink() and not folder.exists():
        raise OptionError(f"the nodes are not installed there: {folder} does not exist")
    _check_ours(folder)
    compiled = folder / "__pycache__"
    try:
        # what says that the folder is ours goes last.
        for name in reversed(_files()):
            (folder / name).unlink(missing_ok=True)
        for path in compiled.glob("__init__.*.pyc"):
            path.unlink()
        for path in (compiled, folder / EXAMPLES, folder):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
    except OSError as error:
        raise unwritten(folder, error) from None
    return folder


def _files() -> dict[str, bytes]:
    """What the folder holds, by the names in it; what says that it is ours comes first."""
    examples = sorted((Path(__file__).parent / EXAMPLES).glob("*.json"))
    return {
        "__init__.py": _INIT.encode(),
        **{f"{EXAMPLES}/{path.name}": path.read_bytes() for path in examples},
    }


def _place(comfyui: Path) -> Path:
    nodes = comfyui / "custom_nodes"
    if not nodes.is_dir():
        raise OptionError(
            f"{comfyui} is no ComfyUI: it has no folder custom_nodes. "
            "Hint: name the folder that ComfyUI's main.py or your models are in."
        )
    return nodes / NAME


def _check_ours(folder: Path) -> None:
    """Raise an ``OptionError`` unless the folder is one that ``write_folder`` wrote."""
    first = folder / "__init__.py"
    ours = not folder.is_symlink() and first.is_file()
    if not ours or not first.read_text("utf-8", "replace").startswith(_OURS):
        raise OptionError(
            f"{folder} was not written by `vidsparse comfyui install` and is left as it is. "
            "Hint: move it away first."
        )
