"""What a sampling's attention did, in words and as a picture."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from vidsparse.schedule import Action
from vidsparse.trace import Cell

if TYPE_CHECKING:
    from PIL.Image import Image

    from vidsparse.apps.comfyui.session import NodeSession

NOTHING: Final = "NOTHING WAS SPARSE"

_WIDTH, _MARGIN, _LINE, _MAP = 960, 16, 20, 320
_PAPER, _INK, _ALARM = (250, 250, 248), (30, 32, 36), (176, 32, 32)
# computed share 0 and 1, and a cell that was never called.
_SPARSE, _DENSE, _EMPTY = (12, 120, 112), (240, 226, 190), (222, 222, 220)


def write_report(session: NodeSession | None) -> str:
    """The report as text, one fact a line; of the last sampling of ``session``."""
    if session is None:
        return (
            f"{NOTHING}: this model did not come through the node 'vidsparse'. "
            "Connect the model that the sampler was given."
        )
    trace = session.engine.trace
    cells = trace.cells
    # resolves times and densities, which the lines below read.
    summary = trace.summary()
    method = session.settings.method
    options = ", ".join(f"{k} {v}" for k, v in method.options().items() if v is not None)
    lines = [f"method: {method.name} ({options}), {session.settings.order} order"]
    sparse = [cell for cell in cells if cell.sparse]
    if not sparse:
        lines.insert(0, f"{NOTHING}: {_why_nothing(session)}")
    seconds = sum(cell.seconds or 0.0 for cell in sparse)
    lines.append(
        f"video self-attention: {len(cells)} calls, {summary.attention_seconds:.2f} s, "
        f"of {len({cell.step for cell in cells})} steps"
    )
    lines.append(f"sparse: {len(sparse)} calls, {seconds:.2f} s")
    if sparse:
        lines[-1] += f", by {summary.implementation}"
        lines.append(
            f"density of the sparse calls: selected {summary.selected:.1%}, "
            f"computed {summary.computed:.1%}"
        )
    if summary.work is not None:
        lines.append(f"computed of all pairs, dense calls included: {summary.work.total:.1%}")
    by_reason: defaultdict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if not cell.sparse:
            by_reason[_reason(session, cell)].append(cell)
    for reason, dense in by_reason.items():
        taken = sum(cell.seconds or 0.0 for cell in dense)
        lines.append(f"dense: {len(dense)} calls, {taken:.2f} s: {reason}")
    for reason, count in session.others.items():
        lines.append(f"beside it, dense: {count} calls: {reason}")
    return "\n".join([*lines, *trace.notes])


def draw_report(session: NodeSession | None, text: str) -> Tensor:
    """The report as a picture ``[1, H, W, 3]`` from 0 to 1: its text and the map of densities.

    The map has a column for every step and a row for every layer; the darker, the less computed.
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(14)
    lines = [piece for line in text.splitlines() for piece in _wrapped(line, font)]
    top = 2 * _MARGIN + _LINE * len(lines)
    rows = [] if session is None else session.engine.trace.density_map()
    image = Image.new("RGB", (_WIDTH, top + (_MAP + 2 * _LINE if rows else 0)), _PAPER)
    draw = ImageDraw.Draw(image)
    alarm = text.startswith(NOTHING)
    if alarm:
        draw.rectangle((0, 0, _WIDTH, 6), fill=_ALARM)
    for number, line in enumerate(lines):
        ink = _ALARM if alarm and number == 0 else _INK
        draw.text((_MARGIN, _MARGIN + number * _LINE), line, fill=ink, font=font)
    if rows:
        heat = _heat_map(rows).resize((_WIDTH - 2 * _MARGIN, _MAP), Image.Resampling.NEAREST)
        image.paste(heat, (_MARGIN, top))
        axes = f"steps 1 to {len(rows)} from left to right, layers 1 to {len(rows[0])} downwards"
        draw.text((_MARGIN, top + _MAP + 4), f"{axes}; dark: little computed", fill=_INK, font=font)
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255).unsqueeze(0)


def _heat_map(rows: list[list[float | None]]) -> Image:
    """One pixel a step and layer."""
    from PIL import Image

    shares = np.array(
        [[np.nan if share is None else min(share, 1.0) for share in row] for row in rows]
    ).T[..., None]
    colours = np.array(_SPARSE) * (1 - shares) + np.array(_DENSE) * shares
    colours = np.where(np.isnan(shares), np.array(_EMPTY), colours)
    return Image.fromarray(colours.astype(np.uint8), "RGB")


def _wrapped(line: str, font: object) -> list[str]:
    """A line in pieces that fit the picture."""
    pieces = [""]
    for word in line.split(" "):
        longer = f"{pieces[-1]} {word}".strip()
        if pieces[-1] and font.getlength(longer) > _WIDTH - 2 * _MARGIN:  # type: ignore[attr-defined]
            pieces.append(word)
        else:
            pieces[-1] = longer
    return pieces


def _reason(session: NodeSession, cell: Cell) -> str:
    """Why a call was dense."""
    if cell.action == Action.REFRESH.value:
        return "a refresh, as the preset has them"
    if cell.action != Action.DENSE.value:
        return cell.action.removeprefix("dense: ")
    percent = session.settings
    outside = (cell.step < session.window.start, cell.step >= session.window.stop)
    # where sigmas rise, a run goes through the percents backwards.
    before, after = reversed(outside) if session.rising else outside
    if before:
        return f"step before start_percent {percent.start_percent:g}"
    if after:
        return f"step after end_percent {percent.end_percent:g}"
    return "a layer that the preset keeps dense"


def _why_nothing(session: NodeSession) -> str:
    """The commonest reason, for the first line."""
    reasons = Counter(_reason(session, cell) for cell in session.engine.trace.cells)
    reasons = reasons or session.others
    if not reasons:
        return (
            "no attention call came. Was this model sampled after the last start, and is ComfyUI "
            "0.3.60 or newer?"
        )
    reason, count = reasons.most_common(1)[0]
    return f"{reason} ({count} calls)"
