"""A tiny model whose folder brings settings of its own, and requests for its videos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_pipelines import WORDS, save_tiny_wan

from vidsparse.pipelines.request import GenerateRequest

CARD = {
    "name": "tiny",
    "description": "A tiny model for tests.",
    "license": "Apache-2.0",
    "frames": 5,
    "size": "48x32",
    "steps": 3,
    "guidance": 2.0,
    "fps": 8,
    "order": "columnmajor",
    "vocabulary": list(WORDS),
    "example_prompts": ["a red circle"],
}


def save_tiny_model(folder: Path) -> Path:
    """Save a tiny pipeline and its card in a folder."""
    save_tiny_wan(folder)
    (folder / "vidsparse.json").write_text(json.dumps(CARD), encoding="utf-8")
    return folder


def a_request(**changes: Any) -> GenerateRequest:
    """A request in the model's words."""
    return GenerateRequest(**{"prompt": "a red circle that moves right", **changes})
