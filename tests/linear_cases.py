"""What tests of linear layers in another number format share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from vidsparse.apps.cli import main

LAYERS_OF_A_BLOCK = 10
"""Wan's: four of each attention, two of the feed-forward."""


def compared(model: Path, folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The report of `vidsparse compare` on a prompt and a tiny video, and what was printed."""
    prompts, out = folder / "prompts.txt", folder / "out"
    prompts.write_text("a red circle\n", encoding="utf-8")
    video = ("--frames", "9", "--size", "32x32", "--device", "cpu")
    result = CliRunner().invoke(
        main,
        ["compare", str(prompts), "--model", str(model), *video, "--out", str(out), *options],
    )
    assert result.exit_code == 0, result.output
    (file,) = out.glob("*/report.json")
    return json.loads(file.read_text(encoding="utf-8")), result.output
