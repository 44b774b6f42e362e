"""``sparsify`` and the handle that undoes it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch import nn

from vidsparse.attention import AttentionEngine
from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.logs import logger
from vidsparse.methods import Method, make_method
from vidsparse.pipelines.adapter import (
    Adapter,
    Session,
    SparseProcessor,
    find_adapter,
    parallel_unsupported,
)
from vidsparse.presets import Preset, load_preset
from vidsparse.schedule import Schedule
from vidsparse.trace import Trace, TraceSummary


class SparseHandle:
    """A pipeline made sparse: its trace, and the way back.

    Usable as a context manager: leaving the block removes it.
    """

    def __init__(self, method: Method, session: Session, modules: list[Any]) -> None:
        self._method = method
        self._session = session
        self._modules = modules

    @property
    def method(self) -> Method:
        """What decides which attention is skipped."""
        return self._method

    @property
    def engine(self) -> AttentionEngine:
        """What runs the attention calls (of the first transformer, where there are two)."""
        return self._session.engines[0]

    @property
    def engines(self) -> tuple[AttentionEngine, ...]:
        """What runs the attention calls of each transformer."""
        return self._session.engines

    @property
    def trace(self) -> Trace:
        """What every attention call of the last run did."""
        return self.engine.trace

    @property
    def active(self) -> bool:
        """Whether the pipeline is still sparse."""
        return self._session.active

    def summary(self) -> TraceSummary:
        """Densities, shares and time of the last run; waits for the device to finish."""
        return self.trace.summary()

    def remove(self) -> None:
        """Restore the pipeline: the same processor objects, no hooks. Harmless when repeated."""
        _detach(self._session, self._modules)
        self._modules = []

    def __enter__(self) -> SparseHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "active" if self.active else "removed"
        return f"SparseHandle({self._method!r}, {state})"


def sparsify(
    pipe: Any,
    method: str | Method | None = None,
    *,
    preset: str | os.PathLike[str] | Preset | None = None,
    order: str | None = None,
    dense_steps: int | float = 0.24,
    dense_last_steps: int | float = 0,
    dense_layers: int | float = 0,
    dense_last_layers: int | float = 0,
    reuse: int = 1,
    implementation: str = "auto",
    check_finite: bool = False,
    **method_options: Any,
) -> SparseHandle:
    """Make the video self-attention of a diffusers pipeline sparse.

    The pipeline keeps working as before: same call, same arguments, any size and length. Options
    belong to this pipeline alone; others are untouched.

    Args:
        pipe: a stock diffusers pipeline of a supported family.
        method: a name from ``vidsparse.METHODS``, or a method built already; ``fg-attn`` by
            default, or the preset's.
        preset: a calibrated method, or the file of one (``vidsparse calibrate`` makes them). Its
            transformer's configuration is compared; weights are not, since a loaded pipeline does
            not say where they are from.
        order: how video tokens are ordered before tiles are cut; ``hilbert`` by default, or the
            preset's.
        dense_steps: first denoising steps kept dense (decimal: share rounded up; integer: count).
        dense_last_steps: last steps kept dense.
        dense_layers: first transformer layers kept dense.
        dense_last_layers: last transformer layers kept dense.
        reuse: steps that a plan serves.
        implementation: ``auto`` or one of ``vidsparse.kernels.IMPLEMENTATIONS``.
        check_finite: raise when attention returns NaN or Inf, naming layer and step.
        **method_options: the method's own numbers, such as ``top_p=0.9``.

    Raises:
        UnsupportedError: the pipeline's class is not supported, it is sparse already, it runs
            under context parallelism, or somebody's own processors are in place.
        OptionError: an option is unknown, or has a value that is not valid; a preset cannot be
            read, or was made for another model, method or order.
    """
    adapter = find_adapter(pipe)
    if preset is not None:
        preset = preset if isinstance(preset, Preset) else load_preset(preset)
        if method is not None and method != preset.method:
            name = method if isinstance(method, str) else method.name
            raise OptionError(
                f"{preset.source} is for {preset.method}, not for {name}. "
                "Hint: leave the method out."
            )
        preset.check_model(transformer_configs(pipe))
        order = order or preset.order
        preset.check_order(order)
        method = preset.make_method(**method_options)
    elif method is None or isinstance(method, str):
        method = make_method(method or "fg-attn", **method_options)
    elif method_options:
        names = ", ".join(sorted(method_options))
        raise OptionError(
            f"{names} given beside a method that is built already. "
            "Hint: give the options when building it."
        )
    transformers = _transformers(pipe, adapter)
    sites = [_attention_modules(transformer, adapter) for transformer in transformers]
    schedule = Schedule(
        dense_steps=dense_steps,
        dense_last_steps=dense_last_steps,
        dense_layers=dense_layers,
        dense_last_layers=dense_last_layers,
        reuse=reuse,
    )
    engines = tuple(
        AttentionEngine(
            method,
            schedule=schedule,
            order=order or "hilbert",
            layers=len(modules),
            implementation=implementation,
            check_finite=check_finite,
        )
        for modules in sites
    )
    # everything is known to be valid by here: from now on the pipeline is changed.
    session = Session(pipe, adapter, engines)
    for part, (transformer, modules) in enumerate(zip(transformers, sites, strict=True)):
        session.watch(part, transformer)
        for layer, module in modules.items():
            session.stock[part, layer] = module.processor
            module.processor = adapter.processor(module.processor, session, part, layer)
    handle = SparseHandle(method, session, [m for modules in sites for m in modules.values()])
    logger.info("%s on %d layers of %s", method.name, len(session.stock), type(pipe).__name__)
    return handle


def restore(pipe: Any) -> bool:
    """Undo ``sparsify`` where the handle was lost; answers whether there was anything to undo.

    Raises:
        UnsupportedError: the pipeline's class is not supported.
    """
    modules = _sparse_modules(pipe)
    for session in {module.processor.session for module in modules}:
        _detach(session, modules)
    return bool(modules)


def is_sparse(pipe: Any) -> bool:
    """Whether ``sparsify`` is in effect on ``pipe``.

    Raises:
        UnsupportedError: the pipeline's class is not supported.
    """
    return bool(_sparse_modules(pipe))


def transformer_configs(pipe: Any) -> list[dict[str, Any]]:
    """Class and configuration of each of the pipeline's transformers, as a preset keeps them.

    Raises:
        UnsupportedError: the pipeline's class is not supported.
    """
    transformers: list[Any] = list(_transformers(pipe, find_adapter(pipe)))
    return [
        {
            "class": type(one).__name__,
            # names with an underscore in front say how the model was loaded, not what it is.
            "config": {k: v for k, v in one.config.items() if not k.startswith("_")},
        }
        for one in transformers
    ]


def attention_shape(pipe: Any) -> tuple[int, int, int]:
    """Transformers of the pipeline, layers of each, and heads of a layer.

    Raises:
        UnsupportedError: the pipeline's class is not supported.
    """
    adapter = find_adapter(pipe)
    sites = [_attention_modules(one, adapter) for one in _transformers(pipe, adapter)]
    heads = next(iter(sites[0].values())).heads
    return len(sites), max(len(modules) for modules in sites), heads


def _sparse_modules(pipe: Any) -> list[Any]:
    adapter = find_adapter(pipe)
    return [
        module
        for transformer in _transformers(pipe, adapter)
        for name, module in transformer.named_modules()
        if adapter.attention.fullmatch(name) and isinstance(module.processor, SparseProcessor)
    ]


def _detach(session: Session, modules: Iterable[Any]) -> None:
    """Put the stock processors of ``session`` back and stop following the transformers."""
    for module in modules:
        ours = module.processor
        # a processor that somebody has put in place since is not ours to replace.
        if isinstance(ours, SparseProcessor) and ours.session is session:
            module.processor = ours.stock
    session.unwatch()


def _transformers(pipe: Any, adapter: Adapter) -> list[nn.Module]:
    """The pipeline's transformers, each as it is beneath ``torch.compile``."""
    found = [
        getattr(component, "_orig_mod", component)
        for name in adapter.transformers
        if (component := getattr(pipe, name, None)) is not None
    ]
    if not found:
        raise UnsupportedError(
            f"this {type(pipe).__name__} has no transformer. Hint: load the whole pipeline."
        )
    return found


def _attention_modules(transformer: nn.Module, adapter: Adapter) -> dict[int, Any]:
    """The self-attention modules by layer, each checked to carry a stock processor."""
    modules: dict[int, Any] = {}
    for name, module in transformer.named_modules():
        match = adapter.attention.fullmatch(name)
        if not match:
            continue
        processor: Any = module.processor
        if isinstance(processor, SparseProcessor):
            raise UnsupportedError(
                "this pipeline is sparse already. Hint: call remove() on its handle, or "
                "vidsparse.pipelines.restore(pipe)."
            )
        if type(processor).__name__ not in adapter.stock_processors:
            raise UnsupportedError(
                f"{name} has its own attention processor, {type(processor).__name__}. "
                f"Hint: sparsify replaces {', '.join(adapter.stock_processors)} only."
            )
        if getattr(processor, "_parallel_config", None) is not None:
            raise parallel_unsupported()
        modules[int(match[1])] = module
    if not modules:
        raise UnsupportedError(
            f"{type(transformer).__name__} has no module named like {adapter.attention.pattern}. "
            "Hint: this version of diffusers may be too new; please report it."
        )
    return modules
