"""What choosing the tiles costs, as a share of dense attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vidsparse.apps.bench.attention_cases import structured_qk
from vidsparse.apps.bench.attention_peers import first_dense
from vidsparse.apps.bench.machine import dtype_name
from vidsparse.apps.bench.timing import time_in_turns
from vidsparse.apps.results.row_file import RowFile
from vidsparse.apps.results.tables import Columns, number
from vidsparse.methods import SPARSE_METHODS, SparseMethod, make_method
from vidsparse.methods.studied import Settings

if TYPE_CHECKING:
    import torch

    from vidsparse.plan import SparsePlan
    from vidsparse.site import CallSite

CASES: Final[tuple[tuple[str, Settings], ...]] = tuple(
    (name, own) for name, cls in SPARSE_METHODS.items() for own in cls.masks
)
"""Methods and the options that differ from their defaults, as they declare them."""

GRIDS: Final[Mapping[int, tuple[int, int, int]]] = {
    75_600: (21, 45, 80),
    7_488: (13, 24, 24),
    2_304: (9, 16, 16),
}
"""Token grids by length: Wan at 1280x720 and 81 frames, and `shapes` at both its sizes; other
lengths become one frame of one row."""

# kernels and torch add in other orders, so tiles at a threshold may fall on either side of it.
UNLIKE = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRow:
    """One method's mask against the dense attention of the same run; medians in milliseconds.

    ``mask_ms`` is from ordered q and k to the mask, ``plan_ms`` from there to key lists. ``share``
    is ``mask_ms / dense_ms``. ``selected`` is the share of pairs that the mask keeps of structured
    q and k. ``unlike`` is the share of tiles of the first head in which kernels and torch disagree,
    None where torch made the mask itself.
    """

    method: str
    options: str
    tile: str
    seq_len: int
    heads: int
    head_dim: int
    dtype: str
    mask_ms: float
    plan_ms: float
    dense_impl: str
    dense_ms: float
    share: float
    selected: float
    unlike: float | None


def words_of(
    method: SparseMethod, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, site: CallSite
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The mask in words and the keys of each query tile, by kernels; None where torch selects."""
    from vidsparse.order import token_order
    from vidsparse.planning import mask_words
    from vidsparse.route import find_route

    route = find_route(method, q, k, v)
    if route.selection == "blocks":
        # putting tokens in order is a part of its kernels.
        chosen = method.choose_blocks(q, k, v, site, token_order("rowmajor", site.grid, q.device))
        return chosen.words, chosen.count
    return None if route.selection == "select" else mask_words(method, q, k, site, route.selection)


def mask_of(
    method: SparseMethod, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, site: CallSite
) -> tuple[torch.Tensor, ...]:
    """The mask as the engine would have it: words and keys by kernels, else bools by torch."""
    return words_of(method, q, k, v, site) or (method.select(q, k, site, v=v),)


def plan_of(
    method: SparseMethod, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, site: CallSite
) -> SparsePlan:
    """Mask and plan."""
    from vidsparse.order import token_order
    from vidsparse.planning import order_and_plan, plan_attention

    if method.looks_at_values:
        order = token_order("rowmajor", site.grid, q.device)
        return order_and_plan(method, q, k, site, order, v=v).plan
    return plan_attention(method, q, k, site)


def key_lists(
    method: SparseMethod, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, site: CallSite
) -> torch.Tensor:
    """Mask, plan and lists: all that comes before the kernel."""
    return plan_of(method, q, k, v, site).kv_index


def unlike(
    method: SparseMethod, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, site: CallSite
) -> float | None:
    """Share of the first head's tiles in which the mask by kernels is not torch's."""
    from vidsparse.masks import unpack_bits

    q, k, v = q[:, :1], k[:, :1], v[:, :1]
    made = words_of(method, q, k, v, site)
    if made is None:
        return None
    expected = method.select(q, k, site, v=v)
    return (unpack_bits(made[0], expected.shape[-1]) != expected).float().mean().item()


def measure_masks(
    names: Sequence[str],
    seq_len: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    say: Callable[[str], None],
) -> list[MaskRow]:
    """Check, then time the masks of the methods in ``names`` beside dense attention.

    Raises:
        UnsupportedError: no dense attention runs here, or a mask is not the one of torch.
    """
    import torch

    from vidsparse.errors import UnsupportedError
    from vidsparse.grid import TokenGrid
    from vidsparse.order import token_order
    from vidsparse.site import CallSite

    torch.manual_seed(0)
    grid = TokenGrid(*GRIDS.get(seq_len, (1, 1, seq_len)))
    site = CallSite(0, 0, 0.0, grid)
    order = token_order("hilbert", grid, device)
    q, k = (order.apply(x) for x in structured_qk(grid, heads, head_dim, dtype, device))
    # values that go with a token's place, too.
    v = order.apply(structured_qk(grid, heads, head_dim, dtype, device)[1])
    dense = first_dense(q, k, q, say)

    calls: dict[str, Callable[[], Any]] = {f"dense {dense.name}": dense.call}
    made: list[tuple[str, str, SparseMethod, float | None]] = []
    for name, options in CASES:
        method = make_method(name, **options)
        if name not in names or not isinstance(method, SparseMethod):
            continue
        label = " ".join(f"{key}={value}" for key, value in options.items())
        off = unlike(method, q, k, v, site)
        if off is not None and not off <= UNLIKE:
            raise UnsupportedError(
                f"the mask of {name} {label} by kernels differs from torch's in {off:.1%} of the "
                "tiles; no time is reported for a wrong result"
            )
        made.append((name, label, method, off))
        calls[f"mask {name} {label}"] = partial(mask_of, method, q, k, v, site)
        calls[f"plan {name} {label}"] = partial(key_lists, method, q, k, v, site)
    ms = time_in_turns(calls, device, repeats)
    dense_ms = ms[f"dense {dense.name}"]
    return [
        MaskRow(
            method=name,
            options=label,
            tile="x".join(map(str, method.tile)),
            seq_len=seq_len,
            heads=heads,
            head_dim=head_dim,
            dtype=dtype_name(dtype),
            mask_ms=ms[f"mask {name} {label}"],
            plan_ms=max(0.0, ms[f"plan {name} {label}"] - ms[f"mask {name} {label}"]),
            dense_impl=dense.name,
            dense_ms=dense_ms,
            share=ms[f"mask {name} {label}"] / dense_ms,
            selected=plan_of(method, q, k, v, site).selected.mean().item(),
            unlike=off,
        )
        for name, label, method, off in made
    ]


def masks_file(path: Path, *, fresh: bool = False) -> RowFile:
    """The rows of this bench in ``path``, or none yet where it is to begin ``fresh``.

    Raises:
        OptionError: it exists and holds something else.
    """
    return RowFile(path, "vidsparse-masks/1", "mask benchmark", fresh=fresh, unnamed=True)


COLUMNS: Final[Columns[MaskRow]] = {
    "method": lambda row: row.method,
    "options": lambda row: row.options,
    "tile": lambda row: row.tile,
    "tokens x heads x dim": lambda row: f"{row.seq_len}x{row.heads}x{row.head_dim}",
    "mask ms": lambda row: number(row.mask_ms),
    "plan ms": lambda row: number(row.plan_ms),
    "dense ms": lambda row: f"{row.dense_ms:.1f} ({row.dense_impl})",
    "mask of dense": lambda row: f"{row.share:.1%}",
    "selected": lambda row: number(row.selected, 3),
    "unlike torch": lambda row: "" if row.unlike is None else f"{row.unlike:.0e}",
}
"""The table's columns."""
