"""What a tab has sent to the queue, and how its end is shown to whoever looks then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vidsparse.apps.page.queue import Job
from vidsparse.apps.page.workbench import Workbench

Updates = dict[Any, Any]
"""Components of the page, and what they become."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tab tells how its jobs stand.

    Args:
        tab: its name.
        area: the component that says it.
        stop: the tab's Cancel.
    """

    tab: str
    area: Any
    stop: Any


@dataclass(eq=False, kw_only=True)
class Errand:
    """One job of a visit. The page that asked may be closed and opened again meanwhile.

    Args:
        place: where it is told how it stands.
        job: what is done.
        done: what its end is called.
        show: the updates that show a result.
        warnings: said below its progress.
        so_far: how much there is to show while it runs, and the updates that do.
        windows: those that it is told in, by Gradio's sessions.
    """

    place: Place
    job: Job[Workbench, Any]
    done: str
    show: Callable[[Any], Updates]
    warnings: Sequence[str] = ()
    so_far: Callable[[], tuple[int, Callable[[], Updates]]] = lambda: (0, dict)
    windows: set[str] = field(default_factory=set)


def and_keep(
    work: Callable[[Workbench, Job[Workbench, Any]], Any], keep: Callable[[Any], object]
) -> Callable[[Workbench, Job[Workbench, Any]], Any]:
    """The same work, whose result is given to ``keep`` whoever listens then."""

    def both(bench: Workbench, job: Job[Workbench, Any]) -> Any:
        result = work(bench, job)
        keep(result)
        return result

    return both
