"""One of several processes that denoise one tiny video together; rank 0 writes what it found.

Started by torchrun, with the file to write as the only argument.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from tiny_pipelines import tiny_wan
from torch.distributed.device_mesh import init_device_mesh

from vidsparse.pipelines import sparsify


def latents(pipe: Any) -> torch.Tensor:
    """The latents of a tiny video, with guidance, from the same noise every time."""
    out: torch.Tensor = pipe(
        prompt="a cat",
        negative_prompt="a dog",
        num_frames=9,
        height=64,
        width=64,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).frames
    return out


def run(*, method: str, when: str, **options: Any) -> dict[str, float]:
    """Compare with one process: the largest difference and value, and the density."""
    alone = tiny_wan()
    with sparsify(alone, method, **options):
        expected = latents(alone)
    pipe = tiny_wan()
    config = ContextParallelConfig(
        ulysses_degree=dist.get_world_size(),
        mesh=init_device_mesh(
            "cpu", (1, dist.get_world_size()), mesh_dim_names=("ring", "ulysses")
        ),
    )
    if when == "after":
        pipe.transformer.enable_parallelism(config=config)
    handle = sparsify(pipe, method, **options)
    if when == "before":
        pipe.transformer.enable_parallelism(config=config)
    seen: list[int] = []
    watch = pipe.transformer.blocks[0].attn1.to_q.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape[1])
    )
    actual = latents(pipe)
    watch.remove()
    computed = handle.summary().computed
    handle.remove()
    stock = latents(pipe)
    return {
        "error": float((actual - expected).abs().max()),
        "largest": float(expected.abs().max()),
        "tokens": max(seen),
        "computed": 1.0 if computed is None else float(computed),
        "stock_error": float((stock - latents(tiny_wan())).abs().max()),
    }


def main() -> None:
    """Run every case; all processes take part in each."""
    dist.init_process_group("gloo")
    # diffusers numbers a process's device by this count, which is 0 on a CPU, and fails there.
    vars(torch.accelerator)["device_count"] = lambda: 1
    sparse: dict[str, Any] = {"method": "fg-attn", "top_p": 0.2, "dense_steps": 0}
    found = {
        "dense": run(method="dense", when="after"),
        "sparsify before": run(when="before", **sparse),
        "sparsify after": run(when="after", **sparse),
    }
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
