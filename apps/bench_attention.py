"""``vidsparse bench attention``: sparse against dense attention, checked before it is timed."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vidsparse.apps.attention_cases import (
    KERNEL,
    PLANNING,
    SMALL_SHIFT,
    SUITE,
    WHOLE,
    WITH_PLAN,
    Case,
    random_mask,
    structured_qk,
)
from vidsparse.apps.attention_peers import Peer, dense_offers, ready, sparse_offers

if TYPE_CHECKING:
    import torch

    from vidsparse.kernels import QuantizedQK
    from vidsparse.plan import SparsePlan

# SageAttention's 8-bit scores on normal inputs; anything far beyond is a broken kernel.
LOSSY_BUDGET = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case of one implementation against one dense kernel; times are medians in milliseconds.

    ``case`` names what the ratio counts: ``ratio`` is ``dense_ms`` over the sum of ``ms`` (the
    kernel), ``plan_ms`` (grouping and lists) and ``mask_ms`` (selection), of which those that the
    case leaves out are None. On a GPU ``plan_ms`` holds the selection too, where it counts, and
    rounding to 8 bits: all that the whole call takes beyond its kernel. ``kept`` is the
    computed density, ``kept_tflops`` 4·D operations per computed pair over ``ms``. ``error`` is
    relative to fp64, ||out - ref|| / ||ref||, over sampled blocks.
    """

    case: str
    tile: str
    kept: float
    seq_len: int
    heads: int
    head_dim: int
    dtype: str
    impl: str
    ms: float | None
    mask_ms: float | None
    plan_ms: float | None
    kept_tflops: float | None
    dense_impl: str
    dense_ms: float
    ratio: float
    error: float | None


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
    blocks = plan.kv_count.shape[2]
    kv_index = plan.kv_index
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
    """Median milliseconds of each call; they take turns, so that drift hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    if device.type == "cuda":
        from triton.testing import do_bench

        for _ in range(repeats):
            for name, call in calls.items():
                times[name].append(do_bench(call, warmup=30, rep=120, return_mode="median"))
    else:
        for turn in range(repeats + 1):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if turn:  # the first turn warms caches and allocators.
                    times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


@dataclass(frozen=True, slots=True)
class Bench:
    """The device and how long to look.

    Args:
        repeats: turns that every call gets.
        peers: also time other sparse attention kernels that are installed.
        say: where notes about absent peers go.
    """

    device: torch.device
    dtype: torch.dtype
    repeats: int
    peers: bool
    say: Callable[[str], None]

    def rows(self, case: Case) -> list[Row]:
        """Check, then time one case; one row per implementation and dense kernel.

        Raises:
            UnsupportedError: an implementation cannot run here, or an output is not right.
        """
        import torch

        torch.manual_seed(0)
        with torch.inference_mode() if self.device.type == "cpu" else nullcontext():
            return self._planning(case) if case.counts == PLANNING else self._kernels(case)

    def _kernels(self, case: Case) -> list[Row]:
        import torch

        from vidsparse.attention import order_and_plan, plan_attention
        from vidsparse.grid import TokenGrid
        from vidsparse.kernels import block_rows, choose, plans_on_device, sparse_attention
        from vidsparse.masks import pack_bits, tile_sizes
        from vidsparse.methods import FgAttn
        from vidsparse.order import token_order
        from vidsparse.plan import make_plan, make_plan_of_bits
        from vidsparse.site import CallSite

        shape = (1, case.heads, case.seq_len, case.head_dim)
        q, k, v = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in "qkv")
        mask = random_mask(case, self.device)
        # of random q and k all tiles weigh nearly the same: lists are as long as the random ones.
        method = FgAttn(tile=case.tile, merge=case.merge, top_p=min(case.kept, 0.9))

        # where kernels plan, they do so from bits: what the kernel that selects hands on.
        by_kernels = plans_on_device(self.device, self.dtype, case.head_dim)
        words = pack_bits(mask) if by_kernels else None
        sizes = tile_sizes(case.seq_len, case.tile[1], self.device)
        keys = torch.stack([(head * sizes).sum(-1) for head in mask[0]]).int().unsqueeze(0)

        def make() -> SparsePlan:
            if words is not None:
                return make_plan_of_bits(words, keys, case.tile, case.seq_len, case.merge)
            return make_plan(
                mask, case.tile, case.seq_len, case.merge, block_rows=block_rows(self.device)
            )

        plan = make()
        kv_index = plan.kv_index
        grid = TokenGrid(1, 1, case.seq_len)
        site, order = CallSite(0, 0, 0.0, grid), token_order("rowmajor", grid, self.device)
        whole = case.counts == WHOLE and by_kernels
        rounded = None
        if whole and case.quantize:
            rounded = order_and_plan(method, q, k, site, order, case.quantize).quantized
        runners = []
        whole_calls: dict[str, Callable[[], Any]] = {}
        for asked in case.implementations or ("auto",):
            where = (self.device, self.dtype, case.head_dim)
            name = _chosen(choose, asked, *where, quantize=case.quantize)

            def kernel(
                name: str = name, quantize: str | QuantizedQK | None = rounded or case.quantize
            ) -> torch.Tensor:
                return sparse_attention(
                    q,
                    k,
                    v,
                    plan.q_tiles,
                    plan.kv_count,
                    kv_index,
                    tile=case.tile,
                    implementation=name,
                    quantize=quantize,
                )[0]

            def all_of_it(kernel: Callable[..., torch.Tensor] = kernel) -> None:
                # the same lists whatever is selected: what selecting costs does not depend on it.
                if case.quantize is None:
                    rounded, made = None, plan_attention(method, q, k, site)
                else:
                    ordered = order_and_plan(method, q, k, site, order, case.quantize)
                    rounded, made = ordered.quantized, ordered.plan
                made.kv_index  # noqa: B018
                kernel(quantize=rounded)

            whole_calls[f"whole {name}"] = all_of_it
            runners.append(Peer(name, kernel, exact=case.quantize is None))
        ours = {one.name for one in runners}
        if self.peers:
            others, absent = ready(sparse_offers(q, k, v, mask, case.tile))
            self._tell(absent)
            runners += others
        # a peer computes the mask as it stands; ours computes it merged.
        alone = make_plan(mask, case.tile, case.seq_len, "consecutive", block_rows=case.tile[0])
        errors = {
            one.name: self._checked(one, q, k, v, plan if one.name in ours else alone, case)
            for one in runners
        }

        dense = self._dense(q, k, v, case)
        calls: dict[str, Callable[[], Any]] = {one.name: one.call for one in runners}
        calls |= {f"dense {one.name}": one.call for one in dense}
        with_plan, with_mask = case.counts in (WITH_PLAN, WHOLE), case.counts == WHOLE
        if with_plan:
            calls["plan"] = lambda: make().kv_index
            calls |= {f"plan {one.name}": one.plan for one in runners if one.plan is not None}
        if whole:
            # launches of a few microseconds each: their own cost is that of a whole call, in which
            # the GPU is never ahead of what launches them.
            calls |= whole_calls
        elif with_mask:
            calls["mask"] = lambda: method.select(q, k, site)
        ms = time_together(calls, self.device, self.repeats)

        kept = plan.computed.mean().item()
        rows = []
        for one in runners:
            if one.name in ours:
                computed, plan_ms = kept, ms.get("plan")
                if whole:
                    plan_ms = ms[f"whole {one.name}"] - ms[one.name]
            else:
                computed, plan_ms = plan.selected.mean().item(), ms.get(f"plan {one.name}")
            mask_ms = ms.get("mask")
            total = ms[one.name] + (plan_ms or 0) + (mask_ms or 0)
            operations = 4 * case.head_dim * computed * case.seq_len**2 * case.heads
            rows += [
                self._row(
                    case,
                    kept=round(computed, 4),
                    impl=one.name,
                    ms=ms[one.name],
                    mask_ms=mask_ms,
                    plan_ms=plan_ms,
                    kept_tflops=operations / ms[one.name] / 1e9,
                    dense_impl=other.name,
                    dense_ms=ms[f"dense {other.name}"],
                    ratio=ms[f"dense {other.name}"] / total,
                    error=errors[one.name],
                )
                for other in dense
            ]
        return rows

    def _planning(self, case: Case) -> list[Row]:
        from vidsparse.attention import plan_attention
        from vidsparse.grid import TokenGrid
        from vidsparse.methods import FgAttn
        from vidsparse.order import token_order
        from vidsparse.site import CallSite

        # Wan at 720x1280 and 81 frames; a length just below lacks the end of its curve. Others
        # become one frame.
        grid = TokenGrid(21, 45, 80)
        if not 0 <= grid.tokens - case.seq_len <= SMALL_SHIFT:
            grid = TokenGrid(1, 1, case.seq_len)
        order = token_order("hilbert", grid, self.device)
        q, k = (
            order.apply(x)[:, :, : case.seq_len].contiguous()
            for x in structured_qk(grid, case.heads, case.head_dim, self.dtype, self.device)
        )
        method = FgAttn(tile=case.tile, top_p=0.9, merge=case.merge)

        dense = self._dense(q, k, q, case)
        site = CallSite(0, 0, 0.0, TokenGrid(1, 1, case.seq_len))
        made = plan_attention(method, q, k, site)
        calls: dict[str, Callable[[], Any]] = {f"dense {one.name}": one.call for one in dense}
        calls["plan"] = lambda: plan_attention(method, q, k, site).kv_index
        ms = time_together(calls, self.device, self.repeats)
        return [
            self._row(
                case,
                kept=round(made.computed.mean().item(), 4),
                impl="plan_attention",
                ms=None,
                mask_ms=None,
                plan_ms=ms["plan"],
                kept_tflops=None,
                dense_impl=other.name,
                dense_ms=ms[f"dense {other.name}"],
                ratio=ms[f"dense {other.name}"] / ms["plan"],
                error=None,
            )
            for other in dense
        ]

    def _row(self, case: Case, **measured: Any) -> Row:
        return Row(
            case=case.name,
            tile=f"{case.tile[0]}x{case.tile[1]}",
            seq_len=case.seq_len,
            heads=case.heads,
            head_dim=case.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
            **measured,
        )

    def _tell(self, absent: dict[str, str]) -> None:
        for name, reason in absent.items():
            self.say(f"  without {name}: {reason}")

    def _dense(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> list[Peer]:
        from vidsparse.errors import UnsupportedError
        from vidsparse.plan import make_plan

        peers, absent = ready(dense_offers(q, k, v))
        self._tell(absent)
        import torch

        tiles = -(-case.seq_len // 128)
        everything = torch.ones(1, case.heads, tiles, tiles, dtype=torch.bool, device=q.device)
        plan = make_plan(everything, (128, 128), case.seq_len, "consecutive")
        for one in peers:
            self._checked(one, q, k, v, plan, case)
        if not peers:
            raise UnsupportedError("no dense attention runs on these tensors")
        return peers

    def _checked(
        self,
        one: Peer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: SparsePlan,
        case: Case,
    ) -> float:
        import torch

        from vidsparse.errors import UnsupportedError

        error, stock_error = sampled_errors(q, k, v, plan, one.call())
        # twice the stock error, and never below a few roundings of the dtype.
        budget = 2 * stock_error + 4 * torch.finfo(self.dtype).eps if one.exact else LOSSY_BUDGET
        if not error <= budget:
            raise UnsupportedError(
                f"{one.name} is wrong at {case.seq_len} tokens, tile {case.tile[0]}x"
                f"{case.tile[1]}: relative error {error:.2e}, budget {budget:.2e}; no speed is "
                "reported for a wrong result"
            )
        return error


def _chosen(choose: Callable[..., str], asked: str, *where: Any, **wanted: Any) -> str:
    from vidsparse.errors import UnsupportedError

    try:
        return choose(asked, *where, **wanted)
    except ValueError as reason:
        raise UnsupportedError(str(reason)) from None


def device_and_dtype(device: str, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """What ``--device`` and ``--dtype`` mean; bfloat16 on a GPU and float32 on a CPU by default.

    Raises:
        OptionError: PyTorch sees no GPU, or knows no such dtype.
    """
    import torch

    from vidsparse.errors import OptionError

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError("CUDA was asked for, but PyTorch sees no GPU. Hint: --device cpu.")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    where = torch.device(device)
    name = dtype or ("bfloat16" if where.type == "cuda" else "float32")
    if name not in dtypes:
        raise OptionError(f"dtype must be one of {', '.join(dtypes)}, got {name!r}")
    return where, dtypes[name]


def hardware(device: torch.device) -> str:
    """The device in words."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions(*others: str) -> dict[str, str]:
    """Versions of what a measurement rests on, as far as installed; ``others`` are packages too."""
    from importlib.metadata import PackageNotFoundError, version

    from vidsparse._version import __version__

    found = {"vidsparse": __version__, "python": platform.python_version()}
    for name in (
        "torch",
        "triton",
        "flash-attn-4",
        "flashinfer-python",
        "sageattention",
        *others,
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def number(value: float | None, digits: int = 2) -> str:
    """A number for a table; nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


COLUMNS = (
    "case",
    "tile",
    "tokens x heads x dim",
    "computed",
    "implementation",
    "mask ms",
    "plan ms",
    "kernel ms",
    "kept TFLOP/s",
    "dense",
    "dense ms",
    "ratio",
    "error",
)


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, in the order of ``COLUMNS``."""
    return (
        row.case,
        row.tile,
        f"{row.seq_len}x{row.heads}x{row.head_dim}",
        f"{row.kept:.3f}",
        row.impl,
        number(row.mask_ms),
        number(row.plan_ms),
        number(row.ms, 3),
        number(row.kept_tflops, 0 if (row.kept_tflops or 0) >= 10 else 3),
        row.dense_impl,
        number(row.dense_ms),
        number(row.ratio),
        "" if row.error is None else f"{row.error:.1e}",
    )


def markdown(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def _parse_tiles(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> Any:
    from vidsparse.masks import parse_tile

    return [parse_tile(text) for text in value]


def _read_rows(path: str) -> list[Row]:
    from vidsparse.errors import OptionError

    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        return [Row(**row) for row in document["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{path} holds no rows of this bench: {error}") from None


def write_rows(path: str, device: torch.device, rows: Sequence[Any]) -> None:
    """Write rows, dataclasses, to a JSON file under the hardware, the versions and the date.

    Raises:
        OutputError: the file cannot be written.
    """
    from vidsparse.errors import OutputError

    head = {
        "hardware": hardware(device),
        "versions": versions(),
        "date": date.today().isoformat(),
    }
    lines = ",\n".join("  " + json.dumps(asdict(row)) for row in rows)
    text = f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n'
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None


@click.command(
    epilog="""\b
Examples:
  vidsparse bench attention --device cpu
  vidsparse bench attention --device cuda --seq-len 32768 --heads 16 --head-dim 128
  vidsparse bench attention --device cuda --suite --json docs/benchmarks/attention-h200.json
  vidsparse bench attention --show docs/benchmarks/attention-h200.json --against cudnn
"""
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--suite", is_flag=True, help="The standard cases instead of those given by the options below."
)
@click.option(
    "--seq-len",
    "seq_lens",
    multiple=True,
    default=(8192,),
    show_default=True,
    type=click.IntRange(min=128),
    help="Tokens; repeat for several.",
)
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
    help="Share of key chunks in the lists; repeat for several.",
)
@click.option(
    "--skew",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="How unequal lists are: lengths from kept x (1 - skew) to kept x (1 + skew).",
)
@click.option(
    "--counts",
    type=click.Choice((KERNEL, WITH_PLAN, WHOLE)),
    default=WHOLE,
    show_default=True,
    help="What the ratio counts.",
)
@click.option(
    "--implementation",
    "implementations",
    multiple=True,
    help="Repeat for several.  [default: auto]",
)
@click.option("--peers", is_flag=True, help="Also time other sparse kernels that are installed.")
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Also write rows here.")
@click.option(
    "--show",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Measure nothing: print the rows of FILE as a Markdown table.",
)
@click.option(
    "--against",
    metavar="NAME",
    help="With --show and --plot: only rows against this dense implementation.",
)
@click.option("--plot", type=click.Path(dir_okay=False), metavar="PNG", help="Also draw the rows.")
def attention(
    device: str,
    suite: bool,
    seq_lens: tuple[int, ...],
    heads: int,
    head_dim: int,
    dtype: str | None,
    tiles: list[tuple[int, int]],
    kept: tuple[float, ...],
    skew: float,
    counts: str,
    implementations: tuple[str, ...],
    peers: bool,
    repeats: int,
    json_path: str | None,
    show: str | None,
    against: str | None,
    plot: str | None,
) -> None:
    """Time sparse attention against dense, after checking its output.

    Random q, k, v and random lists: with 128-row tiles the share computed is the share kept. Every
    ratio is between medians of one run.
    """
    if show is not None:
        rows = [row for row in _read_rows(show) if against in (None, row.dense_impl)]
        click.echo(markdown(rows))
    else:
        options = {"heads": heads, "head_dim": head_dim, "skew": skew, "counts": counts}
        cases = [
            Case(
                tile=tile,
                kept=share,
                seq_len=seq_len,
                merge="xor-window",
                implementations=implementations,
                **options,  # type: ignore[arg-type]
            )
            for seq_len in seq_lens
            for tile in tiles
            for share in kept
        ]
        if suite:
            cases = [
                replace(case, implementations=case.implementations or implementations)
                for case in SUITE
            ]
        rows = _measure(cases, device, dtype, repeats, peers, json_path)
    if plot is not None:
        from vidsparse.apps.attention_plot import draw_ratios

        draw_ratios(rows, Path(plot))
        click.echo(plot)


def _measure(
    cases: Sequence[Case],
    device: str,
    dtype: str | None,
    repeats: int,
    peers: bool,
    json_path: str | None,
) -> list[Row]:
    import torch

    from vidsparse.errors import UnsupportedError

    where, kind = device_and_dtype(device, dtype)
    name = str(kind).removeprefix("torch.")
    click.echo(f"{hardware(where)}; torch {torch.__version__}; {name}")
    click.echo("  ".join(COLUMNS))

    def say(text: str) -> None:
        click.echo(text, err=True)

    bench = Bench(where, kind, repeats, peers, say)
    rows: list[Row] = []
    failed: list[str] = []
    for case in cases:
        try:
            measured = bench.rows(case)
        except (UnsupportedError, torch.OutOfMemoryError) as error:
            if len(cases) == 1:
                raise
            # the others are still worth having; the command fails at the end.
            failed.append(f"{case.name}, tile {case.tile[0]}x{case.tile[1]}: {error}")
            say(failed[-1])
            continue
        for row in measured:
            rows.append(row)
            click.echo("  ".join(cells(row)))
        if json_path:
            write_rows(json_path, where, rows)
    if failed:
        raise UnsupportedError(f"{len(failed)} of {len(cases)} cases failed: {failed[0]}")
    return rows
