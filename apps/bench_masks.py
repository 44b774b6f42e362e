"""``vidsparse bench masks``: what choosing the tiles costs, as a share of dense attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from vidsparse.apps.attention_cases import structured_qk
from vidsparse.apps.attention_peers import dense_offers, ready
from vidsparse.apps.bench_attention import hardware, time_together, write_rows
from vidsparse.apps.console import verbosity_options

if TYPE_CHECKING:
    import torch

    from vidsparse.methods import SparseMethod
    from vidsparse.site import CallSite

CASES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("fg-attn", {}),
    ("spargeattn", {}),
    ("spargeattn", {"topk": 0.3}),
    *(("xattention", {"stride": stride}) for stride in (4, 8, 16, 64)),
    ("sale", {}),
)
"""Methods and the options that differ from their defaults."""

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


def mask_of(
    method: SparseMethod, q: torch.Tensor, k: torch.Tensor, site: CallSite
) -> tuple[torch.Tensor, ...]:
    """The mask as the engine would have it: words and keys by kernels, else bools by torch."""
    from vidsparse.attention import mask_by_kernels

    return mask_by_kernels(method, q, k, site) or (method.select(q, k, site),)


def key_lists(
    method: SparseMethod, q: torch.Tensor, k: torch.Tensor, site: CallSite
) -> torch.Tensor:
    """Mask, plan and lists: all that comes before the kernel."""
    from vidsparse.attention import plan_attention

    return plan_attention(method, q, k, site).kv_index


def unlike(method: SparseMethod, q: torch.Tensor, k: torch.Tensor, site: CallSite) -> float | None:
    """Share of the first head's tiles in which the mask by kernels is not torch's."""
    from vidsparse.attention import mask_by_kernels
    from vidsparse.masks import unpack_bits

    q, k = q[:, :1], k[:, :1]
    made = mask_by_kernels(method, q, k, site)
    if made is None:
        return None
    expected = method.select(q, k, site)
    return (unpack_bits(made[0], expected.shape[-1]) != expected).float().mean().item()


def measure(
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

    from vidsparse.attention import plan_attention
    from vidsparse.errors import UnsupportedError
    from vidsparse.grid import TokenGrid
    from vidsparse.methods import SparseMethod, make_method
    from vidsparse.order import token_order
    from vidsparse.site import CallSite

    torch.manual_seed(0)
    # Wan at 720x1280 and 81 frames is 21x45x80; other lengths become one frame.
    grid = TokenGrid(21, 45, 80) if seq_len == 75_600 else TokenGrid(1, 1, seq_len)
    site = CallSite(0, 0, 0.0, grid)
    order = token_order("hilbert", grid, device)
    q, k = (order.apply(x) for x in structured_qk(grid, heads, head_dim, dtype, device))
    dense, absent = ready(dense_offers(q, k, q))
    for name, reason in absent.items():
        say(f"  without {name}: {reason}")
    if not dense:
        raise UnsupportedError("no dense attention runs on these tensors")

    calls: dict[str, Callable[[], Any]] = {f"dense {dense[0].name}": dense[0].call}
    made: list[tuple[str, str, SparseMethod, float | None]] = []
    for name, options in CASES:
        method = make_method(name, **options)
        if name not in names or not isinstance(method, SparseMethod):
            continue
        label = " ".join(f"{key}={value}" for key, value in options.items())
        off = unlike(method, q, k, site)
        if off is not None and not off <= UNLIKE:
            raise UnsupportedError(
                f"the mask of {name} {label} by kernels differs from torch's in {off:.1%} of the "
                "tiles; no time is reported for a wrong result"
            )
        made.append((name, label, method, off))
        calls[f"mask {name} {label}"] = partial(mask_of, method, q, k, site)
        calls[f"plan {name} {label}"] = partial(key_lists, method, q, k, site)
    ms = time_together(calls, device, repeats)
    dense_ms = ms[f"dense {dense[0].name}"]
    return [
        MaskRow(
            method=name,
            options=label,
            tile="x".join(map(str, method.tile)),
            seq_len=seq_len,
            heads=heads,
            head_dim=head_dim,
            dtype=str(dtype).removeprefix("torch."),
            mask_ms=ms[f"mask {name} {label}"],
            plan_ms=max(0.0, ms[f"plan {name} {label}"] - ms[f"mask {name} {label}"]),
            dense_impl=dense[0].name,
            dense_ms=dense_ms,
            share=ms[f"mask {name} {label}"] / dense_ms,
            selected=plan_attention(method, q, k, site).selected.mean().item(),
            unlike=off,
        )
        for name, label, method, off in made
    ]


COLUMNS = (
    "method",
    "options",
    "tile",
    "tokens x heads x dim",
    "mask ms",
    "plan ms",
    "dense ms",
    "mask of dense",
    "selected",
    "unlike torch",
)


def cells(row: MaskRow) -> tuple[str, ...]:
    """A row as text, in the order of ``COLUMNS``."""
    return (
        row.method,
        row.options,
        row.tile,
        f"{row.seq_len}x{row.heads}x{row.head_dim}",
        f"{row.mask_ms:.2f}",
        f"{row.plan_ms:.2f}",
        f"{row.dense_ms:.1f} ({row.dense_impl})",
        f"{row.share:.1%}",
        f"{row.selected:.3f}",
        "" if row.unlike is None else f"{row.unlike:.0e}",
    )


def markdown(rows: Iterable[MaskRow]) -> str:
    """The rows as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines)


@click.command(
    epilog="""\b
Examples:
  vidsparse bench masks --device cpu --seq-len 8192 --heads 2 --head-dim 64
  vidsparse bench masks --device cuda --json docs/benchmarks/masks-h200.json
"""
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--seq-len", default=75_600, show_default=True, type=click.IntRange(min=128))
@click.option("--heads", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--head-dim", default=128, show_default=True, type=click.IntRange(min=8))
@click.option("--dtype", default=None, help="float32 (default on a CPU), bfloat16 or float16.")
@click.option("--method", "names", multiple=True, help="Only this one; repeat for several.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Also write rows here.")
@verbosity_options
def masks(
    device: str,
    seq_len: int,
    heads: int,
    head_dim: int,
    dtype: str | None,
    names: tuple[str, ...],
    repeats: int,
    json_path: str | None,
) -> None:
    """Time the methods' masks beside dense attention, after checking them against torch.

    q and k are structured like a video's, in Hilbert order: masks of random ones keep everything.
    """
    import torch

    from vidsparse.errors import OptionError

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError("CUDA was asked for, but PyTorch sees no GPU. Hint: --device cpu.")
    known = dict.fromkeys(name for name, _ in CASES)
    for name in names:
        if name not in known:
            raise OptionError(f"no mask of {name!r}. Hint: choose from {', '.join(known)}.")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    where = torch.device(device)
    chosen = dtype or ("bfloat16" if where.type == "cuda" else "float32")
    if chosen not in dtypes:
        raise OptionError(f"dtype must be one of {', '.join(dtypes)}, got {chosen!r}")
    click.echo(f"{hardware(where)}; torch {torch.__version__}; {chosen}")
    rows = measure(
        names or tuple(known),
        seq_len,
        heads,
        head_dim,
        dtypes[chosen],
        where,
        repeats,
        lambda text: click.echo(text, err=True),
    )
    click.echo(markdown(rows))
    if json_path:
        write_rows(json_path, where, rows)
