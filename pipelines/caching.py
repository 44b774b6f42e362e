"""Step caches: denoising steps that need not be run.

Two are diffusers' own (``StepCache``), and one leaves out forwards of guidance
(``guidance_cache.py``). A cache of diffusers' puts hooks around the blocks of a transformer;
whatever it leaves out, the blocks it does run are counted as they run, so that a record says what
happened and not what was meant to. Sparse attention stands inside the blocks and sees the same: a
plan ages by the steps that were run.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from vidsparse.errors import OptionError, UnsupportedError, listed
from vidsparse.pipelines.cached import (
    FIRST_BLOCK_HOOK,
    TAYLORSEER_HOOK,
    cache_hooks,
    check_uncached,
)
from vidsparse.pipelines.families import FAMILIES
from vidsparse.pipelines.family import TOGETHER, Family
from vidsparse.pipelines.forwards import show_changes, wrap_forward
from vidsparse.pipelines.placement import check_choice

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vidsparse.pipelines.guidance_cache import GuidanceCache

CACHES: Final[Mapping[str, float | None]] = {
    "none": None,
    "first-block": 0.05,
    "taylorseer": 2,
    "guidance": 2,
}
"""The caches, and the threshold of each where none is given: diffusers' own, and the least.

``first-block`` leaves a step's other blocks out where the first one's residual changed by less than
this share since it was last computed. ``taylorseer`` runs one of so many steps, and
extrapolates the output to the others; not in a run whose outputs swing. ``guidance`` runs the
unconditional branch in one of so many steps; in the others it differs from the conditional one as
it did then.
"""

_BLOCK_LISTS: Final = r"[^.]*block[^.]*\.[^.]+"
"""Names of blocks in a transformer, as the host's own ``taylorseer`` finds them."""

_UNKNOWN: Final = "not registered"
"""What the host says of blocks that ``first-block`` does not know."""

_EARLY: Final = 3
"""Steps that ``taylorseer`` always runs: its slope takes two, and the first says little."""

_FAR: Final = 0.1
"""Of an output's norm: 0.28 and 2.5 in the two branches of a run of ``shapes`` that swings, 0.03
at most in one that does not (docs/speed.md)."""


def check_cache(cache: str | None, threshold: float | None) -> None:
    """Raise an ``OptionError`` unless there is such a cache and it takes such a threshold."""
    check_choice("cache", cache, (None, *CACHES))
    if threshold is None:
        return
    number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if cache in (None, "none"):
        raise OptionError(
            f"cache_threshold {threshold} was given without a cache. Hint: add --cache first-block."
        )
    if cache == "first-block" and not (number and 0 < threshold < float("inf")):
        raise OptionError(
            f"cache_threshold of first-block must be above 0, got {threshold}. Hint: 0.05."
        )
    if cache in ("taylorseer", "guidance") and not (number and threshold in range(2, 1001)):
        raise OptionError(
            f"cache_threshold of {cache} must be a whole number of steps from 2, got "
            f"{threshold}. Hint: 2 runs every second step."
        )


def check_family(cache: str, family: Family) -> None:
    """Raise an ``UnsupportedError`` where the cache does not work with the family."""
    if cache != "none" and cache not in family.caches:
        if cache == "guidance":
            raise UnsupportedError(f"{family.name} {TOGETHER}")
        able = [each.name for each in FAMILIES if cache in each.caches]
        other = f"use {listed(family.caches)}" if family.caches else "leave --cache out"
        raise UnsupportedError(
            f"diffusers' cache {cache} does not know the blocks of {family.name}; it knows those "
            f"of {listed(able)}. Hint: {other}."
        )


def open_cache(
    pipe: Any,
    cache: str,
    *,
    threshold: float | None = None,
    dense_steps: int | float,
    steps: int,
    whole: Callable[[int], Collection[int]] = lambda steps: (),
) -> AnyCache:
    """Put a step cache on a pipeline for runs of ``steps`` of which ``dense_steps`` are dense.

    ``whole`` says in which steps of a run sparse layers compute everything. Raises what the cache
    does.
    """
    if cache != "guidance":
        warmup = cache_warmup(dense_steps, steps)
        return StepCache(pipe, cache, threshold=threshold, warmup=warmup)
    from vidsparse.pipelines.guidance_cache import GuidanceCache
    from vidsparse.schedule import share_or_count

    check_cache(cache, threshold)
    every = CACHES[cache] if threshold is None else threshold
    assert every is not None
    warmup = share_or_count(dense_steps, steps, "dense_steps")
    return GuidanceCache(pipe, int(every), warmup=warmup, whole=whole)


def cache_warmup(dense_steps: int | float, steps: int) -> int:
    """First steps that ``taylorseer`` runs whole, of ``steps``: the dense ones, or a third.

    With a threshold of 2, at most a third of all steps is then left out.
    """
    from vidsparse.schedule import share_or_count

    # of the others every second one, their first included, is left out.
    least = steps - 2 * (steps // 3)
    return max(least, share_or_count(dense_steps, steps, "dense_steps"))


@dataclass(slots=True)
class _Forward:
    """One forward of a transformer: its step, its blocks, and how many of them were run.

    ``branch`` counts the forwards of one step: guidance makes two or more. ``name`` is what its
    pipeline calls it, if anything.
    """

    step: int
    blocks: int
    branch: int
    name: str
    run: int = 0


class _Swing:
    """Whether a transformer's outputs turn back at every step, as ``taylorseer`` runs them all.

    Where they do, a line through the last two points away from the next, and as one of so many
    steps always meets the same half of a swing, nothing after it would show that. So it is looked
    for in the first steps, in each video of a batch and each branch of guidance.
    """

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._last: dict[int, list[Tensor]] = {}
        self._off: dict[int, list[Tensor]] = {}
        self._steps: dict[int, int] = {}

    def found(self, branch: int, output: Tensor) -> bool:
        """Take the output ``[B, ...]`` of the next step of a branch.

        True at the last step to see, if in the last two a line was far off for one of the videos:
        by more than the step before was, and by more than a tenth of the output. Small swings that
        die out are common in the first steps, and do no harm.
        """
        seen = self._steps[branch] = self._steps.get(branch, 0) + 1
        if seen > self._warmup:
            return False
        last = self._last.setdefault(branch, [])
        if last and last[0].shape != output.shape:
            # ChronoEdit drops frames in the middle of a run.
            last.clear()
            self._off.pop(branch, None)
        if len(last) == 2:
            moved = _norms(output - last[1])
            missed = _norms(output - last[1] - (last[1] - last[0]))
            far = (missed > moved) & (missed > _FAR * _norms(output))
            self._off.setdefault(branch, []).append(far)
            last.pop(0)
        last.append(output.detach())
        if seen < self._warmup:
            return False
        del self._last[branch]
        off = self._off.pop(branch, [])
        # one step says little: where three are run in all, none is judged.
        return len(off) > 1 and bool((off[-2] & off[-1]).any())


class _Splits:
    """The host's hooks that split a block's input for context parallelism, off and on again.

    They must be the outermost: the cache below compares what goes into a block with what comes out.

    Args:
        blocks: where they may be.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._registries = [
            one._diffusers_hook for one in blocks if hasattr(one, "_diffusers_hook")
        ]
        self._lifted: list[tuple[Any, str, Any]] = []

    def lift(self) -> None:
        """Take off those that are there."""
        for registry in self._registries:
            for name in [name for name in registry.hooks if name.startswith("cp_input")]:
                self._lifted.append((registry, name, registry.get_hook(name)))
                registry.remove_hook(name, recurse=False)

    def put_back(self) -> None:
        """Put on again what was taken off."""
        while self._lifted:
            registry, name, hook = self._lifted.pop()
            registry.register_hook(hook, name)


def _decide_together(transformer: Any, blocks: Sequence[Any]) -> None:
    """Have the first-block cache decide by the whole video, of which a process holds a part.

    What it compares are sums over tokens, and those of all processes are added before it does.
    """
    import torch
    import torch.distributed as dist

    (hook,) = (
        hook
        for block in blocks
        if (hook := block._diffusers_hook.get_hook(FIRST_BLOCK_HOOK)) is not None
    )

    def changed(residual: Tensor) -> bool:
        before = hook.state_manager.get_state().head_block_residual
        if before is None:
            return True
        parts = (residual - before, before)
        sums = torch.stack([part.abs().sum(dtype=torch.float32) for part in parts])
        # read at every step: the transformer may be dealt to others by then.
        config = transformer._parallel_config
        if config is not None:
            mesh = config.context_parallel_config._flattened_mesh
            dist.all_reduce(sums, group=mesh.get_group())
        different, whole = sums.tolist()
        return bool(different > hook.threshold * whole)

    hook._should_compute_remaining_blocks = torch.compiler.disable(changed)  # type: ignore[no-untyped-call]


class _Outputs:
    """The last modules of a transformer, which ``taylorseer`` extrapolates.

    Args:
        transformer: with the cache on it.
        names: where they are; it need not have all.
    """

    def __init__(self, transformer: Any, names: Sequence[str]) -> None:
        self._transformer = transformer
        self._hooked = {
            name: getattr(transformer, name) for name in names if hasattr(transformer, name)
        }

    def follow(self) -> None:
        """Move the host's hooks to the modules that are there now, which a LoRA has replaced.

        A LoRA that was loaded wraps the module that has the hook: it would be added to outputs that
        are extrapolated. One that was unloaded has taken the hook along.
        """
        from diffusers.hooks import HookRegistry

        for name, before in self._hooked.items():
            now = getattr(self._transformer, name)
            if now is before:
                continue
            hook = before._diffusers_hook.get_hook(TAYLORSEER_HOOK)
            before._diffusers_hook.remove_hook(TAYLORSEER_HOOK, recurse=False)
            HookRegistry.check_if_exists_or_initialize(now).register_hook(hook, TAYLORSEER_HOOK)
            self._hooked[name] = now
            self._transformer._diffusers_hook.invalidate_child_registries_cache()
            show_changes(self._transformer)


class _Memory:
    """What the host's cache keeps of a transformer, apart for each of a step's forwards.

    The host leaves it to pipelines to say which forward is next, and when a run is over. Some say
    nothing, some call several parts of a video the same, and some make one section of a video
    after the other: so it is said here, by what the pipeline says and the place within a step.

    Args:
        managers: those of the states of the cache's hooks.
    """

    def __init__(self, managers: Sequence[Any]) -> None:
        self._managers = managers
        self._told: Any = None
        self._shapes: dict[str, Any] = {}

    @property
    def announced(self) -> str:
        """What the pipeline calls the forward to come; empty where it says nothing."""
        context = self._managers[0]._context
        return "" if context is None or context is self._told else str(context.name)

    def tell(self, name: str, shape: Any) -> None:
        """That the forward ``name`` is next, of a latent of such a shape."""
        from diffusers.hooks.hooks import CacheContext

        if self._shapes.setdefault(name, shape) != shape:
            # ChronoEdit drops frames in the middle of a run.
            self._shapes[name] = shape
            for manager in self._managers:
                manager._state_cache.pop(name, None)
        self._told = CacheContext(name)
        for manager in self._managers:
            manager.set_context(self._told)

    def forget(self) -> None:
        """Everything: another run begins."""
        self._shapes.clear()
        for manager in self._managers:
            manager._state_cache.clear()


def _norms(values: Tensor) -> Tensor:
    """The norm of each item of a batch: [B] of ``[B, ...]``."""
    import torch

    norms: Tensor = torch.linalg.vector_norm(values.flatten(1), dim=1, dtype=torch.float32)
    return norms


class StepCache(AbstractContextManager["StepCache"]):
    """A step cache on a pipeline's transformers, with counts of the blocks that were run.

    As a context manager it removes itself when the block ends.

    Args:
        pipe: a pipeline of a supported class.
        cache: ``first-block`` or ``taylorseer``.
        threshold: of that cache; None: its default.
        warmup: first steps that ``taylorseer`` runs whole, at least 3.

    Attributes:
        swung: whether ``taylorseer`` left no step of the last run out, because its outputs swing.

    Raises:
        OptionError: there is no such cache, or the threshold is not valid for it.
        UnsupportedError: the cache does not know the family's blocks, or the pipeline has a cache
            already.
    """

    def __init__(
        self, pipe: Any, cache: str, *, threshold: float | None = None, warmup: int = 0
    ) -> None:
        from vidsparse.pipelines.adapter import transformers_of
        from vidsparse.pipelines.branches import check_both_branches
        from vidsparse.pipelines.lookup import find_adapter
        from vidsparse.pipelines.position import Positions

        check_cache(cache, threshold)
        adapter = find_adapter(pipe)
        check_family(cache, adapter.family)
        transformers = transformers_of(pipe, adapter)
        for transformer in transformers:
            check_both_branches(transformer)
            check_uncached(transformer)
        self.cache = cache
        self.threshold = CACHES[cache] if threshold is None else threshold
        self._pipe = weakref.ref(pipe)
        self._positions = Positions()
        self._forwards: list[_Forward] = []
        self._swings: dict[int, _Swing] = {}
        self._hooks: list[tuple[Any, int]] = []
        self._outputs: list[_Outputs] = []
        self._memories: dict[int, _Memory] = {}
        self.swung = False
        self._undo: list[Callable[[], object]] = []
        try:
            for transformer in transformers:
                self._attach(transformer, adapter, warmup)
        except ValueError as error:
            self.remove()
            if _UNKNOWN in str(error):
                # relatives whose blocks have the family's make, and classes of their own.
                others = [one for one in adapter.family.caches if one != cache]
                raise UnsupportedError(
                    f"diffusers' cache {cache} does not know the blocks of {type(pipe).__name__}. "
                    f"Hint: use {listed(others)}."
                ) from None
            # the host's word for a cache that is there already.
            raise UnsupportedError(f"{cache} cannot be put on this pipeline: {error}") from None

    @property
    def note(self) -> str | None:
        """What the last run has to say of the cache beside counts, if anything."""
        if not self.swung:
            return None
        return f"without {self.cache}: outputs swing from step to step, which it would miss"

    def blocks_run(self) -> dict[int, float]:
        """By step of the last run, from 0: the share of all its blocks that were run."""
        steps = sorted({one.step for one in self._forwards})
        found = {}
        for step in steps:
            own = [one for one in self._forwards if one.step == step]
            found[step] = sum(one.run for one in own) / sum(one.blocks for one in own)
        return found

    def share_left_out(self) -> float:
        """Of all blocks of the last run, the share that was left out."""
        blocks = sum(one.blocks for one in self._forwards)
        return 1 - sum(one.run for one in self._forwards) / blocks if blocks else 0.0

    def remove(self) -> None:
        """Take the cache off the transformers. Harmless when repeated."""
        while self._undo:
            self._undo.pop()()

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _attach(self, transformer: Any, adapter: Any, warmup: int) -> None:
        import torch

        from vidsparse.pipelines.adapter import transformer_blocks

        blocks = transformer_blocks(transformer, adapter)

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._begin(module, args, kwargs, len(blocks))

        eager = torch.compiler.disable(begin)  # type: ignore[no-untyped-call]
        splits = _Splits(blocks)
        # undone last.
        self._undo.append(lambda: show_changes(transformer))
        self._undo.append(splits.put_back)
        splits.lift()
        self._undo.append(transformer.register_forward_pre_hook(eager, with_kwargs=True).remove)
        for block in blocks:
            self._count(block)
        config = self._config(warmup, transformer, adapter)
        self._put_on(transformer, config)
        managers = {id(one.state_manager): one.state_manager for _, one in cache_hooks(transformer)}
        self._memories[id(transformer)] = _Memory(list(managers.values()))
        if self.cache == "first-block" and getattr(transformer, "_parallel_config", None):
            _decide_together(transformer, blocks)
        splits.put_back()
        self._undo.append(splits.lift)
        if self.cache == "taylorseer":
            self._watch(transformer, config.disable_cache_before_step)
            self._outputs.append(_Outputs(transformer, adapter.outputs))
        show_changes(transformer)

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], blocks: int
    ) -> None:
        from vidsparse.pipelines.position import named_arguments

        arguments = named_arguments(module, args, kwargs)
        at = self._positions.next(self._pipe(), arguments)
        if at.begins:
            self._begin_run()
        step = at.step
        last = self._forwards[-1] if self._forwards else None
        branch = last.branch + 1 if last is not None and step == last.step else 0
        memory = self._memories[id(module)]
        name = memory.announced
        before = itertools.takewhile(lambda one: one.step == step, reversed(self._forwards))
        place = sum(one.name == name for one in before)
        memory.tell(f"{name} {place}", getattr(arguments.get("hidden_states"), "shape", None))
        self._forwards.append(_Forward(step, blocks, branch, name))

    def _begin_run(self) -> None:
        self._forwards.clear()
        self._swings.clear()
        self.swung = False
        for memory in self._memories.values():
            memory.forget()
        for outputs in self._outputs:
            outputs.follow()
        for hook, warmup in self._hooks:
            hook.disable_cache_before_step = warmup

    def _watch(self, transformer: Any, warmup: int) -> None:
        """Have every step run for the rest of each run in which the outputs swing."""
        import torch

        self._hooks += [(hook, warmup) for _, hook in cache_hooks(transformer)]

        def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            swing = self._swings.setdefault(id(transformer), _Swing(warmup))
            video = output[0] if isinstance(output, tuple) else output.sample
            # Cosmos 3 returns a list of videos.
            video = video[0] if isinstance(video, list) else video
            if swing.found(self._forwards[-1].branch, video):
                self.swung = True
                for hook, _ in self._hooks:
                    hook.disable_cache_before_step = sys.maxsize

        eager = torch.compiler.disable(end)  # type: ignore[no-untyped-call]
        self._undo.append(transformer.register_forward_hook(eager).remove)

    def _count(self, block: Any) -> None:
        """Have the block's own forward counted, below whatever hooks the cache puts around it."""

        def counting(inner: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(inner)
            def counted(*args: Any, **kwargs: Any) -> Any:
                self._forwards[-1].run += 1
                return inner(*args, **kwargs)

            return counted

        self._undo.append(wrap_forward(block, counting))

    def _put_on(self, transformer: Any, config: Any) -> None:
        """Put the host's cache on, also where the host's class does not offer it."""
        from diffusers.hooks import HookRegistry, apply_taylorseer_cache

        if hasattr(transformer, "enable_cache"):
            transformer.enable_cache(config)
            self._undo.append(transformer.disable_cache)
            return
        registry = HookRegistry.check_if_exists_or_initialize(transformer)
        if self.cache != "taylorseer":
            raise ValueError(_UNKNOWN)
        apply_taylorseer_cache(transformer, config)
        registry.invalidate_child_registries_cache()
        self._undo.append(registry.invalidate_child_registries_cache)
        self._undo.append(lambda: registry.remove_hook(TAYLORSEER_HOOK, recurse=True))

    def _config(self, warmup: int, transformer: Any, adapter: Any) -> Any:
        import diffusers

        from vidsparse.pipelines.adapter import transformer_blocks

        if self.cache == "first-block":
            return diffusers.FirstBlockCacheConfig(threshold=self.threshold)
        assert self.threshold is not None
        # the last projections alone are extrapolated: all blocks' outputs would take more memory
        # than the model. blocks come to nothing meanwhile, those of text as well.
        blocks = {id(block) for block in transformer_blocks(transformer, adapter)}
        names = [name for name, one in transformer.named_modules() if id(one) in blocks]
        return diffusers.TaylorSeerCacheConfig(
            cache_interval=int(self.threshold),
            disable_cache_before_step=max(_EARLY, warmup),
            taylor_factors_dtype=None,
            skip_predict_identifiers=[_BLOCK_LISTS, *map(re.escape, names)],
            cache_identifiers=[re.escape(name) for name in adapter.outputs],
        )


AnyCache: TypeAlias = "StepCache | GuidanceCache"
"""A cache on a pipeline, with counts of what it ran."""
