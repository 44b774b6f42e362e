"""Pictures of matplotlib's: the option that names one, and writing it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vidsparse.errors import OptionError, OutputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FigurePath(click.Path):
    """A file to draw into: what cannot be one is refused before anything is measured for it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path of a text.

        Raises:
            click.BadParameter: there is no such format, or no place for it.
        """
        from matplotlib.backend_bases import FigureCanvasBase

        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        formats = sorted(FigureCanvasBase.get_supported_filetypes())
        if path.suffix.lower().removeprefix(".") not in formats:
            self.fail(
                f"a picture's name must end in its format, got {str(path)!r}. "
                f"Hint: .png, or another of {', '.join(formats)}.",
                param,
                ctx,
            )
        # what is missing of the folder is made when it is drawn.
        there = next(folder for folder in path.absolute().parents if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            self.fail(f"{str(path)!r} cannot be written: {there} is no folder for it.", param, ctx)
        return str(path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write ``figure`` in the format that the name of ``path`` says, and close it.

    Its folder is made where there is none.

    Raises:
        OptionError: there is no such format.
        OutputError: the file cannot be written.
    """
    import matplotlib.pyplot as plt

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140)
    except ValueError as error:
        raise OptionError(f"no plot can be written to {path}: {error}") from None
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        plt.close(figure)
