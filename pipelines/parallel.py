"""One video over several processes: diffusers' context parallelism, its Ulysses form.

The host gives each process an equal run of the tokens, with all heads. Around attention these are
exchanged for all tokens of an equal share of the heads (DeepSpeed-Ulysses, arXiv 2309.14509,
section 3), so that grids, orders, masks and plans are those of one process.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from vidsparse.errors import UnsupportedError


def check_parallel(config: Any, *, supported: bool) -> None:
    """Check a transformer's or processor's ``_parallel_config``; None passes.

    ``supported`` says whether the family's attention calls can be exchanged.

    Raises:
        UnsupportedError: the family does not run in parallel, or the configuration is another
            than Ulysses alone over equal shards.
    """
    if config is None:
        return
    if not supported:
        raise UnsupportedError(
            "sparse attention does not run under context parallelism in this family yet. "
            "Hint: run the pipeline without enable_parallelism()."
        )
    context = getattr(config, "context_parallel_config", None)
    if context is None or context.ring_degree != 1 or context.ulysses_anything:
        raise UnsupportedError(
            "sparse attention runs under context parallelism by Ulysses with equal shards only. "
            "Hint: enable_parallelism(config=ContextParallelConfig(ulysses_degree=N))."
        )


def ulysses_group(config: Any) -> Any:
    """The process group of a configuration that was checked; None without one."""
    return None if config is None else config.context_parallel_config._ulysses_mesh.get_group()


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
