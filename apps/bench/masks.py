"""What choosing the tiles costs, as a share of dense attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from vidsparse.apps.bench.attention_peers import first_dense_of
from vidsparse.apps.bench.inputs import STRUCTURED, CallInputs, shape_text
from vidsparse.apps.bench.timing import time_in_turns
from vidsparse.apps.results.row_file import RowFile
from vidsparse.apps.results.tables import Columns, number
from vidsparse.dtypes import dtype_name
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

# kernels and torch add in other orders, so tiles at a threshold may fall on either side of it.
UNLIKE = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRow:
    """One method's mask against the dense attention of the same run; medians in milliseconds.

    ``mask_ms`` is from ordered q and k to the mask, ``plan_ms`` from there to key lists. ``share``
    is ``mask_ms / dense_ms``. ``selected`` is the share of pairs that the mask keeps. All of them
    are means over the calls of ``data``. ``unlike`` is the share of tiles of the first head in
    which kernels and torch disagree, None where torch made the mask itself.
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
    data: str = STRUCTURED


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
    names: Sequence[str], data: CallInputs, repeats: int, say: Callable[[str], None]
) -> list[MaskRow]:
    """Check, then time the masks of the methods in ``names`` beside dense attention.

    Raises:
        UnsupportedError: no dense attention runs here, or a mask is not the one of torch.
    """
    from vidsparse.errors import UnsupportedError
    from vidsparse.order import token_order

    device = data.calls[0].q.device
    ordered: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, CallSite]] = []
    for one in data.calls:
        order = token_order("hilbert", one.site.grid, device)
        q, k, v = order.apply(one.q), order.apply(one.k), order.apply(one.v)
        ordered.append((q, k, v, one.site))
    dense = first_dense_of([(q, k, v) for q, k, v, _ in ordered], say)

    def each(work: Callable[..., Any], method: SparseMethod) -> Callable[[], Any]:
        return lambda: [work(method, *one) for one in ordered]

    calls: dict[str, Callable[[], Any]] = {
        f"dense {dense[0].name}": lambda: [one.call() for one in dense]
    }
    made: list[tuple[str, str, SparseMethod, float | None]] = []
    for name, options in CASES:
        method = make_method(name, **options)
        if name not in names or not isinstance(method, SparseMethod):
            continue
        label = " ".join(f"{key}={value}" for key, value in options.items())
        off = _worst(unlike(method, *one) for one in ordered)
        if off is not None and not off <= UNLIKE:
            raise UnsupportedError(
                f"the mask of {name} {label} by kernels differs from torch's in {off:.1%} of the "
                "tiles; no time is reported for a wrong result"
            )
        made.append((name, label, method, off))
        calls[f"mask {name} {label}"] = each(mask_of, method)
        calls[f"plan {name} {label}"] = each(key_lists, method)
    timed = time_in_turns(calls, device, repeats)
    ms = {name: value / len(ordered) for name, value in timed.items()}
    dense_ms = ms[f"dense {dense[0].name}"]
    tokens, heads, channels = data.shape
    return [
        MaskRow(
            method=name,
            options=label,
            tile="x".join(map(str, method.tile)),
            seq_len=tokens,
            heads=heads,
            head_dim=channels,
            dtype=dtype_name(data.dtype),
            mask_ms=ms[f"mask {name} {label}"],
            plan_ms=max(0.0, ms[f"plan {name} {label}"] - ms[f"mask {name} {label}"]),
            dense_impl=dense[0].name,
            dense_ms=dense_ms,
            share=ms[f"mask {name} {label}"] / dense_ms,
            selected=fmean(plan_of(method, *one).selected.mean().item() for one in ordered),
            unlike=off,
            data=data.name,
        )
        for name, label, method, off in made
    ]


def _worst(shares: Iterator[float | None]) -> float | None:
    """The largest share, None where torch made the masks itself."""
    known = [share for share in shares if share is not None]
    return max(known, default=None)


def masks_file(path: Path) -> RowFile:
    """The rows of this bench in ``path``, which need not exist.

    Raises:
        OptionError: it exists and holds something else.
    """
    return RowFile(path, "vidsparse-masks/1", "mask benchmark", unnamed=True)


COLUMNS: Final[Columns[MaskRow]] = {
    "method": lambda row: row.method,
    "options": lambda row: row.options,
    "tile": lambda row: row.tile,
    "tokens x heads x dim": lambda row: shape_text(row.seq_len, row.heads, row.head_dim, row.data),
    "mask ms": lambda row: number(row.mask_ms),
    "plan ms": lambda row: number(row.plan_ms),
    "dense ms": lambda row: f"{row.dense_ms:.1f} ({row.dense_impl})",
    "mask of dense": lambda row: f"{row.share:.1%}",
    "selected": lambda row: number(row.selected, 3),
    "unlike torch": lambda row: "" if row.unlike is None else f"{row.unlike:.0e}",
}
"""The table's columns."""
