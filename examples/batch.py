"""Several prompts in one call, dense and sparse, and what sparsity cost each of them.

python examples/batch.py --prompts "a red ball that bounces" "a blue ring that orbits"
"""

import argparse

from vidsparse.metrics import compare_videos
from vidsparse.pipelines.generate import generate_batch
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.pipelines.video import write_video

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="shapes", help="bundled name, hub id or folder")
parser.add_argument(
    "--prompts",
    nargs="+",
    default=["a large red ball that bounces", "a small blue ring that orbits"],
)
parser.add_argument("--frames", type=int, help="the model's by default")
parser.add_argument("--width", type=int)
parser.add_argument("--height", type=int)
parser.add_argument("--steps", type=int)
parser.add_argument("--device", help="cuda where there is any, by default")
parser.add_argument("--out", default="batch", help="videos are OUT-0.mp4, OUT-1.mp4, ..")
args = parser.parse_args()

loaded = load(args.model, device=args.device)


def requests(method: str) -> list[GenerateRequest]:
    """One for each prompt, alike in all else."""
    return [
        GenerateRequest(
            prompt=prompt,
            method=method,
            frames=args.frames,
            width=args.width,
            height=args.height,
            steps=args.steps,
        )
        for prompt in args.prompts
    ]


dense = generate_batch(loaded, requests("dense"))
sparse = generate_batch(loaded, requests("fg-attn"))
for number, (before, after) in enumerate(zip(dense, sparse, strict=True)):
    quality = compare_videos(before.frames, after.frames)
    psnr = "identical" if quality.psnr is None else f"{quality.psnr:.1f} dB"
    print(f"{after.record['prompt']}: PSNR {psnr}, SSIM {quality.ssim:.3f}")
    write_video(after.frames, f"{args.out}-{number}.mp4", after.record["options"]["fps"])

record = sparse[0].record  # shares and times are those of the whole batch
print(f"computed {record['total']:.2f} of the run's query-key pairs")
print(f"denoising: {dense[0].record['times']['denoise']:.1f} s dense, ", end="")
print(f"{record['times']['denoise']:.1f} s sparse")
