"""One attention call, sparse against dense: checked, then timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vidsparse.apps.bench.attention_cases import (
    DENSE,
    PLANNING,
    SMALL_SHIFT,
    WHOLE,
    WITH_PLAN,
    Case,
    random_mask,
    structured_qk,
)
from vidsparse.apps.bench.attention_peers import Peer, dense_offers, ready, sparse_offers
from vidsparse.apps.bench.attention_rows import AttentionRow
from vidsparse.apps.bench.exactness import error_budget, sampled_errors
from vidsparse.apps.bench.inputs import RANDOM, CallInputs
from vidsparse.apps.bench.timing import time_in_turns
from vidsparse.dtypes import dtype_name

if TYPE_CHECKING:
    import torch

    from vidsparse.apps.results.row_file import RowFile
    from vidsparse.kernels import QuantizedQK
    from vidsparse.plan import SparsePlan


@dataclass(frozen=True, slots=True)
class AttentionBench:
    """The device and how long to look.

    Args:
        repeats: turns that every call gets.
        peers: also time other sparse attention kernels that are installed.
        say: where notes about absent peers go.
        data: recorded calls, of which the middle one is timed with the lists that FG-Attn chooses
            for it; None is random q, k, v and lists.
    """

    device: torch.device
    dtype: torch.dtype
    repeats: int
    peers: bool
    say: Callable[[str], None]
    data: CallInputs | None = None

    def rows(self, case: Case) -> list[AttentionRow]:
        """Check, then time one case; one row per implementation and dense kernel.

        None where the case is of the dense kernel, and that cannot run here.

        Raises:
            UnsupportedError: an implementation cannot run here, or an output is not right.
        """
        import torch

        torch.manual_seed(0)
        with torch.inference_mode() if self.device.type == "cpu" else nullcontext():
            if case.counts == DENSE:
                return self._without_lists(case)
            return self._planning(case) if case.counts == PLANNING else self._kernels(case)

    def _kernels(self, case: Case) -> list[AttentionRow]:
        import torch

        from vidsparse.grid import TokenGrid
        from vidsparse.kernels import block_rows, choose, plans_on_device, sparse_attention
        from vidsparse.masks import pack_bits, tile_sizes
        from vidsparse.methods import FgAttn
        from vidsparse.order import token_order
        from vidsparse.plan import make_plan, make_plan_of_bits
        from vidsparse.planning import order_and_plan, plan_attention
        from vidsparse.route import find_route
        from vidsparse.site import CallSite

        q, k, v = self._qkv(case)
        grid = TokenGrid(1, 1, case.seq_len)
        site, order = CallSite(0, 0, 0.0, grid), token_order("rowmajor", grid, self.device)
        if self.data is None:
            # of random q and k all tiles weigh nearly the same: lists are as long as those.
            share: dict[str, Any] = {"top_p": min(case.kept, 0.9)}
        else:
            share = {"topk": case.kept, "top_p": None}
        # with means q and k are not rounded where they are put in order, and no kernel timed here
        # takes any.
        method = FgAttn(tile=case.tile, merge=case.merge, means=None, **share)
        mask = random_mask(case, self.device) if self.data is None else method.select(q, k, site)

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
        whole = case.counts == WHOLE and by_kernels
        rounded = None
        route = find_route(method, q, k, v, quantize=case.quantize)
        if whole and case.quantize:
            rounded = order_and_plan(method, q, k, site, order, route).quantized
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
                    ordered = order_and_plan(method, q, k, site, order, route)
                    rounded, made = ordered.quantized, ordered.plan
                made.kv_index  # noqa: B018
                kernel(quantize=rounded or case.quantize)

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
        ms = time_in_turns(calls, self.device, self.repeats)

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

    def _without_lists(self, case: Case) -> list[AttentionRow]:

        from vidsparse.kernels import dense_attention, support

        where = self.device, self.dtype, case.head_dim
        if (reason := support("gluon", *where, quantize=case.quantize)) is not None:
            self._tell({"gluon": f"it {reason}"})
            return []
        q, k, v = self._qkv(case)
        ours = Peer(
            "gluon",
            lambda: dense_attention(q, k, v, quantize=case.quantize)[0],
            exact=case.quantize is None,
        )
        error = self._checked(ours, q, k, v, _everything(case, self.device), case)
        dense = self._dense(q, k, v, case)
        calls: dict[str, Callable[[], Any]] = {f"dense {one.name}": one.call for one in dense}
        ms = time_in_turns(calls | {ours.name: ours.call}, self.device, self.repeats)
        operations = 4 * case.head_dim * case.seq_len**2 * case.heads
        return [
            self._row(
                case,
                kept=1.0,
                impl=ours.name,
                ms=ms[ours.name],
                mask_ms=None,
                plan_ms=None,
                kept_tflops=operations / ms[ours.name] / 1e9,
                dense_impl=other.name,
                dense_ms=ms[f"dense {other.name}"],
                ratio=ms[f"dense {other.name}"] / ms[ours.name],
                error=error,
            )
            for other in dense
        ]

    def _planning(self, case: Case) -> list[AttentionRow]:
        from vidsparse.grid import TokenGrid
        from vidsparse.methods import FgAttn
        from vidsparse.order import token_order
        from vidsparse.planning import plan_attention
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
        method = FgAttn(tile=case.tile, top_p=0.9, merge=case.merge, means=None)

        dense = self._dense(q, k, q, case)
        site = CallSite(0, 0, 0.0, TokenGrid(1, 1, case.seq_len))
        made = plan_attention(method, q, k, site)
        calls: dict[str, Callable[[], Any]] = {f"dense {one.name}": one.call for one in dense}
        calls["plan"] = lambda: plan_attention(method, q, k, site).kv_index
        ms = time_in_turns(calls, self.device, self.repeats)
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

    def _qkv(self, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tensors of the case's shape, on a Hilbert curve where they are a model's."""
        import torch

        from vidsparse.order import token_order

        if self.data is None:
            shape = (1, case.heads, case.seq_len, case.head_dim)
            q, k, v = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in "qkv")
            return q, k, v
        call = self.data.calls[len(self.data.calls) // 2]
        order = token_order("hilbert", call.site.grid, self.device)
        return order.apply(call.q), order.apply(call.k), order.apply(call.v)

    def _row(self, case: Case, **measured: Any) -> AttentionRow:
        return AttentionRow(
            case=case.name,
            tile=f"{case.tile[0]}x{case.tile[1]}",
            seq_len=case.seq_len,
            heads=case.heads,
            head_dim=case.head_dim,
            dtype=dtype_name(self.dtype),
            data=RANDOM if self.data is None else self.data.name,
            **measured,
        )

    def _tell(self, absent: dict[str, str]) -> None:
        for name, reason in absent.items():
            self.say(f"  without {name}: {reason}")

    def _dense(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> list[Peer]:
        from vidsparse.errors import UnsupportedError

        peers, absent = ready(dense_offers(q, k, v))
        self._tell(absent)
        plan = _everything(case, q.device)
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
        from vidsparse.errors import UnsupportedError

        error, stock_error = sampled_errors(q, k, v, plan, one.call())
        budget = error_budget(stock_error, self.dtype, lossy=not one.exact)
        if not error <= budget:
            raise UnsupportedError(
                f"{one.name} is wrong at {case.seq_len} tokens, tile {case.tile[0]}x"
                f"{case.tile[1]}: relative error {error:.2e}, budget {budget:.2e}; no speed is "
                "reported for a wrong result"
            )
        return error


def _everything(case: Case, device: torch.device) -> SparsePlan:
    """A plan with which every query attends all keys."""
    import torch

    from vidsparse.plan import make_plan

    tiles = -(-case.seq_len // 128)
    mask = torch.ones(1, case.heads, tiles, tiles, dtype=torch.bool, device=device)
    return make_plan(mask, (128, 128), case.seq_len, "consecutive")


def measure_cases(
    bench: AttentionBench,
    cases: Sequence[Case],
    show: Callable[[AttentionRow], None],
    file: RowFile | None = None,
) -> list[AttentionRow]:
    """Measure one case after the other.

    Args:
        bench: where and how long.
        cases: at least one.
        show: given each row as soon as it is there.
        file: held, with its header; rows are added to it after each case.

    Raises:
        UnsupportedError: a case cannot run or is not right. Where there are others, their rows come
            first.
        OutputError: the file cannot be written.
    """
    import torch

    from vidsparse.errors import UnsupportedError

    rows: list[AttentionRow] = []
    failed: list[str] = []
    for case in cases:
        try:
            measured = bench.rows(case)
        except (UnsupportedError, torch.OutOfMemoryError) as error:
            if len(cases) == 1:
                raise
            # the others are still worth having; the command fails at the end.
            failed.append(f"{case.name}, tile {case.tile[0]}x{case.tile[1]}: {error}")
            bench.say(failed[-1])
            continue
        rows += measured
        for row in measured:
            show(row)
        if file is not None:
            file.add(*map(asdict, measured))
    if failed:
        raise UnsupportedError(f"{len(failed)} of {len(cases)} cases failed: {failed[0]}")
    return rows


def _chosen(choose: Callable[..., str], asked: str, *where: Any, **wanted: Any) -> str:
    from vidsparse.errors import UnsupportedError

    try:
        return choose(asked, *where, **wanted)
    except ValueError as reason:
        raise UnsupportedError(str(reason)) from None
