"""A video by MiniMax-H3 with FG-Attn; rows of text and sound are computed in full.

python examples/minimax_h3.py --prompt "rain on a tin roof"
"""

import argparse

import torch
from diffusers import ModularPipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="MiniMaxAI/MiniMax-H3", help="hub id or folder")
parser.add_argument("--prompt", default="rain on a tin roof")
parser.add_argument("--frames", type=int, default=124, help="17k+5, at least 124")
parser.add_argument("--width", type=int, default=1344)
parser.add_argument("--height", type=int, default=768)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="minimax_h3.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = ModularPipeline.from_pretrained(args.model, workflow="t2va")
pipe.load_components(dtype=torch.float32 if on_cpu else torch.bfloat16)
pipe.vae.enable_tiling()  # decoding a whole video at once takes more memory than denoising it
pipe.to(args.device)

# the sound comes beside the frames, where all outputs are asked for.
with sparsify(pipe, "fg-attn", top_p=0.9) as handle:
    video = pipe(
        prompt=args.prompt,
        num_frames=args.frames,
        width=args.width,
        height=args.height,
        num_inference_steps=args.steps,
        generator=torch.Generator("cpu").manual_seed(0),
        output="videos",
    )[0]
    print(handle.summary())

export_to_video(video, args.out, fps=24)
