"""Command line options shared by ``bench quality`` and ``ablate``: what a study is made of."""

from __future__ import annotations

from collections.abc import Callable

import click

from vidsparse.apps.terminal.options import pixel_size

_OPTIONS: tuple[Callable[[Callable[..., None]], Callable[..., None]], ...] = (
    click.argument("prompts_file", metavar="[PROMPTS.txt]", required=False),
    click.option(
        "--model",
        metavar="MODEL",
        default="shapes",
        show_default=True,
        help="A bundled model, a diffusers folder or a hub id.",
    ),
    click.option(
        "--size", type=pixel_size, metavar="WIDTHxHEIGHT", help="Pixels.  [default: the model's]"
    ),
    click.option("--frames", type=int, metavar="N", help="Frames.  [default: the model's]"),
    click.option("--steps", type=int, metavar="N", help="Denoising steps.  [default: the model's]"),
    click.option(
        "--guidance",
        type=float,
        metavar="SCALE",
        help="Guidance scale of all videos; 1 is none.  [default: the model's]",
    ),
    click.option(
        "--seed",
        type=int,
        metavar="N",
        default=0,
        show_default=True,
        help="Of every prompt's initial noise.",
    ),
    click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.  [default: the best]"),
    click.option("--dtype", metavar="DTYPE", help="fp32, bf16 or fp16.  [default: the device's]"),
    click.option(
        "--implementation",
        metavar="NAME",
        default="auto",
        show_default=True,
        help="Kernel to run; never replaced by another.",
    ),
    click.option(
        "--batch", type=int, metavar="N", default=4, show_default=True, help="Prompts made at once."
    ),
    click.option("--prompts", type=int, metavar="N", help="Use the first N prompts only."),
    click.option(
        "--ssim-every",
        type=int,
        metavar="N",
        default=4,
        show_default=True,
        help="Take SSIM on every N-th frame; PSNR is always taken on all.",
    ),
    click.option(
        "--presets",
        metavar="FOLDER",
        default="presets",
        show_default=True,
        help="Where calibrated methods' presets lie; those that are missing are made.",
    ),
    click.option("--commit", metavar="ID", help="The code measured.  [default: git's HEAD]"),
)


def study_options(command: Callable[..., None]) -> Callable[..., None]:
    """The argument and options that say what a study is made of."""
    for decorate in reversed(_OPTIONS):
        command = decorate(command)
    return command
