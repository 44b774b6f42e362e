"""The methods by name, and the one way to make them from options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from vidsparse.errors import OptionError, listed
from vidsparse.methods.base import Method, SparseMethod
from vidsparse.methods.bsfa import Bsfa
from vidsparse.methods.dense import Dense
from vidsparse.methods.fg_attn import FgAttn
from vidsparse.methods.foresight import Foresight
from vidsparse.methods.numbers import Numbers
from vidsparse.methods.sale import Sale
from vidsparse.methods.sol_attn import SolAttn
from vidsparse.methods.spargeattn import SpargeAttn
from vidsparse.methods.xattention import XAttention

METHODS: Final[Mapping[str, type[Method]]] = MappingProxyType(
    {
        cls.name: cls
        for cls in (FgAttn, SpargeAttn, XAttention, Sale, Bsfa, SolAttn, Foresight, Dense)
    }
)
"""Every method by the name used in options, the default first."""

SPARSE_METHODS: Final[Mapping[str, type[SparseMethod]]] = MappingProxyType(
    {name: cls for name, cls in METHODS.items() if issubclass(cls, SparseMethod)}
)
"""The methods that leave anything out, by name: all but ``dense``."""


def _owners(option: str) -> list[str]:
    return [
        name
        for name, cls in METHODS.items()
        if any(field.name == option for field in cls.option_fields())
    ]


def make_method(name: str, **options: Any) -> Method:
    """Make a method from its name and its own options.

    Raises:
        OptionError: no such method, an option that it does not have, or a value out of range.
    """
    if not isinstance(name, str) or name not in METHODS:
        raise OptionError(f"unknown method {name!r}. Hint: choose from {', '.join(METHODS)}.")
    cls = METHODS[name]
    own = [field.name for field in cls.option_fields()]
    for option in options:
        if option not in own:
            owners = _owners(option)
            whose = f"it belongs to {listed(owners)}" if owners else "no method has it"
            has = f"its options are {', '.join(own)}" if own else "it takes no options"
            raise OptionError(f"{name} has no option {option!r}: {whose}. Hint: {has}.")
    try:
        return cls(**options)
    except OptionError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        # files hold values of every type; each option looks at its own only.
        given = ", ".join(f"{option}={value!r:.60}" for option, value in options.items())
        raise OptionError(f"{name} cannot have the options {given}: {error}") from None


__all__ = [
    "METHODS",
    "SPARSE_METHODS",
    "Bsfa",
    "Dense",
    "FgAttn",
    "Foresight",
    "Method",
    "Numbers",
    "Sale",
    "SolAttn",
    "SpargeAttn",
    "SparseMethod",
    "XAttention",
    "make_method",
]
