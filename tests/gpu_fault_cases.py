"""What `gpu_faults.py` tries: broken plans, every kernel, memory that runs out, the guard's cost.

Cases stand in groups that a process runs one after the other; a group's kernels are compiled by
that process alone. A case that is not right raises.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any

import foresight_cases
import planning_cases
import pytest
import quantize_checks
import rotate_cases
import selection_cases
import torch
import torch.nn.functional as F
from broken_plans import EXTRAS, SAID, extra_options, of_16_bits, wrecked
from budget import (
    Work,
    check_gated,
    check_kernel,
    check_quantized,
    check_with_means,
    clustered_qkv,
    in_order,
    random_qkv,
    random_work,
)
from kernel_cases import DEVICE, HEAD_DIMS
from torch import Tensor

from vidsparse import TokenGrid
from vidsparse.kernels import (
    AbsoluteGate,
    RelativeGate,
    dense_attention,
    quantize_qk,
    sparse_attention,
    support,
)

# what a body returns is kept with its case.
Found = dict[str, Any] | None
Case = tuple[str, Callable[[], Found]]
Groups = dict[str, list[Case]]
QKV = tuple[Tensor, Tensor, Tensor]

TILES = ((16, 1), (32, 16), (64, 64), (128, 128))
# the interpreter has no bf16.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
DIM = 128 if DEVICE == "cuda" else 64


def attention_kernels() -> list[str]:
    """Names of the kernels of attention that run here."""
    if DEVICE == "cpu":
        return ["triton"]
    return [name for name in ("triton", "gluon") if support(name, DEVICE, DTYPE, DIM) is None]


def there(qkv: QKV) -> QKV:
    """The same tensors where the kernels run."""
    q, k, v = qkv
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)


def wait() -> None:
    """Wait for the GPU; an access elsewhere is an error here."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def machine() -> dict[str, Any]:
    """Hardware, versions and date."""
    from vidsparse.apps.bench.machine import header

    return header(torch.device(DEVICE))


# ---- broken plans ----


class _Setting:
    """Calls of one kernel on a valid plan, whose output must stay as it was."""

    def __init__(self, name: str, extra: str, tile: tuple[int, int], is_short: bool) -> None:
        self.plan = of_16_bits(random_work(300, tile)) if is_short else random_work(300, tile)
        self.is_short = is_short
        self.qkv = there(random_qkv(300, DIM, DTYPE))
        work = self.plan.to(DEVICE)
        self.options: dict[str, Any] = extra_options(extra, work, *self.qkv[1:])
        self.options |= {"tile": tile, "implementation": name, "chosen": True}
        if not extra:
            call = partial(sparse_attention, implementation=name, chosen=True, validate=True)
            check_kernel(call, *self.qkv, work)
        # what stands beside the call's tensors in memory.
        self.beside = [torch.full((4096,), 7, dtype=torch.int32, device=DEVICE) for _ in range(4)]
        self.right = self.call(work, validate=True)
        wait()
        for x in self.right:
            assert not bool(x.isnan().any())

    def call(self, work: Work, **options: Any) -> tuple[Tensor, Tensor]:
        return sparse_attention(*self.qkv, *work.tensors, **{**self.options, **options})

    def check(self) -> None:
        """Assert that a valid call is what it was, and that nothing beside it was written to."""
        work = self.plan.to(DEVICE)
        for validate in (False, None):
            got = self.call(work, validate=validate)
            wait()
            for a, b in zip(got, self.right, strict=True):
                assert torch.equal(a, b), "a valid plan's output is not what it was before"
        for x in self.beside:
            assert bool((x == 7).all()), "memory beside the call's tensors was written to"


@cache
def _setting(name: str, extra: str, tile: tuple[int, int], is_short: bool) -> _Setting:
    return _Setting(name, extra, tile, is_short)


def broken_plan(name: str, extra: str, number: int) -> None:
    """Run a broken plan unchecked and checked beside the call; it harms nothing and is told."""
    gen = torch.Generator().manual_seed(number)
    drawn = torch.randint(len(SAID), (1 + number % 4,), generator=gen).tolist()
    kinds = [list(SAID)[kind] for kind in drawn]
    setting = _setting(name, extra, TILES[number % len(TILES)], number // len(TILES) % 2 == 1)
    work = wrecked(random_work(300, setting.plan.tile, seed=number), kinds, number)
    broken = (of_16_bits(work) if setting.is_short else work).to(DEVICE)
    setting.call(broken, validate=False)
    wait()
    said = False
    try:
        setting.call(broken)
        wait()
        setting.check()
    except ValueError:
        said = True
    assert said, "nobody was told of a broken plan"
    try:
        setting.call(broken, validate=True)
    except ValueError:
        setting.check()
        return
    raise AssertionError("a broken plan was not refused")


def plans(count: int) -> Groups:
    """``count`` broken plans over all kernels, tiles and what calls have beside a plan."""
    groups = list(itertools.product(attention_kernels(), EXTRAS))
    made: Groups = {f"{name} {extra}".strip(): [] for name, extra in groups}
    for number in range(count):
        name, extra = groups[number % len(groups)]
        body = partial(broken_plan, name, extra, number // len(groups))
        made[f"{name} {extra}".strip()].append((f"plan {number}", body))
    return made


# ---- every kernel, with valid plans ----


def _attention(name: str) -> Iterator[Case]:
    from vidsparse.kernels.dispatch import _KNOWN

    kernel = _KNOWN[name].load()

    def operands(tokens: int, dim: int) -> QKV:
        return there(clustered_qkv(tokens, dim, DTYPE, pull=2.0, mean=1.0))

    def plain(tokens: int, dim: int, tile: tuple[int, int]) -> None:
        check_kernel(kernel, *operands(tokens, dim), random_work(tokens, tile).to(DEVICE))

    for (at, tile), tokens in itertools.product(enumerate(TILES), (129, 333)):
        dim = HEAD_DIMS[at % len(HEAD_DIMS)]
        yield f"{tile} of {tokens} tokens, D={dim}", partial(plain, tokens, dim, tile)

    def rounded(kind: str, tile: tuple[int, int]) -> None:
        q, k, v = operands(333, DIM)
        eight = quantize_qk(q, k, kind, q_run=tile[0])
        check_quantized(kernel, q, k, v, random_work(333, tile).to(DEVICE), eight)

    def gated(gate: Any, tile: tuple[int, int]) -> None:
        work = in_order(random_work(333, tile, share=0.7)).to(DEVICE)
        check_gated(kernel, *operands(333, DIM), work, gate.to(DEVICE))

    def means(tile: tuple[int, int], kind: str | None) -> None:
        q, k, v = operands(333, DIM)
        eight = None if kind is None else quantize_qk(q, k, kind, q_run=tile[0])
        work = random_work(333, tile).to(DEVICE)
        check_with_means(kernel, q, k, v, work, 64, quantized=eight)

    relative, absolute = RelativeGate(-4.0), AbsoluteGate(torch.tensor(6.0), None)
    for tile in ((16, 16), (64, 1), (128, 64)):
        for kind in ("int8", "fp8") if DEVICE == "cuda" else ("int8",):
            yield f"{kind} {tile}", partial(rounded, kind, tile)
        for of_means in (None, "int8"):
            yield f"means {tile}, {of_means or '16 bits'}", partial(means, tile, of_means)
    for gate in (relative, absolute):
        yield f"{type(gate).__name__}", partial(gated, gate, (64, 64))


def _dense() -> Iterator[Case]:
    def plain(tokens: int, kind: str | None) -> None:
        q, k, v = there(random_qkv(tokens, DIM, DTYPE, heads=1))
        out, _ = dense_attention(q, k, v, quantize=kind)
        true = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
        error = float((out.float() - true).norm() / true.norm())
        assert error < (0.1 if kind else 0.02), f"relative error {error:.3g}"

    # the last are cut into parts.
    for tokens, kind in itertools.product((1, 129, 700, 2500), (None, "int8")):
        yield f"dense {tokens} tokens, {kind or '16 bits'}", partial(plain, tokens, kind)


def _tokens() -> Iterator[Case]:
    yield from rotate_cases.cases("rotate", torch.float16)
    yield "mean", partial(quantize_checks.check_mean, DEVICE)
    for tile, judged in (((16, 16), False), ((128, 64), True), ((64, 1), True)):
        check = partial(quantize_checks.check_pooled, "int8", tile, judged=judged)
        yield f"quantise and pool {tile}", partial(check, device=DEVICE)
    yield from foresight_cases.cases()


def _methods() -> Iterator[Case]:
    """Whole calls: order, mask, plan, means and attention, of every method."""
    from vidsparse import attend

    grid = TokenGrid(3, 12, 16, text=37)

    def call(name: str, options: dict[str, Any]) -> None:
        q, k, v = there(clustered_qkv(grid.tokens, DIM, DTYPE, pull=2.0))
        out = attend(q, k, v, grid, name, order="rowmajor", **options)
        dense = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
        error = float((out.float() - dense).norm() / dense.norm())
        assert error < 0.7, f"relative error {error:.3g}"

    for name, options in (
        ("fg-attn", {"top_p": 0.9}),
        ("fg-attn", {"top_p": 0.9, "tile": (128, 16), "means": 64}),
        ("spargeattn", {"tau": 0.9}),
        ("xattention", {"tau": 0.9}),
        ("sale", {}),
        ("foresight", {"share": 0.3}),
        ("sol-attn", {"tau": 0.5}),
    ):
        yield f"{name} {options}", partial(call, name, options)


def _some(cases: Iterator[Case], every: int) -> list[Case]:
    return list(cases)[::every]


def kernels(every: int) -> Groups:
    """A sample of valid calls of all kernels; of those of planning each ``every``-th."""
    made: Groups = {f"{name} attention": list(_attention(name)) for name in attention_kernels()}
    if "gluon" in attention_kernels():
        made["gluon dense"] = list(_dense())
        made["sale on hopper"] = _some(selection_cases.sale_cases(DEVICE, "fp8"), every)
    made["tokens"] = list(_tokens())
    made["methods"] = list(_methods()) if DEVICE == "cuda" else []
    planning = _some(planning_cases.cases(DEVICE), every)
    made["planning"], made["planning, more"] = planning[::2], planning[1::2]
    made["selection"] = _some(selection_cases.cases(DEVICE), every)
    return made


# ---- memory ----


def _right_after(q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid) -> None:
    from vidsparse import attend

    out = attend(q, k, v, grid, "fg-attn", top_p=1.0, order="rowmajor")
    true = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    error = float((out.float() - true).norm() / true.norm())
    assert error < 0.02, f"relative error {error:.3g} after memory ran out"


def _runs_out() -> Found:
    """PyTorch may take no more than there is in use: a call fails, and the next is right."""
    from vidsparse import attend

    grid = TokenGrid(4, 32, 32)
    q, k, v = (torch.randn(1, 8, grid.tokens, 128, device="cuda").bfloat16() for _ in "qkv")
    total = torch.cuda.get_device_properties(0).total_memory
    failed = 0
    for spare in (0, 2**21, 2**22, 2**23):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, (torch.cuda.memory_reserved() + spare) / total)
        )
        try:
            attend(q, k, v, grid, "fg-attn", top_p=0.5, order="rowmajor")
        except torch.OutOfMemoryError:
            failed += 1
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        _right_after(q, k, v, grid)
    assert failed >= 1, "memory never ran out"
    return {"ran out": failed}


def _refused() -> Found:
    """On a GPU that is full, what mask and plan would take is said before it is taken."""
    from vidsparse import UnsupportedError, attend

    grid = TokenGrid(1, 1, 40_000)
    q, k, v = (torch.randn(1, 24, grid.tokens, 64, device="cuda").bfloat16() for _ in "qkv")
    torch.cuda.empty_cache()
    full = torch.empty(torch.cuda.mem_get_info()[0] - 2**28, dtype=torch.uint8, device="cuda")
    said = ""
    try:
        attend(q, k, v, grid, "fg-attn", tile=(16, 1), topk=0.3, order="rowmajor")
    except UnsupportedError as error:
        said = str(error)
    finally:
        del full
        torch.cuda.empty_cache()
    assert "the GPU's memory is too small for mask, plan and means" in said, said or "not refused"
    small = TokenGrid(2, 32, 32)
    q, k, v = (x[:, :2, : small.tokens].contiguous() for x in (q, k, v))
    _right_after(q, k, v, small)
    return {"said": said}


def _estimate(name: str, options: dict[str, Any]) -> Found:
    """What is estimated of mask, plan and means is no more than what they take."""
    from vidsparse import make_method
    from vidsparse.methods import SparseMethod
    from vidsparse.planning import key_means, plan_attention
    from vidsparse.room import planning_bytes
    from vidsparse.route import find_route
    from vidsparse.site import CallSite

    grid = TokenGrid(9, 30, 52)
    q, k, v = (torch.randn(1, 8, grid.tokens, 128, device="cuda").bfloat16() for _ in "qkv")
    method = make_method(name, **options)
    assert isinstance(method, SparseMethod)
    route, site = find_route(method, q, k, v), CallSite(0, 0, 0.0, grid)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan = plan_attention(method, q, k, site, route, v)
    held = [plan.list_keys(by_kernel=route.lists)]
    if method.means is not None:
        counts = plan.left_out(method.means, by_kernel=route.lists)
        means = key_means(k, v, counts, method.means, grid.video, by_kernel=route.lists)
        held += [means.k, means.v, means.counts]
    taken = torch.cuda.max_memory_allocated() - before
    estimate = planning_bytes(method, q, route)
    assert 0 < estimate <= taken + 2**21, f"estimated {estimate}, taken {taken}"
    return {"estimated": estimate, "taken": taken}


def memory(_: int) -> Groups:
    """Memory of a GPU that runs out or would; alone on the GPU, which it fills."""
    if DEVICE == "cpu":
        return {}
    cases: list[Case] = [
        ("a call that runs out of memory", _runs_out),
        ("a plan without room", _refused),
    ]
    for name, options in (
        ("fg-attn", {"tile": (16, 1), "means": None}),
        ("fg-attn", {"tile": (128, 16)}),
        ("fg-attn", {"tile": (16, 8), "top_p": None, "topk": 0.1}),
        ("foresight", {}),
        ("xattention", {}),
    ):
        cases.append((f"estimate of {name} {options}", partial(_estimate, name, options)))
    return {"memory": cases}


# ---- what the guard costs ----


class _Blocks(torch.nn.Module):
    """Blocks of a transformer, and its last projection, to as many channels as latents have.

    A block is what Wan's has beside cross attention: four projections of attention and two layers
    of ``width``; or attention alone.
    """

    def __init__(self, layers: int, heads: int, dim: int, width: int) -> None:
        super().__init__()
        inner = heads * dim
        shapes = [(inner, inner)] * 4 + [(width, inner), (inner, width), (64, inner)]
        self.weights = [
            torch.randn(shape, device=DEVICE, dtype=DTYPE) / shape[1] ** 0.5 for shape in shapes
        ]
        self.layers, self.heads, self.dim = layers, heads, dim

    def operands(self, x: Tensor) -> list[Tensor]:
        return [
            F.linear(x, w).unflatten(2, (self.heads, self.dim)).transpose(1, 2)
            for w in self.weights[:3]
        ]

    def forward(self, x: Tensor, attend: Any, fixed: list[Tensor] | None) -> Tensor:
        w = self.weights
        for layer in range(self.layers):
            q, k, v = self.operands(x) if fixed is None else fixed
            out = attend(q, k, v, layer)
            if fixed is None:
                out = F.linear(out.transpose(1, 2).flatten(2), w[3])
                F.linear(F.gelu(F.linear(out, w[4]), approximate="tanh"), w[5])
        return F.linear(x, w[6])


def guard_cost(
    tokens: int, heads: int, width: int, *, steps: int, layers: int, turns: int, dim: int = 128
) -> dict[str, Any]:
    """What the guard of ``generate`` adds to attention calls and to transformer blocks, in percent,
    and how far two measurements without it lie apart, which is how much of that is noise.

    The three take turns. The guard is that of ``generate``: it notes what each forward is given,
    takes in what that gives back, and looks between steps. A step is one forward of few ``layers``,
    so that a block has more of it than in a large model. Attention keeps 30 % of the keys at 128x16
    tiles by a plan that is reused, without means: a call has as little as it gets beside the guard.
    """
    from vidsparse import AttentionEngine, CallSite, Schedule
    from vidsparse.finite import PAUSE, FiniteGuard
    from vidsparse.methods import FgAttn
    from vidsparse.pipelines.again import Forward, tensors_of
    from vidsparse.trace import Trace

    grid = {32_760: TokenGrid(21, 30, 52), 75_600: TokenGrid(21, 45, 80)}.get(
        tokens, TokenGrid(1, 1, tokens)
    )
    x = torch.randn(1, tokens, heads * dim, device=DEVICE, dtype=DTYPE)
    blocks = _Blocks(layers, heads, dim, width)
    engine = AttentionEngine(
        FgAttn(tile=(128, 16), top_p=None, topk=0.3, means=None),
        schedule=Schedule(dense_steps=0, reuse=10**6),
        order="rowmajor",
        layers=layers,
    )
    engine.begin_run(10**6)
    fixed = blocks.operands(x)
    step = 0

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return engine.attend(q, k, v, CallSite(layer, step, 0.0, grid))

    def run(guard: FiniteGuard[Forward] | None, *, block: bool) -> float:
        nonlocal step
        forward: Forward | None = None

        def begin(module: Any, args: Any, kwargs: Any) -> None:
            nonlocal forward
            site = CallSite(0, step, 0.0, grid)
            if guard is not None:
                forward = Forward.begun(module, site, args, kwargs)

        def end(module: Any, args: Any, output: Any) -> None:
            assert guard is not None
            assert forward is not None
            for out in tensors_of(output):
                guard.watch(out, forward, hold=True)

        # the first is there without the guard as well.
        eager = torch.compiler.disable(begin)
        hooks = [blocks.register_forward_pre_hook(eager, with_kwargs=True)]
        if guard is not None:
            hooks.append(blocks.register_forward_hook(torch.compiler.disable(end)))
        engine.trace = Trace()
        wait()
        began = time.perf_counter()
        for _ in range(steps):
            step += 1
            blocks(x, attend=attend, fixed=None if block else fixed)
            if guard is not None:
                assert guard.look(last=False) is None
        wait()
        seconds = time.perf_counter() - began
        for hook in hooks:
            hook.remove()
        return seconds * 1e3 / (steps * layers)

    found: dict[str, Any] = {"tokens": tokens, "heads": heads, "head_dim": dim}
    for block in (False, True):
        guard: FiniteGuard[Forward] = FiniteGuard(pause=PAUSE)
        for each in (None, guard):
            run(each, block=block)
        off: list[float] = []
        again: list[float] = []
        on: list[float] = []
        legs = [(None, off), (guard, on), (None, again)]
        for turn in range(turns):
            # each place in a turn as often as the others.
            for place in range(len(legs)):
                each, taken = legs[(place + turn) % len(legs)]
                taken.append(run(each, block=block))
        what = "block" if block else "call"
        found[f"{what}_ms"] = round(statistics.median(off + again), 4)
        pairs = list(zip(off, again, strict=True))
        ratios = [2 * a / sum(pair) for a, pair in zip(on, pairs, strict=True)]
        found[f"{what}_percent"] = round(100 * (statistics.median(ratios) - 1), 3)
        apart = [100 * (b / a - 1) for a, b in pairs]
        found[f"{what}_noise_percent"] = round(statistics.median(apart), 3)
    cell = engine.trace.cells[-1]
    with suppress(AttributeError):
        found["kept"] = round(float(cell.computed_share), 3)
    found["implementation"] = cell.implementation
    return found


def guard(turns: int) -> Groups:
    """The guard's cost at sizes of small and large models; alone on the GPU."""
    sizes: list[tuple[int, int, int, int, int]] = [
        # several looks a turn.
        (2_304, 4, 2048, 100, 10),
        (8_190, 12, 8960, 30, 10),
        (32_760, 12, 8960, 4, 6),
        (75_600, 40, 13824, 1, 4),
    ]
    if DEVICE == "cpu":
        sizes = [(512, 2, 256, 2, 2)]
    cases: list[Case] = []
    for tokens, heads, width, steps, layers in sizes:
        body = partial(
            guard_cost, tokens, heads, width, steps=steps, layers=layers, turns=turns, dim=DIM
        )
        cases.append((f"{tokens} tokens, {heads} heads", body))
    return {"guard": cases}


PARTS: dict[str, Callable[[int], Groups]] = {
    "plans": plans,
    "kernels": kernels,
    "memory": memory,
    "guard": guard,
}
ALONE = ("memory", "guard")
"""Parts that want the GPU for themselves."""

SKIPPED = pytest.skip.Exception
