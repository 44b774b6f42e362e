"""The rows of ``vidsparse bench attention`` as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vidsparse.apps.results.figures import save_figure
from vidsparse.errors import OptionError

if TYPE_CHECKING:
    from vidsparse.apps.bench.attention_rows import AttentionRow

_COLOURS = ("#0a7c74", "#3b6fd6", "#7a4bb5", "#c2571a", "#8a8a2b", "#a03050", "#555555")


def draw_ratios(rows: Sequence[AttentionRow], path: Path) -> None:
    """One bar an implementation and case: how many times faster than the first dense kernel.

    The thin line behind a group of bars is the bound ``1 / computed``: no loss at all against that
    dense kernel.

    Raises:
        OptionError: there is nothing to draw, or no such picture format.
        OutputError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    against = rows[0].dense_impl if rows else ""
    drawn = [row for row in rows if row.dense_impl == against and row.ms is not None]
    if not drawn:
        raise OptionError("there are no kernel rows to draw")
    labels: dict[str, list[AttentionRow]] = {}
    for row in drawn:
        shape = f"{row.seq_len:,} x {row.heads} x {row.head_dim}"
        labels.setdefault(f"{row.case}\n{row.tile}, kept {row.kept:.2f}\n{shape}", []).append(row)
    names = list(dict.fromkeys(row.impl for row in drawn))
    colour = dict(zip(names, _COLOURS * len(names), strict=False))
    figure, panel = plt.subplots(figsize=(9, 0.9 + 0.75 * len(labels)), layout="constrained")
    for line, group in enumerate(labels.values()):
        height = 0.8 / len(group)
        for place, row in enumerate(group):
            y = line - 0.4 + (place + 0.5) * height
            panel.barh(y, row.ratio, height * 0.9, color=colour[row.impl])
            panel.text(row.ratio, y, f" {row.ratio:.2f}", va="center", fontsize=7)
        bound = 1 / group[0].kept
        panel.plot([bound, bound], [line - 0.45, line + 0.45], color="#999999", linewidth=1)
    panel.set_yticks(range(len(labels)), list(labels), fontsize=7)
    panel.set_ylim(len(labels) - 0.5, -0.5)
    panel.set_xlabel(f"times faster than {against}")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour[name]) for name in names]
    # above the panel: inside, it would hide the last bars.
    figure.legend(handles, names, fontsize=8, loc="outside upper center", ncols=min(3, len(names)))
    save_figure(figure, path)
