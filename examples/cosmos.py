"""A video by Cosmos 2.5 with FG-Attn, from text, an image or a video: here from text.

python examples/cosmos.py --prompt "a red bus drives off as the light turns green"

Its licence wants NVIDIA's guardrail, which diffusers asks for: pip install cosmos_guardrail
"""

import argparse

import torch
from diffusers import Cosmos2_5_PredictBasePipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="nvidia/Cosmos-Predict2.5-2B", help="hub id or folder")
parser.add_argument("--revision", default="diffusers/base/post-trained", help="of a hub id")
parser.add_argument("--prompt", default="a red bus drives off as the light turns green")
parser.add_argument("--frames", type=int, default=93, help="4k+1")
parser.add_argument("--width", type=int, default=1280)
parser.add_argument("--height", type=int, default=704)
parser.add_argument("--steps", type=int, default=36)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="cosmos.mp4")
args = parser.parse_args()

on_cpu = args.device == "cpu"
pipe = Cosmos2_5_PredictBasePipeline.from_pretrained(
    args.model,
    revision=args.revision,
    torch_dtype=torch.float32 if on_cpu else torch.bfloat16,
)
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

export_to_video(video, args.out, fps=16)
