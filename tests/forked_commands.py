"""Commands of two processes, as torchrun starts them, but forked so that one import serves all.

Arguments are those of ``vidsparse``, ``then`` between several commands; ``broken`` in front of one
has its second process mistake what it exchanges. Benchmarks find tiny models under the published
names. Prints exit codes behind all else.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from bench_models import TINY, shrink

# what each process would import for itself.
from diffusers import (  # noqa: F401
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
)
from diffusers.hooks import context_parallel  # noqa: F401
from forked_ranks import fork_ranks

import vidsparse.apps.bench.gpus
import vidsparse.apps.commands.bench_gpus
import vidsparse.apps.commands.compare
import vidsparse.apps.commands.generate  # noqa: F401
from vidsparse.apps.cli import main
from vidsparse.pipelines import parallel, wan  # noqa: F401

COUNT = 2


def mistake() -> None:
    """Give attention's output back to the tokens behind those that it is of."""
    right = parallel.bring_to_tokens

    def wrong(x: torch.Tensor, *more: Any) -> torch.Tensor:
        return right(x, *more).roll(1, dims=1)

    vars(parallel)["bring_to_tokens"] = wrong


def together(arguments: list[str]) -> int:
    """Have both processes run a command; the exit code of the first."""

    def take_part(rank: int) -> None:
        words = arguments
        if words[0] == "broken":
            words = words[1:]
            if rank:
                mistake()
        main([*words, "--device", "cpu"])

    return fork_ranks(COUNT, take_part)[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    # heads enough to be dealt.
    TINY["wan-1.3b"]["num_attention_heads"] = 8
    shrink(pytest.MonkeyPatch())
    # what was imported stays: no collection of a process looks through it, nor copies its pages.
    gc.freeze()
    commands = " ".join(sys.argv[1:]).split(" then ")
    print("codes", *(together(command.split()) for command in commands))
