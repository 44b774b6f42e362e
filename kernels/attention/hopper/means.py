"""Steps of mean keys: what a weight takes from the tokens that its key stands for.

A block's last steps are of means. Their counts come with the stage, 0 behind the last group. In 16
bits without a gate a score is raised by the count's logarithm, in the branch in which a first step
is masked: a second branch, behind the exponentials, would hold up every step (8 %). With 8 bits or
a gate, where scores are not yet what the exponential takes, weights are multiplied there all the
same.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .layouts import by_run
from .ptx import log2


@gluon.jit
def raised_by(counts, scale_log2):
    """What the counts of mean keys add to their scores: minus infinity for none."""
    return log2(counts) * (1.0 / scale_log2)


@gluon.jit
def with_counts(scores, counts_memory, scale_log2):
    """Scores of mean keys, each raised for the tokens that it stands for.

    ``counts_memory`` holds what to add, or counts in 8 bits.
    """
    added = counts_memory.load(gl.SliceLayout(0, scores.type.layout))
    if counts_memory.dtype != gl.float32:
        added = raised_by(added.to(gl.float32), scale_log2)
    return scores + added[None, :]


@gluon.jit
def times_counts(fresh, counts_memory, SCORES: gl.constexpr):
    """Weights of mean keys as ``by_run`` gives them, times the tokens that each stands for."""
    rows: gl.constexpr = fresh.shape[0]
    counts = counts_memory.load(gl.SliceLayout(0, SCORES)).to(gl.float32)
    of_rows = gl.full([rows, counts.shape[0]], 1.0, gl.float32, SCORES) * counts[None, :]
    return fresh * gl.convert_layout(by_run(of_rows, fresh.shape[1]), fresh.type.layout)
