"""The pages: files and names that they mention exist, and every public name is in the reference."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FOLDERS = "vidsparse|kernels|pipelines|apps|tests|docs|examples|\\.ci|\\.github"

# `kernels/attention/gates.py`, tests/budget.py: a path from the root, in prose or in code.
_PATH = re.compile(rf"(?<![\w./<:-])(?:{FOLDERS})/[\w./-]*\w/?")
# a name in capitals stands for whatever is added.
_PLACEHOLDER = re.compile(r"NAME|MODEL")
# `vidsparse.presets.load_preset`.
_NAME = re.compile(r"(?<![\w./-])vidsparse(?:\.[A-Za-z_]\w*)+")
FILES = {"vidsparse.json", "vidsparse.md"}
_IN_REFERENCE = re.compile(r"^::: ([\w.]+)$", re.M)


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# a changelog tells of files that were, too.
@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=page_id)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = {
        path for path in _PATH.findall(page.read_text("utf-8")) if not _PLACEHOLDER.search(path)
    }
    places = (ROOT, page.parent)
    missing = [path for path in sorted(named) if not any((at / path).exists() for at in places)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_name_that_a_page_uses_resolves(page: Path) -> None:
    names = set(_NAME.findall(page.read_text("utf-8")))
    for name in sorted(names - FILES):
        resolve(name)


def resolve(name: str) -> object:
    """The module, or the attribute of one, that ``name`` stands for."""
    parts = name.split(".")
    value: object = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 2):
        if hasattr(value, part):
            value = getattr(value, part)
        else:
            value = importlib.import_module(".".join(parts[:place]))
    return value


@pytest.mark.parametrize(
    "module",
    [
        "vidsparse",
        "vidsparse.calibration",
        "vidsparse.kernels",
        "vidsparse.methods",
        "vidsparse.pipelines",
    ],
)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    told = {
        id(resolve(name))
        for page in (DOCS / "reference").glob("*.md")
        for name in _IN_REFERENCE.findall(page.read_text("utf-8"))
    }
    loaded = importlib.import_module(module)
    # the errors stand in the reference as the module that documents them all.
    public = {
        name: getattr(loaded, name)
        for name in loaded.__all__
        if not name.endswith("Error") and not name.startswith("__")
    }
    assert [name for name, value in public.items() if id(value) not in told] == []


def test_every_video_transformer_of_diffusers_is_named_as_taken_or_left_out() -> None:
    import diffusers.models.transformers as hosts

    # classes that make images, for all their name.
    images = {"JoyImageEditTransformer3DModel", "JoyImageEditPlusTransformer3DModel"}
    video = {name for name in vars(hosts) if "Transformer3D" in name} | {"Cosmos3OmniTransformer"}
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    assert len(video) > 25
    assert [name for name in sorted(video - images) if f"`{name}`" not in page] == []
