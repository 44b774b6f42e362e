"""Command line options shared by ``generate`` and ``compare``, and the request they make.

Options of the methods come from the methods' own declarations, so that a new method needs no line
here. Help lists options in groups, each method's under its own name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import cloup
from cloup import OptionGroup, option, option_group

from vidsparse.errors import OptionError, listed
from vidsparse.methods import METHODS
from vidsparse.order import ORDERS

if TYPE_CHECKING:
    from vidsparse.pipelines.request import GenerateRequest

Function = TypeVar("Function", bound=Callable[..., Any])

# a prefix of its own keeps a method's `--steps` from ever shadowing the request's.
_METHOD_PREFIX = "method_option_"


class FiniteRange(click.FloatRange):
    """Numbers of a range: click's own takes ``nan`` for one of every range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number of a text.

        Raises:
            click.BadParameter: it is none, or outside of the range.
        """
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return float(number)


class MethodOption(cloup.Option):
    """An option declared by one or more methods; help lists it under each of them."""

    def __init__(self, flag: str, fields: Mapping[str, dataclasses.Field[Any]]) -> None:
        first = next(iter(fields.values()))
        super().__init__(
            [flag, _METHOD_PREFIX + flag.lstrip("-").replace("-", "_")],
            metavar=first.metadata["metavar"],
            help=first.metadata["help"],
            default=None,
        )
        self.flag = flag
        self.fields = fields

    def record_for(self, method: str) -> tuple[str, str]:
        """The line of help under ``method``'s heading."""
        field = self.fields[method]
        return (
            f"{self.flag} {field.metadata['metavar']}",
            f"{field.metadata['help']}  [default: {default_text(field)}]",
        )


def default_text(field: dataclasses.Field[Any]) -> str:
    """A method option's default as one types it."""
    value = field.default
    if value is None:
        return str(field.metadata["absent"])
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


class _MethodOptions(OptionGroup):
    """The options of all methods, each listed by every method that has it, with its default.

    In cloup's groups an option has one place and one default.
    """

    def by_method(self) -> Iterator[OptionGroup]:
        """A heading for each method that has options."""
        for name, cls in METHODS.items():
            own = [one for one in self if isinstance(one, MethodOption) and name in one.fields]
            if own:
                group = _OneMethod(f"Options of --method {name} ({cls.title})", name)
                group.options = own
                yield group


class _OneMethod(OptionGroup):
    def __init__(self, title: str, method: str) -> None:
        super().__init__(title)
        self._method = method

    def get_help_records(self, ctx: click.Context) -> list[tuple[str, str]]:
        return [one.record_for(self._method) for one in self if isinstance(one, MethodOption)]


class RequestCommand(cloup.Command):
    """A command with ``request_options``, whose help has a group of options for each method.

    cloup alone would list an option of several methods in one group only.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # the longest option of one method should not narrow the help of another.
        super().__init__(*args, align_option_groups=False, **kwargs)
        # an option of several methods is one parameter, and a parameter has one group.
        self.option_groups = [
            shown
            for group in self.option_groups
            for shown in (group.by_method() if isinstance(group, _MethodOptions) else (group,))
        ]


def amount(text: str) -> int | float:
    """A whole count (12), or a share written with a point (0.24)."""
    try:
        return int(text) if text.strip().lstrip("+-").isdecimal() else float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a count (12) nor a share (0.24).") from None


def _rate(text: str) -> int | float:
    """A number that stays whole where it is: 16 and 16.0 are one setting."""
    try:
        number = float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number. Hint: 16.") from None
    return int(number) if number.is_integer() else number


def _keyframe(text: str) -> tuple[int, str]:
    """The number of a frame and the file of its image."""
    number, _, file = text.partition("=")
    if not (number.isdecimal() and len(number) <= _MOST_DIGITS and file):
        raise click.BadParameter(
            f"{text!r} is no keyframe. Hint: write N=FILE, such as 41=middle.png."
        )
    return int(number), file


# of a side: none is as long, and Python reads no number of thousands of digits.
_MOST_DIGITS: Final = 9


def pixel_size(text: str) -> tuple[int, int]:
    """WIDTHxHEIGHT in pixels."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(
        part.strip().isdecimal() and len(part.strip()) <= _MOST_DIGITS for part in parts
    ):
        raise click.BadParameter(
            f"{text!r} is not a size. Hint: write WIDTHxHEIGHT, such as 256x256."
        )
    return int(parts[0]), int(parts[1])


def _method_options() -> list[MethodOption]:
    flags: dict[str, dict[str, dataclasses.Field[Any]]] = {}
    for name, cls in METHODS.items():
        for field in cls.option_fields():
            flags.setdefault(field.metadata["flag"], {})[name] = field
    return [MethodOption(flag, fields) for flag, fields in flags.items()]


def _names(values: Any) -> str:
    return ", ".join(values)


def request_options(function: Function) -> Function:
    """Add every option of a ``GenerateRequest`` to a command."""
    decorators = (
        option_group(
            "What to make",
            option(
                "--model",
                metavar="MODEL",
                default="shapes",
                show_default=True,
                help="A bundled model, a diffusers folder or a hub id.",
            ),
            option(
                "--frames",
                type=int,
                metavar="N",
                help="Frames; 4k+1, 6k+1 or 8k+1, by model.  [default: the model's]",
            ),
            option(
                "--size",
                type=pixel_size,
                metavar="WIDTHxHEIGHT",
                help="Pixels.  [default: the model's]",
            ),
            option(
                "--steps", type=int, metavar="N", help="Denoising steps.  [default: the model's]"
            ),
            option(
                "--guidance",
                type=float,
                metavar="SCALE",
                help="Classifier-free guidance scale.  [default: the model's]",
            ),
            option("--negative-prompt", metavar="TEXT", default="", help="What not to show."),
            option(
                "--image",
                metavar="FILE",
                help="First frame, for image-to-video; scaled and cut to the video's size, on "
                "white where it is transparent.",
            ),
            option(
                "--last-image",
                metavar="FILE",
                help="Last frame, where the model takes one (Wan's first-last-frame-to-video, "
                "LTX-2).",
            ),
            option(
                "--keyframe",
                "keyframes",
                type=_keyframe,
                multiple=True,
                metavar="N=FILE",
                help="Frame N, counted from 0, where the model takes some (LTX-2: 8k+1); as often "
                "as you like.",
            ),
            option(
                "--seed",
                type=int,
                metavar="N",
                default=0,
                show_default=True,
                help="The same for every prompt, wherever it stands in the file.",
            ),
            option(
                "--fps", type=_rate, metavar="N", help="Frames a second.  [default: the model's]"
            ),
            option(
                "--lora",
                metavar="PATH",
                help="A LoRA file, folder or hub id to load into the model.",
            ),
        ),
        option_group(
            "What to skip",
            option(
                "--speed",
                metavar="NAME",
                help="A bundle of method, dense steps, linear layers, compilation and step cache: "
                "exact, high, balanced, fast, or a quality such as 33dB for the fastest that was "
                "measured to give it; every flag overrides its part.  [default: none]",
            ),
            option(
                "--method",
                metavar="NAME",
                help=f"One of {_names(METHODS)}; see `vidsparse methods`.  "
                "[default: the model's, the preset's, or the one whose options are given]",
            ),
            option(
                "--preset",
                metavar="FILE",
                help="A calibrated method, as `vidsparse calibrate` makes it.",
            ),
            option(
                "--order",
                metavar="NAME",
                help=f"Token order before tiles are cut: {_names(ORDERS)}.  [default: the model's]",
            ),
            option(
                "--dense-steps",
                type=amount,
                metavar="N|SHARE",
                help="First steps kept dense: a share rounded up (0.24) or a count (12).  "
                "[default: the model's]",
            ),
            option(
                "--dense-last-steps",
                type=amount,
                metavar="N|SHARE",
                default="0",
                show_default=True,
                help="Last steps kept dense.",
            ),
            option(
                "--dense-layers",
                type=amount,
                metavar="N|SHARE",
                help="First transformer layers kept dense.  [default: the model's]",
            ),
            option(
                "--dense-last-layers",
                type=amount,
                metavar="N|SHARE",
                help="Last transformer layers kept dense.  [default: the model's]",
            ),
            option(
                "--reuse",
                type=int,
                metavar="N",
                help="Steps that one plan serves before it is made anew.  [default: the model's]",
            ),
            option(
                "--refresh",
                type=amount,
                metavar="N|SHARE",
                help="Steps that compute everything and keep what the plan lacks, for the steps "
                "after them to add.  [default: the model's]",
            ),
        ),
        _add_method_options,
        option_group(
            "Which steps to take from the last ones",
            option(
                "--cache",
                metavar="NAME",
                help="Step cache: none, first-block, taylorseer, or guidance, which leaves out "
                "forwards of the unconditional branch.  [default: none]",
            ),
            option(
                "--cache-threshold",
                type=_rate,
                metavar="N",
                help="first-block: change of its residual below which the other blocks are left "
                "out (0.05). taylorseer and guidance: run one of N steps (2).",
            ),
        ),
        option_group(
            "How to run",
            option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.  [default: the best]"),
            option("--dtype", metavar="DTYPE", help="fp32, bf16 or fp16.  [default: the device's]"),
            option(
                "--offload",
                metavar="MODE",
                default="none",
                show_default=True,
                help="Keep unused weights in the host's memory: none, model, group.",
            ),
            option(
                "--linear",
                metavar="FORMAT",
                help="The transformer's large linear layers in 8 bits, or in bf16 (on a CPU, and "
                "the decoder's convolutions): none, fp8, int8, bf16.  [default: the speed's, or "
                "none]",
            ),
            option(
                "--compile/--no-compile",
                default=None,
                help="Run the transformer by torch.compile.  [default: the speed's, or no]",
            ),
            option(
                "--implementation",
                metavar="NAME",
                default="auto",
                show_default=True,
                help="Kernel to run; never replaced by another. See `vidsparse doctor`.",
            ),
            option(
                "--dense-kernel",
                metavar="NAME",
                default="auto",
                show_default=True,
                help="Kernel of dense steps and layers: stock, gluon, auto (the faster).",
            ),
        ),
    )
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def batch_option(function: Function) -> Function:
    """The option that says how many prompts are made at once, one where nothing is said."""
    return option(
        "--batch",
        type=int,
        metavar="N",
        default=1,
        show_default=True,
        help="Prompts made at once, for a GPU with room.",
    )(function)


def gpus_options(function: Function) -> Function:
    """``--gpus``, ``--ring`` and ``--apart``: several processes that make each video together."""
    options = (
        click.option(
            "--gpus",
            type=click.IntRange(min=1, max=1024),
            metavar="N",
            help="Use N GPUs, all of them on each video; with --device cpu, N processes.",
        ),
        click.option(
            "--ring",
            type=click.IntRange(min=1),
            metavar="R",
            help="Of the GPUs of a video, pass keys and values round R; the others share attention "
            "heads out.  [default: as few as the model's heads need]",
        ),
        click.option(
            "--apart/--no-apart",
            default=None,
            help="Of the GPUs of a video, let each half compute one of a step's two guidance "
            "branches.  [default: where all GPUs make each video and it can be: Wan's models, an "
            "even number, no --ring, no step cache]",
        ),
    )
    for each in reversed(options):
        function = each(function)
    return function


def _add_method_options(function: Function) -> Function:
    group = _MethodOptions("Options of methods")
    for one in reversed(_method_options()):
        one.group = group
        # the same list click.option keeps; there is no decorator for a ready-made option.
        params: list[click.Parameter] = function.__dict__.setdefault("__click_params__", [])
        params.append(one)
    return function


def method_values(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the method options among ``given`` (parameter name to text) to the method's values.

    Raises:
        OptionError: an option of another method, or a value that cannot be read.
    """
    values: dict[str, Any] = {}
    for one in _method_options():
        text = given.get(one.name or "")
        # an unknown method owns nothing: building the request names the ones there are.
        if text is None or method not in METHODS:
            continue
        field = one.fields.get(method)
        if field is None:
            owners = listed(list(one.fields))
            raise OptionError(
                f"{one.flag} is an option of {owners}, not of {method}. "
                f"Hint: add --method {next(iter(one.fields))}, or leave {one.flag} out."
            )
        try:
            values[field.name] = field.metadata["convert"](text)
        except OptionError:
            raise
        except ValueError:
            raise OptionError(
                f"{one.flag} cannot be {text!r} ({field.metadata['help']}). "
                f"Hint: {default_text(field)} is the default."
            ) from None
    return values


def build_request(prompt: str, options: Mapping[str, Any]) -> GenerateRequest:
    """The request of one prompt from a command's parameters.

    Raises:
        OptionError: a value, or a combination of values, is not valid.
    """
    from vidsparse.pipelines.request import GenerateRequest

    options = {**options, "speed": _named_speed(options["speed"], options["model"])}
    own = {k: v for k, v in options.items() if not k.startswith(_METHOD_PREFIX) and k != "size"}
    width, height = options["size"] or (None, None)
    own["method"] = _method_name(options)
    own["keyframes"] = _keyframes(options.get("keyframes", ()))
    return GenerateRequest(
        prompt=prompt,
        width=width,
        height=height,
        method_options=method_values(own["method"], options),
        **own,
    )


def _keyframes(given: Sequence[tuple[int, str]]) -> dict[int, str]:
    """The files of keyframes by their numbers.

    Raises:
        OptionError: a frame was given twice.
    """
    found = dict(given)
    if len(found) < len(given):
        raise OptionError("a frame was given two keyframes. Hint: give each --keyframe once.")
    return found


def without_own_cache(options: dict[str, Any]) -> None:
    """Take the step cache of the model or the speed off, unless one was asked for by name."""
    if options["cache"] is None:
        options["cache"] = "none"


def _named_speed(asked: str | None, model: str) -> str | None:
    """The name of a speed, where one was asked for by name or by the quality it is to have."""
    from vidsparse.pipelines.models import resolve_model
    from vidsparse.pipelines.speed import quality_of, speed_reaching

    quality = quality_of(asked or "")
    if quality is None:
        return asked
    known = resolve_model(model)
    return speed_reaching(quality, known.name, known.defaults)


def _method_name(options: Mapping[str, Any]) -> str:
    given, path = options["method"], options["preset"]
    if path is None and given:
        return str(given)
    if path is None:
        from vidsparse.pipelines.request import own_method

        names = [
            next(iter(one.fields.values())).name
            for one in _method_options()
            if options.get(one.name or "") is not None
        ]
        return own_method(options["model"], options["speed"], names)
    from vidsparse.presets import load_preset

    preset = load_preset(path)
    if given not in (None, preset.method):
        raise OptionError(
            f"{path} is for {preset.method}, not for {given}. Hint: leave --method out."
        )
    return preset.method
