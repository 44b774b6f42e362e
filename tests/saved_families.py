"""Saved tiny pipelines of every family, and requests for videos of them: fixtures.

A pipeline is saved and loaded once for all tests of a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_families import TINY
from tiny_hunyuan import hunyuan_image_to_video, with_little_text
from tiny_parts import IMAGE

from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.models import LoadedPipeline, load
from vidsparse.pipelines.request import GenerateRequest

BUILDERS: dict[str, Callable[[], Any]] = {
    **{name: tiny.build for name, tiny in TINY.items()},
    "hunyuan-image": lambda: hunyuan_image_to_video("token_replace", towers=True),
    "hunyuan-image-concat": lambda: hunyuan_image_to_video("latent_concat", towers=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("models") / name
            BUILDERS[name]().save_pretrained(made[name])
        return made[name]

    return folder


Opened = Callable[..., LoadedPipeline]


@pytest.fixture(scope="module")
def opened(folders: Callable[[str], Path]) -> Opened:
    made: dict[tuple[str, bool], LoadedPipeline] = {}

    def load_once(name: str, *, image: bool = False) -> LoadedPipeline:
        if (name, image) not in made:
            made[name, image] = load(folders(name), device="cpu", image=image)
            if "hunyuan15" in name:
                with_little_text(made[name, image].pipe)
        return made[name, image]

    return load_once


@pytest.fixture
def image(tmp_path: Path) -> str:
    IMAGE.save(tmp_path / "first.png")
    return str(tmp_path / "first.png")


def a_request(**changes: Any) -> GenerateRequest:
    small = {"frames": 9, "width": 64, "height": 64, "steps": 3}
    return GenerateRequest(**{"prompt": "a red circle", "method": "fg-attn", **small, **changes})


def check_made(loaded: LoadedPipeline, request: GenerateRequest, frames: int) -> dict[str, Any]:
    """Generate twice, dense and sparse; the sparse record."""
    assert request.width is not None
    assert request.height is not None
    told: list[tuple[int, int]] = []
    dense = generate(loaded, replace(request, method="dense", method_options={}))
    made = generate(loaded, request, progress=lambda step, steps, _: told.append((step, steps)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert made.frames.shape == dense.frames.shape == (frames, request.height, request.width, 3)
    assert made.record["notes"] == []
    assert made.record["selected"] is not None
    assert made.record["times"]["denoise"] > 0
    assert len(made.record["density_map"]) == 3
    json.dumps(made.record)
    return made.record
