"""A video by HunyuanVideo 1.5 with FG-Attn; guidance is a part of its pipeline.

python examples/hunyuan_video15.py --prompt "a paper boat drifts down a stream"
"""

import argparse

import torch
from diffusers import HunyuanVideo15Pipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--model", default="hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v", help="hub id or folder"
)
parser.add_argument("--prompt", default="a paper boat drifts down a stream")
parser.add_argument("--frames", type=int, default=121, help="4k+1")
parser.add_argument("--width", type=int, default=848)
parser.add_argument("--height", type=int, default=480)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="hunyuan_video15.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = HunyuanVideo15Pipeline.from_pretrained(
    args.model, torch_dtype=torch.float32 if on_cpu else torch.bfloat16
)
pipe.vae.enable_tiling()  # decoding a whole video at once takes more memory than denoising it
if on_cpu:
    pipe.to("cpu")
else:
    pipe.enable_model_cpu_offload(device=args.device)

# the first fifth of the steps stays dense here; the family's default is a tenth.
with sparsify(pipe, "fg-attn", top_p=0.9, dense_steps=0.2) as handle:
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
