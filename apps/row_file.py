"""Rows of measurements in a JSON file, one a line, written after every row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vidsparse.apps.run_folder import write_text
from vidsparse.errors import OptionError
from vidsparse.report import finite_json

Row = Mapping[str, Any]


class RowFile:
    """The rows measured so far.

    Args:
        path: the file; it need not exist.
        form: name and version of the format, the value of ``format`` in the file.
        kind: what the file holds, for the error.

    Raises:
        OptionError: it exists and holds something else.
    """

    def __init__(self, path: Path, form: str, kind: str) -> None:
        self.path = path
        self._form = form
        self.rows: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {}
        if not path.exists():
            return
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OptionError(
                f"{path} cannot be read as JSON: {error}. Hint: name another file."
            ) from None
        if not isinstance(document, dict) or document.get("format") != form:
            raise OptionError(f"{path} holds no {kind}. Hint: name another file.")
        self.rows = document.pop("rows")
        del document["format"]
        self.header = document

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
        head = json.dumps(
            finite_json({"format": self._form, **self.header}), indent=1, ensure_ascii=False
        )
        lines = ",\n".join(
            "  " + json.dumps(finite_json(row), ensure_ascii=False, allow_nan=False)
            for row in self.rows
        )
        write_text(self.path, f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')
