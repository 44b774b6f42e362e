"""A video by EasyAnimate with Foresight; text and video attend together.

python examples/easyanimate.py --prompt "a panda plays a small guitar"
"""

import argparse

import torch
from diffusers import EasyAnimatePipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--model", default="alibaba-pai/EasyAnimateV5.1-7b-zh-diffusers", help="hub id or folder"
)
parser.add_argument("--prompt", default="a panda plays a small guitar")
parser.add_argument("--frames", type=int, default=49, help="4k+1")
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--height", type=int, default=512)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="easyanimate.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = EasyAnimatePipeline.from_pretrained(
    args.model, torch_dtype=torch.float32 if on_cpu else torch.bfloat16
)
pipe.vae.enable_tiling()  # decoding a whole video at once takes more memory than denoising it
if on_cpu:
    pipe.to("cpu")
else:
    pipe.enable_model_cpu_offload(device=args.device)

# each block of queries keeps as many keys; a tenth of the steps computes everything again.
with sparsify(pipe, "foresight", share=0.3, refresh=0.1) as handle:
    video = pipe(
        prompt=args.prompt,
        negative_prompt="bad detailed",
        num_frames=args.frames,
        width=args.width,
        height=args.height,
        num_inference_steps=args.steps,
        generator=torch.Generator("cpu").manual_seed(0),
    ).frames[0]
    print(handle.summary())

export_to_video(video, args.out, fps=8)
