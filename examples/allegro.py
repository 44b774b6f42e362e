"""A video by Allegro with FG-Attn.

python examples/allegro.py --prompt "boats lie in a harbour in bright sunlight"
"""

import argparse

import torch
from diffusers import AllegroPipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="rhymes-ai/Allegro", help="hub id or folder")
parser.add_argument("--prompt", default="boats lie in a harbour in bright sunlight")
parser.add_argument("--frames", type=int, default=85, help="4k+1")
parser.add_argument("--width", type=int, default=1280)
parser.add_argument("--height", type=int, default=720)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="allegro.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = AllegroPipeline.from_pretrained(
    args.model, torch_dtype=torch.float32 if on_cpu else torch.bfloat16
)
pipe.vae.to(torch.float32)  # decodes visibly worse in 16 bits
pipe.vae.enable_tiling()  # it decodes by tiles alone
if on_cpu:
    pipe.to("cpu")
else:
    pipe.enable_model_cpu_offload(device=args.device)

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

export_to_video(video, args.out, fps=15)
