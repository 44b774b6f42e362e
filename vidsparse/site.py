"""Where in a run an attention call stands."""

from __future__ import annotations

from dataclasses import dataclass

from vidsparse.grid import TokenGrid


@dataclass(frozen=True, slots=True)
class CallSite:
    """One attention call of a run: what a method may know beside q and k.

    Args:
        layer: transformer layer, from 0.
        step: denoising step, from 0.
        timestep: the scheduler's, which says how noisy the latent is whatever the number of steps.
        grid: the token grid.
        branch: ``conditional`` or ``unconditional`` (classifier-free guidance runs both).
        part: which of the pipeline's transformers, from 0.
        first_head: number, in its layer, of the first head of q and k: long sequences are planned
            a few heads at a time.
        heads: numbers, in their layer, of all heads of the call, where these are not neighbours;
            ``first_head`` is a place among them then.
        stacked: guidance branches that stand one after the other in the batch, the conditional one
            last.
        window: which of several stretches of a video a forward is about, where a step has more
            than one forward a branch.
        samples: which of the batch's samples, where these differ in text and attend apart.
    """

    layer: int
    step: int
    timestep: float
    grid: TokenGrid
    branch: str = "conditional"
    part: int = 0
    first_head: int = 0
    heads: tuple[int, ...] | None = None
    stacked: int = 1
    window: int = 1
    samples: tuple[int, ...] = ()
