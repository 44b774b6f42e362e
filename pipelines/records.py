"""The record of a run: everything its result depends on, and what its attention did."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from vidsparse._version import __version__
from vidsparse.pipelines.caching import AnyCache
from vidsparse.pipelines.handle import SparseHandle
from vidsparse.pipelines.image import image_hash
from vidsparse.pipelines.models import LoadedPipeline
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.presets import load_preset
from vidsparse.work import Work

_PACKAGES: Final = ("diffusers", "transformers", "triton", "torchao")


def shared_record(
    loaded: LoadedPipeline,
    request: GenerateRequest,
    handle: SparseHandle | None,
    cache: AnyCache | None,
) -> dict[str, Any]:
    """The record of a run but for its prompt and times, as JSON values.

    ``handle`` is that of a sparse run, None for the stock pipeline; ``cache`` None without one.
    """
    summary = handle.summary() if handle is not None else None
    if summary is not None:
        work = summary.work
    else:
        # no call of the stock pipeline is followed, but a cache counts what it leaves out.
        work = Work.all_dense(0.0 if cache is None else cache.share_left_out())
    return {
        "negative_prompt": request.negative_prompt,
        "seed": request.seed,
        "options": request.options(),
        "preset": None if request.preset is None else load_preset(request.preset).digest,
        "lora": loaded.lora_hash,
        "images": {name: image_hash(path) for name, path in request.images().items()},
        **provenance(loaded),
        "linear": None if loaded.linear_facts is None else asdict(loaded.linear_facts),
        "total": work.total if work else None,
        "work": work.to_json() if work else None,
        "selected": summary.selected if summary else None,
        "computed": summary.computed if summary else None,
        "skipped": summary.skipped if summary else None,
        "sparsity": summary.sparsity if summary else None,
        "dense_step_share": summary.dense_step_share if summary else 1.0,
        "dense_call_share": summary.dense_call_share if summary else 1.0,
        "implementation": summary.implementation if summary else "the stock pipeline",
        "notes": [
            *(summary.notes if summary else ()),
            *([] if cache is None or cache.note is None else [cache.note]),
        ],
        "steps": _steps(request, handle, cache),
        "oldest_plan": handle.trace.oldest_plan() if handle is not None else None,
        "density_map": handle.trace.density_map() if handle is not None else [],
    }


def _steps(
    request: GenerateRequest, handle: SparseHandle | None, cache: AnyCache | None
) -> list[dict[str, Any]]:
    """What each denoising step was, and the share of its blocks that were run."""
    assert request.steps is not None
    kinds = handle.trace.step_kinds() if handle is not None else {}
    run = cache.blocks_run() if cache is not None else {}
    return [
        {
            "kind": "cached" if blocks < 1 else kinds.get(step, "dense"),
            "blocks": blocks,
        }
        for step in range(request.steps)
        for blocks in (run.get(step, 1.0),)
    ]


def provenance(loaded: LoadedPipeline) -> dict[str, Any]:
    """What a result depends on beside its request: weights, scheduler, versions and device."""
    scheduler = loaded.pipe.scheduler
    return {
        "model": {
            "name": loaded.ref.name,
            "source": loaded.ref.source,
            "weights_hash": loaded.weights_hash,
        },
        "scheduler": {
            "class": type(scheduler).__name__,
            "config": _jsonable(dict(scheduler.config)),
        },
        **machine_facts(loaded.device),
    }


def machine_facts(device: str) -> dict[str, Any]:
    """What times and the last digits depend on: versions of packages, and device and threads."""
    return {"versions": _versions(), "device": recorded_device(device)}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "vidsparse": __version__,
        "python": platform.python_version(),
        # what was built for which CUDA; the package's own version does not always tell.
        "torch": str(torch.__version__),
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def recorded_device(device: str) -> dict[str, Any]:
    """The hardware in a record: ``kind``, ``name`` and, of a CPU, ``threads``."""
    if device.startswith("cuda"):
        return {"kind": "cuda", "name": torch.cuda.get_device_name(device), "threads": None}
    return {"kind": "cpu", "name": _cpu_name(), "threads": torch.get_num_threads()}


def _cpu_name() -> str:
    # on Linux, platform.processor() returns nothing or the architecture.
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for line in facts.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _jsonable(value: Any) -> Any:
    """Schedulers' settings hold infinities and tuples, which JSON does not."""
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
