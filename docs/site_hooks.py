"""What the site needs beside ``docs/``: pages of the repository's root, and the package's sources.

Forges show the pages of the root where they stand, so links in them are relative to the root. On
the site they lie beside the others, under lower-case names, and their links are turned accordingly.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parents[1]

ROOT_PAGES: Final = {
    "README.md": "index.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "DESIGN.md": "design.md",
}

# a Markdown link or an HTML attribute up to its address.
_LINK: Final = re.compile(r"(\]\(|(?:src|href)=\")((?:\.\./)*(?:[\w.-]+/)*[\w.-]+)")


def turned(text: str, folder: str) -> str:
    """``text`` of a page in ``folder`` (relative to the root), its links as the site needs them."""

    def address(match: re.Match[str]) -> str:
        opening, link = match.groups()
        target = (ROOT / folder / link).resolve()
        if not target.is_relative_to(ROOT):
            return match.group()
        inside = target.relative_to(ROOT).as_posix()
        if inside in ROOT_PAGES:
            depth = len(Path(folder).parts[1:])
            return opening + "../" * depth + ROOT_PAGES[inside]
        if not folder and inside.startswith("docs/"):
            return opening + inside.removeprefix("docs/")
        return match.group()

    return _LINK.sub(address, text)


# before mkdocstrings looks where its paths lead.
@event_priority(100)
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lay out the package as it is installed, from the source folders, for the reference."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        folders = tomllib.load(file)["tool"]["setuptools"]["package-dir"]
    package = ROOT / "build" / "reference"
    shutil.rmtree(package, ignore_errors=True)
    for name, folder in sorted(folders.items()):
        place = package.joinpath(*name.split("."))
        shutil.copytree(ROOT / folder, place, ignore=_all_but_python)
    return config


def _all_but_python(folder: str, names: list[str]) -> list[str]:
    here = Path(folder)
    return [
        name
        for name in names
        if name == "__pycache__" or not ((here / name).is_dir() or name.endswith(".py"))
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root."""
    for page, name in ROOT_PAGES.items():
        content = turned((ROOT / page).read_text(encoding="utf-8"), "")
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links from pages of ``docs/`` to those of the root."""
    if page.file.generated_by:
        return markdown
    return turned(markdown, (Path("docs") / page.file.src_uri).parent.as_posix())
