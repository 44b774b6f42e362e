"""One attention call on tensors of your own, without a pipeline, beside dense attention.

python examples/attend.py --tokens 16 32 32
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse import TokenGrid, attend

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--tokens", type=int, nargs=3, default=(16, 32, 32), help="frames, height, width in tokens"
)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--top-p", type=float, default=0.9)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

# a random walk along each axis: like a video, neighbours in space and time are alike.
grid = TokenGrid(*args.tokens)
torch.manual_seed(0)
walk = torch.randn(1, args.heads, *args.tokens, 64)
for axis in (2, 3, 4):
    walk = walk.cumsum(axis)
k = F.layer_norm(walk.flatten(2, 4), (64,)).to(args.device)  # [B, H, S, D]
q, v = 3 * k, torch.randn_like(k)


def timed(run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The answer, and seconds of a second call."""
    run()
    began = time.perf_counter()
    out = run().cpu()
    return out, time.perf_counter() - began


dense, dense_seconds = timed(lambda: F.scaled_dot_product_attention(q, k, v))
sparse, sparse_seconds = timed(lambda: attend(q, k, v, grid, "fg-attn", top_p=args.top_p))
error = ((sparse - dense).abs().sum() / dense.abs().sum()).item()
print(f"{grid.tokens} tokens: {dense_seconds:.3f} s dense, {sparse_seconds:.3f} s sparse")
print(f"relative L1 error {error:.3f}")
