"""One of several processes that denoise tiny videos together; rank 0 writes what it found.

Started by torchrun, with the file to write as the first argument; names of cases may follow.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from tiny_families import PROMPTS, TINY, latents
from torch.distributed.device_mesh import init_device_mesh

from vidsparse.errors import UnsupportedError
from vidsparse.methods.fg_attn import FgAttn
from vidsparse.methods.numbers import Numbers
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.adapter import SparseProcessor
from vidsparse.pipelines.caching import StepCache
from vidsparse.pipelines.parallel import gather_heads

JOINT = ("hunyuan-", "cogvideox", "mochi-", "motif-")

METHODS: dict[str, dict[str, Any]] = {
    "sparse": {"method": "fg-attn", "top_p": 0.2, "tile": "16x16", "dense_steps": 0},
    "dense": {"method": "dense"},
    # a head's number differs from the next one's, so that it matters which of them a process takes.
    "calibrated": {
        "method": FgAttn(
            tile=(16, 16),
            numbers=Numbers({"top_p": torch.tensor([[[0.1, 0.9], [0.9, 0.1]]])}, None),
        ),
        "dense_steps": 0,
    },
}


def video(name: str, pipe: Any) -> torch.Tensor:
    """The latents of two tiny videos where that can be, with guidance, from the same noise."""
    tiny = TINY[name]
    frames, height, width = tiny.size
    # beside text, which is computed whole, a video of few tiles has none to skip.
    size = (frames, 2 * height, 2 * width) if f"{name}-".startswith(JOINT) else tiny.size
    prompts = PROMPTS if tiny.batch else PROMPTS[:1]
    return latents(name, pipe, prompts=prompts, size=size, num_inference_steps=2)


def enable(pipe: Any) -> None:
    """What a user calls without us."""
    count = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, count), mesh_dim_names=("ring", "ulysses"))
    config = ContextParallelConfig(ulysses_degree=count, mesh=mesh)
    pipe.transformer.enable_parallelism(config=config)


def what_is_left(transformer: Any) -> list[str]:
    """The modules and processors that know of several processes, and the host's hooks."""
    modules = list(transformer.modules())
    holders = [*modules, *(getattr(module, "processor", None) for module in modules)]
    told = [one for one in holders if getattr(one, "_parallel_config", None) is not None]
    hooks = [getattr(module, "_diffusers_hook", None) for module in modules]
    return [type(one).__name__ for one in told] + [k for one in hooks if one for k in one.hooks]


def cached(name: str, pipe: Any, handle: Any) -> dict[str, Any]:
    """The same with ``taylorseer``; what is said of ``first-block`` before and after dealing."""
    found: dict[str, Any] = {}
    with StepCache(pipe, "taylorseer") as cache:
        expected = latents(name, pipe, num_inference_steps=7)
        alone = cache.blocks_run()
    with StepCache(pipe, "first-block"):
        try:
            handle.parallelize()
        except UnsupportedError as error:
            found["before"] = str(error)
    handle.parallelize()
    with StepCache(pipe, "taylorseer") as cache:
        actual = latents(name, pipe, num_inference_steps=7)
        found["left_out"] = [step for step, share in cache.blocks_run().items() if not share]
        found["same"] = alone == cache.blocks_run()
    try:
        StepCache(pipe, "first-block")
    except UnsupportedError as error:
        found["after"] = str(error)
    handle.remove()
    return {
        **found,
        "error": float((actual - expected).abs().max()),
        "largest": float(expected.abs().max()),
    }


def run(name: str, kind: str, when: str) -> dict[str, Any]:
    """Compare with one process: the largest difference and value, tokens held, the density."""
    options = METHODS[kind]
    pipe = TINY[name].build()
    with sparsify(pipe, **options) as alone:
        expected = video(name, pipe)
        computed_alone = alone.summary().computed
    if when == "host-after":
        enable(pipe)
    handle = sparsify(pipe, **options)
    if when == "cached":
        return cached(name, pipe, handle)
    if when == "host-before":
        enable(pipe)
    try:
        if not when.startswith("host"):
            handle.parallelize()
        elif when == "host-refused":
            enable(pipe)
    except UnsupportedError as error:
        return {"refused": str(error), "left": what_is_left(pipe.transformer)}
    seen: list[int] = []
    modules = [
        one
        for one in pipe.transformer.modules()
        if isinstance(getattr(one, "processor", None), SparseProcessor)
    ]
    if when == "swapped":
        for one in modules:
            one.processor = type(one.processor.stock)()
    module = modules[0]
    watch = module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((*args, kwargs.get("hidden_states"))[0].shape[1]),
        with_kwargs=True,
    )
    actual = video(name, pipe)
    watch.remove()
    heads = 2 * handle.trace.cells[0].pairs
    assert gather_heads(handle.trace)
    assert handle.trace.cells[0].pairs == heads
    computed = handle.summary().computed
    handle.remove()
    stock_error = 0.0
    if kind == "sparse":
        stock_error = float((video(name, pipe) - video(name, TINY[name].build())).abs().max())
    return {
        "error": float((actual - expected).abs().max()),
        "largest": float(expected.abs().max()),
        "tokens": max(seen),
        "computed": 1.0 if computed is None else float(computed),
        "alone": 1.0 if computed_alone is None else float(computed_alone),
        "stock_error": stock_error,
    }


def main() -> None:
    """Run every case; all processes take part in each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # diffusers numbers a process's device by this count, which is 0 on a CPU, and fails there.
    vars(torch.accelerator)["device_count"] = lambda: 1
    found = {case: run(*case.split("/")) for case in sys.argv[2:]}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
