"""Rows of measurements in a JSON file, one a line, written after every row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from vidsparse.apps.results.held_file import held_file
from vidsparse.errors import OptionError
from vidsparse.files import clear_partial, finite_json, parse_json, write_text

Row = Mapping[str, Any]
Typed = TypeVar("Typed")


def rounded(row: Any, digits: Mapping[str, int | None]) -> dict[str, Any]:
    """A row, a dataclass, as it is written: no digits that a second run would not give.

    ``digits`` are the decimals of fields that do not have two; None leaves a field as it is.
    """
    values = asdict(row)
    for name, value in values.items():
        places = digits.get(name, 2)
        if isinstance(value, float) and places is not None:
            values[name] = round(value, places)
    return values


def hardware_text(facts: Any) -> str:
    """The hardware of a header in words: written so, or as the device's facts in a record."""
    if not isinstance(facts, Mapping):
        return str(facts)
    threads = facts.get("threads")
    return str(facts.get("name")) + (f", {threads} thread{'s' * (threads != 1)}" if threads else "")


def _origin(header: Mapping[str, Any]) -> tuple[str, str, str]:
    """Where and on what the rows of a header were measured, in words."""
    model = header.get("model")
    weights = model.get("weights_hash") if isinstance(model, Mapping) else None
    return (
        f"{hardware_text(header.get('hardware', 'unnamed hardware'))} in {header.get('dtype')}",
        # digits that tell two apart.
        f"a model with weights {str(weights)[:12]}",
        f"prompts with hash {str(header.get('prompts_hash'))[:12]}",
    )


class RowFile:
    """The rows measured so far.

    Neither ``json`` nor a table library writes it so: a header, then one row a line, so that a
    committed file has a readable diff; and the whole file anew after each row, so that a run that
    is killed loses nothing. Whoever measures into it does so within ``held``, after ``begin`` or
    ``go_on``.

    Args:
        path: the file; it need not exist.
        form: name and version of the format, the value of ``format`` in the file.
        kind: what the file holds, for the error.
        unnamed: also take a file without ``format``: the first ones of its kind had none.
        keys: what every row of the kind has.

    Raises:
        OptionError: it exists and holds something else.
    """

    def __init__(
        self,
        path: Path,
        form: str,
        kind: str,
        *,
        unnamed: bool = False,
        keys: frozenset[str] = frozenset(),
    ) -> None:
        self.path = path
        self._form = form
        self._kind = kind
        self._unnamed = unnamed
        self._keys = keys
        self.rows: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {}
        self._read()

    def _read(self) -> None:
        self.rows, self.header = [], {}
        if not self.path.exists():
            return
        try:
            document = parse_json(self.path.read_bytes())
        except (OSError, ValueError) as error:
            raise OptionError(
                f"{self.path} cannot be read as JSON: {error}. Hint: name another file."
            ) from None
        if not isinstance(document, dict):
            raise self._something_else()
        named = document.pop("format", self._form if self._unnamed else None)
        rows = document.pop("rows", None)
        if named != self._form or not isinstance(rows, list):
            raise self._something_else()
        if not all(isinstance(row, dict) and row.keys() >= self._keys for row in rows):
            raise self._something_else()
        self.rows = rows
        self.header = document

    @contextmanager
    def held(self, *, make_folder: bool = False) -> Iterator[None]:
        """Keep other processes out while rows are measured into the file.

        It is read again first: until it was ours, another process may have written rows.

        Args:
            make_folder: make the file's folder if it is missing.

        Raises:
            OptionError: another process holds the file, or it holds something else by now.
            OutputError: its folder is missing or cannot be written to.
        """
        with held_file(self.path, "measuring", "name another file", make_folder=make_folder):
            self._read()
            yield

    def begin(self, header: Mapping[str, Any], *, overwrite: bool) -> None:
        """Start anew under ``header``; rows that are there stay until the first new one is written.

        Raises:
            OptionError: there are rows, and they are not to be overwritten.
        """
        if self.rows and not overwrite:
            raise OptionError(
                f"{self.path} has rows already. Hint: --overwrite replaces them, or name another "
                "file."
            )
        self.rows, self.header = [], dict(header)

    def go_on(
        self, header: Mapping[str, Any], unsaid: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Put new rows beside those that are there, under ``header``.

        Its versions and date are the new rows': a header says when the file was last measured into.

        Args:
            header: of the new rows.
            unsaid: as in ``check_origin``. What the file did not say of its rows stays unsaid.

        Raises:
            as ``check_origin``.
        """
        self.check_origin(header, unsaid)
        left_out = unsaid.keys() - self.header.keys() if self.rows else ()
        self.header = {name: value for name, value in header.items() if name not in left_out}

    def check_origin(
        self, header: Mapping[str, Any], unsaid: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Check that the rows that are there were measured where, and on what, new ones would be.

        Hardware, number format, weights and prompts are one for all rows of a file; what else
        differs stands in each row.

        Args:
            header: of the new rows.
            unsaid: what a header has to be taken for where it does not say it, as those of earlier
                versions do not.

        Raises:
            OptionError: they are of something else.
        """
        if not self.rows:
            return
        theirs, ours = _origin({**unsaid, **self.header}), _origin(header)
        for there, here in zip(theirs, ours, strict=True):
            if there != here:
                raise OptionError(
                    f"{self.path} holds rows of {there}, not of {here}. Hint: name another file."
                )

    def check_there(self, hint: str) -> None:
        """Check that there is a file to read, where nothing is measured into it.

        Raises:
            OptionError: there is none; ``hint`` says what to give.
        """
        if not self.path.exists():
            raise OptionError(f"there is no file of rows {self.path}. Hint: {hint}.")

    def typed(self, kind: Callable[..., Typed]) -> list[Typed]:
        """The rows as values of the dataclass ``kind``.

        Raises:
            OptionError: they are rows of something else.
        """
        try:
            return [kind(**row) for row in self.rows]
        except TypeError:
            raise self._something_else() from None

    def find(self, wanted: Callable[[Row], bool]) -> dict[str, Any] | None:
        """The first row that is ``wanted``."""
        return next((row for row in self.rows if wanted(row)), None)

    def put(self, row: Row, same: Callable[[Row], bool]) -> None:
        """Add ``row``, or replace the one that is the ``same``, and write the file.

        Raises:
            OutputError: the file cannot be written.
        """
        known = self.find(same)
        if known is not None:
            self.rows[self.rows.index(known)] = dict(row)
        else:
            self.rows.append(dict(row))
        self._write()

    def add(self, *rows: Row) -> None:
        """Add ``rows`` at the end and write the file.

        Raises:
            OutputError: the file cannot be written.
        """
        self.rows += map(dict, rows)
        self._write()

    def _write(self) -> None:
        # what a killed run left of its last row.
        clear_partial(self.path.parent, self.path.name)
        head = json.dumps(
            finite_json({"format": self._form, **self.header}), indent=1, ensure_ascii=False
        )
        lines = ",\n".join(
            "  " + json.dumps(finite_json(row), ensure_ascii=False, allow_nan=False)
            for row in self.rows
        )
        write_text(self.path, f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')

    def _something_else(self) -> OptionError:
        return OptionError(f"{self.path} holds no {self._kind}. Hint: name another file.")
