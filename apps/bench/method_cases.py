"""Cases as one types them: a method, and the options that differ from its defaults."""

from __future__ import annotations

from typing import Any

from vidsparse.errors import OptionError
from vidsparse.methods import METHODS, SparseMethod, make_method


def method_of(case: str) -> SparseMethod:
    """The method of a case such as ``foresight share=0.1``.

    Raises:
        OptionError: no sparse method, an option without a value, twice, or one that it does not
            take.
    """
    # of nothing but spaces, a method without a name.
    name, *settings = case.split() or [""]
    if name not in METHODS:
        make_method(name)
    fields = {field.name: field for field in METHODS[name].option_fields()}
    options: dict[str, Any] = {}
    for setting in settings:
        option, given, value = setting.partition("=")
        if not given:
            raise OptionError(f"{setting!r} of {case!r} has no value. Hint: {setting}=...")
        if option in options:
            raise OptionError(f"{case!r} gives {option} twice. Hint: a case for each value.")
        try:
            read = fields[option].metadata["convert"](value) if option in fields else value
        except ValueError:
            raise OptionError(f"{option} of {case!r} cannot be {value!r}") from None
        options[option] = read
    method = make_method(name, **options)
    if not isinstance(method, SparseMethod):
        raise OptionError(f"{name} is not sparse: it is what the others are compared with")
    return method
