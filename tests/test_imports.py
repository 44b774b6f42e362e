"""What importing costs, and which room may import which. Fresh interpreters throughout."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "diffusers", "triton", "gradio", "transformers", "numpy", "matplotlib")

# rooms from the bottom up: a file imports its own room and those below.
ROOMS = {"kernels": 0, "vidsparse": 1, "pipelines": 2, "apps": 3}
# python -m vidsparse is the command line by another name.
ENTRY_POINTS = {"vidsparse/__main__.py"}


def fresh(code: str, *, cwd: Path | None = None, timeout: float = 120) -> str:
    """What ``code`` prints in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- what a light import loads ----


@pytest.mark.parametrize(
    "module", ["vidsparse", "vidsparse.errors", "vidsparse.kernels", "vidsparse.pipelines"]
)
def test_a_light_import_loads_nothing_heavy(module: str, tmp_path: Path) -> None:
    code = f"import {module}, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert fresh(code, cwd=tmp_path) == "[]"


def test_import_vidsparse_is_quick(tmp_path: Path) -> None:
    # processor time, and the best of three: other work on the machine is not the import's.
    code = (
        "import time; began = time.process_time(); import vidsparse; "
        "print(time.process_time() - began)"
    )
    assert min(float(fresh(code, cwd=tmp_path)) for _ in range(3)) < 0.3


def test_core_and_kernels_load_neither_diffusers_nor_triton(tmp_path: Path) -> None:
    code = (
        "import sys, torch, vidsparse as v, vidsparse.kernels.dispatch; "
        "v.attend(*[torch.randn(1, 1, 32, 64)] * 3, v.TokenGrid(2, 4, 4)); "
        "print([m for m in ('diffusers', 'transformers', 'triton', 'gradio') if m in sys.modules])"
    )
    assert fresh(code, cwd=tmp_path) == "[]"


# ---- names ----


@pytest.mark.parametrize(
    "module",
    ["vidsparse", "vidsparse.kernels", "vidsparse.methods", "vidsparse.pipelines"],
)
def test_every_public_name_resolves(module: str) -> None:
    loaded = importlib.import_module(module)
    assert len(loaded.__all__) == len(set(loaded.__all__))
    for name in loaded.__all__:
        assert getattr(loaded, name) is not None


def test_the_public_names_of_the_package() -> None:
    import vidsparse

    assert set(dir(vidsparse)) == set(vidsparse.__all__)
    # what is public stays so: removing a name is a breaking change, adding one a decision.
    assert vidsparse.__all__ == [
        "METHODS",
        "ORDERS",
        "AttentionEngine",
        "CallSite",
        "ModelError",
        "OptionError",
        "OutputError",
        "Schedule",
        "SparseHandle",
        "SparsePlan",
        "TokenGrid",
        "TokenOrder",
        "Trace",
        "UnsupportedError",
        "VidsparseError",
        "__version__",
        "attend",
        "make_method",
        "sparsify",
        "token_order",
    ]


def test_an_unknown_name_is_an_attribute_error() -> None:
    import vidsparse

    with pytest.raises(AttributeError, match="no attribute 'sparsifi'"):
        vidsparse.sparsifi  # noqa: B018


# ---- started in the checkout ----

# as after a plain install elsewhere: no editable finder, and no installed vidsparse.
ONLY_THE_CHECKOUT = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")
                    and "__editable__" not in getattr(f, "__name__", "")]
"""


@pytest.mark.skipif(not (ROOT / "kernels").is_dir(), reason="not a checkout")
def test_the_checkout_alone_finds_its_sister_folders() -> None:
    code = ONLY_THE_CHECKOUT + (
        "import vidsparse.kernels, vidsparse.apps, vidsparse.pipelines; "
        "print([m.__file__ for m in (vidsparse.kernels, vidsparse.apps, vidsparse.pipelines)])"
    )
    expected = [str(ROOT / room / "__init__.py") for room in ("kernels", "apps", "pipelines")]
    assert fresh(code, cwd=ROOT) == repr(expected)


@pytest.mark.skipif(not (ROOT / "kernels").is_dir(), reason="not a checkout")
def test_kernels_imports_under_its_plain_name_without_vidsparse() -> None:
    # transformers imports `kernels` by that name when python starts in this folder.
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vidsparse":
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import json, kernels
light = "torch" not in sys.modules
reason = kernels.support("triton", "cpu", __import__("torch").float32, 64)
leaked = [m for m in sys.modules if m.split(".")[0] == "vidsparse"]
print(json.dumps([kernels.__file__, light, reason, leaked]))
"""
    file, light, reason, leaked = json.loads(fresh(code, cwd=ROOT))
    assert Path(file) == ROOT / "kernels" / "__init__.py"
    assert light
    assert reason == "runs on CUDA devices, not on cpu"
    assert leaked == []


@pytest.mark.skipif(not (ROOT / "kernels").is_dir(), reason="not a checkout")
def test_diffusers_imports_with_the_checkout_as_current_folder() -> None:
    pytest.importorskip("diffusers")
    code = "from diffusers import WanPipeline; print(WanPipeline.__name__)"
    assert fresh(code, cwd=ROOT).endswith("WanPipeline")


# ---- one way: apps -> pipelines -> vidsparse -> kernels ----


def _is_type_checking(node: ast.If) -> bool:
    test = node.test
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run: what stands under TYPE_CHECKING does not."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and _is_type_checking(child):
            for other in child.orelse:
                yield other
                yield from _nodes(other)
            continue
        yield child
        yield from _nodes(child)


def imported(source: str, module: str, *, is_package: bool) -> set[str]:
    """Dotted names that a file imports, relative ones resolved, lazy ones by string too."""
    parts = module.split(".")
    package = parts if is_package else parts[:-1]
    found = set()
    for node in _nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found.update(f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            first = node.args[0] if node.args else None
            if name == "import_module" and isinstance(first, ast.Constant):
                found.add(str(first.value))
    return found


def room_of(dotted: str) -> str | None:
    """The room a dotted name belongs to, None for other people's packages."""
    parts = dotted.split(".")
    if parts[0] in ("kernels", "pipelines", "apps"):
        return parts[0]
    if parts[0] != "vidsparse":
        return None
    if len(parts) == 1 or parts[1] not in ROOMS:
        # the package's lazy names live in other rooms.
        import vidsparse

        home = vidsparse._LAZY.get(parts[1], "") if len(parts) == 2 else ""
        return "pipelines" if home.startswith("vidsparse.pipelines") else "vidsparse"
    return parts[1]


def violations(source: str, path: Path) -> list[str]:
    """Imports of ``path`` (relative to the root) that climb, or that name a room by itself."""
    room = path.parts[0]
    inside = [*path.with_suffix("").parts]
    if inside[-1] == "__init__":
        inside.pop()
    module = ".".join(inside if room == "vidsparse" else ["vidsparse", *inside])
    wrong = []
    for name in sorted(imported(source, module, is_package=path.name == "__init__.py")):
        target = room_of(name)
        if target is None:
            continue
        if ROOMS[target] > ROOMS[room]:
            wrong.append(f"{path} imports {name}: {room} must not import {target}")
        elif name.split(".")[0] in ("kernels", "pipelines", "apps"):
            wrong.append(f"{path} imports {name}: write vidsparse.{name}")
    return wrong


def sources() -> list[Path]:
    return sorted(
        path.relative_to(ROOT)
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if path.relative_to(ROOT).as_posix() not in ENTRY_POINTS
    )


@pytest.mark.parametrize("path", sources(), ids=str)
def test_imports_run_one_way(path: Path) -> None:
    assert violations((ROOT / path).read_text(encoding="utf-8"), path) == []


def test_all_rooms_were_read() -> None:
    assert {path.parts[0] for path in sources()} == set(ROOMS)


@pytest.mark.parametrize("path", [p for p in sources() if p.parts[0] == "kernels"], ids=str)
def test_kernels_imports_relatively_and_never_the_core(path: Path) -> None:
    """Under its plain name the folder has no ``vidsparse`` around it."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level <= 1, "a relative import above the room"
            assert node.level == 1 or (node.module or "").split(".")[0] != "vidsparse"
        elif isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] != "vidsparse" for alias in node.names)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("kernels/a.py", "from vidsparse.masks import tile_count"),
        ("kernels/a.py", "import vidsparse"),
        ("vidsparse/a.py", "from vidsparse.pipelines import sparsify"),
        ("vidsparse/a.py", "from vidsparse import sparsify"),
        ("vidsparse/a.py", "from . import pipelines"),
        ("vidsparse/methods/a.py", "from ..apps.cli import main"),
        ("vidsparse/a.py", "def f():\n    import vidsparse.apps.cli"),
        ("vidsparse/a.py", "importlib.import_module('vidsparse.apps')"),
        ("pipelines/a.py", "from vidsparse.apps import cli"),
        ("apps/a.py", "from kernels import support"),
        ("apps/a.py", "import pipelines"),
    ],
)
def test_the_check_sees_an_import_that_climbs(path: str, line: str) -> None:
    assert len(violations(line, Path(path))) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("kernels/a.py", "from .dispatch import support\nimport torch"),
        ("vidsparse/a.py", "from vidsparse.kernels import support\nfrom vidsparse import attend"),
        ("vidsparse/a.py", "if TYPE_CHECKING:\n    from vidsparse.pipelines import sparsify"),
        ("pipelines/a.py", "from vidsparse.attention import attend\nimport diffusers"),
        ("apps/a.py", "from vidsparse import sparsify\nfrom . import cli"),
    ],
)
def test_the_check_lets_a_good_import_pass(path: str, line: str) -> None:
    assert violations(line, Path(path)) == []
