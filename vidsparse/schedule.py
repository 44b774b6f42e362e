"""When attention runs dense, when it makes a plan, and when it reuses the last one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from vidsparse.errors import OptionError


class Action(StrEnum):
    """What one attention call does."""

    DENSE = "dense"
    REPLAN = "replan"
    REUSE = "reuse"


def share_or_count(value: int | float, total: int, name: str) -> int:
    """Read an amount of steps or layers: a decimal is a share rounded up, an integer a count.

    ``0.24`` of 50 steps is 12, ``1.0`` is all of them, ``1`` is one.

    Raises:
        OptionError: a negative or infinite value, or a share above 1.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise OptionError(f"{name} must be a share (0.24) or a count (12), got {value!r}")
    if isinstance(value, float):
        if value > 1:
            raise OptionError(
                f"{name} as a share must lie between 0.0 and 1.0, got {value}. "
                f"Hint: a count is written without a point: {int(value)}."
            )
        # 0.07 * 100 is 7.000000000000001: without the slack a share would round one step too high.
        return min(total, math.ceil(value * total - 1e-9))
    return min(total, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Which (step, layer) calls stay dense and how long a plan lives.

    The first steps fix the layout of a video and are the most sensitive; FG-Attn (section 6) keeps
    24 % of the steps dense on Wan and LTX and 10 % on HunyuanVideo.

    Args:
        dense_steps: first denoising steps kept dense (decimal: share rounded up; integer: count).
        dense_last_steps: last steps kept dense.
        dense_layers: first transformer layers kept dense in every step.
        dense_last_layers: last transformer layers kept dense in every step.
        reuse: steps a plan serves before it is made anew; 1 plans in every step.

    Raises:
        OptionError: a value is negative, a share above 1, or ``reuse`` below 1.
    """

    dense_steps: int | float = 0.24
    dense_last_steps: int | float = 0
    dense_layers: int | float = 0
    dense_last_layers: int | float = 0
    reuse: int = 1

    def __post_init__(self) -> None:
        for name in ("dense_steps", "dense_last_steps", "dense_layers", "dense_last_layers"):
            share_or_count(getattr(self, name), 1, name)
        if isinstance(self.reuse, bool) or not isinstance(self.reuse, int) or self.reuse < 1:
            raise OptionError(f"reuse must be a whole number of steps from 1, got {self.reuse!r}")

    def sparse_window(self, steps: int) -> range:
        """The steps that may be sparse, of ``steps`` in all."""
        first = share_or_count(self.dense_steps, steps, "dense_steps")
        last = share_or_count(self.dense_last_steps, steps, "dense_last_steps")
        return range(first, steps - last)

    def plan_step(self, step: int, steps: int) -> int:
        """The step whose plan serves ``step``; a dense one is its own."""
        window = self.sparse_window(steps)
        return step - (step - window.start) % self.reuse if step in window else step

    def decide(self, step: int, steps: int, layer: int, layers: int) -> Action:
        """Decide for one call: dense, make a plan, or reuse the layer's last one."""
        window = self.sparse_window(steps)
        first = share_or_count(self.dense_layers, layers, "dense_layers")
        last = share_or_count(self.dense_last_layers, layers, "dense_last_layers")
        if step not in window or not first <= layer < layers - last:
            return Action.DENSE
        return Action.REPLAN if self.plan_step(step, steps) == step else Action.REUSE
