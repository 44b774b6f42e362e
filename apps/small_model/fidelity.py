"""Does a small model draw what its prompt says? Read from the frames alone.

    python -m vidsparse.apps.small_model.fidelity --model FOLDER --device cuda

Generates the 24 held-out prompts (combinations that training never drew) with the stock pipeline,
and has the world's reader say what the decoded frames show: of ``shapes`` the object's colour and
direction, of ``scenes`` the bodies with their colours and shapes, and the camera. Bars: all of it
right in at least 22 and 20 of 24.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vidsparse.pipelines.video import write_video

from .registry import small_model_of


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of ``python -m vidsparse.apps.small_model.fidelity``; 0 when the bar is met."""
    parser = argparse.ArgumentParser(
        prog="python -m vidsparse.apps.small_model.fidelity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="diffusers folder to judge")
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument("--size", help="WIDTHxHEIGHT (default: the model's own)")
    parser.add_argument("--frames", type=int, help="default: the model's own")
    parser.add_argument("--steps", type=int, help="default: the model's own")
    parser.add_argument("--guidance", type=float, help="default: the model's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=1, help="prompts at a time (default: 1)")
    parser.add_argument("--json", type=Path, help="write every reading here")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet (PNG) here")
    parser.add_argument("--videos", type=Path, help="keep every clip in this folder")
    options = parser.parse_args(arguments)
    card = json.loads((options.model / "vidsparse.json").read_text(encoding="utf-8"))
    size = options.size or str(card["size"])
    width, height = (int(side) for side in size.lower().split("x"))
    frames = options.frames or int(card["frames"])
    steps = options.steps or int(card["steps"])
    guidance = float(card["guidance"]) if options.guidance is None else options.guidance
    model = small_model_of(options.model)
    world = model.world
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    dtypes = {"default": dtype} | ({"vae": torch.float32} if model.vae_fp32 else {})
    pipeline = model.pipeline_class.from_pretrained(options.model, torch_dtype=dtypes)
    pipeline.to(options.device).set_progress_bar_config(disable=options.batch > 1)
    clips = generate(
        pipeline,
        [world.caption(scene, None) for scene in world.held_out()],
        frames=frames,
        height=height,
        width=width,
        steps=steps,
        guidance=guidance,
        seed=options.seed,
        batch=options.batch,
    )
    verdicts = world.judge(clips)
    for verdict in verdicts:
        mark = "right" if verdict.right else "WRONG"
        shown = "  ".join(str(part) for part in vars(verdict.shown).values())
        print(f"{mark}  {shown}  {verdict.prompt}")
    right = sum(verdict.right for verdict in verdicts)
    parts = ", ".join(
        f"{name} {sum(verdict.parts[name] for verdict in verdicts)}" for name in verdicts[0].parts
    )
    faults = "".join(
        f"; {name} {sum(verdict.faults[name] for verdict in verdicts)}"
        for name in verdicts[0].faults
    )
    print(
        f"{width}x{height}, {frames} frames, {steps} steps, guidance {guidance:g}: "
        f"all right {right}, {parts} of {len(verdicts)} (bar {world.bar}){faults}"
    )
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "size": f"{width}x{height}",
                    "frames": frames,
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
    if options.videos:
        options.videos.mkdir(parents=True, exist_ok=True)
        for number, clip in enumerate(clips):
            write_video(clip, options.videos / f"{number:02d}.mp4", float(card["fps"]))
    return 0 if right >= world.bar else 1


if __name__ == "__main__":
    raise SystemExit(main())
