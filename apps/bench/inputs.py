"""What benches of single calls run on: made-up queries and keys, or calls of a model's own run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vidsparse.apps.bench.attention_cases import structured_qk
from vidsparse.dtypes import dtype_name

if TYPE_CHECKING:
    import torch

    from vidsparse.calls import RecordedCall

RANDOM: Final = "random"
STRUCTURED: Final = "structured"

GRIDS: Final[Mapping[int, tuple[int, int, int]]] = {
    75_600: (21, 45, 80),
    7_488: (13, 24, 24),
    2_304: (9, 16, 16),
}
"""Token grids by length: Wan at 1280x720 and 81 frames, and `shapes` at both its sizes; other
lengths become one frame of one row."""

RECORDED_STEPS: Final = (1 / 6, 1 / 2, 5 / 6)
RECORDED_LAYERS: Final = (0.0, 1 / 2, 1.0)
"""Where calls are recorded, as shares of a run's steps and of a transformer's layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInputs:
    """Attention calls of one shape, in row-major order.

    Args:
        name: what they are.
        calls: at least one.
    """

    name: str
    calls: tuple[RecordedCall, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, heads and channels of a head."""
        _, heads, tokens, channels = self.calls[0].q.shape
        return tokens, heads, channels

    @property
    def dtype(self) -> torch.dtype:
        """The number format of all of them."""
        return self.calls[0].q.dtype


def structured(
    seq_len: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> CallInputs:
    """One call whose q, k and v go with a token's place; the same every time."""
    import torch

    from vidsparse.calls import RecordedCall
    from vidsparse.grid import TokenGrid
    from vidsparse.site import CallSite

    torch.manual_seed(0)
    grid = TokenGrid(*GRIDS.get(seq_len, (1, 1, seq_len)))
    q, k = structured_qk(grid, heads, head_dim, dtype, device)
    v = structured_qk(grid, heads, head_dim, dtype, device)[1]
    v = (v.float() / v.float().std()).to(dtype)
    call = RecordedCall(q=q, k=k, v=v, site=CallSite(0, 0, 0.0, grid))
    return CallInputs(name=STRUCTURED, calls=(call,))


def recorded(
    model: str,
    *,
    size: tuple[int, int] | None,
    frames: int | None,
    steps: int | None,
    dtype: torch.dtype,
    device: torch.device,
    say: Callable[[str], None],
) -> CallInputs:
    """Nine calls of a dense run of ``model``: three layers at three steps.

    The prompt is the first of a small model's held-out ones, the seed 0, so that a rerun records
    the same calls; what is left open is the model's own.

    Raises:
        VidsparseError: the model cannot be found, loaded or run so.
    """
    from vidsparse.apps.small_model.prompts import held_out_prompts
    from vidsparse.calls import record_calls
    from vidsparse.pipelines import sparsify
    from vidsparse.pipelines.generate import denoise
    from vidsparse.pipelines.models import load, resolve_model
    from vidsparse.pipelines.request import GenerateRequest, resolve

    found = resolve_model(model)
    width, height = size or (None, None)
    request = resolve(
        GenerateRequest(
            prompt=held_out_prompts(found)[0],
            model=model,
            method="dense",
            dense_kernel="stock",
            width=width,
            height=height,
            frames=frames,
            steps=steps,
            device=str(device),
            dtype=dtype_name(dtype),
        ),
        found.defaults,
    )
    assert request.steps is not None
    assert request.frames is not None
    say(f"recording calls of {model} ...")
    loaded = load(found, device=request.device, dtype=request.dtype)
    at = sorted({min(request.steps - 1, int(share * request.steps)) for share in RECORDED_STEPS})
    with sparsify(loaded.pipe, "dense") as handle:
        last = handle.engine.layers - 1
        layers = {round(share * last) for share in RECORDED_LAYERS}
        with record_calls(handle.engine, steps=at, layers=layers, rows=1) as calls:
            denoise(loaded, [request], at[-1])
    where = f"{request.width}x{request.height}, {request.frames} frames"
    which = f"layers {_listed(layers)} at steps {_listed(at)} of {request.steps}"
    return CallInputs(name=f"{model}, {where}, {which}", calls=tuple(calls))


def shape_text(seq_len: int, heads: int, head_dim: int, data: str) -> str:
    """The table cell that says what a row was measured on."""
    shape = f"{seq_len}x{heads}x{head_dim}"
    return shape if data in (RANDOM, STRUCTURED) else f"{shape} of {data}"


def inputs_of(
    options: Mapping[str, Any],
    seq_len: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    say: Callable[[str], None],
) -> CallInputs:
    """What ``--data`` and the options beside it ask for; without it, made up in the given shape."""
    if options["data"] is None:
        return structured(seq_len, heads, head_dim, dtype, device)
    return recorded(
        options["data"],
        size=options["size"],
        frames=options["frames"],
        steps=options["steps"],
        dtype=dtype,
        device=device,
        say=say,
    )


def _listed(numbers: set[int] | list[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
