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
        timestep: the scheduler's, which says how noisy the latent is, however many steps there are.
        grid: the token grid.
        branch: ``conditional`` or ``unconditional`` (classifier-free guidance runs both).
        part: which of the pipeline's transformers, from 0.
        first_head: number, in its layer, of the first head of q and k: long sequences are planned
            a few heads at a time.
        heads: numbers, in their layer, of all heads of the call, if they are not consecutive;
            ``first_head`` is then an index into them.
        stacked: number of guidance branches in the batch, one after another, the conditional one
            last.
        guided: whether the pipeline says that a forward of the unconditional branch follows each
            of the conditional one. Some say so and have none.
        window: which stretch of the video the forward computes, if a step has several forwards a
            branch.
        samples: which samples of the batch the call has, if these differ in text and attend apart.
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
    guided: bool = False
