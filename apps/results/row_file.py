"""Rows of measurements in a JSON file, one a line, written after every row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from vidsparse.errors import OptionError
from vidsparse.files import clear_partial, parse_json, write_text
from vidsparse.report import finite_json

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


class RowFile:
    """The rows measured so far.

    Neither ``json`` nor a table library writes it so: a header, then one row a line, so that a
    committed file has a readable diff; and the whole file anew after each row, so that a run that
    is killed loses nothing.

    Args:
        path: the file; it need not exist.
        form: name and version of the format, the value of ``format`` in the file.
        kind: what the file holds, for the error.
        fresh: begin anew whatever the file holds.
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
        fresh: bool = False,
        unnamed: bool = False,
        keys: frozenset[str] = frozenset(),
    ) -> None:
        self.path = path
        self._form = form
        self._kind = kind
        self.rows: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {}
        if fresh or not path.exists():
            return
        try:
            document = parse_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise OptionError(
                f"{path} cannot be read as JSON: {error}. Hint: name another file."
            ) from None
        if not isinstance(document, dict):
            raise self._something_else()
        named = document.pop("format", form if unnamed else None)
        rows = document.pop("rows", None)
        if named != form or not isinstance(rows, list):
            raise self._something_else()
        if not all(isinstance(row, dict) and row.keys() >= keys for row in rows):
            raise self._something_else()
        self.rows = rows
        self.header = document

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
