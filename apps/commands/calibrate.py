"""``vidsparse calibrate``: a method's numbers for one model at one size, as a preset."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from cloup import option, option_group

from vidsparse.apps.results.held_file import held_file
from vidsparse.apps.runs.prepared import prepare
from vidsparse.apps.runs.prompts import PromptFile, read_prompts
from vidsparse.apps.terminal.console import Terminal, json_option, verbosity_options
from vidsparse.apps.terminal.options import (
    RequestCommand,
    batch_option,
    request_options,
    without_own_cache,
)
from vidsparse.apps.terminal.progress import plain_bar
from vidsparse.apps.terminal.tables import INDENT, print_pairs
from vidsparse.calibration import CALIBRATORS
from vidsparse.calibration.base import setting_fields
from vidsparse.errors import OptionError, OutputError

Function = TypeVar("Function", bound=Callable[..., Any])

_PREFIX = "calibration_"


def _flags() -> dict[str, dict[str, dataclasses.Field[Any]]]:
    """Every calibrator's settings by flag and method."""
    flags: dict[str, dict[str, dataclasses.Field[Any]]] = {}
    for name, cls in CALIBRATORS.items():
        for field in setting_fields(cls):
            flags.setdefault(field.metadata["flag"], {})[name] = field
    return flags


def _written(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "none"
    return ",".join(f"{part:g}" for part in value) if isinstance(value, tuple) else f"{value:g}"


def calibration_options(function: Function) -> Function:
    """Add the settings of all calibrators to a command."""
    options = []
    for flag, fields in _flags().items():
        first = next(iter(fields.values()))
        defaults = "; ".join(f"{_written(field.default)} for {m}" for m, field in fields.items())
        options.append(
            option(
                flag,
                _PREFIX + flag.lstrip("-").replace("-", "_"),
                metavar=first.metadata["metavar"],
                help=f"{first.metadata['help']}  [default: {defaults}]",
            )
        )
    return option_group("What to aim at", *options)(function)


def _settings(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The calibrator's settings among a command's parameters.

    Raises:
        OptionError: a method that is not calibrated, a setting of another, or one that is no value.
    """
    if method not in CALIBRATORS:
        raise OptionError(
            f"{method} is not calibrated. Hint: choose --method from {', '.join(CALIBRATORS)}."
        )
    values: dict[str, Any] = {}
    for flag, fields in _flags().items():
        text = given.get(_PREFIX + flag.lstrip("-").replace("-", "_"))
        if text is None:
            continue
        if method not in fields:
            raise OptionError(f"{flag} is for {' and '.join(fields)}, not for {method}")
        field = fields[method]
        try:
            values[field.name] = field.metadata["convert"](text)
        except ValueError:
            raise OptionError(
                f"{flag} cannot be {text!r} ({field.metadata['help']}). "
                f"Hint: {_written(field.default)} is the default."
            ) from None
    return values


@click.command(
    cls=RequestCommand,
    epilog="""\b
Examples:
  vidsparse calibrate --method spargeattn --prompts prompts.txt --out sparge
  vidsparse calibrate --method spargeattn --prompts prompts.txt --out strict --l1 0.03 --l2 0.04
  vidsparse calibrate --method foresight --prompts prompts.txt --out clear --target-psnr 32
  vidsparse calibrate --method bsfa --prompts prompts.txt --out bsfa --fractions 0.2,0.4
  vidsparse generate prompts.txt --preset sparge

\b
Files: OUT.json and OUT.safetensors. A run that was stopped leaves
OUT.progress.safetensors, and dense videos in OUT.progress-0.safetensors
and so on. The same command goes on from there, and removes them at its end.
""",
)
@click.option(
    "--prompts",
    "prompts_file",
    metavar="PROMPTS.txt",
    required=True,
    help="One prompt a line; the first ones are used, as many as the method needs.",
)
@click.option("--out", metavar="PRESET", required=True, help="Where the preset's two files go.")
@click.option(
    "--samples", type=int, metavar="N", help="Prompts to use.  [default: the method's number]"
)
@batch_option
@click.option("--overwrite", is_flag=True, help="Replace a preset that is there.")
@calibration_options
@request_options
@json_option
@verbosity_options
@click.pass_obj
def calibrate(
    terminal: Terminal,
    /,
    prompts_file: str,
    out: str,
    samples: int | None,
    batch: int,
    overwrite: bool,
    **options: Any,
) -> None:
    """Find a method's numbers for every layer and head of a model, as its paper does.

    The prompts are denoised densely while the method's candidates are measured on the attention
    calls of a few steps. For foresight whole videos are made instead, until they are as near to the
    dense ones as --target-psnr asks, at the smallest share. The preset holds the numbers, what they
    were made with and what was measured; it fits this model, size and token order only.
    """
    from vidsparse.pipelines.calibrate import calibrate as run
    from vidsparse.pipelines.calibrate import check_calibration
    from vidsparse.presets import preset_files

    terminal.interrupted = "Interrupted; the same command goes on from the last finished prompt."
    if options["preset"] is not None:
        raise OptionError("calibrate makes a preset and takes none. Hint: leave --preset out.")
    without_own_cache(options)
    if options["method"] is None:
        raise OptionError(f"say what to calibrate: --method {' or '.join(CALIBRATORS)}")
    given = {name: options.pop(name) for name in list(options) if name.startswith(_PREFIX)}
    settings = _settings(options["method"], given)
    target = preset_files(out)[0]
    _check_place(out, overwrite, options["lora"])
    wanted = CALIBRATORS[options["method"]].samples if samples is None else samples
    if wanted < 1:
        raise OptionError(f"samples must be at least 1, got {wanted}")
    if batch < 1:
        raise OptionError(f"batch must be at least 1, got {batch}")
    source = read_prompts(prompts_file)
    used = PromptFile(stem=source.stem, prompts=source.prompts[:wanted])
    prepared = prepare(used, options, terminal, ready=False)
    assert prepared.request.steps is not None
    check_calibration(prepared.request, prepared.request.steps, settings, len(used.prompts))
    _check_beside_weights(target, prepared.request.model)
    if len(used.prompts) < wanted:
        terminal.warn(
            f"{prompts_file} has {len(used.prompts)} prompts; {prepared.request.method} is "
            f"calibrated with {wanted}."
        )
    with held_file(target, "calibrating", "give another name with --out", make_folder=True):
        # until it was ours, another process may have written it.
        _check_place(out, overwrite, options["lora"])
        loaded = prepared.load(terminal)
        began = time.perf_counter()
        with plain_bar(terminal, f"Calibrating {prepared.request.method}") as progress:
            preset = run(
                loaded,
                prepared.request,
                [prompt.text for prompt in used.prompts],
                Path(out),
                settings=settings,
                batch=batch,
                progress=progress,
            )
    if (short := not_met(preset.measured)) is not None:
        terminal.warn(short)
    if terminal.quiet:
        terminal.show(str(target))
        terminal.answer({"preset": str(target), "measured": dict(preset.measured)})
        return
    click.echo(f"{target}  {time.perf_counter() - began:.0f} s")
    told = [(name.replace("_", " "), _told(value)) for name, value in preset.measured.items()]
    told.append(("psnr of others", psnr_of_others(preset.measured)))
    print_pairs(((name, text) for name, text in told if text), indent=INDENT)


def not_met(measured: Mapping[str, Any]) -> str | None:
    """What to say where a target was given that no try met; None elsewhere."""
    if measured.get("met", True):
        return None
    ((kind, wanted),) = measured["target"].items()
    name, unit = {"psnr": ("PSNR", " dB"), "ssim": ("SSIM", ""), "speed": ("speed", " times")}[kind]
    return (
        f"The target was not met: {name} {wanted:g}{unit} was asked for, "
        f"{measured[kind]:g}{unit} is the nearest that was found."
    )


def psnr_of_others(measured: Mapping[str, Any]) -> str:
    """The mean PSNR to expect of as many other prompts, with its standard deviation.

    Single prompts differ by ``psnr_std``, so that the means of two samples of n prompts differ by
    ``psnr_std`` times the root of 2 / n. Empty where videos were not compared.
    """
    if "psnr_std" not in measured:
        return ""
    off = measured["psnr_std"] * math.sqrt(2 / measured["prompts"])
    return f"{measured['psnr']:.1f} ± {off:.1f} (as many, like these; one standard deviation)"


def _check_place(out: str, overwrite: bool, lora: str | None) -> None:
    """Check that the two files of the preset ``out`` can be written, and replace nothing of worth.

    Args:
        out: the preset, as it was given.
        overwrite: whether a preset that is there may be replaced.
        lora: the LoRA that is asked for, if any.

    Raises:
        OptionError: it has no name, or that of a calibration's progress, or a file is there that is
            not to be replaced.
        OutputError: the folder cannot be written to.
    """
    from vidsparse.pipelines.calibrate import is_progress, progress_file
    from vidsparse.presets import preset_files

    target, tables = preset_files(out)
    if target.name.removesuffix(".json") in ("", ".", ".."):
        raise OptionError(
            f"--out {out!r} gives the preset no name. Hint: name a file, such as --out my-preset."
        )
    if is_progress(tables):
        raise OptionError(
            f"{tables.name} is the name of what calibrations keep until they end. "
            "Hint: give another name with --out."
        )
    try:
        for path in (target, tables):
            if path.is_dir():
                raise OptionError(f"{path} is a folder. Hint: give another name with --out.")
        there = [path for path in (target, tables) if path.exists()]
        if tables in there and lora is not None and _same(tables, Path(lora)):
            raise OptionError(
                f"{tables} is the LoRA itself, which the preset would replace. "
                "Hint: give another name with --out."
            )
        # a calibration that was stopped as it wrote the second file has left its progress.
        if there == [tables] and not progress_file(Path(out)).exists():
            raise OptionError(
                f"{tables} is there without {target.name}, so that it is no preset's. "
                "Hint: give another name with --out."
            )
        if target in there and not overwrite:
            raise OptionError(f"{target} is there already. Hint: --overwrite replaces it.")
        # folders are made with the first file: a run that is refused later leaves none behind.
        folder = next(path for path in target.absolute().parents if path.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"{target} cannot be written: {error.strerror or error}. "
            "Hint: give another place with --out."
        ) from None


def _check_beside_weights(target: Path, model: str) -> None:
    """Check that a preset does not lie among its model's files: it would be for other weights then.

    Raises:
        OptionError: it does.
    """
    from vidsparse.pipelines.cards import PRESETS
    from vidsparse.pipelines.models import resolve_model

    ref, place = resolve_model(model), target.absolute().parent.resolve()
    inside = ref.source != "hub" and place.is_relative_to(Path(ref.location).resolve())
    if inside and place.name != PRESETS:
        raise OptionError(
            f"{target} would lie among the model's own files, by which a preset knows its model. "
            "Hint: give another place with --out."
        )


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)


def _told(value: Any) -> str:
    """What was measured, in words: of a list of tries, or of passes, a line each."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {_told(one)}" for name, one in value.items())
    if isinstance(value, (list, tuple)):
        nested = any(isinstance(one, (Mapping, list, tuple)) for one in value)
        return ("\n" if nested else ", ").join(filter(None, map(_told, value)))
    return "" if value is None else str(value)
