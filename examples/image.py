"""A video that begins with an image, which is scaled and cut to the video's size.

python examples/image.py first.png --prompt "the cat turns its head"
"""

import argparse

from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.pipelines.video import write_video

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("image", help="the first frame")
parser.add_argument(
    "--model", default="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", help="hub id or folder"
)
parser.add_argument("--prompt", default="the cat turns its head")
parser.add_argument("--frames", type=int, help="the model's by default")
parser.add_argument("--width", type=int, help="the image's shape at the model's area, by default")
parser.add_argument("--height", type=int)
parser.add_argument("--steps", type=int)
parser.add_argument("--device", help="cuda where there is any, by default")
parser.add_argument("--offload", default="none", help="none, model or group")
parser.add_argument("--out", default="image.mp4")
args = parser.parse_args()

loaded = load(args.model, device=args.device, offload=args.offload, image=True)
made = generate(
    loaded,
    GenerateRequest(
        prompt=args.prompt,
        image=args.image,
        method="fg-attn",
        method_options={"top_p": 0.9},
        frames=args.frames,
        width=args.width,
        height=args.height,
        steps=args.steps,
        offload=args.offload,
    ),
    progress=lambda step, steps, _: print(f"step {step} of {steps}", end="\r"),
)
write_video(made.frames, args.out, made.record["options"]["fps"])
print(f"{args.out}: computed {made.record['total']:.2f} of the run's query-key pairs")
