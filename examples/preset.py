"""Numbers for every layer and head: calibrate a method on a few prompts, save the preset, use it.

python examples/preset.py --method spargeattn --out sparge
"""

import argparse
from pathlib import Path

from vidsparse import sparsify
from vidsparse.pipelines.calibrate import calibrate
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="shapes", help="bundled name, hub id or folder")
parser.add_argument("--method", default="spargeattn", help="spargeattn, xattention, sale or bsfa")
parser.add_argument(
    "--prompts",
    nargs="+",
    default=["a large red ball that bounces", "a small blue ring that orbits"],
    help="the papers use 5, bsfa 16",
)
parser.add_argument("--frames", type=int, help="the model's by default")
parser.add_argument("--width", type=int)
parser.add_argument("--height", type=int)
parser.add_argument("--steps", type=int)
parser.add_argument("--device", help="cuda where there is any, by default")
parser.add_argument("--out", default="sparge", help="two files: OUT.json and OUT.safetensors")
args = parser.parse_args()

loaded = load(args.model, device=args.device)
request = GenerateRequest(
    prompt="not used: calibration has prompts of its own",
    method=args.method,
    frames=args.frames,
    width=args.width,
    height=args.height,
    steps=args.steps,
)
preset = calibrate(loaded, request, args.prompts, Path(args.out))
print(f"{args.out}: {preset.method} for {preset.video}")

# the same file serves `vidsparse generate --preset`, and `sparsify` on a pipeline of your own.
with sparsify(loaded.pipe, preset=args.out) as handle:
    loaded.pipe(
        args.prompts[0],
        num_frames=preset.video["frames"],
        width=preset.video["width"],
        height=preset.video["height"],
        num_inference_steps=args.steps or loaded.defaults.steps,
        output_type="latent",
    )
    print(handle.summary())
