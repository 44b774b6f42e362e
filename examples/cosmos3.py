"""A video by Cosmos 3 with FG-Attn, from text.

python examples/cosmos3.py --prompt "a red bus drives off as the light turns green"

Its licence wants NVIDIA's guardrail, which diffusers asks for: pip install cosmos_guardrail
"""

import argparse

import torch
from diffusers import Cosmos3OmniPipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="nvidia/Cosmos3-Nano", help="hub id or folder")
parser.add_argument("--prompt", default="a red bus drives off as the light turns green")
parser.add_argument("--frames", type=int, default=189, help="4k+1")
parser.add_argument("--width", type=int, default=1280)
parser.add_argument("--height", type=int, default=720)
parser.add_argument("--steps", type=int, default=35)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="cosmos3.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = Cosmos3OmniPipeline.from_pretrained(
    args.model, torch_dtype=torch.float32 if on_cpu else torch.bfloat16
)
if on_cpu:
    pipe.to("cpu")
else:
    pipe.enable_model_cpu_offload(device=args.device)

# rows of text, sound and actions are computed in full.
with sparsify(pipe, "fg-attn", top_p=0.9) as handle:
    video = pipe(
        prompt=args.prompt,
        num_frames=args.frames,
        width=args.width,
        height=args.height,
        num_inference_steps=args.steps,
        generator=torch.Generator("cpu").manual_seed(0),
    ).video
    print(handle.summary())

export_to_video(video, args.out, fps=24)
