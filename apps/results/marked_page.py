"""A Markdown page whose tables are written by a command and whose words are written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from vidsparse.errors import OptionError
from vidsparse.files import write_text

_PLACE = re.compile(r"(<!-- rows: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill_page(path: Path, tables: Mapping[str, str]) -> None:
    """Put each table between ``<!-- rows: NAME -->`` and ``<!-- end -->`` of the page.

    Places that no table is given for stay as they are.

    Raises:
        OptionError: the page cannot be read, or lacks the place of a table.
        OutputError: it cannot be written.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(
            f"the page {path} cannot be read: {reason}. Hint: --page takes a Markdown file that "
            "exists, such as docs/ablations.md."
        ) from None
    places = {match["name"] for match in _PLACE.finditer(text)}
    if missing := sorted(set(tables) - places):
        raise OptionError(
            f"{path} has no place for {', '.join(missing)}. "
            f"Hint: a line <!-- rows: {missing[0]} --> and, below it, <!-- end -->."
        )

    def written(match: re.Match[str]) -> str:
        table = tables.get(match["name"])
        return match[0] if table is None else f"{match[1]}\n{table.strip()}\n\n{match[3]}"

    write_text(path, _PLACE.sub(written, text))
