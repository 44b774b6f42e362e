"""One video over several processes: diffusers' context parallelism, by Ulysses, ring or both.

Each process gets an equal run of the video's tokens, with all heads. Around attention these are
exchanged for all tokens of an equal share of the heads (DeepSpeed-Ulysses, arXiv 2309.14509,
section 3), so that grids, orders, masks and plans are those of one process.

Text that attends together with video stands whole in every process, since its length is seldom a
multiple of their number: a process takes its heads of it without an exchange, and the rows that
attention made of it are gathered. So what it holds is the same everywhere (``packed.py`` where one
sequence holds both).

In a ring (``vidsparse/ring.py``) processes keep all heads of what tokens they have. With both,
processes are a table of R rows and U columns: rows exchange heads, so that each row has a run of
the video's tokens and each process of it some heads, whose keys travel in its column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.grid import TokenGrid
from vidsparse.pipelines.balance import HeadDeal, device_of, imbalance
from vidsparse.pipelines.exchange import Dealing, bring_to_tokens, send_to_heads
from vidsparse.pipelines.forwards import is_compiled, wrap_forward
from vidsparse.pipelines.packed import Packed, deal_packed
from vidsparse.ring import Ring
from vidsparse.trace import Balance

if TYPE_CHECKING:
    from vidsparse.trace import Trace

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How a family's sequence is dealt to processes.

    Args:
        plan: diffusers' plan for a transformer, of where its tensors are split and gathered again,
            or ours. It raises ``UnsupportedError`` for a transformer that cannot be dealt so.
        exchanged: matches the names of further attention modules, whose keys are split and whose
            queries are whole (LTX-2's sound that listens to video): the host's own exchange runs
            there. All others attend to what is whole everywhere.
        host: ``enable_parallelism`` may be called in place of ``SparseHandle.parallelize``.
        apart: transformer classes that pipelines call once for each guidance branch, with all
            arguments by name, and of which they look at neither prediction before both are there.
    """

    plan: Callable[[Any], Mapping[str, Any] | Packed]
    exchanged: re.Pattern[str] | None = None
    host: bool = False
    apart: tuple[str, ...] = ()


def own_plan(transformer: Any) -> Mapping[str, Any]:
    """The plan that diffusers has for a transformer.

    Raises:
        UnsupportedError: it has none.
    """
    plan: Mapping[str, Any] | None = transformer._cp_plan
    if plan is None:
        raise UnsupportedError(
            f"{type(transformer).__name__} cannot run in several processes: diffusers has no plan "
            "of context parallelism for it. Hint: run it in one process."
        )
    return plan


def split_input(dim: int, dims: int) -> Any:
    """A plan's entry: an argument of ``dims`` axes is split along ``dim``."""
    return _entry(dim, dims, output=False)


def split_outputs(dim: int, dims: int, count: int = 1) -> dict[int, Any]:
    """A plan's entry: ``count`` outputs of a module are split along ``dim``."""
    return {place: _entry(dim, dims, output=True) for place in range(count)}


def gathered() -> Any:
    """A plan's entry: the output ``[B, S / N, C]`` of a module is gathered to ``[B, S, C]``."""
    from diffusers.models._modeling_parallel import ContextParallelOutput

    return ContextParallelOutput(gather_dim=1, expected_dims=3)


def _entry(dim: int, dims: int, *, output: bool) -> Any:
    from diffusers.models._modeling_parallel import ContextParallelInput

    return ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=output)


def own_tokens(whole: Tensor, dim: int, count: int) -> Tensor:
    """The part along ``dim`` of what belongs to this process's ``count`` tokens of the video.

    For what reaches a processor whole, because no plan can split it: angles in a dictionary.
    """
    if whole.shape[dim] == count:
        return whole
    return whole.narrow(dim, dist.get_rank() * count, count)


def check_parallel(config: Any, shares: Shares) -> None:
    """Check a ``_parallel_config`` that the host has set; None passes.

    Raises:
        UnsupportedError: the family does not follow the host's own call, or the configuration is
            another than Ulysses and ring over equal shards.
    """
    if config is None:
        return
    if not shares.host:
        raise UnsupportedError(
            "sparse attention follows enable_parallelism() only in Wan; context parallelism of "
            "this family needs another plan. Hint: leave that call out, and call "
            "sparsify(pipe).parallelize()."
        )
    context = getattr(config, "context_parallel_config", None)
    anything = (getattr(context, f"{kind}_anything", False) for kind in ("ulysses", "ring"))
    if context is None or any(anything):
        raise UnsupportedError(
            "sparse attention runs under context parallelism with equal shards only, by Ulysses "
            "or ring. Hint: enable_parallelism(config=ContextParallelConfig(ulysses_degree=N))."
        )


def process_count() -> int:
    """The processes of ``torch.distributed``; 1 where it was not started."""
    started = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if started else 1


def everywhere(flag: Tensor) -> Tensor:
    """Whether ``flag`` (a bool of no dimensions) holds in every process; all must call it."""
    holds = flag.to(device_of(None), torch.int32)
    dist.all_reduce(holds, op=dist.ReduceOp.MIN)
    return holds.bool()


def from_all(own: T) -> list[T]:
    """What every process has, in their order; all must call it."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told


def all_processes(heads: int, ring: int | None = None, halves: int = 1) -> Any:
    """diffusers' configuration that deals to every process of ``torch.distributed``; None if one.

    With ``halves`` above 1 it deals to the processes of one such part.

    Args:
        heads: of an attention layer.
        ring: how many processes keys and values travel round; None for as few as let the others
            share the heads out.
        halves: number of equal parts of the processes that have a sequence each.

    Raises:
        UnsupportedError: ``torch.distributed`` was not started.
        OptionError: ``ring`` or ``halves`` does not divide the processes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UnsupportedError(
            "parallelize() needs several processes, and torch.distributed was not started. "
            "Hint: start the script with torchrun, and call "
            "torch.distributed.init_process_group() before."
        )
    count, more = divmod(dist.get_world_size(), halves)
    if more:
        raise OptionError(
            f"apart=True needs an even number of processes, got {dist.get_world_size()}. "
            "Hint: parallelize() without apart."
        )
    if ring is None:
        ring = count // math.gcd(count, heads)
    if type(ring) is not int or ring < 1 or count % ring:
        raise OptionError(
            f"ring must be a whole number that divides the {count} processes, got {ring!r}. "
            "Hint: leave it out."
        )
    return None if count == 1 else _configured(ring, count // ring, halves)


# by shape, those of the process group that all processes are in.
_MESHES: Final[dict[tuple[Any, ...], Any]] = {}


def _mesh(kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """All processes in ``shape``, made once: groups hold a device's memory until the end."""
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.group.WORLD
    # of one that was destroyed nothing is left.
    for key in [key for key in _MESHES if key[0] is not world]:
        del _MESHES[key]
    key = world, kind, shape, names
    if key not in _MESHES:
        _MESHES[key] = init_device_mesh(kind, shape, mesh_dim_names=names)
    return _MESHES[key]


def _configured(ring: int, ulysses: int, halves: int = 1) -> Any:
    """diffusers' configuration of all processes of each half, ``ring`` rows of ``ulysses``."""
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig

    kind = device_of(None).type
    context = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    shape, names = context.mesh_shape, context.mesh_dim_names
    if halves > 1:
        shape, names = (halves, *shape), ("half", *names)
    mesh = _mesh(kind, shape, names)
    config = ParallelConfig(context_parallel_config=context)
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else kind
    config.setup(dist.get_rank(), ring * ulysses, torch.device(device), mesh=mesh)
    return config


def deal(
    transformers: Iterable[nn.Module],
    shares: Shares,
    config: Any,
    grid: Callable[[], TokenGrid | None],
) -> list[Callable[[], None]]:
    """Deal the transformers' sequences to the processes of ``config``; returns what undoes it.

    ``grid`` returns the token grid of the forward that is running.

    Raises:
        UnsupportedError: a transformer cannot be dealt; then none is.
    """
    undone: list[Callable[[], None]] = []
    try:
        for transformer in transformers:
            undone.append(_deal_one(transformer, shares, config, grid))
    except UnsupportedError:
        for undo in undone:
            undo()
        raise
    return undone


def _deal_one(
    transformer: nn.Module,
    shares: Shares,
    config: Any,
    grid: Callable[[], TokenGrid | None],
) -> Callable[[], None]:
    """``deal`` for one transformer.

    Not by ``enable_parallelism``: it would have every attention module exchange, those too whose
    keys are whole, and it does not know a CPU.

    Raises:
        UnsupportedError: the transformer cannot be dealt, or is already.
    """
    import diffusers
    from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel

    if getattr(transformer, "_parallel_config", None) is not None:
        raise UnsupportedError(
            "this pipeline runs under context parallelism already. "
            "Hint: call parallelize() or enable_parallelism() once."
        )
    if isinstance(getattr(transformer, "_cache_config", None), diffusers.FirstBlockCacheConfig):
        raise UnsupportedError(
            "a first-block cache put on before parallelize() would see only one process's part of "
            "the video, so processes would skip different steps. "
            "Hint: call parallelize() first, and put the StepCache on after it."
        )
    if is_compiled(transformer):
        raise UnsupportedError(
            "a transformer that is compiled as a whole cannot run in several processes: the code "
            "that splits its sequence depends on data, which compilation does not allow. "
            "Hint: pipe.transformer.compile_repeated_blocks(fullgraph=True)."
        )
    plan = shares.plan(transformer)
    told: list[tuple[Any, Any]] = [(transformer, config)]
    if shares.exchanged is not None:
        modules = [
            module
            for name, module in transformer.named_modules()
            if shares.exchanged.fullmatch(name)
        ]
        by_heads = _exchange_config(config, modules)
        told += [(module.processor, by_heads) for module in modules]
    context = config.context_parallel_config
    # hooks go around what is compiled: all blocks alike, so that they are compiled once.
    compiled = [wrap_forward(module) for module in transformer.modules() if is_compiled(module)]
    if isinstance(plan, Packed):
        group = context._flattened_mesh.get_group()
        undone = deal_packed(transformer, plan, grid, group)
    else:
        plan = dict(plan)
        apply_context_parallel(transformer, context, plan)
        undone = [partial(remove_context_parallel, transformer, plan)]
    undone += compiled
    for holder, its in told:
        vars(holder)["_parallel_config"] = its

    def undo() -> None:
        for remove in undone:
            remove()
        for holder, _ in told:
            vars(holder)["_parallel_config"] = None

    return undo


def _exchange_config(config: Any, modules: list[Any]) -> Any:
    """What the host's own exchange of keys that are split goes by: by heads, whatever we do.

    Raises:
        UnsupportedError: the heads of these modules cannot be dealt to all processes.
    """
    context = config.context_parallel_config
    if context.ring_degree == 1:
        return config
    count = context.ring_degree * context.ulysses_degree
    for heads in map(heads_of, modules):
        if heads % count:
            raise UnsupportedError(
                f"the sound's attention to the video has {heads} heads, which {count} processes "
                "cannot share equally. Hint: take a number of processes that divides the heads."
            )
    return _configured(1, count)


@dataclass(frozen=True, slots=True)
class Groups:
    """The processes that this one attends together with.

    Args:
        heads: the process group that shares the heads; None if each process has all of them.
        ring: the processes that pass keys and values round; None if each sees all.
        all: the process group of both.
    """

    heads: Any
    ring: Ring | None
    all: Any

    @property
    def sharers(self) -> int:
        """How many processes share the heads."""
        return 1 if self.heads is None else dist.get_world_size(self.heads)

    @property
    def processes(self) -> int:
        """How many processes attend together."""
        return self.sharers * (1 if self.ring is None else self.ring.count)

    @property
    def place(self) -> int:
        """This process's number among those that share the heads."""
        return 0 if self.heads is None else dist.get_rank(self.heads)

    def first_head(self, heads: int) -> int:
        """Number of this process's first head, of ``heads`` that are dealt in their order."""
        return heads // self.sharers * self.place


def parallel_groups(config: Any) -> Groups | None:
    """The groups of a configuration that was checked; None without one."""
    if config is None:
        return None
    context = config.context_parallel_config
    return Groups(
        heads=context._ulysses_mesh.get_group() if context.ulysses_degree > 1 else None,
        ring=Ring(context._ring_mesh.get_group()) if context.ring_degree > 1 else None,
        all=context._flattened_mesh.get_group(),
    )


def forget_config(transformer: nn.Module, config: Any) -> None:
    """Remove a parallel configuration that is refused from everything the host has given it to.

    These are the transformer and, one by one, the processors before ours. What is left there would
    make the next attempt fail.
    """
    modules = list(transformer.modules())
    processors = [getattr(module, "processor", None) for module in modules]
    for holder in (*modules, *processors):
        if getattr(holder, "__dict__", {}).get("_parallel_config") is config:
            vars(holder)["_parallel_config"] = None


def heads_of(module: Any) -> int:
    """Attention heads of one of the host's modules."""
    # the hosts' own classes have other names for them.
    names = ("heads", "num_heads", "num_attention_heads")
    found: int = next(getattr(module, name) for name in names if hasattr(module, name))
    return found


def check_tokens(grid: TokenGrid, config: Any, plan: Mapping[str, Any] | Packed) -> None:
    """Check that a video's tokens can be dealt in equal shares.

    Raises:
        UnsupportedError: they cannot.
    """
    groups = parallel_groups(config)
    if groups is None:
        return
    packed = isinstance(plan, Packed)
    if grid.lead and (groups.ring is not None or not packed):
        among = "in a ring" if packed else "among several processes"
        other = "share all heads out" if packed else "run this pipeline in one process"
        raise UnsupportedError(
            f"text on both sides of the video cannot be divided {among}. Hint: {other}."
        )
    count = groups.processes
    tokens = grid.tokens - grid.text
    if tokens % count:
        raise UnsupportedError(
            f"{count} processes cannot share {tokens} video tokens equally. Hint: change the "
            "video's size or length, or take a number of processes that divides the tokens."
        )


def exchanged(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    qkv: Iterable[Tensor],
    grid: TokenGrid | None,
    groups: Groups,
    deal: HeadDeal | None = None,
) -> Tensor:
    """``attend`` on this process's heads, for the tokens of all processes that share the heads.

    q, k, v and the result are ``[B, S, H, D]``: this process's tokens of the video with all text
    beside them. ``deal`` says whose heads are which; None leaves them in their order.

    Raises:
        UnsupportedError: the sequence was split in another way, or heads cannot be dealt.
    """
    q, k, v = qkv
    text, front = (0, 0) if grid is None else (grid.text, grid.before)
    group = groups.heads
    together = (q.shape[1] - text) * groups.processes + text
    if grid is None or together != grid.tokens:
        raise UnsupportedError(
            f"the processes hold {together} tokens together, which do not fit the video's grid. "
            "Hint: split the sequence by the model's own plan."
        )
    if group is None:
        return attend(q, k, v)
    dealing = Dealing(group, front, text, None if deal is None else deal.on(q.device))
    sent = [send_to_heads(x, dealing) for x in (q, k, v)]
    return bring_to_tokens(attend(*(one.arrived() for one in sent)), dealing)


def gather_heads(trace: Trace, groups: Groups) -> bool:
    """Complete a run's trace with the heads that other processes computed.

    Every process must call it; seconds stay its own. Returns whether it could be done: not if a
    call became dense in one process alone, because densities then differ between processes.
    """
    trace.resolve()
    count, group = groups.sharers, groups.heads
    if count == 1:
        return True
    device = device_of(group)
    held = [
        (cell, name)
        for cell in trace.cells
        for name in ("selected", "computed", "skipped")
        if getattr(cell, name) is not None
    ]
    numbers = [torch.tensor(cell.heads or (), dtype=torch.float32) for cell in trace.cells]
    own = [*numbers, *(getattr(cell, name).flatten().float() for cell, name in held)]
    flat = torch.cat(own or [torch.zeros(0)]).to(device)
    lengths = torch.zeros(count, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(lengths, torch.tensor([flat.numel()], device=device), group=group)
    if len(set(lengths.tolist())) > 1:
        return False
    received = [torch.empty_like(flat) for _ in range(count)]
    dist.all_gather(received, flat, group=group)
    sizes = [values.numel() for values in own]
    parts = [torch.split(one.cpu(), sizes) for one in received]
    loads = torch.zeros(2, 2, dtype=torch.float64)
    orders = {
        id(cell): torch.cat([part[place] for part in parts]).argsort()
        for place, cell in enumerate(trace.cells)
        if cell.heads is not None
    }
    for place, (cell, name) in enumerate(held, len(numbers)):
        shape = getattr(cell, name).shape
        dealt = torch.cat([part[place].view(shape) for part in parts], dim=1)
        order = orders.get(id(cell))
        whole = dealt if order is None else dealt[:, order]
        setattr(cell, name, whole)
        if name == "computed":
            loads += cell.pairs * torch.tensor(
                [imbalance(work.mean(0), count) for work in (dealt, whole)]
            )
    for cell in trace.cells:
        cell.pairs *= count
        cell.heads = None
    trace.left_out *= count
    if loads[0, 1]:
        trace.balance = Balance(count, *(loads[:, 0] / loads[:, 1]).tolist())
    return True
