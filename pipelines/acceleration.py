"""``accelerate``: all settings of a speed on a pipeline of one's own."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from vidsparse.dtypes import dtype_name
from vidsparse.errors import OptionError, check_flag
from vidsparse.pipelines.adapter import transformers_of
from vidsparse.pipelines.branches import has_one_branch
from vidsparse.pipelines.caching import AnyCache, check_cache, check_family, open_cache
from vidsparse.pipelines.compilation import compile_blocks
from vidsparse.pipelines.handle import SparseHandle, sparsify
from vidsparse.pipelines.linear import LinearFacts, has_layers_for, quantize_linear
from vidsparse.pipelines.lookup import find_adapter
from vidsparse.pipelines.placement import LINEARS, check_choice
from vidsparse.pipelines.speed import SPEEDS, Bundle, bundle_for, described


class AcceleratedPipeline(AbstractContextManager["AcceleratedPipeline"]):
    """What ``accelerate`` did to a pipeline, and how to undo it (``remove()``).

    As a context manager it removes itself when the block ends.

    Attributes:
        bundle: the settings in effect, with those that were given.
        sparse: the handle of its attention; its method is ``dense`` at the speed ``exact``.
        cache: its step cache, None without one.
        linear: what was done to its linear layers, None if nothing.
    """

    def __init__(
        self,
        bundle: Bundle,
        sparse: SparseHandle,
        cache: AnyCache | None,
        linear: LinearFacts | None,
    ) -> None:
        self.bundle = bundle
        self.sparse = sparse
        self.cache = cache
        self.linear = linear

    def remove(self) -> None:
        """Remove sparse attention and the cache; rounded weights and compiled blocks stay."""
        if self.cache is not None:
            self.cache.remove()
        self.sparse.remove()

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __str__(self) -> str:
        names = ("method", "method_options", "linear", "compile", "cache", "cache_threshold")
        parts = {name: getattr(self.bundle, name) for name in names} | dict(self.bundle.schedule)
        return f"speed {self.bundle.speed}: {described(parts)}"


def accelerate(
    pipe: Any,
    speed: str = "balanced",
    *,
    steps: int | None = None,
    guidance: float | None = None,
    method: str | None = None,
    dense_steps: int | float | None = None,
    refresh: int | float | None = None,
    linear: str | None = None,
    compile: bool | None = None,
    cache: str | None = None,
    **method_options: Any,
) -> AcceleratedPipeline:
    """Speed a pipeline up by a speed's settings; arguments that are given override them.

    Args:
        pipe: a pipeline of a supported class, on its device already.
        speed: ``exact``, ``high``, ``balanced`` or ``fast``.
        steps: denoising steps that it will take; None: the family's own.
        guidance: guidance scale of its runs, since a step is one forward where that is 1 or less;
            None: the pipeline's own where that is so, else the family's.
        method: as in ``sparsify``.
        dense_steps: as in ``sparsify``.
        refresh: as in ``sparsify``.
        linear: ``none``, ``fp8``, ``int8`` or ``bf16``; ``remove()`` does not bring rounded
            weights back.
        compile: whether blocks are compiled; ``remove()`` does not undo it.
        cache: ``none``, ``first-block``, ``taylorseer`` or ``guidance``.
        **method_options: the method's own options.

    Raises:
        OptionError: a value is not valid.
        UnsupportedError: a setting cannot be used with this pipeline or device.
    """
    check_choice("speed", speed, SPEEDS)
    check_cache(cache, None)
    check_choice("linear", linear, (None, *LINEARS))
    if compile is not None:
        check_flag("compile", compile)
    if method is not None and not isinstance(method, str):
        raise OptionError(
            f"method must be the name of one, got {method!r}. "
            "Hint: sparsify() takes methods that are built already."
        )
    adapter = find_adapter(pipe)
    family = adapter.family
    steps = family.defaults.steps if steps is None else steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise OptionError(f"steps must be a whole number from 1, got {steps!r}")
    if guidance is None:
        guidance = _own_guidance(pipe, family.defaults.guidance)
    number = isinstance(guidance, (int, float)) and not isinstance(guidance, bool)
    if not number or not 0 <= guidance < float("inf"):
        raise OptionError(f"guidance must be a number from 0, got {guidance!r}")
    device, dtype = str(pipe.device), dtype_name(pipe.dtype)
    transformer: Any = transformers_of(pipe, adapter)[0]
    defaults = replace(family.defaults.for_transformer(transformer.config), guidance=guidance)
    own = bundle_for(speed, defaults, steps=steps, device=device, dtype=dtype, method=method)
    if cache is None and has_one_branch(transformer):
        # no cache can be there, and nobody asked for one by name.
        cache = "none"
    asked = {"dense_steps": dense_steps, "refresh": refresh}
    given = {name: value for name, value in asked.items() if value is not None}
    bundle = replace(
        own,
        method_options={**own.method_options, **method_options},
        schedule={**own.schedule, **given},
        linear=own.linear if linear is None else linear,
        compile=own.compile if compile is None else compile,
        cache=own.cache if cache is None else cache,
        cache_threshold=own.cache_threshold if cache is None else None,
    )
    schedule: dict[str, Any] = dict(bundle.schedule)
    sparse = sparsify(pipe, bundle.method, **schedule, **bundle.method_options)
    try:
        check_family(bundle.cache, family)
        settled = sparse.engine.schedule

        def put_cache_on() -> AnyCache:
            return open_cache(
                pipe,
                bundle.cache,
                threshold=bundle.cache_threshold,
                dense_steps=settled.dense_steps,
                steps=steps,
                whole=settled.refresh_steps,
            )

        if bundle.cache != "none":
            # what can be refused comes before what cannot be undone; hooks come last, around the
            # rest.
            put_cache_on().remove()
        facts = None
        if linear is None and bundle.linear != "none" and not has_layers_for(pipe, bundle.linear):
            # a model in few bits already, for one; nobody asked for this format.
            bundle = replace(bundle, linear="none")
        if bundle.linear != "none":
            facts = quantize_linear(pipe, bundle.linear, device=device)
            if not facts.layers:
                # all are as they were.
                facts, bundle = None, replace(bundle, linear="none")
        if bundle.compile:
            compile_blocks(pipe)
        held = None if bundle.cache == "none" else put_cache_on()
    except Exception:
        sparse.remove()
        raise
    return AcceleratedPipeline(bundle, sparse, held, facts)


def _own_guidance(pipe: Any, family: float) -> float:
    """The scale that a pipeline's call has by itself if that is none, else its ``family``'s."""
    own = inspect.signature(type(pipe).__call__).parameters.get("guidance_scale")
    if own is not None and isinstance(own.default, (int, float)) and own.default <= 1:
        return float(own.default)
    return family
