"""A video by LTX-Video with FG-Attn and a plan that serves two steps.

python examples/ltx.py --prompt "a lighthouse at dusk"
"""

import argparse

import torch
from diffusers import LTXPipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="Lightricks/LTX-Video", help="hub id or folder")
parser.add_argument("--prompt", default="a lighthouse at dusk")
parser.add_argument("--frames", type=int, default=161, help="8k+1")
parser.add_argument("--width", type=int, default=704)
parser.add_argument("--height", type=int, default=512)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="ltx.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = LTXPipeline.from_pretrained(
    args.model, torch_dtype=torch.float32 if on_cpu else torch.bfloat16
)
pipe.to(args.device)

# a plan serves two steps: choosing costs half as much.
with sparsify(pipe, "fg-attn", top_p=0.9, reuse=2) as handle:
    video = pipe(
        prompt=args.prompt,
        num_frames=args.frames,
        width=args.width,
        height=args.height,
        num_inference_steps=args.steps,
        generator=torch.Generator("cpu").manual_seed(0),
    ).frames[0]
    print(handle.summary())

export_to_video(video, args.out, fps=25)
