"""``vidsparse ui``: the page in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from vidsparse.apps.page.start import (
    check_hosts,
    check_login,
    check_port,
    load_first,
    make_desk,
    require_gradio,
    wait_for_the_end,
)
from vidsparse.apps.terminal.console import Terminal, json_option, verbosity_options


@click.command(
    epilog="""\b
Examples:
  vidsparse ui
  vidsparse ui --model shapes --model path/to/Wan2.1 --device cuda:0 --device cuda:1
  vidsparse ui --listen --auth anna:secret --max-frames 81 --max-side 832
  vidsparse ui --model shapes --preset presets/
  VIDSPARSE_AUTH=anna:secret vidsparse ui --share

\b
Files, in outputs/page/<time and a random name>/ for every visitor:
  0003-<words>.mp4, .json   as `vidsparse generate` writes them
  0004-report/              one page, a zip, and a folder for each setting
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
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A further name to answer to, as in the browser's address; may be repeated. "
    "[default: this machine's own names; with --listen or --share any]",
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
@click.option(
    "--away",
    type=int,
    metavar="SECONDS",
    default=120,
    show_default=True,
    help="How long jobs go on whose page was closed, for those who open it again.",
)
@json_option
@verbosity_options
@click.pass_obj
def ui(
    terminal: Terminal,
    /,
    port: int | None,
    listen: bool,
    share: bool,
    auth: str | None,
    hosts: tuple[str, ...],
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
    away: int,
) -> int:
    """Open a page to generate, compare and report in a browser.

    It answers this machine alone unless asked otherwise, loads nothing from outside, and works on
    one job per device; others wait in a queue.
    """  # fmt: skip
    from vidsparse.apps.page.host import Limits

    login = check_login(auth, listen=listen, share=share)
    names = check_hosts(hosts)
    check_port(port, listen=listen)
    require_gradio()
    limits = Limits(
        frames=max_frames,
        side=max_side,
        steps=max_steps,
        prompts=max_prompts,
        waiting=max_waiting,
        upload=max_upload,
        away=away,
    )
    desk = make_desk(models, devices, dtype, Path(out), limits, presets)
    from vidsparse.apps.page.build import serve

    served = serve(desk, port=port, listen=listen, share=share, auth=login, hosts=names)
    if terminal.json:
        folder = str(desk.host.folder)
        terminal.answer({"page": served.url, "public": served.public_url, "folder": folder})
    else:
        click.echo(f"page: {served.url}")
        if served.public_url:
            click.echo(f"public: {served.public_url}")
    terminal.say(f"Videos go to {desk.host.folder}. Ctrl-C closes the page.")
    load_first(desk)
    try:
        wait_for_the_end()
    finally:
        terminal.say("Closing the page; files are kept.")
        desk.queue.close()
        served.close()
    return 0
