"""A video by Kandinsky 6 with FG-Attn; attention that makes or hears sound is left as it is.

python examples/kandinsky6.py --prompt "a cat and a dog bake a cake"
"""

import argparse

import torch
from diffusers import Kandinsky6TI2VAPipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--model",
    default="kandinskylab/Kandinsky-6.0-Pro-distill-5s-Diffusers",
    help="hub id or folder",
)
parser.add_argument("--prompt", default="a cat and a dog bake a cake")
parser.add_argument("--frames", type=int, default=121, help="4k+1")
parser.add_argument("--width", type=int, default=864)
parser.add_argument("--height", type=int, default=480)
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="kandinsky6.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = Kandinsky6TI2VAPipeline.from_pretrained(
    args.model, torch_dtype=torch.float32 if on_cpu else torch.bfloat16
)
pipe.vae.enable_tiling()  # decoding a whole video at once takes more memory than denoising it
if on_cpu:
    pipe.to("cpu")
else:
    pipe.enable_model_cpu_offload(device=args.device)

# these weights are distilled. the sound comes beside the frames, as `.audio`.
with sparsify(pipe, "fg-attn", top_p=0.9) as handle:
    video = pipe(
        prompt=args.prompt,
        num_frames=args.frames,
        width=args.width,
        height=args.height,
        num_inference_steps=args.steps,
        guidance_scale=1.0,
        generator=torch.Generator("cpu").manual_seed(0),
    ).frames[0]
    print(handle.summary())

export_to_video(video, args.out, fps=24)
