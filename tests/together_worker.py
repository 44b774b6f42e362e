"""Two processes that train a tiny model, started with a folder to leave things and what to train.

Each leaves the weights that it ended with and the clips that it drew.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
from forked_ranks import fork_ranks
from safetensors.torch import save_file

from vidsparse.apps.small_model import train

out = Path(sys.argv[1])
learners: list[Any] = []
drawn: list[Any] = []


class Kept(train.Learner):
    """A learner that is still there when the training is over."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        learners.append(self)

    def step(self, source: Any, *arguments: Any) -> Any:
        """As the learner's own; keeps where the clips came from."""
        drawn.append(source)
        return super().step(source, *arguments)


def take_part(rank: int) -> None:
    """Train, as one of the processes."""
    train.main(["--out", str(out), "--tiny", "--device", "cpu", *sys.argv[2:]])
    weights = {str(i): parameter.detach() for i, parameter in enumerate(learners[0].parameters)}
    save_file(weights, out / f"weights{rank}.safetensors")
    save_file({"values": drawn[0].values}, out / f"drawn{rank}.safetensors")


train.Learner = Kept  # type: ignore[misc]
torch.set_num_threads(1)
# what was imported stays: no collection of a process looks through it, nor copies its pages.
gc.freeze()
sys.exit(any(fork_ranks(2, take_part)))
