"""``vidsparse bench linear``: what blocks take beside attention, by their layers' format."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from vidsparse.apps.bench.linear import COLUMNS, LinearRow, linear_file, measure_linear
from vidsparse.apps.bench.machine import device_and_dtype, device_line, header
from vidsparse.apps.bench.model_settings import latent_of
from vidsparse.apps.bench.model_shapes import MODEL_SHAPES
from vidsparse.apps.bench.shown import show_file, shown_rows
from vidsparse.apps.bench.targets import filled_anew
from vidsparse.apps.terminal.bench_options import device_option, measuring_options
from vidsparse.apps.terminal.console import Terminal, verbosity_options
from vidsparse.apps.terminal.options import pixel_size
from vidsparse.dtypes import dtype_name
from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.pipelines.compilation import require_compiler
from vidsparse.pipelines.placement import LINEARS, check_linear


@click.command(
    epilog="""\b
Examples:
  vidsparse bench linear --device cuda
  vidsparse bench linear --device cuda --family wan-14b --linear fp8 --json rows.json
  vidsparse bench linear --family wan-1.3b --size 256x192 --frames 9 --linear int8 --no-compile
"""
)
@click.option(
    "--family",
    "families",
    multiple=True,
    type=click.Choice(tuple(MODEL_SHAPES)),
    help="Model whose blocks are built; repeat for several.  [default: all]",
)
@click.option(
    "--linear",
    "formats",
    multiple=True,
    type=click.Choice([name for name in LINEARS if name != "none"]),
    help="Format beside the model's own; repeat for several.  [default: all that run here]",
)
@click.option(
    "--size",
    type=pixel_size,
    metavar="WIDTHxHEIGHT",
    help="Pixels of the video.  [default: as published]",
)
@click.option(
    "--frames",
    type=click.IntRange(min=1, max=100_000),
    help="Video frames.  [default: as published]",
)
@click.option(
    "--compile/--no-compile",
    "compiled",
    default=None,
    help="Compile the blocks; the model's own format is then measured both ways.  [default: on a "
    "GPU]",
)
@device_option
@click.option("--dtype", default=None, help="Of the weights: bf16 (default on a GPU), fp16, fp32.")
@measuring_options(repeats=3)
@verbosity_options
@click.pass_obj
def bench_linear(
    terminal: Terminal,
    /,
    families: tuple[str, ...],
    formats: tuple[str, ...],
    size: tuple[int, int] | None,
    frames: int | None,
    compiled: bool | None,
    device: str,
    dtype: str | None,
    repeats: int,
    json_path: str | None,
    overwrite: bool,
    show: str | None,
) -> None:
    """Time what a transformer's blocks take beside attention, by the format of their linear layers.

    One block of each kind of a published model, with random weights and what the model gives it at
    this size; attention is left out of it. Outputs are checked against the block as it was. What a
    format costs in quality is another matter: `vidsparse compare --linear` shows it.
    """
    if show is not None:
        shown = linear_file(Path(show))
        show_file(terminal, shown, shown.typed(LinearRow), COLUMNS)
        return
    where, kind = device_and_dtype(device, dtype)
    latents = {name: latent_of(name, size, frames) for name in families or MODEL_SHAPES}
    compiled = where.type == "cuda" if compiled is None else compiled
    if compiled:
        require_compiler(str(where))
    chosen = tuple(dict.fromkeys(formats)) or _runnable(str(where), dtype_name(kind))
    terminal.show(device_line(where, kind))
    about = header(where, "diffusers", "torchao")
    with (
        filled_anew(json_path, linear_file, LinearRow, about, overwrite=overwrite) as file,
        shown_rows(terminal, COLUMNS, about) as show_row,
    ):
        for name, latent in latents.items():
            measured = measure_linear(name, latent, chosen, kind, where, repeats, compiled=compiled)
            for row in measured:
                show_row(row)
                if file is not None:
                    file.add(asdict(row))


def _runnable(device: str, dtype: str) -> tuple[str, ...]:
    """The formats that can run in a model of ``dtype`` here.

    Raises:
        UnsupportedError: there is none.
    """
    able, reasons = [], []
    for name in LINEARS[1:]:
        try:
            check_linear(name, device, dtype)
        except (OptionError, UnsupportedError) as error:
            reasons.append(str(error))
        else:
            able.append(name)
    if not able:
        raise UnsupportedError("no other format runs here: " + "; ".join(reasons))
    return tuple(able)
