"""Whether there is memory for what a sparse call takes beside its operands, asked before it does.

Estimates count the large tensors that exist at the same time for certain, and free memory is the
most that there can be, so that nothing is refused that would fit.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.kernels.attention.checks import INDEX_MULTIPLE
from vidsparse.masks import tile_count
from vidsparse.methods import SparseMethod
from vidsparse.planning import heads_at_once
from vidsparse.route import Route

# a place of a list in torch: the flag that is sorted, and its place as a number of 64 bits.
SORTED_PLACE_BYTES = 9

# of the machine's free memory.
_LOCKABLE = 0.4


class NoRoomError(UnsupportedError):
    """Mask, plan and means of a call would not fit into memory.

    Args:
        needed: bytes that they take at the least.
        free: bytes that there are at the most.
        whose: memory it is.
        what: takes them.
    """

    def __init__(self, needed: int, free: int, whose: str, what: str) -> None:
        super().__init__(
            f"{whose} is too small for {what}, which take {needed / 2**30:.2f} GiB where "
            f"{max(0, free) / 2**30:.2f} are free. Hint: a larger tile, or fewer tokens."
        )
        self.needed, self.free, self.whose, self.what = needed, free, whose, what


def planning_bytes(method: SparseMethod, q: Tensor, route: Route) -> int:
    """Bytes that mask, plan and means of queries ``q`` ``[B, H, S, D]`` take, at the least."""
    batch, heads, tokens, dim = q.shape
    rows, keys = method.tile
    tiles, chunks = tile_count(tokens, rows), tile_count(tokens, keys)
    blocks = batch * heads * tile_count(tiles, max(1, route.block_rows // rows))
    bits = blocks * chunks // 8
    if route.selection in ("select", "blocks"):
        at_once = min(heads, heads_at_once(q, method.tile))
        mask = batch * at_once * tiles * chunks * method.mask_bytes
    else:
        mask = 0
    number = 2 if chunks <= torch.iinfo(torch.int16).max else 4
    place = number if route.lists else number + SORTED_PLACE_BYTES
    lists = blocks * (chunks + -chunks % INDEX_MULTIPLE) * place
    means = 0
    if method.means is not None:
        groups = tile_count(tokens, method.means)
        means = 2 * batch * heads * groups * dim * q.element_size() + blocks * groups
    return bits + max(mask, lists + means)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be taken of a device's memory, at the most; None where nobody tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held
    if device.type != "cpu":
        return None
    limits = (_free_of_machine(), _free_of_container(), _free_of_process())
    found = [limit for limit in limits if limit is not None]
    return min(found, default=None)


def lockable_bytes() -> int:
    """Bytes of the machine's memory that this process may lock for what its GPU has no room for.

    Locked memory cannot be swapped and is given out in powers of two, so that it is less than half
    of what is free; the processes that a launcher started on this machine share it. What was locked
    for a run before stays with the process, for the next one.
    """
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    held = 0
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        stats = torch.cuda.host_memory_stats()
        held = stats["allocated_bytes.current"] - stats["active_bytes.current"]
    return int((free_bytes(torch.device("cpu")) or 0) * _LOCKABLE) // beside + held


def check_room(method: SparseMethod, q: Tensor, route: Route) -> None:
    """Raise a ``NoRoomError`` where mask, plan and means of ``q`` ``[B, H, S, D]`` cannot fit."""
    free, needed = free_bytes(q.device), planning_bytes(method, q, route)
    if free is not None and needed > free:
        whose = "the GPU's memory" if q.is_cuda else "the memory of this machine"
        rows, keys = method.tile
        raise NoRoomError(
            needed,
            free,
            whose,
            f"mask, plan and means of {q.shape[2]:,} tokens and {q.shape[1]} heads in tiles of "
            f"{rows}x{keys}",
        )


def _free_of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = {line.partition(":")[0]: line.split()[1] for line in lines}
    return 1024 * sum(int(kilobytes.get(name, 0)) for name in ("MemAvailable", "SwapFree"))


def _free_of_container(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a limit on the container's memory leaves it (control groups, version 2)."""
    try:
        most, taken, kinds = (
            (group / f"memory.{name}").read_text(encoding="ascii")
            for name in ("max", "current", "stat")
        )
        # files that were read are counted, and make room when it is asked for.
        files = next(line.split()[1] for line in kinds.splitlines() if line.startswith("file "))
        # without a limit it says "max".
        return int(most) - int(taken) + int(files)
    except (OSError, ValueError, StopIteration):
        return None


def _free_of_process() -> int | None:
    """What a limit on the process's addresses (``ulimit -v``) leaves it."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):
        return None
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return None
    return most - pages * os.sysconf("SC_PAGE_SIZE")
