"""A video by Mochi with SpargeAttn, q·k in 8 bits where the kernel is faster for it.

python examples/mochi.py --prompt "waves break on black rocks"
"""

import argparse

import torch
from diffusers import MochiPipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="genmo/mochi-1-preview", help="hub id or folder")
parser.add_argument("--prompt", default="waves break on black rocks")
parser.add_argument("--frames", type=int, default=163, help="6k+1")
parser.add_argument("--width", type=int, default=848)
parser.add_argument("--height", type=int, default=480)
parser.add_argument("--steps", type=int, default=64)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="mochi.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = MochiPipeline.from_pretrained(
    args.model, torch_dtype=torch.float32 if on_cpu else torch.bfloat16
)
pipe.vae.enable_tiling()  # decoding a whole video at once takes more memory than denoising it
if on_cpu:
    pipe.to("cpu")
else:
    pipe.enable_model_cpu_offload(device=args.device)

# one tau for all heads; examples/preset.py finds one for each.
with sparsify(pipe, "spargeattn", tau=0.9) as handle:
    video = pipe(
        prompt=args.prompt,
        num_frames=args.frames,
        width=args.width,
        height=args.height,
        num_inference_steps=args.steps,
        generator=torch.Generator("cpu").manual_seed(0),
    ).frames[0]
    print(handle.summary())

export_to_video(video, args.out, fps=30)
