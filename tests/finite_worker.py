"""Two processes (gloo) that make a tiny video together, of which the second's kernel is broken.

Arguments are the folder of a model and one to leave files in: what each process was told, by case.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_worker import compute_on
from torch import Tensor

from vidsparse.errors import NonFiniteError
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.handle import SparseHandle
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest

COUNT = 2
# how the video is dealt; and whether the kernel is right when the step is run again.
CASES: dict[str, dict[str, Any]] = {
    "heads": {},
    "ring": {"ring": COUNT},
    "apart": {"apart": True},
    "heads, once": {},
    "apart, once": {"apart": True},
}


def broken(handle: SparseHandle, *, once: bool) -> None:
    """Have the kernel give NaN in the second layer of the second step."""
    (engine,) = handle.engines
    planner, kernel = engine.planner, engine.kernel
    here, left = False, 1 if once else 100

    def plan(*args: Any) -> Any:
        nonlocal here
        site = args[3]
        here = (site.step, site.layer) == (1, 1)
        return planner(*args)

    def attend(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        nonlocal left
        out, lse = kernel(*args, **options)
        if here and left:
            left -= 1
            out[0, 0, 3, 2] = torch.nan
        return out, lse

    engine.planner, engine.kernel = plan, attend


def take_part(rank: int, folder: Path, store: Path, out: Path) -> None:
    """Run every case as one of the processes."""
    compute_on("cpu")
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=COUNT)
    loaded = load(folder, device="cpu")
    request = GenerateRequest(
        prompt="a red circle", frames=9, width=64, height=64, steps=3, guidance=3.0, device="cpu",
        method="fg-attn", dense_steps=0,
        method_options={"top_p": 0.3, "tile": "16x16", "means": None, "plans": "own"},
    )  # fmt: skip
    told: dict[str, str] = {}
    for name, options in CASES.items():

        def attach(handle: SparseHandle, once: bool = "once" in name) -> None:
            if rank == 1:
                broken(handle, once=once)

        try:
            generate(loaded, request, attach=attach, **options)
        except NonFiniteError as error:
            told[name] = str(error)
        # the same processes go on together.
        told[f"{name}, then"] = str(generate(loaded, request, **options).frames.mean())
    (out / f"{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    dist.destroy_process_group()


def main() -> int:
    """Fork the processes; 0 where all of them came to their end."""
    folder, out = map(Path, sys.argv[1:])
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as place:
        store = Path(place) / "store"
        children = [
            context.Process(target=take_part, args=(rank, folder, store, out))
            for rank in range(COUNT)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(120)
        good = all(child.exitcode == 0 for child in children)
        for child in children:
            child.kill()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
