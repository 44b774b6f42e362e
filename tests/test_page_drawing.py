"""What the page draws of texts and jobs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from vidsparse.apps.page.queue import Snapshot


def test_texts_of_visitors_are_escaped() -> None:
    from vidsparse.apps.page import draw

    evil = "<img src=x onerror=alert(1)>\"'"
    for page in (draw.alert(evil), draw.note(evil), draw.links([(evil, Path(f"/o/{evil}"))])):
        assert "<img" not in page
        assert "&lt;img" in page


def test_the_status_says_where_a_job_is() -> None:
    from vidsparse.apps.page import draw

    base = Snapshot(
        job="a1", state="waiting", ahead=2, phase="dense", done=0.0, step=0, steps=0, elapsed=0.0,
        left=None, stopping=False,
    )  # fmt: skip
    assert "2 jobs before yours" in draw.status(base)
    running = dataclasses.replace(
        base, state="running", step=3, steps=8, done=0.375, elapsed=2.0, left=100.0
    )
    page = draw.status(running, warnings=["careful"])
    for words in (
        "Dense",
        "step 3 / 8",
        "2 s so far",
        "about 2 min left",
        'aria-valuenow="38"',
        "careful",
    ):
        assert words in page
    placed = dataclasses.replace(running, place="prompt 2 of 5, setting 3 of 4")
    assert "prompt 2 of 5, setting 3 of 4 · step 3 / 8" in draw.status(placed)
    # loading has no steps, and its bar no value.
    loading = draw.status(dataclasses.replace(running, phase="loading shapes", steps=0, done=0.0))
    assert "Loading shapes" in loading
    assert "vs-bar busy" in loading
    assert "aria-valuenow" not in loading
    stopping = dataclasses.replace(running, stopping=True)
    assert "Stopping after this step" in draw.status(stopping)
    decoding = draw.status(dataclasses.replace(stopping, step=8))
    assert "<b>Stopping</b>" in decoding
    cancelled = dataclasses.replace(running, state="cancelled")
    assert "at step 3 / 8; your settings and videos are kept" in draw.status(cancelled)
    assert "ready" in draw.status(dataclasses.replace(running, state="done"), "It is ready")
