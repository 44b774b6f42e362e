"""Memory that runs out: the prompt ends with advice, and the next request runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fault_runs import Commands, Limit

from vidsparse import TokenGrid, attend, room
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


# ---- asked before it is taken ----


def test_a_plan_that_would_not_fit_is_refused_before_it_is_made(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text("a red circle\n", encoding="utf-8")
    commands = Commands(tmp_path)
    given = (
        "generate", "one.txt", "--model", str(tiny_model), "--steps", "1", "--dense-steps", "0",
        "--device", "cpu", "--method", "fg-attn", "--tile", "16x1", "--frames", "129", "--out", "o",
    )  # fmt: skip
    # a mask of 2,112 x 33,792 tiles.
    ended = commands.run((*given, "--size", "512x512"), setup=Limit(300))
    assert ended.status == 1, ended
    assert "the memory of this machine is too small for 129 frames of 512x512: mask" in ended.said
    assert "33,792 tokens and 2 heads in tiles of 16x1 alone take 1.0" in ended.said
    assert "Hint: try " in ended.said
    assert "Traceback" not in ended.said


def test_a_plan_without_room_is_said_with_as_many_frames_as_have_some(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny_model, device="cpu")
    request = GenerateRequest(
        prompt="a red circle", method="fg-attn", frames=33, width=64, height=64, steps=2,
        guidance=3.0, dense_steps=0, device="cpu",
    )  # fmt: skip
    asked = 0

    def little(device: torch.device) -> int:
        nonlocal asked
        asked += 1
        return 600

    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr(room, "free_bytes", little)
        with pytest.raises(
            UnsupportedError,
            match=r"^the memory of this machine is too small for 33 frames of 64x64: mask, plan and"
            r" means of 144 tokens .* are free\. Hint: try (5|9|13|17) frames, a smaller size or a",
        ):
            generate(loaded, request)
    assert asked == 1
    assert generate(loaded, request).frames.shape[0] == 33


def test_attend_says_what_there_is_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 2, 300, 64) for _ in range(3))
    monkeypatch.setattr(room, "free_bytes", lambda device: 1000)
    with pytest.raises(UnsupportedError, match=r"too small for mask, plan and means of 300 tokens"):
        attend(q, k, v, TokenGrid(3, 10, 10), "fg-attn")


_PEAK = """
import re, sys, torch
from pathlib import Path
from vidsparse import CallSite, TokenGrid, make_method
from vidsparse.planning import key_means, plan_attention
from vidsparse.room import planning_bytes
from vidsparse.route import find_route
torch.set_num_threads(1)
grid = TokenGrid(8, 30, 40)
def now(name):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(name + r":\\s*(\\d+)", status)[1])
def plan(grid, heads):
    q, k, v = (torch.randn(1, heads, grid.tokens, 32) for _ in range(3))
    method = make_method(sys.argv[1], **eval(sys.argv[2]))
    site = CallSite(0, 0, 0.0, grid)
    route = find_route(method, q, k, v)
    # the most from now on.
    Path("/proc/self/clear_refs").write_text("5")
    before = now("VmRSS")
    made = plan_attention(method, q, k, site, route, v)
    if method.means is not None:
        counts = made.left_out(method.means, by_kernel=False)
        means = key_means(k, v, counts, method.means, grid.video, by_kernel=False)
    lists = made.list_keys(by_kernel=False)
    return planning_bytes(method, q, route), now("VmHWM") - before
plan(TokenGrid(1, 8, 8), 1)
print(*plan(grid, 8))
"""


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fg-attn", {"tile": "16x1", "means": None}),
        ("fg-attn", {"tile": "16x8"}),
        ("foresight", {}),
        ("fg-attn", {"tile": "16x1", "top_p": None, "topk": 0.1}),
        ("xattention", {}),
    ],
    ids=str,
)
def test_an_estimate_is_no_more_than_what_is_taken(method: str, options: dict[str, object]) -> None:
    command = [sys.executable, "-c", _PEAK, method, repr(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    estimate, taken = map(int, done.stdout.split())
    # what a process takes it takes by pages, and some of it has been taken before.
    assert 0 < estimate <= taken + 2**21
