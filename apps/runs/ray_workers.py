"""Workers on a Ray cluster, or on a Ray of their own on this machine (extra ``vidsparse[ray]``)."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TextIO

from vidsparse.apps.runs import ray_actor
from vidsparse.apps.runs.crew import WorkerDied
from vidsparse.errors import OptionError, UnsupportedError, VidsparseError


class RayWorkers:
    """An engine whose workers are Ray actors of one GPU each, or of one processor core.

    Args:
        device: what they compute on.
        count: how many there will be.
    """

    def __init__(self, device: str, count: int) -> None:
        self.count = count
        ray, resource = _ray(), {"num_gpus": 1} if device.startswith("cuda") else {"num_cpus": 1}
        # its code travels: a name would be imported before the actor's path is put right.
        ray.cloudpickle.register_pickle_by_value(ray_actor)
        self._actor = ray.remote(**resource)(ray_actor.WorkerOfRay)
        # where the command itself does look into it, so do they.
        here = os.path.abspath(os.curdir)
        self._hidden = None if here in map(os.path.abspath, sys.path) else here

    def start(self, place: int) -> RayWorker:
        """Start one wherever the cluster has room."""
        return RayWorker(self._actor.remote(self._hidden))

    def meeting_host(self) -> str | None:
        """Workers of a group meet on the first one's machine, wherever that is."""
        return None


class RayWorker:
    """One actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, name: str, *arguments: Any) -> Future[Any]:
        """Have ``Worker.name`` called."""
        from ray.exceptions import RayActorError, RayTaskError

        answer: Future[Any] = Future()

        def pass_on(done: Future[Any]) -> None:
            error = done.exception()
            if isinstance(error, RayActorError):
                error = WorkerDied("its process or its machine is gone")
            elif isinstance(error, RayTaskError):
                # its own text is the worker's whole traceback.
                error = error.cause or VidsparseError("a worker failed and could not say how")
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(done.result())

        self._actor.call.remote(name, *arguments).future().add_done_callback(pass_on)
        return answer

    def kill(self) -> None:
        """End the actor; calls that wait for it raise ``WorkerDied``."""
        _ray().kill(self._actor)


@contextmanager
def connected(address: str | None, count: int | None, device: str) -> Iterator[RayWorkers]:
    """Workers of the cluster at ``address``, or of one that is started here for ``count`` of them.

    Without a ``count`` every GPU of the cluster gets one.

    Raises:
        UnsupportedError: Ray is not installed.
        OptionError: there is no cluster at the address, or too little room on it.
    """
    # it would report to its makers, and let whatever else the machine does go before its workers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray = _ray()
    except ImportError:
        raise UnsupportedError(
            "--engine ray needs Ray, which is not installed. "
            "Hint: pip install 'vidsparse[ray]', or leave --engine out on one machine."
        ) from None
    cuda = device.startswith("cuda")
    room: dict[str, Any] = {}
    if address is None:
        room["include_dashboard"] = False
        if not cuda:
            room["num_cpus"] = count
    own = sys.stdout
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **room)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"there is no Ray cluster to be reached at {address}: {' '.join(str(error).split())}. "
            "Hint: `ray status` on one of its machines shows whether it runs."
        ) from None
    sys.stdout = _WithoutRay(own)
    try:
        kind = "GPU" if cuda else "CPU"
        there = int(ray.cluster_resources().get(kind, 0))
        if there < (count or 1):
            raise OptionError(
                f"{count or 1} {kind}s are needed, and the cluster has {there}. "
                "Hint: give a smaller --gpus."
            )
        yield RayWorkers(device, count or there)
    finally:
        sys.stdout = own
        ray.shutdown()


def _ray() -> Any:
    """The package, whose own types are those of its internals."""
    import ray

    return ray


class _WithoutRay:
    """Standard output without what Ray's own threads print there, such as that an actor died."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if threading.current_thread().name.startswith("ray_"):
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
