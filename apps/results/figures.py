"""Writing a picture of matplotlib's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vidsparse.errors import OptionError, OutputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write ``figure`` in the format that the name of ``path`` says, and close it.

    Raises:
        OptionError: there is no such format.
        OutputError: the file cannot be written.
    """
    import matplotlib.pyplot as plt

    try:
        figure.savefig(path, dpi=140)
    except ValueError as error:
        raise OptionError(f"no plot can be written to {path}: {error}") from None
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        plt.close(figure)
