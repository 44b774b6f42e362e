"""Several processes that denoise tiny videos together; the first writes what they found.

Arguments are cpu or cuda, the file to write, then a number of processes and the cases that they
run, as often as one likes. On a CPU the processes are forked, so that one import serves them all;
on GPUs each starts anew, with one of its own.
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from tiny_families import PROMPTS, TINY, latents
from tiny_pipelines import latents_of, tiny_transformer, tiny_wan
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from vidsparse.errors import UnsupportedError
from vidsparse.methods.fg_attn import FgAttn
from vidsparse.methods.foresight import Foresight
from vidsparse.methods.numbers import Numbers
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.adapter import SparseProcessor
from vidsparse.pipelines.caching import AnyCache, StepCache
from vidsparse.pipelines.compilation import compile_blocks
from vidsparse.pipelines.exchange import Dealing, bring_to_tokens, send_to_heads
from vidsparse.pipelines.guidance_cache import GuidanceCache
from vidsparse.trace import Trace

# the first stage of a pyramid is a quarter as high and as wide.
JOINT = ("hunyuan-", "cogvideox", "mochi-", "motif-", "helios-pyramid")

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
    # tiles that a short video has enough of to be cut between, in a ring.
    "fine": {"method": "fg-attn", "top_p": 0.2, "tile": "16x16", "means": None, "dense_steps": 0},
    "reused": {
        "method": "spargeattn",
        "topk": 0.3,
        "theta": -1.0,
        "tile": "16x16",
        "reuse": 2,
        "dense_steps": 0,
    },
    # plans that the second guidance branch goes by for two steps, or makes for itself.
    "kept": {"method": "fg-attn", "top_p": 0.2, "tile": "16x16", "reuse": 2, "dense_steps": 0},
    "own": {"method": "fg-attn", "top_p": 0.2, "tile": "16x16", "plans": "own", "dense_steps": 0},
    "refreshed": {"method": "foresight", "tile": "16x16", "refresh": 1, "dense_steps": 0},
    "sol-attn": {"method": "sol-attn", "tile": "16x16", "dense_steps": 0},
    "xattention": {"method": "xattention", "tile": "16x16", "tau": 0.3, "dense_steps": 0},
    "sale": {"method": "sale", "tile": "16x16", "tau": 1.0, "local": 1, "dense_steps": 0},
    "gated": {"method": "spargeattn", "topk": 0.3, "tile": "16x64", "lambda_": -0.1},
    "layers": {"method": "fg-attn", "top_p": 0.2, "tile": "16x16", "dense_layers": 1},
}


device = "cpu"
# built once, before processes are forked: the first of each name that they ask for.
_BUILT: dict[str, Any] = {}


def tiny(name: str) -> Any:
    """The variant ``name``, where it is computed."""
    pipe = _BUILT.pop(name) if name in _BUILT else TINY[name].build()
    # some hosts draw noise without a generator.
    torch.manual_seed(0)
    return pipe.to(device)


def video(name: str, pipe: Any, *, large: bool = False, guidance: float = 3.0) -> torch.Tensor:
    """The latents of two tiny videos where that can be, with guidance, from the same noise."""
    tiny = TINY[name]
    frames, height, width = tiny.size
    # beside text, which is computed whole, a video of few tiles has none to skip.
    large = large or f"{name}-".startswith(JOINT)
    size = (frames, 2 * height, 2 * width) if large else tiny.size
    prompts = PROMPTS if tiny.batch else PROMPTS[:1]
    # a pyramid has as many in each stage as its call says.
    more: dict[str, Any] = {"num_inference_steps": 2}
    more = {} if more.keys() & set(tiny.without) else more
    return latents(name, pipe, prompts=prompts, size=size, guidance=guidance, **more)


def enable(pipe: Any, *, ring: bool = False) -> None:
    """What a user calls without us."""
    count = dist.get_world_size()
    shape = (count, 1) if ring else (1, count)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("ring", "ulysses"))
    config = ContextParallelConfig(ring_degree=shape[0], ulysses_degree=shape[1], mesh=mesh)
    pipe.transformer.enable_parallelism(config=config)


def what_is_left(transformer: Any) -> list[str]:
    """The modules and processors that know of several processes, and the host's hooks."""
    modules = list(transformer.modules())
    holders = [*modules, *(getattr(module, "processor", None) for module in modules)]
    told = [one for one in holders if getattr(one, "_parallel_config", None) is not None]
    hooks = [getattr(module, "_diffusers_hook", None) for module in modules]
    return [type(one).__name__ for one in told] + [k for one in hooks if one for k in one.hooks]


def is_first() -> bool:
    """Whether this process tells what it found; the others only take part."""
    return dist.get_rank() == 0


def cache_of(pipe: Any, name: str, threshold: float | None) -> AnyCache:
    """A step cache that runs no step because it is among the first."""
    return GuidanceCache(pipe) if name == "guidance" else StepCache(pipe, name, threshold=threshold)


def cached(name: str, pipe: Any, handle: Any) -> dict[str, Any]:
    """The same with each step cache; what is said of ``first-block`` before dealing."""
    found: dict[str, Any] = {}
    # at which some steps are left out, and some are not.
    least = {"wan": 0.1, "hunyuan": 0.4, "ltx": 0.2}
    caches = {"taylorseer": None, **({"first-block": least[name]} if name in least else {})}
    if name == "wan":
        caches["guidance"] = None
    alone = {}
    for name_of_cache, threshold in caches.items() if is_first() else ():
        with cache_of(pipe, name_of_cache, threshold) as cache:
            alone[name_of_cache] = latents(name, pipe, num_inference_steps=7), cache.blocks_run()
    if name in least:
        with StepCache(pipe, "first-block"):
            try:
                handle.parallelize()
            except UnsupportedError as error:
                found["before"] = str(error)
    handle.parallelize()
    for name_of_cache, threshold in caches.items():
        with cache_of(pipe, name_of_cache, threshold) as cache:
            actual = latents(name, pipe, num_inference_steps=7)
            handle.gather_trace()
            if not is_first():
                continue
            expected, blocks = alone[name_of_cache]
            work = handle.summary().work
            assert work is not None
            found[name_of_cache] = {
                "left_out": [step for step, share in cache.blocks_run().items() if share < 1],
                "same": blocks == cache.blocks_run(),
                "share_left_out": (work.left_out, cache.share_left_out()),
                "error": float((actual - expected).abs().max()),
                "largest": float(expected.abs().max()),
                "lost": 0.0,
            }
    handle.remove()
    return found


@dataclass
class Alone:
    """What one process makes: a video, the sound beside it, the trace and the share computed."""

    video: torch.Tensor
    sound: torch.Tensor
    trace: Trace
    computed: float | None


# by family, method, size and guidance: cases share them.
_ALONE: dict[tuple[Any, ...], Alone] = {}


def alone(pipe: Any, name: str, kind: str, sounds: list[torch.Tensor], **how: Any) -> Alone:
    """What ``pipe`` makes in one process, or what one like it made for another case."""
    key = (name, kind, *how.items())
    if key not in _ALONE:
        with sparsify(pipe, **METHODS[kind]) as handle:
            expected = video(name, pipe, **how)
            _ALONE[key] = Alone(expected, sounds[-1], handle.trace, handle.summary().computed)
    return _ALONE[key]


@cache
def stock(name: str) -> torch.Tensor:
    """What a pipeline makes that nobody has touched."""
    return video(name, tiny(name))


def lost(name: str, expected: torch.Tensor) -> float:
    """What sparsity did to ``expected``."""
    pipe = tiny(name)
    with sparsify(pipe, "dense"):
        return float((video(name, pipe, large=True) - expected).abs().max())


def rounding(name: str) -> float:
    """How far one process's dense video is from one by torch's other kernel, of a pyramid.

    Its keys of the past weigh more, stage after stage: rounding grows a hundred times there.
    """
    if name != "helios-pyramid":
        return 0.0
    pipe = tiny(name)
    with sparsify(pipe, "dense"):
        expected = video(name, pipe, large=True)
        with sdpa_kernel(SDPBackend.MATH):
            return float((video(name, pipe, large=True) - expected).abs().max())


def balanced(when: str) -> dict[str, Any]:
    """Eight heads, of which the last four compute several times as much as the first four."""
    pipe = tiny_wan()
    pipe.transformer = tiny_transformer(num_attention_heads=8)
    pipe.to(device)
    shares = torch.tensor([0.02, 0.03, 0.04, 0.05, 0.3, 0.5, 0.7, 0.9]).expand(1, 2, 8)
    apart = when == "apart"
    if apart:
        # nearly alike: which head computes most may differ from one guidance branch to the other.
        shares = torch.full((1, 2, 8), 0.3)
    method = FgAttn(tile=(128, 16), means=None, numbers=Numbers({"top_p": shares}, None))
    # where branches are apart the first step is sparse: each plans for itself then.
    options: dict[str, Any] = {"dense_steps": int(not apart), "reuse": 2 if when == "reuse" else 1}
    size = {"height": 128, "width": 128, "num_frames": 33, "num_inference_steps": 5}
    if is_first():
        with sparsify(pipe, method, **options) as alone:
            expected = latents_of(pipe, **size)
    found: dict[str, Any] = {}
    for name in ("on", "off"):
        with sparsify(pipe, method, **options) as handle:
            ring = 2 if when == "both" else 1
            handle.parallelize(balance=name == "on", ring=ring, apart=apart)
            actual = latents_of(pipe, **size)
            moved = {cell.step for cell in handle.trace.cells if cell.heads is not None}
            assert handle.gather_trace()
            if not is_first():
                continue
            cells = zip(handle.trace.cells, alone.trace.cells, strict=True)
            balance = handle.trace.balance
            assert balance is not None
            found[name] = {
                "error": float((actual - expected).abs().max()),
                "largest": float(expected.abs().max()),
                "density_error": max(
                    float((one.computed - its.computed).abs().max())
                    for one, its in cells
                    if one.computed is not None and its.computed is not None
                ),
                "moved": sorted(moved),
                "dealt": balance.dealt,
                "in_order": balance.in_order,
            }
    if not is_first():
        return {}
    densities = [cell.computed.mean(0) for cell in alone.trace.cells if cell.computed is not None]
    found["densities"] = torch.stack(densities).mean(0).tolist()
    return found


def agreement(when: str) -> dict[str, Any]:
    """What processes have to decide alike, beside one process: runs of refreshes."""
    pipe = tiny_wan()
    pipe.transformer = tiny_transformer(num_attention_heads=4)
    pipe.to(device)
    apart = when == "room-apart" or when.startswith("off")
    size: dict[str, Any] = {"height": 128, "width": 128, "num_frames": 33}
    size |= {"num_inference_steps": 8}
    shares = torch.tensor([0.02, 0.5, 0.04, 0.9]).expand(2, 2, 4)
    method: Any = Foresight(tile=(16, 16), numbers=Numbers({"share": shares}, None), slope=1.0)
    options: dict[str, Any] = {"method": method, "refresh": 3, "dense_steps": 1}
    if when == "off-planned":
        options = {**METHODS["fine"], "dense_steps": 1}
    # after step 2 a run has no guidance, and after step 4 it has again.
    scales = {2: 1.0, 4: 3.0} if when == "off-on" else {2: 1.0}

    def guide(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._guidance_scale = scales.get(step, pipe._guidance_scale)
        return tensors

    if when.startswith("off"):
        size["callback_on_step_end"] = guide
    with sparsify(pipe, **options) as one:
        expected = latents_of(pipe, **size)
    with sparsify(pipe, **options) as handle:
        handle.parallelize(apart=apart)
        if when.startswith("room") and not is_first():
            handle.engine._find_room = lambda *_: False  # type: ignore[method-assign]
        actual = latents_of(pipe, **size)
        gathered = handle.gather_trace()
        calls, alone = (
            sorted((cell.step, cell.layer, cell.branch) for cell in trace.cells)
            for trace in (handle.trace, one.trace)
        )
        kinds = {cell.action for cell in handle.trace.cells}
        notes = handle.trace.notes
    groups = len(_world.pg_map)
    for _ in range(2):
        with sparsify(pipe, **options) as handle:
            handle.parallelize(apart=apart)
    outputs = [torch.empty_like(actual) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, actual.contiguous())
    return {
        "error": float((actual - expected).abs().max()),
        "between": max(float((other - actual).abs().max()) for other in outputs),
        "largest": float(expected.abs().max()),
        "gathered": gathered,
        "same_calls": calls == alone,
        "kinds": sorted(kinds),
        "notes": notes,
        "more_groups": len(_world.pg_map) - groups,
    }


def longest(*arguments: Any) -> int:
    """The tokens of the longest sequence among a module's arguments."""
    return max(one.shape[-2] for one in arguments if isinstance(one, torch.Tensor))


def sound_of(output: Any) -> torch.Tensor:
    """What a transformer gives back beside the video; nothing of most."""
    _, *beside = (one for one in tree_leaves(output) if isinstance(one, torch.Tensor))
    return beside[0] if beside else torch.zeros(1)


def second_thoughts(pipe: Any, handle: Any) -> list[str]:
    """What is said of changes to a pipeline whose branches are apart."""
    said = []
    for change in (
        handle.parallelize,
        lambda: enable(pipe),
        lambda: StepCache(pipe, "taylorseer"),
    ):
        try:
            change()
        except UnsupportedError as error:
            said.append(str(error))
    return said


def exchange() -> dict[str, Any]:
    """Heads for tokens and back, of which every process knows what should come."""
    count, rank = dist.get_world_size(), dist.get_rank()
    wrong, tried = [], 0
    kinds = itertools.product(
        (torch.float32, torch.bfloat16), (8, 6), (1, 3), ((0, 0), (3, 0), (2, 3)), (False, True)
    )
    for dtype, width, batch, (front, back), is_dealt in kinds:
        heads, tokens = 2 * count, 5
        torch.manual_seed(tried)
        whole = torch.randn(batch, front + count * tokens + back, heads, width, dtype=dtype)
        order = torch.randperm(heads)
        runs = (front, front + rank * tokens, front + count * tokens)
        own = torch.cat(
            [whole[:, : runs[0]], whole[:, runs[1] : runs[1] + tokens], whole[:, runs[2] :]], 1
        )
        # a part of what one projection gave, as the hosts' fused ones do.
        own = torch.stack([own, own + 1, own], 2)[:, :, 2]
        assert not own.is_contiguous()
        dealing = Dealing(dist.group.WORLD, front, front + back, order if is_dealt else None)
        its = order[2 * rank : 2 * rank + 2] if is_dealt else slice(2 * rank, 2 * rank + 2)
        come = send_to_heads(own, dealing).arrived()
        back_again = bring_to_tokens(come, dealing)
        if not (torch.equal(come, whole[:, :, its]) and torch.equal(back_again, own)):
            wrong.append([rank, str(dtype), width, batch, front, back, is_dealt])
        tried += 1
    of_all: list[Any] = [None] * count
    dist.all_gather_object(of_all, wrong)
    return {"wrong": [one for each in of_all for one in each], "tried": tried}


def run(name: str, kind: str, when: str) -> dict[str, Any]:
    """Compare with one process: the largest difference and value, tokens held, the density."""
    if name == "exchange":
        return exchange()
    if kind == "balanced":
        return balanced(when)
    if kind == "agreement":
        return agreement(when)
    options = METHODS[kind]
    pipe = tiny(name)
    # a ring of all processes, or of half as many.
    half = dist.get_world_size() // 2
    rings = {"ring": 2 * half, "ring-refused": 2 * half, "both": half, "apart-ring": half}
    ring = rings.get(when)
    large = when == "host-ring" or (ring is not None and not when.endswith("refused"))
    # of a small video both branches have the same plans.
    large = large or (when.startswith("apart") and kind != "sparse")
    guidance = 1.0 if when == "apart-unguided" else 3.0
    sounds: list[torch.Tensor] = []
    heard = pipe.transformer.register_forward_hook(lambda *said: sounds.append(sound_of(said[2])))
    single = None
    if is_first() and when != "cached" and not when.endswith("refused"):
        single = alone(pipe, name, kind, sounds, large=large, guidance=guidance)
    if when in ("host-after", "host-ring"):
        enable(pipe, ring=when == "host-ring")
    if when.endswith("compiled"):
        compile_blocks(pipe, backend="aot_eager")
    handle = sparsify(pipe, **options)
    if when == "cached":
        return cached(name, pipe, handle)
    if when == "host-before":
        enable(pipe)
    try:
        if not when.startswith("host"):
            handle.parallelize(ring=ring, apart=when.startswith("apart"))
        elif when == "host-refused":
            enable(pipe)
    except UnsupportedError as error:
        return {"refused": str(error), "left": what_is_left(pipe.transformer)}
    compiled_before = counters["stats"]["unique_graphs"]
    seen: list[int] = []
    modules = [
        one
        for one in pipe.transformer.modules()
        if isinstance(getattr(one, "processor", None), SparseProcessor)
    ]
    if when == "swapped":
        for one in modules:
            one.processor = type(one.processor.stock)()
    watch = None
    # the compiler would trace the list too, and compile anew when it is longer.
    if not when.endswith("compiled"):
        watch = modules[0].register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(longest(*args, kwargs.get("hidden_states"))),
            with_kwargs=True,
        )
    try:
        actual = video(name, pipe, large=large, guidance=guidance)
    except UnsupportedError as error:
        return {"refused": str(error)}
    if watch is not None:
        watch.remove()
    heard.remove()
    calls = len(handle.trace.cells)
    assert handle.gather_trace()
    computed, notes = handle.summary().computed, handle.trace.notes
    again = handle.apart and dist.get_world_size() == 2
    refused = second_thoughts(pipe, handle) if again else []
    handle.remove()
    stock_error = 0.0
    is_stock = kind == "sparse" and not large
    # what the host was asked for is its own, and stays.
    if is_stock and (is_first() or when.startswith("host")):
        left = video(name, pipe)
    if single is None:
        return {}
    assert handle.trace.cells[0].pairs == single.trace.cells[0].pairs
    kinds = [
        [(cell.step, cell.layer, cell.branch, cell.action) for cell in trace.cells]
        for trace in (handle.trace, single.trace)
    ]
    if is_stock:
        stock_error = float((left - stock(name)).abs().max())
    # a run begins with noise, which some schedulers make large.
    noise = 4 * float(getattr(pipe.scheduler, "sigmas", torch.ones(1)).max())
    return {
        "error": float((actual - single.video).abs().max()),
        "largest": max(noise, float(single.video.abs().max())),
        "sound_error": float((sounds[-1] - single.sound).abs().max()),
        "loudest": float(single.sound.abs().max()),
        "lost": lost(name, single.video) if kind == "refreshed" else 0.0,
        "rounding": rounding(name) if ring is not None else 0.0,
        "notes": notes,
        "tokens": max(seen, default=0),
        "computed": 1.0 if computed is None else float(computed),
        "alone": 1.0 if single.computed is None else float(single.computed),
        "stock_error": stock_error,
        "calls": calls,
        "calls_alone": len(single.trace.cells),
        "same_calls": kinds[0] == kinds[1],
        "refused": refused,
        "compiled": counters["stats"]["unique_graphs"] - compiled_before,
    }


def take_part(
    rank: int, count: int, cases: list[str], store: Path, out: Path, on: str = "cpu"
) -> None:
    """Run every case as one of ``count`` processes; the first adds what it found to ``out``."""
    compute_on(on)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store.as_uri(), rank=rank, world_size=count)
    found = {f"{case}/{count}": run(*case.split("/")) for case in cases}
    if rank == 0:
        before = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        out.write_text(json.dumps(before | found), encoding="utf-8")
    dist.destroy_process_group()


def compute_on(on: str) -> None:
    """Have all that follows compute on ``cpu`` or ``cuda``."""
    global device
    device = on
    torch.set_num_threads(1)
    # diffusers numbers a process's device by this count, which is 0 on a CPU, and fails there.
    vars(torch.accelerator)["device_count"] = lambda: 1


def on_gpus(count: int, cases: list[str], store: Path, out: Path) -> bool:
    """Start ``count`` processes with a GPU each; a forked one could not use what its parent has."""
    context = multiprocessing.get_context("spawn")
    children = []
    for rank in range(count):
        # as commands do: each process sees one GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
        arguments = (rank, count, cases, store, out, "cuda")
        children.append(context.Process(target=take_part, args=arguments))
        children[-1].start()
    good = True
    while waiting := {child.sentinel: child for child in children if child.exitcode is None}:
        multiprocessing.connection.wait(waiting)
        if any(child.exitcode for child in children):
            good = False
            for other in waiting.values():
                other.kill()
    return good and not any(child.exitcode for child in children)


def together(count: int, cases: list[str], out: Path) -> bool:
    """Have ``count`` processes run ``cases``; whether all ended well."""
    with tempfile.TemporaryDirectory() as folder:
        if device == "cuda":
            return on_gpus(count, cases, Path(folder) / "store", out)
        children = []
        for rank in range(count):
            if (child := os.fork()) == 0:
                try:
                    take_part(rank, count, cases, Path(folder) / "store", out)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
                os._exit(0)
            children.append(child)
        good = True
        while children:
            child, status = os.wait()
            children.remove(child)
            if status and good:
                good = False
                # they wait for the one that failed.
                for other in children:
                    os.kill(other, signal.SIGKILL)
    return good


def main() -> int:
    """Run what the arguments say, one number of processes after another."""
    on, out, *words = sys.argv[1:]
    compute_on(on)
    # as conftest.py does for tests.
    gc.set_threshold(10_000, 20, 20)
    groups: list[tuple[int, list[str]]] = []
    for word in words:
        if word.isdecimal():
            groups.append((int(word), []))
        else:
            groups[-1][1].append(word)
    if device == "cpu":
        names = dict.fromkeys(case.split("/")[0] for _, cases in groups for case in cases)
        _BUILT.update({name: TINY[name].build() for name in names if name in TINY})
    gc.freeze()
    return 0 if all(together(count, cases, Path(out)) for count, cases in groups) else 1


if __name__ == "__main__":
    sys.exit(main())
