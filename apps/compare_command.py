"""``vidsparse compare``: what sparsity costs, measured against dense videos of the same seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vidsparse.apps.comparison import Comparison, write_report
from vidsparse.apps.console import Session, verbosity_options
from vidsparse.apps.jobs import prepare
from vidsparse.apps.options import GroupedCommand, request_options
from vidsparse.apps.progress import short, step_bar
from vidsparse.apps.prompts import read_prompts
from vidsparse.apps.run_folder import RunFolder
from vidsparse.errors import OptionError
from vidsparse.report import Report, format_psnr, format_seconds, format_share, format_spread

if TYPE_CHECKING:
    from vidsparse.pipelines.generate import Generated
    from vidsparse.pipelines.request import GenerateRequest


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  vidsparse compare prompts.txt
  vidsparse compare prompts.txt --top-p 0.8 --tile 128x128
  vidsparse compare prompts.txt --method spargeattn --order rowmajor
  vidsparse compare prompts.txt --device cuda --batch 8

\b
Files, in outputs/<file>-compare-<method>-<hash of settings>/:
  report.html          one page to look at or send on, with all videos in it
  report.md            the tables
  report.json          every number; identical frames read "psnr": null, "identical": true
  0003-<words>.mp4     dense, sparse and their difference side by side
""",
)
@click.argument("prompts_file", metavar="PROMPTS.txt")
@request_options
@click.option(
    "--batch",
    type=int,
    metavar="N",
    default=1,
    show_default=True,
    help="Prompts made at once, for a GPU with room.",
)
@click.option(
    "--out",
    metavar="FOLDER",
    default="outputs",
    show_default=True,
    help="Where the report's folder is made.",
)
@verbosity_options
@click.pass_obj
def compare(session: Session, /, prompts_file: str, batch: int, out: str, **options: Any) -> None:
    """Make every prompt of PROMPTS.txt dense and sparse, and report how far apart they are.

    PSNR, SSIM and flicker are taken on 8-bit frames before encoding, with the same seeds and the
    same dense attention on both sides.
    """
    from vidsparse.pipelines.request import settings_hash

    if batch < 1:
        raise OptionError(f"batch must be at least 1, got {batch}")
    source = read_prompts(prompts_file)
    jobs = prepare(source, options, session)
    request = jobs.request
    name = f"{source.stem}-compare-{request.method}-{settings_hash(request)}"
    folder = RunFolder(Path(out) / name)
    with folder.claim():
        loaded = jobs.load(session)

        def generate(requests: Sequence[GenerateRequest], label: str) -> list[Generated]:
            from vidsparse.pipelines.generate import generate_batch

            with step_bar(session, label) as progress:
                return generate_batch(loaded, requests, progress=progress)

        comparison = Comparison(generate, folder.path)
        chunks = [jobs.jobs[i : i + batch] for i in range(0, len(jobs.jobs), batch)]
        session.say("Warming up ...")
        comparison.warm_up(chunks[0], loaded.defaults)
        for chunk in chunks:
            for each in comparison.run(chunk):
                if not session.quiet:
                    click.echo(
                        f"{each.number:04d}  PSNR {format_psnr(each.quality, ' dB')}, "
                        f"SSIM {each.quality.ssim:.4f}  {short(each.prompt)}"
                    )
        report = comparison.report(jobs.request, batch)
        paths = write_report(folder.path, report, comparison.videos, request)
    if session.quiet:
        for path in paths:
            click.echo(path)
        return
    _print(report)
    click.echo(f"\nreport: {paths[0]}")


def _print(report: Report) -> None:
    dense, sparse = report.seconds("dense", "denoise"), report.seconds("sparse", "denoise")
    rows = [
        ("PSNR", format_spread(report.psnr, ".2f", " dB", report.identical)),
        ("SSIM", format_spread(report.ssim, ".4f")),
        ("flicker", format_spread(report.flicker, ".2f", " dB")),
        (
            "density",
            f"{format_share(report.selected)} selected, {format_share(report.computed)} computed "
            f"in the sparse steps; {format_share(report.dense_step_share)} of steps dense",
        ),
        ("denoising", f"{format_seconds(dense)} dense, {format_seconds(sparse)} sparse"),
    ]
    click.echo()
    for name, value in rows:
        click.echo(f"{name:<10} {value}")
