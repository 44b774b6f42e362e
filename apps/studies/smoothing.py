"""What means taken out of queries and keys are worth to int8 attention, on recorded calls.

    python -m vidsparse.apps.studies.smoothing shapes --size 256x256 --frames 33

Kernels take the keys' mean out (``quantize_qk``). SageAttention 2 (arXiv 2411.10958, section 3.2)
takes one out of every block of queries, too; its product with the keys is then added to the scores.
Here that is done in torch, to see whether channels stick out so far that it pays.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.calls import RecordedCall
from vidsparse.kernels.tokens.formats import quantize_runs
from vidsparse.markdown import markdown_table
from vidsparse.order import token_order

RUN: Final = 64
"""Neighbouring queries, and keys, that share a scale."""

SMOOTHED: Final = ("nothing", "keys", "keys, queries by block", "keys, all queries")


def block_means(q: Tensor, run: int = RUN) -> Tensor:
    """The mean of every ``run`` queries ``[B, H, S, D]``, repeated for each of them."""
    tokens = q.shape[2]
    padded = F.pad(q, (0, 0, 0, -tokens % run))
    sums = padded.view(*q.shape[:2], -1, run, q.shape[3]).sum(3)
    sizes = (tokens - torch.arange(0, tokens, run)).clamp_max(run)
    return (sums / sizes.unsqueeze(-1)).repeat_interleave(run, 2)[:, :, :tokens]


def int8_scores(q: Tensor, k: Tensor, smoothed: str) -> Tensor:
    """q·k of ``[B, H, S, D]`` as int8 products give it, up to what is the same for a whole row.

    ``smoothed``, one of ``SMOOTHED``, says what means are taken out; what those of queries had to
    say is added in full precision.
    """
    if smoothed != "nothing":
        k = k - k.mean(2, keepdim=True)
    mean = torch.zeros_like(q)
    if smoothed == "keys, queries by block":
        mean = block_means(q)
    elif smoothed == "keys, all queries":
        mean = q.mean(2, keepdim=True).expand_as(q)
    return _rounded(q - mean) @ _rounded(k).mT + mean @ k.mT


def _rounded(x: Tensor) -> Tensor:
    eight, scale, _ = quantize_runs(x, "int8", RUN, None, None, None)
    return eight.to(x.dtype) * scale.repeat_interleave(RUN, 2)[:, :, : x.shape[2], None].to(x.dtype)


def errors(call: RecordedCall) -> dict[str, Tensor]:
    """Relative errors of a call's output in int8, ``[B, H]``, by what was smoothed."""
    order = token_order("hilbert", call.site.grid, call.q.device)
    q, k, v = (order.apply(x).double() for x in (call.q, call.k, call.v))
    scale = q.shape[-1] ** -0.5
    exact = (q @ k.mT * scale).softmax(-1) @ v
    size = exact.norm(dim=(2, 3))
    return {
        name: ((int8_scores(q, k, name) * scale).softmax(-1) @ v - exact).norm(dim=(2, 3)) / size
        for name in SMOOTHED
    }


def standing_out(x: Tensor) -> tuple[float, float]:
    """How far channels of queries or keys ``[B, H, S, D]`` stick out, in the worst head.

    Returns:
        The largest mean of a channel and the largest number, each over the root mean square.
    """
    size = x.square().mean((2, 3)).sqrt()
    return (
        float((x.mean(2).abs().amax(-1) / size).max()),
        float((x.abs().amax((2, 3)) / size).max()),
    )


def rows(calls: tuple[RecordedCall, ...]) -> Iterator[dict[str, str]]:
    """A row for every call, and one of their means."""
    found: dict[str, list[Tensor]] = {name: [] for name in SMOOTHED}
    for call in calls:
        erred = errors(call)
        shown = {"layer": str(call.site.layer), "step": str(call.site.step)}
        for name, x in (("q", call.q), ("k", call.k)):
            mean, peak = standing_out(x.double())
            shown[name] = f"{mean:.1f}, {peak:.1f}"
        for name, each in erred.items():
            found[name].append(each.flatten())
            shown[name] = f"{float(each.mean()):.5f}"
        yield shown
    means = {name: f"{float(torch.cat(each).mean()):.5f}" for name, each in found.items()}
    yield {"layer": "all", "step": "", "q": "", "k": "", **means}


def main() -> None:
    """Record calls of a model, and print a table of them."""
    from vidsparse.apps.bench.inputs import recorded

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a bundled model or a folder")
    parser.add_argument("--size", metavar="WxH", help="of the run's video")
    parser.add_argument("--frames", type=int, help="of the run's video")
    parser.add_argument("--steps", type=int, help="of the run")
    given = parser.parse_args()
    width, _, height = (given.size or "").partition("x")
    size = (int(width), int(height)) if given.size else None
    inputs = recorded(
        given.model, size=size, frames=given.frames, steps=given.steps,
        dtype=torch.float32, device=torch.device("cpu"), say=print,
    )  # fmt: skip
    print(f"{inputs.name}. q and k: largest mean of a channel, largest number, over the RMS.")
    columns = ("layer", "step", "q", "k", *SMOOTHED)
    print(markdown_table(columns, ([row[name] for name in columns] for row in rows(inputs.calls))))


if __name__ == "__main__":
    main()
