"""Does the small model draw what its prompt says? Colour and direction, read from the frames.

    python -m vidsparse.apps.small_model.fidelity --model FOLDER --device cuda

Generates the 24 held-out prompts (combinations of colour, shape and direction that training never
drew) with the stock pipeline, and reads the colour of the object and the direction of its motion
from the decoded frames alone. Bar: both right in at least 22 of 24.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .registry import small_model_of
from .text import caption
from .world import COLOURS, held_out_scenes

BAR = 22
_DIRECTIONS = {
    (0, 1): "moves right",
    (0, -1): "moves left",
    (1, 1): "moves down",
    (1, -1): "moves up",
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a clip shows: the object's colour and motion, or "none" where nothing moves."""

    colour: str
    motion: str


def read_clip(frames: np.ndarray) -> Reading:
    """Read colour and direction of the one moving object in RGB bytes [T, H, W, 3].

    The median over time is the background, because a body in straight motion covers no pixel for
    half of the clip. What differs from it is body or shadow; shadow has the background's hue, only
    darker, so it is told apart by direction in RGB space.
    """
    video = frames.astype(np.float32) / 255
    background = np.median(video, axis=0)
    difference = np.linalg.norm(video - background, axis=-1)
    moving = difference > 0.16
    if moving.mean() < 0.002:
        return Reading(colour="none", motion="none")
    pixels = video[moving]
    behind = np.broadcast_to(background, video.shape)[moving]
    brightness, ground = pixels.sum(1), behind.sum(1)
    shadow = (_alignment(pixels, behind) > 0.985) & (brightness < ground)
    body = pixels[~shadow & (brightness > 0.25)]
    if len(body) == 0:
        return Reading(colour="none", motion="none")
    palette = np.array(list(COLOURS.values()), dtype=np.float32)
    votes = np.argmax(np.stack([_alignment(body, c[None]) for c in palette]), axis=0)
    colour = list(COLOURS)[int(np.bincount(votes, minlength=len(palette)).argmax())]
    return Reading(colour=colour, motion=_direction(moving))


def _alignment(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosine between RGB vectors [N, 3]."""
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.asarray((first * second).sum(1) / np.maximum(norms, 1e-6))


def _direction(moving: np.ndarray) -> str:
    """Direction of the centroid of a mask [T, H, W]; "none" under a quarter of the frame."""
    area = moving.sum(axis=(1, 2))
    seen = area > 0.25 * np.median(area[area > 0])
    rows, columns = np.nonzero(seen)[0], np.indices(moving.shape[1:])
    places = np.stack(
        [(columns[1 - axis] * moving[seen]).sum((1, 2)) / area[seen] for axis in range(2)], axis=1
    ) / np.array(moving.shape[:0:-1])
    # the slope of a line through all places stands up to a few frames read wrongly
    slope = np.polyfit(rows / len(moving), places, 1)[0]
    axis = int(np.abs(slope).argmax())
    if abs(slope[axis]) < 0.25:
        return "none"
    return _DIRECTIONS[axis, int(np.sign(slope[axis]))]


def contact_sheet(clips: Sequence[np.ndarray], columns: int = 6, side: int = 128) -> np.ndarray:
    """One row a clip [T, H, W, 3], ``columns`` frames evenly over time, as RGB bytes [H, W, 3]."""
    rows = []
    for clip in clips:
        picks = np.linspace(0, len(clip) - 1, columns).round().astype(int)
        cells = torch.from_numpy(clip[picks]).permute(0, 3, 1, 2).float()
        cells = torch.nn.functional.interpolate(cells, size=(side, side), mode="area")
        cells = torch.nn.functional.pad(cells, (1, 1, 1, 1), value=255.0)
        rows.append(torch.cat(list(cells), dim=2))
    return torch.cat(rows, dim=1).permute(1, 2, 0).round().byte().numpy()


def save_sheet(path: Path, sheet: np.ndarray) -> None:
    """Write a sheet [H, W, 3] as PNG."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(sheet).save(path, optimize=True)


def generate(
    pipeline: Any,
    prompts: Sequence[str],
    *,
    frames: int,
    height: int,
    width: int,
    steps: int,
    guidance: float,
    seed: int,
    batch: int,
) -> list[np.ndarray]:
    """Dense clips [T, H, W, 3] as RGB bytes, one for each prompt, all from the same seed."""
    clips: list[np.ndarray] = []
    for first in range(0, len(prompts), batch):
        part = list(prompts[first : first + batch])
        video = pipeline(
            prompt=part,
            num_frames=frames,
            height=height,
            width=width,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=[torch.Generator("cpu").manual_seed(seed) for _ in part],
            output_type="np",
        ).frames
        clips += [(clip * 255).round().astype(np.uint8) for clip in video]
    return clips


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One prompt: what was asked for, what the frames show."""

    prompt: str
    asked: Reading
    shown: Reading

    @property
    def right(self) -> bool:
        """Colour and direction both as asked."""
        return self.asked == self.shown


def judge(clips: Sequence[np.ndarray]) -> list[Verdict]:
    """Read one clip for each held-out scene, in their order."""
    return [
        Verdict(
            prompt=caption(scene),
            asked=Reading(colour=scene.bodies[0].colour, motion=scene.bodies[0].motion),
            shown=read_clip(clip),
        )
        for scene, clip in zip(held_out_scenes(), clips, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of ``python -m vidsparse.apps.small_model.fidelity``; 0 when the bar is met."""
    parser = argparse.ArgumentParser(
        prog="python -m vidsparse.apps.small_model.fidelity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="diffusers folder to judge")
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument("--size", default="256x256", help="WIDTHxHEIGHT (default: 256x256)")
    parser.add_argument("--frames", type=int, default=33)
    parser.add_argument("--steps", type=int, help="default: the model's own")
    parser.add_argument("--guidance", type=float, help="default: the model's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=1, help="prompts at a time (default: 1)")
    parser.add_argument("--json", type=Path, help="write every reading here")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet (PNG) here")
    options = parser.parse_args(arguments)
    card = json.loads((options.model / "vidsparse.json").read_text(encoding="utf-8"))
    width, height = (int(side) for side in options.size.lower().split("x"))
    steps = options.steps or int(card["steps"])
    guidance = float(card["guidance"]) if options.guidance is None else options.guidance
    model = small_model_of(options.model)
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    dtypes = {"default": dtype} | ({"vae": torch.float32} if model.vae_fp32 else {})
    pipeline = model.pipeline_class.from_pretrained(options.model, torch_dtype=dtypes)
    pipeline.to(options.device).set_progress_bar_config(disable=options.batch > 1)
    clips = generate(
        pipeline,
        [caption(scene) for scene in held_out_scenes()],
        frames=options.frames,
        height=height,
        width=width,
        steps=steps,
        guidance=guidance,
        seed=options.seed,
        batch=options.batch,
    )
    verdicts = judge(clips)
    for verdict in verdicts:
        mark = "right" if verdict.right else "WRONG"
        print(f"{mark}  {verdict.shown.colour:<7} {verdict.shown.motion:<12} {verdict.prompt}")
    right = sum(verdict.right for verdict in verdicts)
    colours = sum(v.asked.colour == v.shown.colour for v in verdicts)
    motions = sum(v.asked.motion == v.shown.motion for v in verdicts)
    print(
        f"{width}x{height}, {options.frames} frames, {steps} steps, guidance {guidance:g}: "
        f"both {right}, colour {colours}, direction {motions} of {len(verdicts)} "
        f"(bar {BAR})"
    )
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "size": f"{width}x{height}",
                    "frames": options.frames,
                    "steps": steps,
                    "guidance": guidance,
                    "seed": options.seed,
                    "right": right,
                    "verdicts": [asdict(verdict) for verdict in verdicts],
                },
                indent=2,
            )
            + "\n",
            encoding="utf-8",
        )
    if options.sheet:
        save_sheet(options.sheet, contact_sheet(clips))
    return 0 if right >= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
