"""What the page costs: seconds to its first sight, and a generation beside the command line's."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the page needs the ui extra")

from page_server import client_of, free_port, served

from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.pipelines.video import write_video

timing = pytest.mark.skipif(
    not os.environ.get("VIDSPARSE_TIMINGS"),
    reason="a timing, for a quiet machine: set VIDSPARSE_TIMINGS=1",
)


@timing
@pytest.mark.slow
def test_the_first_page_is_ready_within_eight_seconds(tmp_path: Path) -> None:
    import httpx

    seconds = []
    for _ in range(3):
        port, began = free_port(), time.monotonic()
        command = [sys.executable, "-m", "vidsparse", "ui", "--port", str(port)]
        with subprocess.Popen(
            [*command, "--out", str(tmp_path / "o")], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == f"page: http://127.0.0.1:{port}/\n"
                page = httpx.get(f"http://127.0.0.1:{port}/")
                seconds.append(time.monotonic() - began)
            finally:
                process.terminate()
        assert page.status_code == 200
        assert process.returncode == 0
    print("seconds to the first page:", seconds)
    # other work on the machine is not the page's: the best of three.
    assert min(seconds) <= 8, seconds


@timing
@pytest.mark.slow
def test_a_generation_from_the_page_costs_little_more_than_the_command_line_s(
    tmp_path: Path,
) -> None:
    # the model's own size; fewer steps than a visitor would ask for, so the page weighs more.
    asked: dict[str, Any] = {
        "prompt": "a red ball",
        "steps": 6,
        "frames": 33,
        "width": 256,
        "height": 256,
    }
    with served(("shapes",), tmp_path / "out") as (_, url):
        client = client_of(url)
        # the page's own loading comes first: two threads cannot load at once.
        client.predict(api_name="/generate", **asked)
        loaded = load("shapes", device="cpu")

        def by_page() -> float:
            began = time.perf_counter()
            client.predict(api_name="/generate", **asked)
            return time.perf_counter() - began

        def by_command() -> float:
            # what the command does for each prompt once the model is loaded.
            began = time.perf_counter()
            made = generate(loaded, GenerateRequest(model="shapes", **asked))
            write_video(made.frames, tmp_path / "direct.mp4", 16)
            (tmp_path / "direct.json").write_text(json.dumps(made.record), encoding="utf-8")
            return time.perf_counter() - began

        by_page(), by_command()
        shares = []
        for number in range(6):
            # who goes first takes turns: a machine that slows down favours neither.
            pair = (by_page, by_command) if number % 2 else (by_command, by_page)
            seconds = {side: side() for side in pair}
            shares.append(seconds[by_page] / seconds[by_command])
    print(f"page over command: median {statistics.median(shares):.3f} of", sorted(shares))
    assert statistics.median(shares) <= 1.05
