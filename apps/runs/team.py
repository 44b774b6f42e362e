"""Several processes that make each video together: starting them, and what they tell each other.

``launch`` starts the same command again, once for each process, through torch.distributed's own
launcher; ``join_team`` makes a process started so, or by torchrun, one of them. The first process
alone reads and writes files and shows progress. The others are told which prompts to compute.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from vidsparse.apps.terminal.console import BAD_INPUT, FAILED, INTERRUPTED, TERMINATED, Terminal
from vidsparse.errors import OptionError, UnsupportedError, VidsparseError

if TYPE_CHECKING:
    from vidsparse.pipelines.request import GenerateRequest

_PATIENCE = 3.0
_LATER = 1.0

# processes without GPUs that any machine may start, to try things out.
LEAST_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class Team:
    """This process among those that make a video together.

    Args:
        rank: its number from 0; 0 is the first.
        count: how many there are.
        ring: how many keys and values travel round; None leaves it to the model's heads.
        apart: whether each half of them computes one guidance branch; None where that can be.
    """

    rank: int
    count: int
    ring: int | None = None
    apart: bool | None = False

    def __str__(self) -> str:
        ring = "" if self.ring is None else f" in rings of {self.ring}"
        apart = {None: ", branches apart where they can be", True: ", branches apart", False: ""}
        return f"{self.count} processes{ring}{apart[self.apart]}"

    @property
    def first(self) -> bool:
        """Whether this process reads and writes files and shows progress."""
        return self.rank == 0

    def connect(self, device: str) -> None:
        """Meet the others; ``device`` is the kind of device that all compute on."""
        import torch.distributed as dist

        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")

    def tell(self, numbers: Sequence[int]) -> None:
        """Tell the others the numbers of the prompts to compute."""
        _from_the_first([len(numbers)])
        _from_the_first([*numbers])

    def hear(self) -> list[int]:
        """The numbers that the first process tells."""
        (count,) = _from_the_first([0])
        return _from_the_first([0] * count)

    def leave(self) -> None:
        """Let go of the others, once all is made."""
        import torch.distributed as dist

        dist.destroy_process_group()

    def wait_to_be_ended(self) -> None:
        """Before an error is told: whoever failed first says so, and the launcher ends the rest."""
        time.sleep(_PATIENCE)


def _from_the_first(numbers: list[int]) -> list[int]:
    """The first process's numbers; each of the others gives as many of any kind."""
    import torch
    import torch.distributed as dist

    if not numbers:
        return []
    # as tensors: objects would be sent pickled.
    shared = torch.tensor(numbers, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(shared, src=0)
    found: list[int] = shared.tolist()
    return found


def join_team(
    terminal: Terminal, gpus: int | None, ring: int | None, apart: bool | None = False
) -> Team | None:
    """The team that this process was started into; None where it runs by itself.

    Raises:
        OptionError: another number of processes was asked for than was started, or a ring or
            halves that they cannot make.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    team = Team(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), ring, apart)
    with said_once(team):
        if gpus not in (None, team.count):
            raise OptionError(
                f"--gpus {gpus} was given to {team.count} processes that torchrun started. "
                "Hint: leave --gpus out, or start without torchrun."
            )
        check_ring(ring, team.count, apart)
    if team.count == 1:
        return None
    # every process sees one GPU, so that `cuda` is its own and settings are the same in all.
    local = int(os.environ.get("LOCAL_RANK", team.rank))
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = given[local] if local < len(given) > 1 else str(local)
    # when another process died, the launcher says so.
    terminal.interrupted = ""
    if not team.first:
        terminal.quiet, terminal.json = True, False
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        # it holds no file, and while it waits for the others python's handlers do not run.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _end_after_the_first()
    return team


def _end_after_the_first() -> None:
    """Have Ctrl-C end this process a little later: the first may be waiting for what it computes.

    A thread waits for the signal; where there is no such waiting, the launcher ends the process.
    """
    if not hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    # threads that are started later have the mask of this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def wait() -> None:
        signal.sigwait({signal.SIGINT})
        time.sleep(_LATER)
        os._exit(INTERRUPTED)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def said_once(team: Team | None) -> Iterator[None]:
    """Leave it to the first process to say what all find wrong."""
    try:
        yield
    except VidsparseError:
        if team is not None and not team.first:
            team.wait_to_be_ended()
        raise


def check_ring(ring: int | None, count: int, apart: bool | None = False) -> None:
    """Check that ``count`` processes can make rings of ``ring``, and perhaps two halves first.

    Raises:
        OptionError: they cannot.
    """
    if apart and count % 2:
        raise OptionError(
            f"--apart needs an even number of GPUs for each video, got {count}. "
            "Hint: --gpus 2, or another even number."
        )
    whole = count // 2 if apart else count
    if ring is not None and whole % ring:
        of = "GPUs for each guidance branch" if apart else "GPUs for each video"
        raise OptionError(
            f"--ring {ring} does not divide the number of {of}, {whole}. "
            "Hint: give a number that does, or leave it out."
        )


def check_shared(request: GenerateRequest, count: int, apart: bool | None = False) -> None:
    """Check that ``count`` processes can make a video of ``request`` together.

    With guidance branches ``apart`` where that is so.

    Raises:
        OptionError: there are too few GPUs, or one of them was named.
        UnsupportedError: an option does not work on several processes.
    """
    check_gpus(request.device, count)
    if apart and request.cache not in (None, "none"):
        raise UnsupportedError(
            f"--apart does not work with the step cache {request.cache} yet. "
            "Hint: --cache none, or leave --apart out."
        )


def check_gpus(device: str | None, count: int) -> None:
    """Check that this machine has ``count`` GPUs, or cores for so many processes without GPUs.

    Args:
        device: what was asked for.
        count: processes.

    Raises:
        OptionError: there are too few, or one of them was named.
    """
    import torch

    device = device or ""
    if device.startswith("cuda:") and device != "cuda:0":
        raise OptionError(
            f"--device {device} names one GPU, and {count} are to be used. Hint: --device cuda."
        )
    there = torch.cuda.device_count()
    if device.startswith("cuda") and there < count and "RANK" not in os.environ:
        raise OptionError(
            f"--gpus {count} needs {count} GPUs, and this machine has {there}. "
            "Hint: give a smaller number."
        )
    most = max(LEAST_PROCESSES, os.cpu_count() or 1)
    if device == "cpu" and count > most:
        raise OptionError(
            f"--gpus {count} with --device cpu starts {count} processes, and this machine has room "
            f"for {most}. Hint: give a smaller number."
        )


def check_prompts_file(path: str) -> None:
    """Check that each of several processes can read the prompts of ``path``: a pipe is read once.

    Raises:
        OptionError: it is standard input, a pipe or a device.
    """
    # a folder, and what is not there, are said for what they are when they are read.
    if path == "-" or (os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))):
        name = "standard input" if path == "-" else path
        raise OptionError(
            f"{name} cannot be read by several processes. Hint: write the prompts to a file."
        )


KEPT_VIDEOS: Final = "finished videos are kept. Hint: run the same command again to make the rest."
"""What is said after the death of a process that made videos."""


def launch(terminal: Terminal, count: int, kept: str) -> int:
    """Run this very command in ``count`` processes, which were checked; the exit code.

    Where one of them dies, ``kept`` says what is left.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # its warnings, and its traces of processes that failed; what there is to say is said here.
    for name in tuple(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    # what this process imported is what they import: -m alone would put the working folder first,
    # which may hold another vidsparse, such as a checkout's core without its other floors.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        os.path.abspath(place) for place in sys.path if os.path.exists(place or os.curdir)
    )
    # torch before 2.12 always gives processes 30 s to end.
    patience: dict[str, Any] = {"shutdown_timeout": 10}
    if patience.keys() - {field.name for field in fields(LaunchConfig)}:
        patience.clear()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"vidsparse-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        **patience,
    )
    try:
        elastic_launch(config, sys.executable)("-P", "-m", "vidsparse", *sys.argv[1:])
    except SignalException as ended:
        terminal.terminated = ended.sigval == signal.SIGTERM
        raise KeyboardInterrupt from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code: int = failure.exitcode
        if code in (FAILED, BAD_INPUT, INTERRUPTED, TERMINATED):
            # it has said why.
            return code
        how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        terminal.complain(f"process {rank + 1} of {count} died ({how}), which ends the run; {kept}")
        return FAILED
    return 0


def silent(terminal: Terminal) -> Terminal:
    """``terminal`` for checks that the processes will make again, warnings included."""
    return replace(terminal, quiet=True)
