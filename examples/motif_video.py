"""A video by Motif-Video with SpargeAttn; guidance is a part of its pipeline.

python examples/motif_video.py --prompt "two friends smile in the evening sun"
"""

import argparse

import torch
from diffusers import MotifVideoPipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="Motif-Technologies/Motif-Video-2B", help="hub id or folder")
parser.add_argument("--prompt", default="two friends smile in the evening sun")
parser.add_argument("--frames", type=int, default=121, help="4k+1")
parser.add_argument("--width", type=int, default=1280)
parser.add_argument("--height", type=int, default=736)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="motif_video.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = MotifVideoPipeline.from_pretrained(
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

export_to_video(video, args.out, fps=24)
