"""The running state of one sparse pipeline, between its transformers and the engine.

A forward pre-hook on each transformer tells the session the grid, the valid text, the step and the
guidance branch, which the operator (``operators.py``) reads when it runs. Padded text is cut off
here, for all families alike.

No class and no Python module of the host is changed: only this pipeline's transformers are, and
removal takes all of it back. A session lives as long as the processors that point to it.

The file has over 600 lines because where a forward stands is read, kept and let go of together.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from vidsparse.engine import INFERENCE_ONLY, AttentionEngine
from vidsparse.errors import UnsupportedError
from vidsparse.finite import FiniteGuard, NonFiniteCall
from vidsparse.grid import TokenGrid
from vidsparse.order import wants_gradient
from vidsparse.pipelines.adapter import Adapter, SparseProcessor, is_stock, transformers_of
from vidsparse.pipelines.again import Forward, Watcher, tensors_of
from vidsparse.pipelines.backends import chooses_backend, stock_attention, swapped
from vidsparse.pipelines.balance import Balancer
from vidsparse.pipelines.branches import Halves, check_apart
from vidsparse.pipelines.copies import refuse_copies
from vidsparse.pipelines.forwards import show_changes
from vidsparse.pipelines.layout import Layout
from vidsparse.pipelines.operators import SESSIONS
from vidsparse.pipelines.parallel import (
    Groups,
    check_tokens,
    deal,
    exchanged,
    forget_config,
    heads_of,
    parallel_groups,
)
from vidsparse.pipelines.position import (
    BRANCHES,
    Positions,
    guided,
    named_arguments,
    says_guided,
    speaks_of_run,
    step_count,
)
from vidsparse.ring import Ring, any_process
from vidsparse.site import CallSite
from vidsparse.trace import Trace

NO_VIDEO: Final = "the arguments of this forward are not those of a video"
MASKED: Final = "the host has a mask for this call"
"""Why a call runs dense whatever was asked for."""

_PASSED_BY: Final = (
    "sparse attention was due in this forward, and none of its attention calls came here: the "
    "transformer, or its blocks, run code that was compiled or captured before sparsify() and did "
    "not notice it. Hint: call torch.compiler.reset() after sparsify(), and again after remove(); "
    "what was captured or exported has to be made anew."
)

# the grid of a call that has none.
_NO_GRID: Final = TokenGrid(1, 1, 1)

_SESSION_IDS: Final = itertools.count()


class Session:
    """The running state of one sparse pipeline.

    Args:
        pipe: the diffusers pipeline; held weakly, so a session never keeps a model in memory.
        adapter: its family.
        engines: what computes attention, one for each transformer: a two-stage model's second
            transformer must not reuse the plans of the first. They share the trace of a run.
    """

    def __init__(self, pipe: Any, adapter: Adapter, engines: tuple[AttentionEngine, ...]) -> None:
        self.id = next(_SESSION_IDS)
        self.adapter = adapter
        self.engines = engines
        # by transformer and layer; a handle that is kept for its trace keeps no model in memory.
        self._modules: weakref.WeakValueDictionary[tuple[int, int], Any] = (
            weakref.WeakValueDictionary()
        )
        # attention heads of a layer, and attention modules of all transformers.
        self.heads = self.layers = 0
        self._stocks: dict[tuple[int, int], Any] = {}
        self._pipe = weakref.ref(pipe)
        self._transformers: list[weakref.ref[nn.Module]] = []
        self._watches: list[Callable[[], object]] = []
        self._site: CallSite | None = None
        self._layout: Layout | None = None
        self._texts: list[tuple[int, ...]] = []
        self._dense_because: str | None = None
        # the transformers whose attention calls come here, with the processors they have now.
        self._reached: set[int] = set()
        # whether the run that goes on was followed from its first step.
        self._from_start = False
        # whether what the pipeline says of guidance is of that run.
        self._spoken_of = False
        self._context: str | None = None
        self._positions = Positions()
        self._timestep_values: list[float] = []
        self._forwards_in_step = self._forwards_before = 0
        # told what forwards return, and the one that goes on; the site of one that runs again.
        self.watcher: Watcher | None = None
        self._forward: Forward | None = None
        self._again: CallSite | None = None
        # whether heads that differ in work are dealt to processes by it.
        self.balance = True
        self._balancer: Balancer | None = None
        # how guidance branches are shared out, where they are.
        self.halves: Halves | None = None
        # of the configuration that was asked last: every attention call asks.
        self._grouped: tuple[Any, Groups | None] = (None, None)
        SESSIONS[self.id] = self

    @property
    def active(self) -> bool:
        """Whether the pipeline's forwards are followed."""
        return bool(self._watches)

    @property
    def in_place(self) -> bool:
        """Whether the transformers of the pipeline are those that are followed."""
        pipe = self._pipe()
        if pipe is None:
            return False
        now, then = transformers_of(pipe, self.adapter), self._living()
        return len(now) == len(then) and all(map(operator.is_, now, then))

    def attach(self, part: int, transformer: nn.Module, modules: Mapping[int, Any]) -> None:
        """Put processors into ``modules``, by layer, and follow the forwards of ``transformer``.

        ``part`` is the transformer's place among the pipeline's.
        """
        session = self
        self._transformers.append(weakref.ref(transformer))

        def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            session._observe(part, module, args, kwargs)

        def look_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            session._check_reached(part, module)
            session._end(output)

        # outside the graph: the grid and the step are read by python before each forward.
        eager = torch.compiler.disable(observe)  # type: ignore[no-untyped-call]
        hook = transformer.register_forward_pre_hook(eager, with_kwargs=True)
        self._watches.append(hook.remove)
        after = torch.compiler.disable(look_back)  # type: ignore[no-untyped-call]
        self._watches.append(transformer.register_forward_hook(after).remove)
        self._watch_context(transformer)
        self._watches.append(refuse_copies(transformer))
        self._modules.update({(part, layer): module for layer, module in modules.items()})
        self.layers += len(modules)
        self.heads = heads_of(modules[0])
        self._install(part, transformer)

    def _install(self, part: int, transformer: nn.Module) -> None:
        """Stand in for the stock processors of a transformer, also for those put in since.

        The host replaces processors by itself where it fuses projections (CogVideoX). What is not
        the host's own stays.
        """
        changed = False
        for (of, layer), module in self._modules.items():
            if of == part and is_stock(module.processor, self.adapter):
                self._stocks[of, layer] = module.processor
                module.processor = self.adapter.processor(module.processor, self, part, layer)
                changed = True
        if changed:
            self._reached.discard(part)
            show_changes(transformer)

    def detach(self) -> None:
        """Put the stock processors back and stop following the transformers."""
        for module in self._modules.values():
            ours = module.processor
            # a processor that somebody has put in place since is not ours to replace.
            if isinstance(ours, SparseProcessor) and ours.session is self:
                module.processor = ours.stock
        for transformer in self._living():
            # what the host would put back once it unfuses projections that were fused meanwhile.
            kept = getattr(transformer, "original_attn_processors", None) or {}
            for name, ours in kept.items():
                if isinstance(ours, SparseProcessor) and ours.session is self:
                    kept[name] = ours.stock
            show_changes(transformer)
        while self._watches:
            self._watches.pop()()
        for engine in self.engines:
            engine.forget()
            engine.any_process = engine.spared = None
        self._site = self._layout = self._dense_because = None
        self.halves = self._balancer = self.watcher = self._forward = None

    def parallelize(self, config: Any) -> None:
        """Deal the sequences of all transformers to the processes of ``config``, until detached."""

        def grid() -> TokenGrid | None:
            return None if self._layout is None else self._layout.grid

        self._watches += deal(self._living(), self.adapter.shares, config, grid)

    def check_apart(self) -> None:
        """Check that guidance branches can be computed apart from each other.

        Raises:
            UnsupportedError: pipelines do not call a transformer once for each, or look at what the
                first call gave too early; it has a step cache, or is dealt to processes already.
        """
        check_apart(self._living(), self.adapter.shares.apart)
        if any(engine.dense_fallback for engine in self.engines):
            raise UnsupportedError(
                "dense_fallback does not work with apart=True, where processes plan together. "
                "Hint: leave one of them out."
            )

    def split_branches(self) -> None:
        """Have each half of the processes compute one guidance branch, until detached."""
        self.halves = halves = Halves(self.adapter.branches)
        # taken back before what deals tokens.
        self._watches += [halves.attach(one, self._guided_at) for one in self._living()]
        self._watches += [halves.share_plans(engine) for engine in self.engines]
        self._decide_together()

    def _guided_at(self) -> tuple[int, str] | None:
        """Step and branch of the forward that begins; None where the run has no guidance."""
        pipe, site = self._pipe(), self._site
        if pipe is None or site is None or not (self._spoken_of and guided(pipe)):
            return None
        return site.step, site.branch

    def undo_parallel(self, config: Any) -> None:
        """Take back what the host has set of a parallel configuration that is refused."""
        for transformer in self._living():
            forget_config(transformer, config)

    def _living(self) -> list[nn.Module]:
        return [one for reference in self._transformers if (one := reference()) is not None]

    def _watch_context(self, transformer: nn.Module) -> None:
        """Learn the guidance branch from the host's own announcement, ``cache_context(name)``."""
        stock = getattr(type(transformer), "cache_context", None)
        if stock is None or "cache_context" in vars(transformer):
            return
        session, reference = self, weakref.ref(transformer)

        @contextmanager
        def cache_context(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
            with stock(reference(), name, *args, **kwargs):
                session._context = name
                try:
                    yield
                finally:
                    session._context = None

        def forget() -> None:
            if (module := reference()) is not None:
                vars(module).pop("cache_context", None)

        # on this one module, not on its class; once deleted, the class's own shows again.
        vars(transformer)["cache_context"] = cache_context
        self._watches.append(forget)

    def _observe(
        self, part: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        pipe = self._pipe()
        if pipe is None:
            raise UnsupportedError(
                "the pipeline that was made sparse no longer exists, but its transformer still "
                "runs. Hint: call restore() on the pipeline in use, then sparsify() it."
            )
        self._install(part, module)
        arguments = named_arguments(module, args, kwargs)
        layout = self.adapter.layout(module, arguments)
        self._layout = layout if isinstance(layout, Layout) else None
        self._dense_because = None if isinstance(layout, Layout) else layout or NO_VIDEO
        if self._again is not None:
            # the scheduler has gone on since.
            self._site = self._again
            return
        grid = _NO_GRID if self._layout is None else self._layout.grid
        if self._layout is not None:
            config = getattr(module, "_parallel_config", None)
            if config is not None:
                check_tokens(grid, config, self.adapter.shares.plan(module))
        at = self._positions.next(pipe, arguments)
        step, steps = at.step, at.steps
        last = self._site.step if self._site is not None else -1
        if at.begins:
            self._begin_run(steps, at.timesteps.tolist()[: step_count(pipe.scheduler)])
            self._from_start = step == 0
            self._spoken_of = speaks_of_run(pipe)
        elif step != last:
            self._forwards_before, self._forwards_in_step = self._forwards_in_step, 0
            self._deal_heads(part, last, step)
        if self._site is not None and self._site.part != part:
            # one transformer takes over from the other.
            self.engines[self._site.part].forget()
        branch, window = self._branch()
        self._site = CallSite(
            layer=0,
            step=step,
            timestep=self._timestep_values[step - steps],
            grid=grid,
            branch=branch,
            part=part,
            stacked=2 if self._stacks() and self._spoken_of and guided(pipe) else 1,
            window=window,
            guided=self._takes_turns() and self._spoken_of and says_guided(pipe),
        )
        self.engines[part].trace.begin_forward()
        if self._layout is not None:
            self._texts += self._layout.new_texts(self._site.stacked, self._texts)
        if self.watcher is not None:
            self._forward = Forward.begun(module, self._site, args, kwargs)

    def _end(self, output: Any) -> None:
        """Count the forward that goes on, which has returned, and show the watcher its output."""
        if self._again is None:
            # not before: one that raises and is repeated is the same branch's again.
            self._forwards_in_step += 1
        if self._site is not None:
            engine = self.engines[self._site.part]
            engine.end_forward(self._site)
            # one that another process computes has left nothing out.
            if self.halves is None or self.halves.computes(self._site.branch):
                engine.trace.end_forward(self._site.part, self._site.branch)
            # by what the step before had, the last forward of all: a decoder that wants memory
            # follows. whoever watches may run it again.
            ends = self._site.step + 1 == engine.steps and self.watcher is None
            if ends and 0 < self._forwards_before <= self._forwards_in_step:
                engine.forget()
        forward, self._forward = self._forward, None
        if self.watcher is not None and forward is not None:
            for out in tensors_of(output):
                self.watcher(forward, out, True)

    def _show_call(self, out: Tensor, part: int, layer: int) -> None:
        """Show the watcher an attention call whose rows do not all reach the transformer's output.

        Rows beside the video's are thrown away at the end, or where text leaves the sequence. Until
        then a row that is not finite stays so, and is a query of all calls that follow: the last is
        enough to see it, and the first in a step whose other blocks a cache leaves out.
        """
        if self.watcher is None or self._forward is None:
            return
        layout = self._layout
        if layout is not None and not layout.grid.text:
            return
        last = self.engines[part].layers
        leave = last if layout is None else layout.layers_with_text or last
        if layer in (0, leave - 1, last - 1):
            self.watcher(self._forward, out, False)

    def find_non_finite(self, forwards: Sequence[Forward]) -> NonFiniteCall | None:
        """The first attention call that is not finite in the forwards of one step, run again.

        They go by the plans they went by, where no later step has replaced them. Only calls that
        were made in the run are told, in the words of its trace, and None where there is none: what
        became NaN or infinity was not attention, or cannot be run again. Afterwards the trace is
        what it was; plans are not.
        """
        found: FiniteGuard[NonFiniteCall] = FiniteGuard()
        made = {(cell.step, cell.layer, cell.branch): cell for cell in self.engines[0].trace.cells}
        try:
            for engine in self.engines:
                engine.guard = found
                engine.go_back(forwards[0].site.step)
            for forward in forwards:
                if not forward.can_run_again:
                    return None
                self._run_again(forward)
            call = found.look(last=True)
        finally:
            for engine in self.engines:
                engine.guard = None
        if call is None:
            return None
        cell = made.get((call.site.step, call.site.layer, call.site.branch))
        if cell is None:
            return None
        return NonFiniteCall(call.site, f"{cell.action}, {cell.implementation}")

    def outputs_with(self, forward: Forward, layers: Collection[int]) -> list[Tensor]:
        """What the forward that has just ended returns if only ``layers`` go by plans."""
        engine = self.engines[forward.site.part]
        before, engine.only = engine.only, layers
        try:
            return list(tensors_of(self._run_again(forward)))
        finally:
            engine.only = before

    def _run_again(self, forward: Forward) -> Any:
        """Run a forward once more, beside the run: its watcher is not told, its trace stays."""
        trace, watcher = self.engines[0].trace, self.watcher
        self.watcher = None
        try:
            for engine in self.engines:
                engine.trace = Trace()
            self._again = forward.site
            return forward.run_again()
        finally:
            self.watcher, self._again = watcher, None
            for engine in self.engines:
                engine.trace = trace

    def _check_reached(self, part: int, module: nn.Module) -> None:
        """Check that a forward that has ended made its attention calls here.

        Raises:
            UnsupportedError: it made none, although nothing says that it may leave them out.
        """
        if part in self._reached or self._layout is None or self._site is None:
            return
        if self.halves is not None and not self.halves.computes(self._site.branch):
            return
        # what keeps blocks from running remembers what they gave, and has to run them first.
        hooked = any(hasattr(one, "_diffusers_hook") for one in module.modules())
        if self._from_start or not hooked:
            raise UnsupportedError(_PASSED_BY)

    def _deal_heads(self, part: int, before: int, step: int) -> None:
        """Deal a transformer's heads to processes anew, by what each computed the step before."""
        groups, engine = self.groups(part), self.engines[part]
        if groups is None or groups.heads is None or not self.balance:
            return
        if self._site is not None and self._site.part == part and before < step:
            if self._balancer is None:
                beside = None if self.halves is None else self.halves.tell
                self._balancer = Balancer(self.heads, beside)
            self._balancer.between_steps(part, engine, before, step, groups.heads)

    def _begin_run(self, steps: int, timesteps: list[float]) -> None:
        if self.halves is not None:
            self.halves.begin_run()
        self._timestep_values = timesteps
        self._forwards_in_step = self._forwards_before = 0
        self._texts.clear()
        for engine in self.engines:
            engine.begin_run(steps)
            engine.trace, engine.branches = self.engines[0].trace, self.engines[0].branches

    def _stacks(self) -> bool:
        """Whether the forward to come has both branches in its batch where there is guidance."""
        said = self._context
        return self.adapter.stacked if said is None else said == "cond_uncond"

    def _takes_turns(self) -> bool:
        """Whether two branches are computed here one after the other where there is guidance."""
        return self.adapter.takes_turns and self.halves is None

    def _branch(self) -> tuple[str, int]:
        """The branch of the forward to come, and which of the branch's it is in its step, from 1.

        Where the pipeline does not announce its branches, they take turns within a step, by the
        forwards that have returned in it: one that is repeated after that is taken for the next.
        Those of one branch may be about parts of the video.
        """
        if self._context is not None:
            return BRANCHES.get(self._context, self._context), 1
        branches = self.adapter.branches
        again, place = divmod(self._forwards_in_step, len(branches))
        # what was planned and kept for one part of the video is nothing for another, nor for a
        # guider's third forward or a loop's other sample.
        window = again + 1
        return branches[place] + (f" {window}" if again else ""), window

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, part: int, layer: int, mask: Tensor | None = None
    ) -> Tensor:
        """One attention call, ``[B, S, H, D]`` in and out (the host's layout).

        Under context parallelism S are the tokens of this process. With a ``mask`` of the host's,
        which is added to scores, the call is dense.

        Raises:
            UnsupportedError: under context parallelism, what is not known to be right there.
        """
        self._reached.add(part)
        groups = self.groups(part)
        if groups is None:
            return self._attend_whole(q, k, v, part, layer, mask=mask)
        if mask is not None:
            raise UnsupportedError(
                "attention with a mask cannot run in several processes. "
                "Hint: run this pipeline in one process."
            )
        if wants_gradient(q, k, v):
            raise UnsupportedError(INFERENCE_ONLY)
        if self.engines[part].observer is not None:
            raise UnsupportedError(
                "calibration looks at all heads, and under context parallelism a process has only "
                "some. Hint: calibrate in one process; several can use the preset."
            )
        if groups.ring is not None and self.engines[part].probe is not None:
            raise UnsupportedError(
                "a probe looks at whole calls, and in a ring a process has only some tokens. "
                "Hint: probe in one process."
            )
        dealt = None if self._balancer is None else self._balancer.deal(part, layer)
        if dealt is None:
            of_heads: dict[str, Any] = {"first_head": groups.first_head(q.shape[2])}
        else:
            of_heads = {"heads": dealt.of(groups.place)}
        attend = partial(
            self._attend_whole, part=part, layer=layer, ring=groups.ring, of_heads=of_heads
        )
        grid = None if self._layout is None else self._layout.grid
        return exchanged(attend, (q, k, v), grid, groups, dealt)

    def groups(self, part: int = 0) -> Groups | None:
        """Whom this process attends together with in a transformer; None where it is alone."""
        # the transformer's, not the processor's: a processor put in since may have lost it.
        config = getattr(self._transformers[part](), "_parallel_config", None)
        if self._grouped[0] is not config:
            self._grouped = config, parallel_groups(config)
            self._decide_together()
        return self._grouped[1]

    def _decide_together(self) -> None:
        """Have engines ask all processes of a run what all have to decide alike."""
        groups = self._grouped[1]
        alone = groups is None and self.halves is None
        # both halves of everyone, where branches are apart.
        group = None if groups is None or self.halves is not None else groups.all
        for engine in self.engines:
            engine.any_process = None if alone else partial(any_process, group=group)

    def attend_dense(
        self, q: Tensor, k: Tensor, v: Tensor, part: int, layer: int
    ) -> tuple[Tensor, Tensor]:
        """``attend`` in a graph that wants a gradient, and the tokens that take part, ``[B]``.

        Raises:
            UnsupportedError: the call is sparse.
        """
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            out = self.attend(q, k, v, part, layer)
        counts = torch.full((q.shape[0],), q.shape[1], device="cpu")
        if self._site is not None and self._layout is not None:
            # outside a graph torch's definition has a gradient; what is kept here knows dense ones.
            if self.engines[part].trace.cells[-1].implementation != "dense":
                raise UnsupportedError(INFERENCE_ONLY)
            for rows, padding in self._layout.groups(q.shape[0], layer):
                counts[rows] -= padding
        return out.detach(), counts

    def _attend_whole(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        part: int,
        layer: int,
        ring: Ring | None = None,
        of_heads: Mapping[str, Any] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attention of all tokens (in a ring, its own); ``of_heads`` says to the site which heads.

        Padded text takes no part: it is cut off, and its rows of the output are zero.
        """
        # one that is removed or wrapped meanwhile is not there to be asked.
        ours = getattr(self._modules.get((part, layer)), "processor", None)
        stock = ours.stock if isinstance(ours, SparseProcessor) else self._stocks[part, layer]
        dense = partial(stock_attention, stock, mask=mask)
        site, layout = self._site, self._layout
        because = self._dense_because or (None if mask is None else MASKED)
        if site is None:
            # a block that was called by itself.
            return swapped(dense(swapped(q), swapped(k), swapped(v))).contiguous()
        site, batch = replace(site, layer=layer, **(of_heads or {})), q.shape[0]
        calls = (
            [(slice(0, batch), 0, site)]
            if because or layout is None
            else layout.calls(batch, site, self._texts)
        )
        undivided = len(calls) == 1 and calls[0][1] == 0
        out = None if undivided else torch.empty_like(q, memory_format=torch.contiguous_format)
        for rows, padding, where in calls:
            tokens = q.shape[1] - padding
            part_out = swapped(
                self.engines[part].attend(
                    swapped(q[rows, :tokens]),
                    swapped(k[rows, :tokens]),
                    swapped(v[rows, :tokens]),
                    where,
                    dense,
                    keep_dense=chooses_backend(stock),
                    dense_because=because,
                    ring=ring,
                )
            )
            if out is None:
                out = part_out.contiguous()
                break
            out[rows, :tokens] = part_out
            out[rows, tokens:] = 0
        assert out is not None
        self._show_call(out, part, layer)
        return out
