"""Calibrated numbers: what a method uses for each layer and head instead of one option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vidsparse.errors import OptionError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vidsparse.site import CallSite


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """The tables of a calibrated method, made for one model at one size.

    Args:
        tables: by name, fp32 on the CPU, each ``[P, L, H, ...]``: transformers of the pipeline,
            layers of each, heads.
        video: frames, height and width of the token grid they were made for; None fits any grid
            (while they are being calibrated).
        edges: timesteps that separate the groups of steps, from high to low: group 0 lies at or
            above the first edge, the last group below all. Empty where tables do not differ by
            group.
        source: where the numbers come from, for errors.
    """

    tables: Mapping[str, Tensor]
    video: tuple[int, int, int] | None
    edges: tuple[float, ...] = ()
    source: str = "these numbers"
    _moved: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, repr=False)
    _places: dict[tuple[tuple[int, ...], torch.device], Tensor] = field(
        default_factory=dict, repr=False
    )

    def __contains__(self, name: str) -> bool:
        return name in self.tables

    def of(self, name: str, site: CallSite, device: torch.device) -> Tensor:
        """The rows of a table for the call's heads from ``site.first_head`` on, ``[<=H, ...]``."""
        key = (name, device)
        if key not in self._moved:
            # once for a run: a copy at every call would wait for the device.
            self._moved[key] = self.tables[name].to(device)
        table = self._moved[key][site.part, site.layer]
        if site.heads is None:
            return table[site.first_head :]
        # likewise: there are as many deals of heads as layers.
        places = (site.heads, device)
        if places not in self._places:
            self._places[places] = table.new_tensor(site.heads).long()
        return table.index_select(0, self._places[places])[site.first_head :]

    def group(self, site: CallSite) -> int:
        """The group of steps that the call belongs to."""
        return sum(site.timestep < edge for edge in self.edges)

    def check(self, site: CallSite, heads: int) -> None:
        """Raise an ``OptionError`` unless the call is one that the numbers were made for."""
        grid = site.grid
        if self.video is not None and (grid.frames, grid.height, grid.width) != self.video:
            asked = "x".join(map(str, (grid.frames, grid.height, grid.width)))
            made = "x".join(map(str, self.video))
            raise OptionError(
                f"{self.source} was calibrated on a token grid of {made}, and this video has "
                f"{asked}. Hint: use the same frames and size, or calibrate anew."
            )
        parts, layers, table_heads = next(iter(self.tables.values())).shape[:3]
        last = max(site.heads) + 1 if site.heads else site.first_head + heads
        if site.part >= parts or site.layer >= layers or last > table_heads:
            raise OptionError(
                f"{self.source} was calibrated for {parts} x {layers} layers (transformers x layers"
                f" of each) with {table_heads} heads, and this call has {heads} heads in layer "
                f"{site.layer} of transformer {site.part}, counted from 0. "
                "Hint: use the model that it was calibrated for."
            )
