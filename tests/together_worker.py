"""One of several processes that train a tiny model: run by torchrun, with a folder to leave things.

Every process leaves the weights that it ended with and the clips that it drew.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

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


train.Learner = Kept  # type: ignore[misc]
train.main(["--out", str(out), "--tiny", "--device", "cpu", *sys.argv[2:]])
weights = {str(i): parameter.detach() for i, parameter in enumerate(learners[0].parameters)}
rank = os.environ["RANK"]
save_file(weights, out / f"weights{rank}.safetensors")
save_file({"values": drawn[0].values}, out / f"drawn{rank}.safetensors")
