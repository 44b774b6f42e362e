"""The comparison that the page opens with, before anybody has run anything.

Its files lie in ``opening/`` and are part of the package. ``python -m vidsparse.apps.page.opening``
makes them anew, as the Compare tab does: both videos, then both again in turns for the speed.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from vidsparse.apps.page.queue import Job
from vidsparse.apps.page.tasks import Clip, Pair, compare, make_in_turns
from vidsparse.apps.page.workbench import Workbench
from vidsparse.files import parse_json, write_text, write_whole
from vidsparse.metrics import FrameQuality, VideoQuality
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.pipelines.video import read_video, write_video
from vidsparse.speedup import TimedPair

FOLDER: Final = Path(__file__).parent / "opening"

PROMPT: Final = "a large red ball that moves right on a plain navy background"

_RATE_FACTOR: Final = 24

# what the page shows of a record.
_KEPT = (
    "work", "total", "selected", "computed", "steps", "density_map", "implementation", "times",
    "device", "versions", "options",
)  # fmt: skip


def opening() -> Pair:
    """The comparison, as the page's own are."""
    document = parse_json((FOLDER / "pair.json").read_bytes())
    clips = {}
    for side in ("dense", "sparse"):
        record = document[side]
        request = GenerateRequest(prompt=document["prompt"], **record["options"])
        video = FOLDER / "panels.mp4"
        clips[side] = Clip(request=request, record=record, video=video, poster=video)
    quality = dict(document["quality"])
    frames = tuple(FrameQuality(**each) for each in quality.pop("frames"))
    return Pair(
        dense=clips["dense"],
        sparse=clips["sparse"],
        quality=VideoQuality(frames=frames, **quality),
        panels=FOLDER / "panels.mp4",
        heads=document["heads"],
        timed=tuple(TimedPair(**each) for each in document["timed"]),
    )


def make(folder: Path) -> None:
    """Make the files anew, on the CPU; a few minutes on two cores."""
    bench = Workbench("cpu")
    request = GenerateRequest(prompt=PROMPT, method="foresight", device="cpu")
    with TemporaryDirectory() as made:
        pair: Pair = _done(Job(compare(request, Path(made) / "opening")), bench)
        fps = pair.sparse.request.fps
        assert fps is not None
        # it stands on the first screen, and is a part of the package: in fewer bytes.
        less = pair.panels.with_name("less.mp4")
        write_video(read_video(pair.panels), less, fps, rate_factor=_RATE_FACTOR)
        panels = less.read_bytes()
    pair = _done(Job(make_in_turns(pair)), bench)
    folder.mkdir(exist_ok=True)
    write_whole(folder / "panels.mp4", panels)
    document = {
        "prompt": PROMPT,
        "quality": _rounded(asdict(pair.quality)),
        "timed": _rounded([asdict(each) for each in pair.timed]),
        "heads": _rounded(pair.heads),
        **{
            side: {name: _rounded(clip.record[name]) for name in _KEPT}
            for side, clip in (("dense", pair.dense), ("sparse", pair.sparse))
        },
    }
    write_text(folder / "pair.json", json.dumps(document) + "\n")


def _done(job: Job[Workbench, Any], bench: Workbench) -> Any:
    job.run(bench, bench.device)
    if job.error is not None:
        raise job.error
    return job.result


def _rounded(value: Any) -> Any:
    """The same with four decimals, which is more than is shown."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    make(FOLDER)
