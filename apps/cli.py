"""``vidsparse``: the command line. Commands load when they run, so that help is quick."""

from __future__ import annotations

import atexit
import difflib
import gc
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import click

from vidsparse._version import __version__
from vidsparse.apps.terminal.console import Terminal, run, verbosity_options

# at its end Python would look through the half million objects of the libraries several times, for
# what goes with the process anyway: 1.3 seconds.
atexit.register(gc.freeze)


class LazyGroup(click.Group):
    """A group whose commands are imported on first use.

    click and cloup have no such class; click's documentation has a recipe. The command ``NAME`` is
    the function ``NAME``, behind the group's prefix, in the file of that name in ``commands/``.

    Args:
        members: a line of help by the name of each command. It stands here and not in the command,
            since listing commands must not import them.
        groups: the members that are groups.
        prefix: what stands before its commands' names there.
    """

    def __init__(
        self,
        *args: Any,
        members: Mapping[str, str],
        groups: Mapping[str, click.Group] | None = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._members = members
        self._groups = groups or {}
        self._prefix = prefix

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Show the help where nothing was given: that is a question, not a mistake."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order in which a newcomer wants them."""
        return list(self._members)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in self._members:
            return None
        if cmd_name in self._groups:
            return self._groups[cmd_name]
        name = f"{self._prefix}{cmd_name}"
        module = importlib.import_module(f"vidsparse.apps.commands.{name}")
        command: click.Command = getattr(module, name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say which one may have been meant."""
        name = args[0]
        if name not in self._members and not name.startswith("-"):
            near = difflib.get_close_matches(name, self._members, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(self._members)}"
            raise click.UsageError(f"there is no command {name!r}. Hint: {hint}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their line of help, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._members.items()))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, print errors as one sentence, and leave with the exit code of ``console``."""
        terminal = Terminal()
        # while PyTorch's threads wait for each other, their core is free for what they wait for.
        # Read when torch is imported, which no command has done yet.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # importing them makes nothing but what stays, and has it looked through a thousand times.
        gc.set_threshold(10_000, *gc.get_threshold()[1:])
        kwargs.update(standalone_mode=False, obj=terminal)
        kwargs.setdefault("prog_name", "vidsparse")
        sys.exit(run(terminal, lambda: super(LazyGroup, self).main(*args, **kwargs)))


bench = LazyGroup(
    name="bench",
    prefix="bench_",
    help="Measure speed and quality on this machine.",
    members={
        "attention": "time one attention call, sparse against dense",
        "calls": "time whole attention calls of methods, and what they err by",
        "gpus": "time one video on one GPU and on several together",
        "gates": "time what skipping products with V costs and saves",
        "linear": "time what blocks take beside attention, by the format of their layers",
        "masks": "time what the methods' masks cost, as a share of dense attention",
        "model": "time whole transformers of published sizes",
        "scaling": "predict more GPUs from rows of few",
        "quality": "sweep tiles, merging and orders on the small model",
    },
)

comfyui = LazyGroup(
    name="comfyui",
    prefix="comfyui_",
    help="Sparse attention as nodes in ComfyUI.",
    members={
        "install": "write the nodes' folder into a ComfyUI",
        "uninstall": "remove that folder",
    },
)

_EPILOG = """\b
Start here:
  echo "a large red circle that moves right on a plain black background" > prompts.txt
  vidsparse generate prompts.txt          a video made with sparse attention, on any machine
  vidsparse compare prompts.txt           what the sparsity cost, as a page to look at
  vidsparse ui                            the same in a browser
  vidsparse doctor                        what this machine can run
"""


@click.group(
    cls=LazyGroup,
    name="vidsparse",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    members={
        "generate": "make a video of every prompt in a file",
        "compare": "measure sparse videos against dense ones",
        "calibrate": "find a method's numbers for a model",
        "ui": "open the page in a browser",
        "ablate": "measure what each paper's parts are worth",
        "doctor": "check this machine",
        "methods": "list the sparse attention methods",
        "models": "list bundled models and supported families",
        "bench": "measure speed and quality",
        "comfyui": "add the nodes for ComfyUI to it, or remove them",
    },
    groups={"bench": bench, "comfyui": comfyui},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@verbosity_options
def main() -> None:
    """Sparse attention for video diffusion: faster videos, and a report of what it cost."""
