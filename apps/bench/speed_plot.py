"""The rows of ``vidsparse bench model --speed`` as a picture: what runs are made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vidsparse.apps.results.figures import save_figure
from vidsparse.errors import OptionError

if TYPE_CHECKING:
    from vidsparse.apps.bench.speed_rows import SpeedRow

_WHOLE: Final = "not told apart"

_COLOURS: Final = {
    "attention": "#0a7c74",
    "mask, plan, order": "#c2571a",
    "linear layers": "#3b6fd6",
    "rest": "#9a9a9a",
    _WHOLE: "#e3d9b8",
}


def draw_runs(rows: Sequence[SpeedRow], path: Path) -> None:
    """A panel a model: the stock run with cuDNN and the run at each speed, in seconds by part.

    Raises:
        OptionError: no row has the times of its parts, or the picture format is unknown.
        OutputError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models: dict[tuple[str, str], list[SpeedRow]] = {}
    for row in rows:
        if row.reference_shares() is not None:
            models.setdefault((row.family, row.shape), []).append(row)
    if not models:
        raise OptionError(
            "there is nothing to draw: none of these rows has separate times of attention and "
            "linear layers, which are measured on a GPU only. Hint: give rows of a GPU."
        )
    lines = sum(len(group) + 1 for group in models.values())
    figure, panels = plt.subplots(
        len(models),
        figsize=(8, 0.6 + 0.45 * len(models) + 0.32 * lines),
        layout="constrained",
        squeeze=False,
        height_ratios=[len(group) + 1 for group in models.values()],
    )
    for panel, ((family, shape), group) in zip(panels[:, 0], models.items(), strict=True):
        first = group[0]
        runs: list[tuple[str, dict[str, float] | None, float | None]]
        runs = [("stock, cuDNN", first.reference_shares(), 1.0)]
        runs += [
            (row.speed, row.shares() or {_WHOLE: row.run_s}, row.ratio(row.cudnn_ms))
            for row in group
        ]
        for place, (_, shares, ratio) in enumerate(runs):
            assert shares is not None
            left = 0.0
            for part, seconds in shares.items():
                panel.barh(place, seconds, 0.8, left=left, color=_COLOURS[part])
                left += seconds
            panel.text(left, place, f" {left:,.0f} s, {ratio:.2f}x", va="center", fontsize=7)
        panel.set_yticks(range(len(runs)), [name for name, _, _ in runs], fontsize=7)
        panel.set_ylim(len(runs) - 0.5, -0.5)
        panel.set_xmargin(0.16)
        panel.tick_params(axis="x", labelsize=7)
        panel.set_title(f"{family}, {shape}, {first.steps} steps", fontsize=8, loc="left", pad=3)
    panels[-1, 0].set_xlabel("seconds of denoising, from measured steps", fontsize=8)
    shown = [part for part in _COLOURS if part != _WHOLE or any(not r.shares() for r in rows)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[part]) for part in shown]
    figure.legend(handles, shown, fontsize=8, loc="outside upper center", ncols=len(shown))
    save_figure(figure, path)
