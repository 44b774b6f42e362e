"""Starting the page: who may visit it, its folder, its devices and their queue.

Everything that can be wrong is found here, before gradio is imported: what it must not do is said
in the environment, which it reads once.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vidsparse.errors import OptionError, OutputError, UnsupportedError
from vidsparse.files import clear_partial

if TYPE_CHECKING:
    from vidsparse.apps.page.desk import Desk
    from vidsparse.apps.page.host import Limits


# how browsers name the machine that they run on.
THIS_MACHINE = ("127.0.0.1", "localhost", "[::1]")

# seconds: so long nobody leaves a file alone who is still writing it.
UNTOUCHED = 600

_HOST = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\]", re.IGNORECASE)


def check_hosts(names: Sequence[str]) -> tuple[str, ...]:
    """Names by which the page may be asked for.

    Raises:
        OptionError: one is no name of a host.
    """
    for name in names:
        if not _HOST.fullmatch(name):
            raise OptionError(
                f"--allow-host cannot be {name!r}. Hint: give a name without http:// and port, "
                "like gpu-box.example.org or *.example.org."
            )
    return tuple(names)


def check_login(auth: str | None, *, listen: bool, share: bool) -> tuple[str, str] | None:
    """Name and password of visitors.

    Raises:
        OptionError: others could reach the page without a password, or it is not USER:PASSWORD.
    """
    if auth is None:
        if listen or share:
            flag = "--listen" if listen else "--share"
            raise OptionError(
                f"{flag} lets others run jobs on this machine, so it needs a password. "
                "Hint: add --auth USER:PASSWORD, or set VIDSPARSE_AUTH."
            )
        return None
    user, _, password = auth.partition(":")
    # gradio looks at a name without the spaces around it.
    user = user.strip()
    if not (user and password.strip()):
        raise OptionError("--auth must be USER:PASSWORD with neither of them empty.")
    return user, password


def check_port(port: int | None, *, listen: bool) -> None:
    """Refuse a port that cannot be listened on, before anything is loaded.

    Raises:
        OptionError: there is none of that number, or it is taken.
    """
    if port is None:
        return
    if not 1 <= port <= 65535:
        raise OptionError(f"--port must lie between 1 and 65535, got {port}.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0" if listen else "127.0.0.1", port))
        except OSError as error:
            raise OptionError(
                f"port {port} cannot be used: {(error.strerror or 'unknown').lower()}. "
                "Hint: give another --port, or none for the first free one from 7860."
            ) from None


def require_gradio() -> None:
    """Complain where the page's extra was not installed, and tell it what it must not do.

    Raises:
        UnsupportedError: gradio is not there.
    """
    if importlib.util.find_spec("gradio") is None:
        raise UnsupportedError(
            "the page needs gradio, which is not installed. Hint: pip install 'vidsparse[ui]'."
        )
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"


def make_desk(
    models: tuple[str, ...],
    devices: tuple[str, ...],
    dtype: str | None,
    out: Path,
    limits: Limits,
    presets: tuple[str, ...] = (),
) -> Desk:
    """Everything of the page but the page: checked settings, folder, devices and their queue.

    Raises:
        VidsparseError: a model, preset, device or folder that cannot be used.
    """
    from vidsparse.apps.page.host import Host, read_presets
    from vidsparse.pipelines.models import resolve_model
    from vidsparse.pipelines.placement import check_device, check_dtype

    if not all(name.strip() for name in models):
        raise OptionError("--model is empty. Hint: give a name as `vidsparse models` lists them.")
    found = [resolve_model(name) for name in dict.fromkeys(models)]
    names = tuple(dict.fromkeys(check_device(name) for name in devices or (None,)))
    for name in names:
        check_dtype(dtype, name)
    refs = tuple(replace(ref, defaults=ref.defaults.on(names[0])) for ref in found)
    calibrated = read_presets(presets, refs, limits)
    folder = make_folder(out)

    from vidsparse.apps.page.desk import Desk
    from vidsparse.apps.page.estimates import Estimates
    from vidsparse.apps.page.queue import JobQueue
    from vidsparse.apps.page.visits import Visits
    from vidsparse.apps.page.workbench import Workbench

    host = Host(
        models=refs,
        folder=folder,
        devices=names,
        limits=limits,
        dtype=dtype,
        presets=calibrated,
    )
    estimates = Estimates()
    benches = [(name, Workbench(name, dtype, estimates)) for name in names]
    queue = JobQueue(benches, waiting=limits.waiting)
    return Desk(host, queue, Visits(folder), estimates=estimates)


def make_folder(out: Path) -> Path:
    """The page's own folder below the output folder, for what it makes.

    Gradio's copies and uploads are sent to one beside it, before it is first imported: what lies
    in the page's own folder may be shown in a browser, and what was uploaded may not.

    Raises:
        OutputError: it cannot be made.
    """
    from vidsparse.apps.page.uploads import forget_old

    folder = (out / "page").resolve()
    uploads = folder.with_name("page-uploads")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        uploads.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"the output folder {folder} cannot be made: {error.strerror}. "
            "Hint: give another one with --out."
        ) from None
    forget_old(uploads)
    # of visits to a page that was killed; another page may be writing to the same folder now.
    for visit in folder.iterdir():
        clear_partial(visit, untouched=UNTOUCHED)
    os.environ["GRADIO_TEMP_DIR"] = str(uploads)
    return folder


def load_first(desk: Desk) -> None:
    """Load the first model before anybody asks, on every device."""
    from vidsparse.apps.page.offers import needs_image
    from vidsparse.apps.page.queue import Job

    model = desk.host.models[0]
    for _ in desk.host.devices:
        desk.queue.submit(
            Job(lambda bench, job: bench.load(model.name, image=needs_image(model)), readies=True)
        )


def wait_for_the_end() -> None:
    """Wait until Ctrl-C or a request to end; a second one ends the process at once."""
    stop = threading.Event()

    def end(signum: int, _: object) -> None:
        # a step may take long: whoever asks a second time is not kept waiting for it.
        signal.signal(signum, signal.SIG_DFL)
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, end)
    # a wait without end would not let the signals through on every system.
    while not stop.wait(1):
        pass
