"""``vidsparse bench attention``: sparse against dense attention, checked before it is timed."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch

    from vidsparse.plan import SparsePlan


@dataclass(frozen=True, slots=True)
class Row:
    """One sparse case against one dense implementation; times are medians in milliseconds.

    ``mask_ms`` is FG-Attn's selection on the same q and k (its cost does not depend on what it
    selects), ``plan_ms`` grouping and index lists, ``ms`` the kernel alone. ``ratio`` is dense
    time over the sum of the three. ``kept_tflops`` counts 4·D operations per computed pair over
    ``ms``. ``error`` is relative to fp64, ||out - ref|| / ||ref||, over sampled blocks.
    """

    case: str
    tile: str
    kept: float
    seq_len: int
    heads: int
    head_dim: int
    dtype: str
    impl: str
    ms: float
    mask_ms: float
    plan_ms: float
    kept_tflops: float
    dense_impl: str
    dense_ms: float
    ratio: float
    error: float


def random_mask(
    batch_heads: int, q_tiles: int, k_tiles: int, kept: float, device: torch.device
) -> torch.Tensor:
    """Equal-length random lists: bool ``[1, batch_heads, q_tiles, k_tiles]``."""
    import torch

    count = max(1, round(k_tiles * kept))
    chosen = torch.rand(1, batch_heads, q_tiles, k_tiles, device=device).topk(count, -1).indices
    mask = torch.zeros(1, batch_heads, q_tiles, k_tiles, dtype=torch.bool, device=device)
    return mask.scatter_(-1, chosen, True)


def sampled_errors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: SparsePlan, out: torch.Tensor
) -> tuple[float, float]:
    """Relative error of ``out`` against fp64 over three blocks a head, and stock SDPA's own.

    The yardstick gathers a block's keys in fp64; the stock error is that of
    ``scaled_dot_product_attention`` on the same gathered keys in the dtype of ``q``.
    """
    import torch
    import torch.nn.functional as F

    rows, keys = plan.tile
    difference, stock_difference, norm = 0.0, 0.0, 0.0
    kv_index = plan.kv_index
    blocks = plan.kv_count.shape[2]
    for head in range(q.shape[1]):
        for block in {0, blocks // 2, blocks - 1}:
            tiles = plan.q_tiles[0, head, block].long()
            tiles = tiles[tiles >= 0]
            row = (tiles.unsqueeze(1) * rows + torch.arange(rows, device=q.device)).flatten()
            row = row[row < plan.tokens]
            chunk = kv_index[0, head, block, : plan.kv_count[0, head, block]].long()
            token = (chunk.unsqueeze(1) * keys + torch.arange(keys, device=q.device)).flatten()
            token = token[token < plan.tokens]
            qs, ks, vs = q[:, head, row], k[:, head, token], v[:, head, token]
            exact = F.scaled_dot_product_attention(qs.double(), ks.double(), vs.double())
            stock = F.scaled_dot_product_attention(qs, ks, vs)
            difference += (out[:, head, row] - exact).square().sum().item()
            stock_difference += (stock - exact).square().sum().item()
            norm += exact.square().sum().item()
    return (difference / norm) ** 0.5, (stock_difference / norm) ** 0.5


def time_together(
    calls: dict[str, Callable[[], Any]], device: torch.device, repeats: int
) -> dict[str, float]:
    """Median milliseconds of each call; on a CPU they take turns, so that drift hits all alike."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return {
            name: float(do_bench(call, warmup=100, rep=100 * repeats, return_mode="median"))
            for name, call in calls.items()
        }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:  # the first turn warms caches and allocators.
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def dense_calls(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    """Every dense implementation that runs on these tensors, by name."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def stock() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    if q.device.type != "cuda":
        return {"sdpa": stock}

    def with_backend(backend: SDPBackend) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v)

        return call

    calls = {}
    for name, backend in (
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("flash", SDPBackend.FLASH_ATTENTION),
    ):
        call = with_backend(backend)
        try:
            call()
        except RuntimeError:
            continue
        calls[name] = call
    return calls or {"sdpa": stock}


def measure(
    *,
    device: torch.device,
    dtype: torch.dtype,
    seq_len: int,
    heads: int,
    head_dim: int,
    tile: tuple[int, int],
    kept: float,
    implementations: list[str],
    repeats: int,
) -> list[Row]:
    """Check, then time one case for each implementation; one row per dense implementation.

    Raises:
        UnsupportedError: an implementation cannot run here, or its output is not right.
    """
    import torch

    from vidsparse.errors import UnsupportedError
    from vidsparse.kernels.dispatch import choose, sparse_attention
    from vidsparse.masks import tile_count
    from vidsparse.methods import FgAttn
    from vidsparse.plan import make_plan

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, seq_len, head_dim, device=device, dtype=dtype) for _ in "qkv")
    mask = random_mask(
        heads, tile_count(seq_len, tile[0]), tile_count(seq_len, tile[1]), kept, device
    )
    method = FgAttn(tile=tile)
    plan = make_plan(mask, tile, seq_len, method.merge)
    kv_index = plan.kv_index
    computed = plan.computed.mean().item()

    rows = []
    for asked in implementations:
        try:
            name = choose(asked, device, dtype, head_dim)
        except ValueError as reason:
            raise UnsupportedError(str(reason)) from None

        def kernel(name: str = name) -> torch.Tensor:
            return sparse_attention(
                q,
                k,
                v,
                plan.q_tiles,
                plan.kv_count,
                kv_index,
                tile=tile,
                implementation=name,
            )[0]

        error, stock_error = sampled_errors(q, k, v, plan, kernel())
        # twice the stock error, and never below a few roundings of the dtype.
        budget = 2 * stock_error + 4 * torch.finfo(dtype).eps
        if not error <= budget:
            raise UnsupportedError(
                f"{name} is wrong at {seq_len} tokens, tile {tile[0]}x{tile[1]}: relative error "
                f"{error:.2e}, budget {budget:.2e}; no speed is reported for a wrong result"
            )
        calls: dict[str, Callable[[], Any]] = {
            "mask": lambda: method.select(q, k),
            "plan": lambda: make_plan(mask, tile, seq_len, method.merge).kv_index,
            "kernel": kernel,
        }
        dense = dense_calls(q, k, v)
        with torch.inference_mode() if device.type == "cpu" else nullcontext():
            ms = time_together({**calls, **dense}, device, repeats)
        total = ms["mask"] + ms["plan"] + ms["kernel"]
        pairs = computed * seq_len * seq_len * heads
        rows += [
            Row(
                case="random equal-length lists",
                tile=f"{tile[0]}x{tile[1]}",
                kept=round(computed, 4),
                seq_len=seq_len,
                heads=heads,
                head_dim=head_dim,
                dtype=str(dtype).removeprefix("torch."),
                impl=name,
                ms=ms["kernel"],
                mask_ms=ms["mask"],
                plan_ms=ms["plan"],
                kept_tflops=4 * head_dim * pairs / ms["kernel"] / 1e9,
                dense_impl=dense_name,
                dense_ms=ms[dense_name],
                ratio=ms[dense_name] / total,
                error=error,
            )
            for dense_name in dense
        ]
    return rows


def _hardware(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _parse_tiles(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> Any:
    from vidsparse.masks import parse_tile

    return [parse_tile(text) for text in value]


@click.command()
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--seq-len", default=8192, show_default=True, type=click.IntRange(min=128))
@click.option("--heads", default=4, show_default=True, type=click.IntRange(min=1))
@click.option("--head-dim", default=64, show_default=True, type=click.IntRange(min=8))
@click.option("--dtype", default=None, help="float32 (default on a CPU), bfloat16 or float16.")
@click.option(
    "--tile",
    "tiles",
    multiple=True,
    default=("128x16",),
    show_default=True,
    metavar="MxN",
    callback=_parse_tiles,
    help="Query rows x keys of a tile; repeat for several.",
)
@click.option(
    "--kept",
    multiple=True,
    default=(0.1, 0.3, 0.5, 1.0),
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of key chunks in every list; repeat for several.",
)
@click.option("--implementation", "implementations", multiple=True, default=("auto",))
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Also write rows here.")
def attention(
    device: str,
    seq_len: int,
    heads: int,
    head_dim: int,
    dtype: str | None,
    tiles: list[tuple[int, int]],
    kept: tuple[float, ...],
    implementations: tuple[str, ...],
    repeats: int,
    json_path: str | None,
) -> None:
    """Time sparse attention against dense, after checking its output.

    Random q, k, v and random lists of equal length: with 128-row tiles the share computed is the
    share kept. Every ratio is between medians of one run; it includes mask and plan.

    \b
    vidsparse bench attention --device cpu
    vidsparse bench attention --device cuda --seq-len 32768 --heads 16 --head-dim 128
    """
    import torch

    from vidsparse._version import __version__
    from vidsparse.errors import OptionError

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError("CUDA was asked for, but PyTorch sees no GPU. Hint: --device cpu.")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    where = torch.device(device)
    name = dtype or ("bfloat16" if where.type == "cuda" else "float32")
    if name not in dtypes:
        raise OptionError(f"dtype must be one of {', '.join(dtypes)}, got {name!r}")

    versions = {"vidsparse": __version__, "torch": torch.__version__}
    click.echo(
        f"{_hardware(where)}; torch {torch.__version__}; {seq_len} tokens, "
        f"{heads} heads of {head_dim}, {name}"
    )
    click.echo(
        "tile     computed  impl       mask ms  plan ms  kernel ms  kept TFLOP/s  "
        "dense          dense ms  ratio  error"
    )
    rows: list[Row] = []
    for tile in tiles:
        for share in kept:
            for row in measure(
                device=where,
                dtype=dtypes[name],
                seq_len=seq_len,
                heads=heads,
                head_dim=head_dim,
                tile=tile,
                kept=share,
                implementations=list(implementations),
                repeats=repeats,
            ):
                rows.append(row)
                click.echo(
                    f"{row.tile:<8} {row.kept:<9.3f} {row.impl:<10} {row.mask_ms:7.2f}  "
                    f"{row.plan_ms:7.2f}  {row.ms:9.2f}  {row.kept_tflops:12.3f}  "
                    f"{row.dense_impl:<14} {row.dense_ms:8.2f}  {row.ratio:5.2f}  {row.error:.1e}"
                )
    if json_path:
        report = {
            "hardware": _hardware(where),
            "versions": versions,
            "date": date.today().isoformat(),
            "rows": [asdict(row) for row in rows],
        }
        Path(json_path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
