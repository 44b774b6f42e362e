"""What tests of families hold pipelines to: one forward's error, and that no trace is left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import ModularPipeline
from tiny_families import latents
from torch import Tensor, nn

from vidsparse.pipelines import sparsify
from vidsparse.pipelines.position import named_arguments


def transformers_of(pipe: Any) -> list[nn.Module]:
    found = (getattr(pipe, name, None) for name in ("transformer", "transformer_2"))
    return [part for part in found if part is not None]


class Stop(Exception):
    pass


def first_forward(name: str, pipe: Any, **changes: Any) -> dict[str, Any]:
    """The arguments of the transformer's first forward in a call of the pipeline."""
    return forward_of(pipe, lambda: latents(name, pipe, **changes))


def forward_of(pipe: Any, run: Callable[[], object]) -> dict[str, Any]:
    """The arguments of the transformer's first forward in ``run``."""
    seen: dict[str, Any] = {}

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.update(named_arguments(module, args, kwargs))
        raise Stop

    hook = pipe.transformer.register_forward_pre_hook(take, with_kwargs=True)
    with pytest.raises(Stop):
        run()
    hook.remove()
    if not isinstance(pipe, ModularPipeline):
        pipe.maybe_free_model_hooks()
    return seen


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(as_dtype(part, dtype) for part in value)
    return value


def forward(transformer: nn.Module, arguments: dict[str, Any], dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        out = transformer(**{k: as_dtype(v, dtype) for k, v in arguments.items()})[0]
    # Cosmos 3 returns a list of videos.
    made: Tensor = out[0] if isinstance(out, list) else out
    return made


def check_within_twice_the_stock_error(ours: Tensor, stock: Tensor, truth: Tensor) -> None:
    assert ours.dtype == stock.dtype
    # one error can be lucky: rounding of the largest value is allowed in any case.
    floor = torch.finfo(ours.dtype).eps * truth.abs().max()
    budget = max(2 * (stock - truth).abs().max(), floor)
    assert (ours - truth).abs().max() <= budget


def check_full_mask(pipe: Any, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """Hold a sparse forward that computes all pairs to twice the stock one's error."""
    truth = forward(copy.deepcopy(pipe.transformer).double(), arguments, torch.float64)
    pipe.transformer.to(dtype)
    stock = forward(pipe.transformer, arguments, dtype)
    with sparsify(pipe, top_p=1.0, dense_steps=0) as handle:
        ours = forward(pipe.transformer, arguments, dtype)
        assert handle.summary().computed == 1.0
        assert handle.summary().notes == ()
    check_within_twice_the_stock_error(ours, stock, truth)


def state_of(pipe: Any) -> list[Any]:
    """Everything that a hook or a replaced part would show up in."""
    found: list[Any] = []
    for transformer in transformers_of(pipe):
        for name, module in transformer.named_modules():
            found.append((name, sorted(vars(module)), list(module._forward_pre_hooks)))
            found.append((list(module._forward_hooks), id(getattr(module, "processor", None))))
    return found
