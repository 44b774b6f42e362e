"""What ``--gpus``, ``--gpus-per-video``, ``--engine`` and ``--address`` come to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vidsparse.apps.runs.crew import Engine
from vidsparse.apps.runs.team import check_gpus, check_ring, check_shared
from vidsparse.errors import OptionError

if TYPE_CHECKING:
    from vidsparse.pipelines.request import GenerateRequest

ENGINES: Final = ("local", "ray")


@dataclass(frozen=True, kw_only=True, slots=True)
class CrewOptions:
    """Prompts are to be spread over groups of workers.

    Args:
        engine: what starts them, of ``ENGINES``.
        address: of the Ray cluster; None starts a Ray here.
        count: workers in all; None takes every GPU of the cluster.
        size: how many make each video together.
        ring: round how many of those keys and values travel; None leaves it to the model's heads.
    """

    engine: str
    address: str | None
    count: int | None
    size: int
    ring: int | None = None

    @contextmanager
    def workers(self, request: GenerateRequest) -> Iterator[tuple[Engine, int]]:
        """The engine, and how many groups it is to start.

        Raises:
            VidsparseError: the machine or the cluster cannot have so many workers.
        """
        device = request.device or ""
        if self.size > 1:
            check_shared(request, self.size)
        if self.engine == "local":
            from vidsparse.apps.runs.local_workers import LocalWorkers

            assert self.count is not None
            check_gpus(device, self.count)
            yield LocalWorkers(self.count, device), self.count // self.size
            return
        from vidsparse.apps.runs.ray_workers import connected

        if self.count is None and not device.startswith("cuda"):
            raise OptionError(
                "--engine ray with --device cpu needs the number of workers. Hint: --gpus 4."
            )
        with connected(self.address, self.count, device) as engine:
            if engine.count < self.size:
                raise OptionError(
                    f"--gpus-per-video {self.size} needs as many GPUs, and the cluster has "
                    f"{engine.count}. Hint: give a smaller number."
                )
            yield engine, engine.count // self.size


def crew_options(
    gpus: int | None,
    gpus_per_video: int | None,
    engine: str | None,
    address: str | None,
    ring: int | None = None,
) -> CrewOptions | None:
    """How prompts are spread; None where all GPUs work on each video, or there is only one.

    Raises:
        OptionError: options that do not go together.
    """
    if address is not None and engine != "ray":
        raise OptionError("--address is that of a Ray cluster. Hint: add --engine ray.")
    if gpus_per_video is None and engine is None:
        return None
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise OptionError(
            "torchrun has started all processes for one video. Hint: leave --gpus-per-video and "
            "--engine out, or start without torchrun."
        )
    size = gpus_per_video or 1
    if gpus is None and engine != "ray":
        raise OptionError("--gpus-per-video needs the number of all. Hint: add --gpus 4.")
    if gpus is not None and gpus % size:
        raise OptionError(
            f"--gpus {gpus} cannot be shared out by --gpus-per-video {size}. "
            f"Hint: give a multiple of {size}."
        )
    check_ring(ring, size)
    if gpus == size and engine != "ray":
        return None
    return CrewOptions(engine=engine or "local", address=address, count=gpus, size=size, ring=ring)
