"""A video by HunyuanVideo with FG-Attn on 32x32 tiles, one part of the model on the GPU at a time.

python examples/hunyuan_video.py --prompt "a red kite over a windy beach"
"""

import argparse

import torch
from diffusers import HunyuanVideoPipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--model", default="hunyuanvideo-community/HunyuanVideo", help="hub id or folder"
)
parser.add_argument("--prompt", default="a red kite over a windy beach")
parser.add_argument("--frames", type=int, default=129, help="4k+1")
parser.add_argument("--width", type=int, default=1280)
parser.add_argument("--height", type=int, default=720)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="hunyuan_video.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = HunyuanVideoPipeline.from_pretrained(
    args.model, torch_dtype=torch.float32 if on_cpu else torch.bfloat16
)
pipe.vae.enable_tiling()  # decoding a whole video at once takes more memory than denoising it
if on_cpu:
    pipe.to("cpu")
else:
    pipe.enable_model_cpu_offload(device=args.device)

# coarser tiles cost less to choose and compute more: see docs/choosing.md.
with sparsify(pipe, "fg-attn", top_p=0.9, tile=(32, 32)) as handle:
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
