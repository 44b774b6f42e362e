"""A folder of videos is of one model as it is: what was trained or fetched anew gets another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from saved_families import a_request

from vidsparse.errors import ModelError
from vidsparse.pipelines import weights as digests
from vidsparse.pipelines.request import GenerateRequest, settings_hash

pytest_plugins = ["saved_families"]


@pytest.fixture
def request_of(folders: Callable[[str], Path], tmp_path: Path) -> Callable[..., GenerateRequest]:
    """Requests of a model in a folder of its own."""
    shutil.copytree(folders("wan"), tmp_path / "model")
    return lambda **more: a_request(model=str(tmp_path / "model"), device="cpu", **more)


def weights(path: Path, value: float) -> Path:
    save_file({"a": torch.full((4,), value)}, path)
    return path


def test_a_lora_is_what_it_says_not_where_it_lies(
    request_of: Callable[..., GenerateRequest], tmp_path: Path
) -> None:
    lora = weights(tmp_path / "style.safetensors", 1.0)
    first = settings_hash(request_of(lora=str(lora)))
    (tmp_path / "loras").mkdir()
    moved = weights(tmp_path / "loras" / "moved.safetensors", 1.0)
    assert settings_hash(request_of(lora=str(moved))) == first
    weights(lora, 2.0)
    assert settings_hash(request_of(lora=str(lora))) != first
    assert settings_hash(request_of(lora="~nobody/style")) != first
    # a folder with one file.
    within = settings_hash(request_of(lora=str(tmp_path / "loras")))
    weights(moved, 3.0)
    assert settings_hash(request_of(lora=str(tmp_path / "loras"))) != within


@pytest.mark.parametrize("large", [False, True])
def test_weights_that_changed_in_their_place_are_another_model(
    request_of: Callable[..., GenerateRequest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    large: bool,
) -> None:
    if large:
        monkeypatch.setattr(digests, "_READ_QUICKLY", 0)
    (path,) = (tmp_path / "model" / "transformer").glob("*.safetensors")
    first = settings_hash(request_of())
    assert settings_hash(request_of()) == first
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    # as fast as a file system tells.
    os.utime(path, ns=(1, 1))
    assert settings_hash(request_of()) != first
    assert settings_hash(request_of()) == settings_hash(request_of())


def test_a_scheduler_that_changed_is_another_model_and_what_a_card_tells_is_not(
    request_of: Callable[..., GenerateRequest], tmp_path: Path
) -> None:
    first = settings_hash(request_of())
    (tmp_path / "model" / "vidsparse.json").write_text('{"description": "Mine."}', "utf-8")
    assert settings_hash(request_of()) == first
    config = tmp_path / "model" / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text("utf-8").replace("{", '{"note": 1,', 1), "utf-8")
    assert settings_hash(request_of()) != first


def test_weights_that_cannot_be_read_are_named(
    request_of: Callable[..., GenerateRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = weights(tmp_path / "style.safetensors", 1.0)

    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(digests, "file_hash", refuse)
    with pytest.raises(ModelError, match="cannot be read: Permission denied"):
        settings_hash(request_of(lora=str(lora)))
