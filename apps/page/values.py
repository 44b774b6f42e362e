"""What comes from the form's controls, read as values; each refusal is one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click

from vidsparse.apps.terminal.options import amount, default_text
from vidsparse.errors import OptionError
from vidsparse.methods import METHODS

# of any number: what a seed can be where no browser is between.
LARGEST = 2**63 - 1
# browsers have numbers of 53 bits, and make another one of a longer seed without a word.
LARGEST_SEED = 2**53 - 1


def parameter(method: str, field: str) -> str:
    """The name of a method's own option among the form's values."""
    return f"{method}_{field}".replace("-", "_").replace(".", "_")


def method_options(
    method: str, values: Mapping[str, Any], own: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The method's own options among the form's values; what is left blank keeps its default.

    ``own`` are the defaults that the model brings.

    Raises:
        OptionError: a value that cannot be read.
    """
    options: dict[str, Any] = {}
    for field in METHODS[method].option_fields():
        value = values.get(parameter(method, field.name))
        if value is None or value == "":
            continue
        if isinstance(field.default, bool):
            if not isinstance(value, bool):
                raise OptionError(f"{field.name} must be on or off, got {shown(value)}")
            options[field.name] = value
            continue
        default = typed(own[field.name]) if field.name in own else default_text(field)
        try:
            options[field.name] = field.metadata["convert"](typed(value))
        except OptionError:
            raise
        except ValueError:
            raise OptionError(
                f"{field.name} cannot be {shown(value)} ({field.metadata['help']}). "
                f"Hint: {default} is the default."
            ) from None
    return options


def whole(name: str, value: object) -> int | None:
    """A whole number of the form, None where it was left blank.

    Raises:
        OptionError: it is none.
    """
    value = form_number(name, value)
    if value is None:
        return None
    if value != int(value):
        raise OptionError(f"{name} must be a whole number, got {value}")
    return int(value)


def form_number(name: str, value: object) -> int | float | None:
    """A number of the form, None where it was left blank.

    Raises:
        OptionError: it is none.
    """
    if value is None:
        return None
    # compared, not converted: a whole number can be too large for that.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not -LARGEST <= value <= LARGEST
    ):
        raise OptionError(f"{name.replace('_', ' ')} must be a number, got {shown(value)}")
    return int(value) if value == int(value) else value


def check_seed(seed: int) -> None:
    """Refuse a seed that a browser does not keep.

    Raises:
        OptionError: it is too large.
    """
    if seed > LARGEST_SEED:
        raise OptionError(
            f"seed can be at most {LARGEST_SEED:,} on this page, since browsers change longer "
            "numbers. Hint: `vidsparse generate` takes longer ones."
        )


def check_text(name: str, text: str) -> None:
    """Refuse a text that cannot be written down.

    Raises:
        OptionError: it holds half of a character, as a script can send it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OptionError(
            f"{name.replace('_', ' ')} holds half of a character. Hint: type it anew."
        ) from None


def shown(value: object) -> str:
    """A value that was refused, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def check_texts(values: Mapping[str, Any]) -> None:
    """As ``check_text``, of all texts among ``values``.

    Raises:
        OptionError: as ``check_text``.
    """
    for name, value in values.items():
        if isinstance(value, str):
            check_text(name, value)


def name_of(what: str, value: object) -> str | None:
    """A name among choices, None where none was chosen.

    Raises:
        OptionError: it is no text.
    """
    if value is not None and not isinstance(value, str):
        raise OptionError(f"unknown {what} {shown(value)}")
    return value or None


def read_amount(name: str, value: object) -> int | float | None:
    """A count or a share of the form, None where it was left blank.

    Raises:
        OptionError: it is neither.
    """
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise OptionError(f"{name} must be a count (3) or a share (0.24), got {shown(value)}")
    try:
        return amount(str(value)) if str(value).strip() else None
    except click.BadParameter as error:
        raise OptionError(f"{name}: {error.message}") from None


def amount_text(value: int | float | None) -> str:
    """An amount as one types it; nothing where it is left to the method."""
    return "" if value is None else str(value)


def typed(value: object) -> str:
    """A value as one types it on the command line."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    # the browser knows one kind of number: 16 and 16.0 are the same to it.
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
