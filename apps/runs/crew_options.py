"""``--gpus-per-video``, ``--engine`` and ``--address``, and what they and ``--gpus`` come to."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import click

from vidsparse.apps.runs.crew import Engine, Outcome, Task, spread_tasks
from vidsparse.apps.runs.team import check_gpus, check_ring, check_shared
from vidsparse.apps.terminal.console import Terminal
from vidsparse.apps.terminal.progress import plain_bar, short
from vidsparse.errors import OptionError

if TYPE_CHECKING:
    from vidsparse.pipelines.request import GenerateRequest

ENGINES: Final = ("local", "ray")


def crew_click_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--gpus-per-video``, ``--engine`` and ``--address``: prompts spread over workers."""
    options = (
        click.option(
            "--gpus-per-video",
            type=click.IntRange(min=1, max=1024),
            metavar="M",
            help="Spread the prompts over groups of M GPUs.  "
            "[default: all on each; with --engine ray, 1]",
        ),
        click.option(
            "--engine",
            type=click.Choice(ENGINES),
            help="What starts the workers that prompts are spread over.  [default: local]",
        ),
        click.option(
            "--address",
            metavar="ADDRESS",
            help="Of a Ray cluster, or auto.  [default: a Ray of its own on this machine]",
        ),
    )
    for each in reversed(options):
        function = each(function)
    return function


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

    def __str__(self) -> str:
        count = "as many workers as there are GPUs"
        if self.count is not None:
            count = f"{self.count} {'worker' if self.count == 1 else 'workers'}"
        return count + (f", {self.size} to a video" if self.size > 1 else "")

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

    @contextmanager
    def doing(
        self, terminal: Terminal, tasks: Sequence[tuple[int, Task]], what: str
    ) -> Iterator[Iterator[Outcome]]:
        """Tasks as they are done, numbered by their first prompts; ``what`` they make, for a bar.

        Raises:
            VidsparseError: as ``workers``, or none can load the model.
            WorkerDied: workers die while they load it.
        """
        request = tasks[0][1].request
        with self.workers(request) as (engine, groups):
            terminal.say(
                f"Loading {request.model} on {replace(self, count=groups * self.size)} ..."
            )
            spreading = spread_tasks(engine, tasks, groups=groups, size=self.size, ring=self.ring)
            with closing(spreading), closing(_shown(terminal, spreading, tasks, what)) as shown:
                yield shown


def _shown(
    terminal: Terminal, outcomes: Iterator[Outcome], tasks: Sequence[tuple[int, Task]], what: str
) -> Generator[Outcome, None, None]:
    """Outcomes, with a bar over all and a word on those that came the second time."""
    prompts = {number: task.request.prompt for number, task in tasks}
    with plain_bar(terminal, what) as progress:
        for done, outcome in enumerate(outcomes, 1):
            if outcome.deaths and outcome.made is not None:
                died = "a worker" if outcome.deaths == 1 else f"{outcome.deaths} workers"
                terminal.warn(f"prompt {outcome.number:04d} was made again: {died} died on it.")
            yield outcome
            progress(short(prompts[outcome.number]), done, len(tasks))


def crew_options(
    gpus: int | None,
    gpus_per_video: int | None,
    engine: str | None,
    address: str | None,
    ring: int | None = None,
    apart: bool | None = False,
) -> CrewOptions | None:
    """How prompts are spread; None where all GPUs work on each video, or there is only one.

    ``apart``: whether the processes of a video are to compute one guidance branch each.

    Raises:
        OptionError: options that do not go together.
    """
    if address is not None and engine != "ray":
        raise OptionError("--address needs a Ray cluster. Hint: add --engine ray.")
    if gpus_per_video is None and engine is None:
        return None
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise OptionError(
            "torchrun has started all processes for one video. Hint: leave --gpus-per-video and "
            "--engine out, or start without torchrun."
        )
    size = gpus_per_video or 1
    if gpus is None and engine != "ray":
        raise OptionError(
            "--gpus-per-video and --engine local need --gpus, the number of all GPUs. "
            "Hint: add --gpus 4."
        )
    if gpus is not None and gpus % size:
        raise OptionError(
            f"--gpus must be a multiple of --gpus-per-video {size}, got {gpus}. "
            f"Hint: --gpus {-(-gpus // size) * size}."
        )
    check_ring(ring, size)
    if gpus == size and engine != "ray":
        return None
    if apart:
        raise OptionError(
            "--apart works where all GPUs make each video together. "
            "Hint: leave --gpus-per-video and --engine out."
        )
    return CrewOptions(engine=engine or "local", address=address, count=gpus, size=size, ring=ring)
