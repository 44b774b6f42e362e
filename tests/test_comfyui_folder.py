"""The folder that brings the nodes into ComfyUI, its commands, and the example workflows."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import comfyui_host as host
import comfyui_workflows
import pytest

from vidsparse.apps.cli import main
from vidsparse.apps.comfyui import NODE_CLASS_MAPPINGS
from vidsparse.apps.comfyui import folder as folder_of_nodes
from vidsparse.apps.comfyui.folder import remove_folder, write_folder
from vidsparse.errors import OptionError

EXAMPLES_AT = Path(folder_of_nodes.__file__).parent / "example_workflows"

SPARSE = NODE_CLASS_MAPPINGS["VidsparseModel"]


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    (tmp_path / "custom_nodes" / "another").mkdir(parents=True)
    return tmp_path


def load_as_comfyui_does(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("custom_nodes_x", folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def everything_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_the_folder_that_is_written_brings_the_nodes_and_the_workflows(comfyui: Path) -> None:
    folder = write_folder(comfyui)
    assert folder == comfyui / "custom_nodes" / "vidsparse"
    assert load_as_comfyui_does(folder).NODE_CLASS_MAPPINGS is NODE_CLASS_MAPPINGS
    written = {path.name: path.read_text("utf-8") for path in folder.glob("*/*.json")}
    assert written == comfyui_workflows.files()
    # once more is an update.
    assert write_folder(comfyui) == folder


def test_the_packages_own_folder_is_a_custom_node_as_it_stands() -> None:
    module = load_as_comfyui_does(EXAMPLES_AT.parent)
    assert module.NODE_CLASS_MAPPINGS.keys() == {"VidsparseModel", "VidsparseReport"}


def test_removing_leaves_what_was_there_before(comfyui: Path) -> None:
    before = everything_in(comfyui)
    folder = write_folder(comfyui)
    load_as_comfyui_does(folder)
    remove_folder(comfyui)
    assert everything_in(comfyui) == before


def test_removing_leaves_what_others_put_there(comfyui: Path) -> None:
    folder = write_folder(comfyui)
    (folder / "note.txt").write_text("mine")
    remove_folder(comfyui)
    assert everything_in(folder) == {"note.txt"}


def test_a_folder_of_others_is_left_alone(comfyui: Path) -> None:
    folder = comfyui / "custom_nodes" / "vidsparse"
    folder.mkdir()
    (folder / "__init__.py").write_text("mine = 1")
    for change in (write_folder, remove_folder):
        with pytest.raises(OptionError, match="was not written by"):
            change(comfyui)
    assert everything_in(folder) == {"__init__.py"}


def test_a_folder_that_is_no_comfyui_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="it has no folder custom_nodes"):
        write_folder(tmp_path)


def test_removing_what_is_not_there_is_refused(comfyui: Path) -> None:
    with pytest.raises(OptionError, match="the nodes are not installed there"):
        remove_folder(comfyui)


def test_without_the_package_the_folder_says_what_is_missing(comfyui: Path) -> None:
    # a python without site-packages.
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(write_folder(comfyui) / "__init__.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "vidsparse is not installed for the Python that runs ComfyUI" in done.stderr


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_the_commands_end_with_2_and_a_sentence_on_bad_input(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("comfyui", command, str(tmp_path)) == 2
    assert "is no ComfyUI" in capsys.readouterr().err


def test_the_commands_write_and_remove_the_folder(
    comfyui: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("comfyui", "install", str(comfyui)) == 0
    folder = comfyui / "custom_nodes" / "vidsparse"
    assert capsys.readouterr().out == f"{folder}\n"
    assert run_command("comfyui", "uninstall", str(comfyui)) == 0
    assert not folder.exists()


def run_command(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return int(stop.value.code or 0)


# ---- the workflows ----


def test_the_workflows_in_the_package_are_those_that_are_described() -> None:
    found = {path.name: path.read_text("utf-8") for path in EXAMPLES_AT.glob("*")}
    assert found == comfyui_workflows.files()


@pytest.mark.parametrize("name", comfyui_workflows.files())
def test_a_workflow_gives_its_nodes_what_they_take(name: str) -> None:
    graph = json.loads(comfyui_workflows.files()[name])
    nodes = {node["id"]: node for node in graph["nodes"]}
    for link, source, out, target, place, of in graph["links"]:
        assert link in nodes[source]["outputs"][out]["links"]
        assert nodes[source]["outputs"][out]["type"] in (of, "STRING")
        assert nodes[target]["inputs"][place]["link"] == link
    model = host.ModelPatcher(host.BaseModel(host.WanModel()))
    described = {**SPARSE.INPUT_TYPES()["required"], **SPARSE.INPUT_TYPES()["optional"]}
    for node in (one for one in graph["nodes"] if one["type"] == "VidsparseModel"):
        values = dict(zip(list(described)[1:], node["widgets_values"], strict=True))
        SPARSE().run(model, **values)
    kinds = [node["type"] for node in graph["nodes"]]
    assert kinds.count("VidsparseModel") == kinds.count("VidsparseReport") > 0
    assert ("LoraLoaderModelOnly" in kinds) == ("4_steps" in name)
