"""``vidsparse ui``: the page in a browser."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vidsparse.apps.console import Session, verbosity_options
from vidsparse.errors import OptionError, OutputError, UnsupportedError

if TYPE_CHECKING:
    from vidsparse.apps.page.desk import Desk
    from vidsparse.apps.page.host import Limits


@click.command(
    epilog="""\b
Examples:
  vidsparse ui
  vidsparse ui --model shapes --model path/to/Wan2.1 --device cuda:0 --device cuda:1
  vidsparse ui --listen --auth anna:secret --max-frames 81 --max-side 832
  vidsparse ui --model shapes --preset presets/
  VIDSPARSE_AUTH=anna:secret vidsparse ui --share

\b
Files, in outputs/page/<time and a random name>/ for every visit:
  0003-<words>.mp4, .json   as `vidsparse generate` writes them
  0004-report/              as `vidsparse compare` writes it
Ctrl-C closes the page; files stay.
""",
)
@click.option("--port", type=int, metavar="N", help="Port.  [default: the first free from 7860]")
@click.option("--listen", is_flag=True, help="Answer other machines; needs --auth.")
@click.option("--share", is_flag=True, help="A public address by Gradio's tunnel; needs --auth.")
@click.option(
    "--auth",
    metavar="USER:PASSWORD",
    envvar="VIDSPARSE_AUTH",
    help="What visitors must give; also read from VIDSPARSE_AUTH, which other users cannot see.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("shapes",),
    metavar="MODEL",
    show_default="shapes",
    help="A model to offer, as for generate; may be repeated. Visitors choose from these only.",
)
@click.option(
    "--preset",
    "presets",
    multiple=True,
    metavar="PATH",
    help="A calibrated method to offer for its model, as for generate, or a folder of them; "
    "may be repeated.",
)
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="DEVICE",
    help="cpu, cuda or cuda:N; may be repeated, one job runs on each.  [default: the best]",
)
@click.option("--dtype", metavar="DTYPE", help="fp32, bf16 or fp16.  [default: the device's]")
@click.option(
    "--out", metavar="FOLDER", default="outputs", show_default=True, help="Where files go."
)
@click.option(
    "--max-frames",
    type=int,
    metavar="N",
    default=161,
    show_default=True,
    help="Most frames of a video.",
)
@click.option(
    "--max-side",
    type=int,
    metavar="PIXELS",
    default=1280,
    show_default=True,
    help="Most pixels of a video's width and height.",
)
@click.option(
    "--max-steps",
    type=int,
    metavar="N",
    default=100,
    show_default=True,
    help="Most denoising steps.",
)
@click.option(
    "--max-prompts",
    type=int,
    metavar="N",
    default=50,
    show_default=True,
    help="Most prompts of a report.",
)
@click.option(
    "--max-waiting",
    type=int,
    metavar="N",
    default=32,
    show_default=True,
    help="Most jobs that wait.",
)
@click.option(
    "--max-upload", type=int, metavar="MB", default=10, show_default=True, help="Largest upload."
)
@verbosity_options
@click.pass_obj
def ui(
    session: Session,
    /,
    port: int | None,
    listen: bool,
    share: bool,
    auth: str | None,
    models: tuple[str, ...],
    presets: tuple[str, ...],
    devices: tuple[str, ...],
    dtype: str | None,
    out: str,
    max_frames: int,
    max_side: int,
    max_steps: int,
    max_prompts: int,
    max_waiting: int,
    max_upload: int,
) -> int:
    """Open a page to generate, compare and report in a browser.

    It answers this machine alone unless asked otherwise, loads nothing from outside, and works on
    one job per device; others wait in a queue.
    """  # fmt: skip
    from vidsparse.apps.page.host import Limits

    login = check_login(auth, listen=listen, share=share)
    require_gradio()
    limits = Limits(
        frames=max_frames,
        side=max_side,
        steps=max_steps,
        prompts=max_prompts,
        waiting=max_waiting,
        upload=max_upload,
    )
    desk = make_desk(models, devices, dtype, Path(out), limits, presets)
    from vidsparse.apps.page.build import serve

    served = serve(desk, port=port, listen=listen, share=share, auth=login)
    click.echo(f"page: {served.url}")
    if served.public_url:
        click.echo(f"public: {served.public_url}")
    session.say(f"Videos go to {desk.host.folder}. Ctrl-C closes the page.")
    load_first(desk)
    try:
        _wait_for_the_end()
    finally:
        session.say("Closing the page; files are kept.")
        desk.queue.close()
        served.close()
    return 0


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
    user, colon, password = auth.partition(":")
    if not (user and colon and password):
        raise OptionError("--auth must be USER:PASSWORD with neither of them empty.")
    return user, password


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
    from vidsparse.pipelines.request import check_device, check_dtype

    refs = tuple(resolve_model(name) for name in dict.fromkeys(models))
    names = tuple(dict.fromkeys(check_device(name) for name in devices or (None,)))
    for name in names:
        check_dtype(dtype, name)
    calibrated = read_presets(presets, refs, limits)
    folder = make_folder(out)

    from vidsparse.apps.page.desk import Desk
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
    benches = [(name, Workbench(name, dtype)) for name in names]
    return Desk(host, JobQueue(benches, waiting=limits.waiting), Visits(folder))


def make_folder(out: Path) -> Path:
    """The page's own folder below the output folder, the only one that it serves.

    Gradio's copies and uploads are sent there as well, before it is first imported.

    Raises:
        OutputError: it cannot be made.
    """
    from vidsparse.apps.page.uploads import forget_old

    folder = (out / "page").resolve()
    uploads = folder / "gradio"
    try:
        uploads.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"the output folder {folder} cannot be made: {error.strerror}. "
            "Hint: give another one with --out."
        ) from None
    forget_old(uploads)
    os.environ["GRADIO_TEMP_DIR"] = str(uploads)
    return folder


def load_first(desk: Desk) -> None:
    """Load the first model before anybody asks, on every device."""
    from vidsparse.apps.page.form import needs_image
    from vidsparse.apps.page.queue import Job

    model = desk.host.models[0]
    for _ in desk.host.devices:
        desk.queue.submit(Job(lambda bench, job: bench.load(model.name, image=needs_image(model))))


def _wait_for_the_end() -> None:
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
