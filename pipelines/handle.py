"""``sparsify`` and the handle that undoes it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from vidsparse.engine import AttentionEngine
from vidsparse.errors import OptionError, UnsupportedError, listed
from vidsparse.finite import NonFiniteCall
from vidsparse.logs import logger
from vidsparse.methods import Method, make_method
from vidsparse.pipelines.adapter import (
    Adapter,
    SparseProcessor,
    attention_modules,
    is_stock,
    transformers_of,
)
from vidsparse.pipelines.again import Forward, Watcher
from vidsparse.pipelines.branches import BRANCHES_ARE_APART, HALVES
from vidsparse.pipelines.linear import bytes_spared
from vidsparse.pipelines.lookup import find_adapter
from vidsparse.pipelines.parallel import (
    all_processes,
    check_parallel,
    gather_heads,
    heads_of,
    process_count,
)
from vidsparse.pipelines.session import Session
from vidsparse.presets import Preset, load_preset
from vidsparse.probe import CellProbe
from vidsparse.schedule import Schedule
from vidsparse.trace import Trace, TraceSummary


class SparseHandle:
    """Handle of a sparse pipeline: says what its attention did, and undoes it (``remove()``).

    As a context manager it removes itself when the block ends.
    """

    def __init__(self, method: Method, session: Session) -> None:
        self._method = method
        self._session = session

    @property
    def method(self) -> Method:
        """The method that selects what is computed."""
        return self._method

    @property
    def engine(self) -> AttentionEngine:
        """The engine that runs the attention calls (of the first transformer, if there are two)."""
        return self._session.engines[0]

    @property
    def engines(self) -> tuple[AttentionEngine, ...]:
        """The engine of each transformer."""
        return self._session.engines

    @property
    def trace(self) -> Trace:
        """What every attention call of the last run did."""
        return self.engine.trace

    @property
    def active(self) -> bool:
        """Whether the pipeline is still sparse: not once another transformer is in its place."""
        return self._session.active and self._session.in_place

    def summary(self) -> TraceSummary:
        """Densities, shares and time of the last run; waits for the device to finish."""
        return self.trace.summary()

    def probe(self, probe: CellProbe | None) -> None:
        """Have ``probe`` record its call in the next runs; None records nothing.

        Raises:
            OptionError: it is neither.
        """
        if probe is not None and not isinstance(probe, CellProbe):
            raise OptionError(
                f"a probe is a CellProbe or None, got {probe!r}. "
                "Hint: handle.probe(CellProbe(step=5, layer=0))."
            )
        for engine in self._session.engines:
            engine.probe = probe

    def watch(self, watcher: Watcher | None) -> None:
        """Have ``watcher`` see what the transformers return in the next runs; None: no watcher.

        Some rows of attention (padding, text of the last layers) never reach a transformer's
        output; the watcher also sees the outputs of the calls that hold them.
        """
        self._session.watcher = watcher

    def outputs_with(self, forward: Forward, layers: Collection[int]) -> list[Tensor]:
        """Run a watched forward again with sparse attention in ``layers`` only.

        All its other layers are dense. The run goes on as if this had not happened.

        Returns:
            The tensors that the transformer returns.
        """
        return self._session.outputs_with(forward, layers)

    def find_non_finite(self, forwards: Sequence[Forward]) -> NonFiniteCall | None:
        """Run the ``forwards`` of one step again to find the first call with NaN or infinity.

        All processes of a run must call it, and each gets its own answer. A step cache must be off
        by then.

        Returns:
            That call, or None if no attention call shows NaN or infinity.
        """
        return self._session.find_non_finite(forwards)

    def parallelize(
        self, *, ring: int | None = None, balance: bool = True, apart: bool = False
    ) -> None:
        """Denoise each video over all processes of ``torch.distributed``, until ``remove()``.

        Every process makes the same pipeline, and calls it with the same arguments and seeds; each
        returns the whole video. Each process holds all text and an equal share of the video's
        tokens, and computes attention for an equal share of the heads. With one process nothing
        changes.

        Args:
            ring: size of a ring: so many of the N processes hold different tokens and pass keys and
                values round; N / ``ring`` processes share the heads. None takes the smallest ring
                for which N / ``ring`` divides the heads; 1 is Ulysses without a ring.
            balance: deal the heads so that all processes have equally much work, by what each head
                computed a step before. Outputs do not change.
            apart: let one half of the processes compute one guidance branch, and the other half
                the other, where the pipeline calls its transformer once for each (Wan). ``ring``
                and N then refer to one half.

        Raises:
            UnsupportedError: ``torch.distributed`` was not started, the pipeline's transformer
                cannot run in several processes, or runs under context parallelism already.
            OptionError: ``ring`` does not divide the number of processes, or ``apart`` was asked
                for with an odd number of them.
        """
        session = self._session
        if session.halves is not None:
            raise UnsupportedError(BRANCHES_ARE_APART)
        apart = apart and process_count() > 1
        if apart:
            session.check_apart()
        config = all_processes(session.heads, ring, HALVES if apart else 1)
        session.balance = balance
        if config is not None:
            session.parallelize(config)
        if apart:
            session.split_branches()

    @property
    def can_be_apart(self) -> bool:
        """Whether ``parallelize(apart=True)`` works with this pipeline and number of processes.

        It saves time only in runs with guidance: without it both halves compute the same.
        """
        if process_count() % HALVES:
            return False
        try:
            self._session.check_apart()
        except UnsupportedError:
            return False
        return True

    @property
    def apart(self) -> bool:
        """Whether each half of the processes computes one guidance branch."""
        return self._session.halves is not None

    @property
    def ring(self) -> int:
        """How many processes pass keys and values round a ring; 1 without a ring."""
        groups = self._session.groups()
        return 1 if groups is None or groups.ring is None else groups.ring.count

    def gather_trace(self) -> bool:
        """Complete the trace of the last run with the heads that other processes computed.

        All processes must call it, once after a run. Seconds stay those of this process.

        Returns:
            False if it could not be done, because a call of one process alone became dense.
        """
        groups, halves = self._session.groups(), self._session.halves
        whole = groups is None or gather_heads(self.trace, groups)
        # all processes ask, or none.
        return (halves is None or halves.gather(self.trace, self.engine)) and whole

    def remove(self) -> None:
        """Restore the pipeline: the same processor objects, no hooks. Harmless when repeated."""
        self._session.detach()

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
        state = "active" if self.active else "not active"
        return f"SparseHandle({self._method!r}, {state})"


def sparsify(
    pipe: Any,
    method: str | Method | None = None,
    *,
    preset: str | os.PathLike[str] | Preset | None = None,
    order: str | None = None,
    dense_steps: int | float | None = None,
    dense_last_steps: int | float = 0,
    dense_layers: int | float | None = None,
    dense_last_layers: int | float | None = None,
    reuse: int | None = None,
    refresh: int | float | None = None,
    implementation: str = "auto",
    dense_kernel: str = "auto",
    check_finite: bool = False,
    dense_fallback: bool = False,
    **method_options: Any,
) -> SparseHandle:
    """Make the video self-attention of a diffusers pipeline sparse.

    The pipeline keeps working as before: same call, same arguments, any size and length. Options
    belong to this pipeline alone; others are untouched. An option that is left out has the family's
    default (``Defaults`` in ``vidsparse.pipelines.family``; `vidsparse models` prints them).

    Steps are counted by this pipeline's own scheduler. Where another scheduler runs its
    transformer, the first forward raises an ``UnsupportedError``; after a run that was stopped
    between two steps the second one does, since the first is taken for the next step of that run. A
    loop of one's own calls ``pipe.scheduler.set_timesteps()`` first.
    (A pipeline that ``from_pipe`` made of this one has its scheduler too, and is sparse with it; of
    video to video the steps that its strength leaves out count as run.)

    Args:
        pipe: a stock diffusers pipeline of a supported family.
        method: a name from ``vidsparse.METHODS``, or a method object. By default the preset's, else
            the family's own (``fg-attn``).
        preset: a calibrated method, or the file of one (``vidsparse calibrate`` makes them). Its
            transformer's configuration is compared; weights are not, since a loaded pipeline does
            not say where they came from.
        order: how video tokens are ordered before tiles are cut; by default the preset's, else the
            method's own (``hilbert`` for foresight), else the family's.
        dense_steps: first denoising steps kept dense (decimal: share rounded up; integer: count).
        dense_last_steps: last steps kept dense.
        dense_layers: first transformer layers kept dense.
        dense_last_layers: last transformer layers kept dense.
        reuse: steps that a plan serves.
        refresh: steps at which sparse layers compute everything again and keep what their plan
            lacks, for the steps that follow to add (decimal: share rounded up; integer: count; 0:
            none). Takes ``S * (D + 2)`` bytes for each head, layer and guidance branch; where
            all of these come to more than 1 GiB on a GPU, about half (4 bits instead of 8).
        implementation: ``auto`` or one of ``vidsparse.kernels.IMPLEMENTATIONS``.
        dense_kernel: what runs dense steps and layers: ``stock`` (the pipeline's own attention),
            ``gluon`` (Hopper), or ``auto``: ``gluon`` where it can run and is faster, unless an
            attention backend was set on the pipeline.
        check_finite: raise when attention returns NaN or Inf, naming layer and step. The host waits
            for every call. (``generate`` looks at the transformer's output between steps instead,
            which costs next to nothing.)
        dense_fallback: run a sparse call again densely if it returns NaN or Inf. The host waits for
            every call. The trace and the report count such calls as dense and say why.
        **method_options: the method's own options, such as ``top_p=0.9``.

    Returns:
        A handle: what the attention did, and ``remove()`` to make the pipeline stock again.

    Raises:
        UnsupportedError: the pipeline's class is not supported; it is sparse already; its attention
            processors are not diffusers' own; or it runs under ``enable_parallelism``, which is
            supported for Wan with equal shards alone (use ``SparseHandle.parallelize``).
        OptionError: an option is unknown, or has a value that is not valid; a preset cannot be
            read, or was made for another model, method or order.
    """
    adapter = find_adapter(pipe)
    defaults = adapter.family.defaults
    settled: Mapping[str, Any] = {}
    if preset is not None:
        preset = preset if isinstance(preset, Preset) else load_preset(preset)
        if isinstance(method, Method):
            raise OptionError(
                f"{preset.source} is a preset of {preset.method}, and a method was given as well "
                f"({method.name}). Hint: leave one of them out."
            )
        if method not in (None, preset.method):
            raise OptionError(
                f"{preset.source} is for {preset.method}, not for {method}. "
                "Hint: leave the method out."
            )
        preset.check_model(transformer_configs(pipe))
        order = preset.order if order is None else order
        preset.check_order(order)
        method, settled = preset.make_method(**method_options), preset.schedule
    elif method is None or isinstance(method, str):
        name = defaults.method if method is None else method
        own = defaults.options_beside(name, method_options)
        method = make_method(name, **{**own, **method_options})
    elif method_options and isinstance(method, Method):
        names = ", ".join(sorted(method_options))
        raise OptionError(
            f"options ({names}) were given together with a method object. "
            "Hint: give them when making that object."
        )

    if isinstance(method, Method):
        defaults = defaults.with_method(method.name)

    def given(name: str, asked: Any) -> Any:
        return settled.get(name, getattr(defaults, name)) if asked is None else asked

    amount = given("refresh", refresh)
    own_refresh = method.refresh if isinstance(method, Method) else 0
    transformers = transformers_of(pipe, adapter)
    sites = [_checked_modules(transformer, adapter) for transformer in transformers]
    schedule = Schedule(
        dense_steps=given("dense_steps", dense_steps),
        dense_last_steps=dense_last_steps,
        dense_layers=given("dense_layers", dense_layers),
        dense_last_layers=given("dense_last_layers", dense_last_layers),
        reuse=given("reuse", reuse),
        refresh=own_refresh if amount is None else amount,
        **(method.of_schedule if isinstance(method, Method) else {}),
    )
    # what is no method is refused by the engine.
    own_order = method.token_order if isinstance(method, Method) else None
    engines = tuple(
        AttentionEngine(
            method,
            schedule=schedule,
            order=(own_order or defaults.order) if order is None else order,
            layers=len(modules),
            implementation=implementation,
            dense_kernel=dense_kernel,
            check_finite=check_finite,
            dense_fallback=dense_fallback,
        )
        for modules in sites
    )
    # everything is known to be valid by here: from now on the pipeline is changed.
    session = Session(pipe, adapter, engines)
    for part, (transformer, modules) in enumerate(zip(transformers, sites, strict=True)):
        session.attach(part, transformer, modules)
        engines[part].spared = partial(_spared, weakref.ref(transformer))
    logger.info("%s on %d layers of %s", method.name, session.layers, type(pipe).__name__)
    return SparseHandle(method, session)


def _spared(transformer: weakref.ref[nn.Module]) -> int:
    alive = transformer()
    return 0 if alive is None else bytes_spared(alive)


def restore(pipe: Any) -> bool:
    """Undo ``sparsify`` where the handle was lost.

    Returns:
        Whether the pipeline was sparse.

    Raises:
        UnsupportedError: the pipeline's class is not supported.
    """
    sessions = _sessions(pipe)
    for session in sessions:
        session.detach()
    return bool(sessions)


def is_sparse(pipe: Any) -> bool:
    """Whether ``sparsify`` is in effect on ``pipe``.

    Raises:
        UnsupportedError: the pipeline's class is not supported.
    """
    return bool(_sessions(pipe))


def transformer_configs(pipe: Any) -> list[dict[str, Any]]:
    """Class and configuration of each of the pipeline's transformers, as a preset keeps them.

    Raises:
        UnsupportedError: the pipeline's class is not supported.
    """
    transformers: list[Any] = list(transformers_of(pipe, find_adapter(pipe)))
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
    sites = [attention_modules(one, adapter) for one in transformers_of(pipe, adapter)]
    heads = heads_of(sites[0][0][1])
    return len(sites), max(len(modules) for modules in sites), heads


def _sessions(pipe: Any) -> set[Session]:
    """The sessions in effect on ``pipe``."""
    adapter = find_adapter(pipe)
    found = (
        getattr(module.processor, "session", None)
        for transformer in transformers_of(pipe, adapter)
        for _, module in attention_modules(transformer, adapter)
    )
    return {session for session in found if isinstance(session, Session) and session.active}


def _checked_modules(transformer: nn.Module, adapter: Adapter) -> dict[int, Any]:
    """The self-attention modules by layer, each checked to carry a stock processor."""
    found = attention_modules(transformer, adapter)
    for name, module in found:
        processor: Any = module.processor
        if isinstance(processor, SparseProcessor):
            if processor.session.active:
                raise UnsupportedError(
                    "this pipeline is sparse already. Hint: call remove() on its handle, or "
                    "vidsparse.pipelines.restore(pipe)."
                )
            # left over from before: the host puts old processors back when it unfuses projections.
            processor = module.processor = processor.stock
        if not is_stock(processor, adapter):
            raise UnsupportedError(
                f"the attention processor of {name} is {type(processor).__name__}, which sparsify "
                f"does not replace. Hint: it replaces {listed(adapter.stock_processors)}; put that "
                "one back first."
            )
        # CogVideoX's and Mochi's processors do not know of it; the transformer does.
        for holder in (processor, transformer):
            check_parallel(getattr(holder, "_parallel_config", None), adapter.shares)
    if not found:
        raise UnsupportedError(
            f"{type(transformer).__name__} has no module named like {adapter.attention.pattern}. "
            "Hint: this version of diffusers may be too new; please report it."
        )
    return {layer: module for layer, (_, module) in enumerate(found)}
