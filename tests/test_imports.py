"""What importing costs and what it finds. Fresh interpreters throughout."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "diffusers", "triton", "gradio", "transformers", "numpy", "matplotlib")


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


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "kernels").is_dir(), reason="not a checkout")
def test_diffusers_imports_with_the_checkout_as_current_folder() -> None:
    pytest.importorskip("diffusers")
    code = "from diffusers import WanPipeline; print(WanPipeline.__name__)"
    assert fresh(code, cwd=ROOT).endswith("WanPipeline")


# ---- what import-linter does not see: its contracts are in pyproject.toml, .ci/run keeps them ----


@pytest.mark.skipif(not (ROOT / "kernels").is_dir(), reason="not a checkout")
def test_kernels_imports_relatively() -> None:
    """Under its plain name the folder has no ``vidsparse`` around it."""
    files = sorted((ROOT / "kernels").rglob("*.py"))
    assert len(files) > 10
    absolute = re.compile(r"^\s*(from|import)\s+vidsparse\b", re.MULTILINE)
    assert [path for path in files if absolute.search(path.read_text("utf-8"))] == []


def test_no_file_of_the_tests_imports_a_test_file() -> None:
    # what two of them need stands in a helper: an imported test file is one that runs twice.
    statement = re.compile(r"^\s*(?:from|import)\s+test_\w+.*$", re.MULTILINE)
    files = sorted(Path(__file__).parent.rglob("*.py"))
    assert len(files) > 100
    found = {file.name: statement.findall(file.read_text("utf-8")) for file in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_names_that_load_late_come_from_where_type_checkers_see_them() -> None:
    # a name in a string is no import to the linter; the same names under TYPE_CHECKING are.
    import vidsparse
    from vidsparse import kernels

    for package, homes, dot in ((vidsparse, vidsparse._LAZY, ""), (kernels, kernels._HOMES, ".")):
        source = Path(str(package.__file__)).read_text("utf-8")
        seen = source[source.index("if TYPE_CHECKING:") :]
        for name, home in homes.items():
            statement = rf"    from {re.escape(dot + home)} import (\([^)]*|[\w, ]*)\b{name}\b"
            assert re.search(statement, seen), name


def test_families_name_files_of_their_own_folder() -> None:
    from vidsparse.pipelines.families import FAMILIES

    for family in FAMILIES:
        assert importlib.util.find_spec(f"vidsparse.pipelines.{family.adapter}"), family.name
