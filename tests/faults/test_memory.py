"""Memory that runs out: the prompt ends with advice, and the next request runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from fault_runs import Commands, Limit

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory"),
]


def test_a_request_that_does_not_fit_into_memory_ends_with_advice(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "two.txt").write_text("a red circle\na blue square\n", encoding="utf-8")
    commands = Commands(tmp_path)
    given = ("generate", "two.txt", "--model", str(tiny_model), "--steps", "2", "--device", "cpu")
    large = ("--frames", "253", "--size", "1024x1024")
    ended = commands.run((*given, *large, "--out", "o"), setup=Limit(400))
    assert ended.status == 1, ended
    assert "Traceback" not in ended.said
    assert "Error: prompt 0002 failed: the memory of this machine is too small" in ended.said
    assert "253 frames of 1024x1024. Hint: try 125 frames or a smaller size." in ended.said
    assert not list(tmp_path.rglob("*.mp4"))
    # under the same limit smaller videos are made.
    small = ("--frames", "5", "--size", "32x32")
    ended = commands.run((*given, *small, "--out", "o"), setup=Limit(400))
    assert ended.status == 0, ended.said


@pytest.mark.parametrize("error", ["OutOfMemoryError", "MemoryError"])
@pytest.mark.parametrize("method", ["dense", "fg-attn", "foresight"])
def test_a_pipeline_that_ran_out_of_memory_makes_the_next_video_as_ever(
    method: str, error: str, tiny_model: Path
) -> None:
    loaded = load(tiny_model, device="cpu")
    request = GenerateRequest(
        prompt="a red circle", method=method, frames=9, width=64, height=64, steps=3,
        guidance=3.0, dense_steps=0, device="cpu",
    )  # fmt: skip
    before = generate(loaded, request).frames
    calls = 0

    def allocate(module: object, args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise {"OutOfMemoryError": torch.OutOfMemoryError, "MemoryError": MemoryError}[error]

    hook = loaded.pipe.transformer.blocks[1].register_forward_pre_hook(allocate)
    with pytest.raises(
        UnsupportedError, match=r"memory.* is too small for 9 frames of 64x64.*try 5 frames"
    ):
        generate(loaded, request)
    hook.remove()
    assert (generate(loaded, request).frames == before).all()
