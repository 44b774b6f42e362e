"""A video by Helios with FG-Attn: made in sections, each behind what was made before it.

python examples/helios.py --prompt "a cat and a dog bake a cake"
"""

import argparse

import torch
from diffusers import HeliosPipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="BestWishYsh/Helios-Base", help="hub id or folder")
parser.add_argument("--prompt", default="a cat and a dog bake a cake")
parser.add_argument("--frames", type=int, default=132, help="33k: whole sections")
parser.add_argument("--width", type=int, default=640)
parser.add_argument("--height", type=int, default=384)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="helios.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = HeliosPipeline.from_pretrained(
    args.model, torch_dtype=torch.float32 if on_cpu else torch.bfloat16
)
pipe.vae.to(torch.float32)  # decodes visibly worse in 16 bits
pipe.to(args.device)

# each section is a run of its own, with dense first steps; the summary is of the last.
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

export_to_video(video, args.out, fps=24)
