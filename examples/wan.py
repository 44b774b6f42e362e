"""A video by Wan with FG-Attn: from text, sparse for one run, stock again afterwards.

python examples/wan.py --prompt "a cat walks on the grass"
"""

import argparse

import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", help="hub id or folder")
parser.add_argument("--prompt", default="a cat walks on the grass")
parser.add_argument("--frames", type=int, default=81, help="4k+1")
parser.add_argument("--width", type=int, default=832)
parser.add_argument("--height", type=int, default=480)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="wan.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = WanPipeline.from_pretrained(
    args.model, torch_dtype=torch.float32 if on_cpu else torch.bfloat16
)
pipe.vae.to(torch.float32)  # decodes visibly worse in 16 bits
pipe.to(args.device)

# what is left open is the family's default: `vidsparse models` prints them.
with sparsify(pipe, "fg-attn", top_p=0.9) as handle:
    video = pipe(
        prompt=args.prompt,
        num_frames=args.frames,
        width=args.width,
        height=args.height,
        num_inference_steps=args.steps,
        generator=torch.Generator("cpu").manual_seed(0),
    ).frames[0]
    print(handle.summary())

export_to_video(video, args.out, fps=16)
