"""One video over several processes: diffusers' context parallelism, its Ulysses form.

Each process gets an equal run of the video's tokens, with all heads. Around attention these are
exchanged for all tokens of an equal share of the heads (DeepSpeed-Ulysses, arXiv 2309.14509,
section 3), so that grids, orders, masks and plans are those of one process.

Text that attends together with video stands whole in every process, since its length is seldom a
multiple of their number: a process takes its heads of it without an exchange, and the rows that
attention made of it are gathered. So what it holds is the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vidsparse.errors import UnsupportedError
from vidsparse.grid import TokenGrid

if TYPE_CHECKING:
    from vidsparse.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How a family's sequence is dealt to processes.

    Args:
        plan: diffusers' plan for a transformer: where its tensors are split, and gathered again.
            It raises ``UnsupportedError`` for a transformer that cannot be dealt so.
        exchanged: matches the names of further attention modules, whose keys are split and whose
            queries are whole (LTX-2's sound that listens to video): the host's own exchange runs
            there. All others attend to what is whole everywhere.
        host: ``enable_parallelism`` may be called in place of ``SparseHandle.parallelize``.
    """

    plan: Callable[[Any], Mapping[str, Any]]
    exchanged: re.Pattern[str] | None = None
    host: bool = False


SHARED_DECISION: Final = (
    "first-block decides by what a process holds of the video, and under context parallelism that "
    "is a part: processes would leave out other steps. Hint: take taylorseer, or one process."
)


def own_plan(transformer: Any) -> Mapping[str, Any]:
    """The plan that diffusers has for a transformer.

    Raises:
        UnsupportedError: it has none.
    """
    plan: Mapping[str, Any] | None = transformer._cp_plan
    if plan is None:
        raise UnsupportedError(
            f"{type(transformer).__name__} cannot be dealt to several processes: diffusers has no "
            "plan of context parallelism for it. Hint: run it in one process."
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


def check_parallel(config: Any, shares: Shares | None) -> None:
    """Check a ``_parallel_config`` that the host has set; None passes.

    Raises:
        UnsupportedError: the family does not follow the host's own call, or the configuration is
            another than Ulysses alone over equal shards.
    """
    if config is None:
        return
    if shares is None:
        raise UnsupportedError(
            "sparse attention does not run under context parallelism in this family yet. "
            "Hint: run the pipeline without enable_parallelism()."
        )
    if not shares.host:
        raise UnsupportedError(
            "sparse attention follows enable_parallelism() only in Wan; context parallelism of "
            "this family needs another plan. Hint: leave that call out, and call "
            "sparsify(pipe).parallelize()."
        )
    context = getattr(config, "context_parallel_config", None)
    if context is None or context.ring_degree != 1 or context.ulysses_anything:
        raise UnsupportedError(
            "sparse attention runs under context parallelism by Ulysses with equal shards only. "
            "Hint: enable_parallelism(config=ContextParallelConfig(ulysses_degree=N))."
        )


def process_count() -> int:
    """The processes of ``torch.distributed``; 1 where it was not started."""
    started = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if started else 1


def all_processes() -> Any:
    """diffusers' configuration that deals to every process of ``torch.distributed``; None if one.

    Raises:
        UnsupportedError: ``torch.distributed`` was not started.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UnsupportedError(
            "parallelize() needs several processes, and torch.distributed was not started. "
            "Hint: start the script with torchrun, and call "
            "torch.distributed.init_process_group() before."
        )
    count = dist.get_world_size()
    if count == 1:
        return None
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
    context = ContextParallelConfig(ulysses_degree=count)
    mesh = init_device_mesh(kind, context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config = ParallelConfig(context_parallel_config=context)
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else kind
    config.setup(dist.get_rank(), count, torch.device(device), mesh=mesh)
    return config


def deal(
    transformers: Iterable[nn.Module], shares: Shares | None, config: Any, family: str
) -> list[Callable[[], None]]:
    """Deal the transformers' sequences to the processes of ``config``; returns what undoes it.

    Raises:
        UnsupportedError: the family or a transformer cannot be dealt; then none is.
    """
    if shares is None:
        raise UnsupportedError(
            f"{family} cannot be dealt to several processes yet. Hint: run it in one process."
        )
    undone: list[Callable[[], None]] = []
    try:
        for transformer in transformers:
            undone.append(_deal_one(transformer, shares, config))
    except UnsupportedError:
        for undo in undone:
            undo()
        raise
    return undone


def _deal_one(transformer: nn.Module, shares: Shares, config: Any) -> Callable[[], None]:
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
        raise UnsupportedError(SHARED_DECISION)
    plan = dict(shares.plan(transformer))
    holders: list[Any] = [transformer]
    if shares.exchanged is not None:
        holders += [
            module.processor
            for name, module in transformer.named_modules()
            if shares.exchanged.fullmatch(name)
        ]
    apply_context_parallel(transformer, config.context_parallel_config, plan)
    for holder in holders:
        vars(holder)["_parallel_config"] = config

    def undo() -> None:
        remove_context_parallel(transformer, plan)
        for holder in holders:
            vars(holder)["_parallel_config"] = None

    return undo


def parallel_group(config: Any) -> Any:
    """The process group of a configuration that was checked; None without one."""
    return None if config is None else config.context_parallel_config._ulysses_mesh.get_group()


def check_tokens(grid: TokenGrid, config: Any) -> None:
    """Check that a video's tokens can be dealt in equal shares.

    Raises:
        UnsupportedError: they cannot.
    """
    if config is None:
        return
    if grid.lead:
        raise UnsupportedError(
            "tokens on both sides of the video cannot be dealt to several processes. "
            "Hint: run this pipeline in one process."
        )
    count = dist.get_world_size(parallel_group(config))
    tokens = grid.tokens - grid.text
    if tokens % count:
        raise UnsupportedError(
            f"{tokens} tokens cannot be dealt to {count} processes in equal shares. "
            "Hint: take a size or length whose tokens, or a number of processes that divides them."
        )


def exchanged(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    qkv: Iterable[Tensor],
    grid: TokenGrid | None,
    group: Any,
) -> Tensor:
    """``attend`` on all tokens of this process's heads; q, k, v and the result are its tokens.

    All are ``[B, S, H, D]``: S / N tokens of the video with all text beside them.

    Raises:
        UnsupportedError: the sequence was split in another way, or heads cannot be dealt.
    """
    q, k, v = qkv
    text = 0 if grid is None else grid.text
    first = grid is not None and grid.text_first
    count = dist.get_world_size(group)
    if grid is None or (q.shape[1] - text) * count + text != grid.tokens:
        raise UnsupportedError(
            f"the processes hold {(q.shape[1] - text) * count + text} tokens together, which is "
            "not the video's grid. Hint: split the sequence by the model's own plan."
        )

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        """Video and text."""
        return (x[:, text:], x[:, :text]) if first else (x[:, : x.shape[1] - text], x[:, -text:])

    def joined(video: Tensor, beside: Tensor) -> Tensor:
        return torch.cat([beside, video] if first else [video, beside], 1)

    if not text:
        return to_tokens(attend(*(to_heads(x, group) for x in (q, k, v))), group)
    rank = dist.get_rank(group)
    whole = []
    for x in (q, k, v):
        video, beside = parts(x)
        video = to_heads(video, group)
        whole.append(joined(video, beside.chunk(count, 2)[rank]))
    video, beside = parts(attend(*whole))
    received = [beside.new_empty(beside.shape) for _ in range(count)]
    dist.all_gather(received, beside.contiguous(), group=group)
    return joined(to_tokens(video, group), torch.cat(received, 2))


def first_head(heads: int, group: Any) -> int:
    """The first of a layer's heads that this process has between the exchanges."""
    return heads // dist.get_world_size(group) * dist.get_rank(group)


def gather_heads(trace: Trace) -> bool:
    """Make a run's trace that of all heads, where every process has that of its own.

    Every process must call it; seconds stay its own. Returns whether it could be done: not where a
    call of one process became dense by itself, so that the processes have other densities.
    """
    trace.resolve()
    count = dist.get_world_size()
    device = torch.device("cuda" if "nccl" in str(dist.get_backend()) else "cpu")
    held = [
        (cell, name)
        for cell in trace.cells
        for name in ("selected", "computed", "skipped")
        if getattr(cell, name) is not None
    ]
    own = [getattr(cell, name).flatten().float() for cell, name in held]
    flat = torch.cat(own or [torch.zeros(0)]).to(device)
    lengths = torch.zeros(count, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(lengths, torch.tensor([flat.numel()], device=device))
    if len(set(lengths.tolist())) > 1:
        return False
    received = [torch.empty_like(flat) for _ in range(count)]
    dist.all_gather(received, flat)
    sizes = [values.numel() for values in own]
    parts = [torch.split(one.cpu(), sizes) for one in received]
    for place, (cell, name) in enumerate(held):
        shape = getattr(cell, name).shape
        whole = torch.cat([part[place].view(shape) for part in parts], dim=1)
        setattr(cell, name, whole)
    for cell in trace.cells:
        cell.pairs *= count
    return True


def to_heads(x: Tensor, group: Any) -> Tensor:
    """From ``[B, S / N, H, D]`` to ``[B, S, H / N, D]``: all tokens of this process's heads.

    Raises:
        UnsupportedError: H is no multiple of the N processes.
    """
    count = dist.get_world_size(group)
    batch, tokens, heads, width = x.shape
    if heads % count:
        raise UnsupportedError(
            f"{heads} attention heads cannot be dealt to {count} processes in equal shares. "
            "Hint: take a number of processes that divides them."
        )
    parts = x.reshape(batch, tokens, count, heads // count, width)
    parts = _exchanged(parts.permute(2, 0, 1, 3, 4), group)
    return parts.transpose(0, 1).reshape(batch, count * tokens, heads // count, width)


def to_tokens(x: Tensor, group: Any) -> Tensor:
    """From ``[B, S, H / N, D]`` back to ``[B, S / N, H, D]``; undoes ``to_heads``."""
    count = dist.get_world_size(group)
    batch, tokens, heads, width = x.shape
    parts = x.reshape(batch, count, tokens // count, heads, width)
    parts = _exchanged(parts.transpose(0, 1), group)
    return parts.permute(1, 2, 0, 3, 4).reshape(batch, tokens // count, count * heads, width)


def _exchanged(parts: Tensor, group: Any) -> Tensor:
    """Part i of ``[N, ...]`` goes to process i; returns what came from each, in their order."""
    parts = parts.contiguous()
    received = parts.new_empty(parts.shape)
    dist.all_to_all_single(received, parts, group=group)
    return received
