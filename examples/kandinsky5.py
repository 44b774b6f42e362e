"""A video by Kandinsky 5 with FG-Attn, for weights without a sparse attention of their own.

python examples/kandinsky5.py --prompt "a cat and a dog bake a cake"
"""

import argparse

import torch
from diffusers import Kandinsky5T2VPipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--model",
    default="kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
    help="hub id or folder",
)
parser.add_argument("--prompt", default="a cat and a dog bake a cake")
parser.add_argument("--frames", type=int, default=121, help="4k+1")
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--height", type=int, default=512)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="kandinsky5.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = Kandinsky5T2VPipeline.from_pretrained(
    args.model, torch_dtype=torch.float32 if on_cpu else torch.bfloat16
)
pipe.vae.enable_tiling()  # decoding a whole video at once takes more memory than denoising it
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

export_to_video(video, args.out, fps=24)
