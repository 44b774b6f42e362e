"""Forwards of a transformer that can be run again, to find what became NaN or infinity in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from vidsparse.site import CallSite


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """One forward of a transformer, by its arguments: references, no copies.

    Args:
        module: the transformer.
        site: where it stands in the run, with layer 0.
        args: what it was called with.
        kwargs: what it was called with by name.
        versions: how often each tensor of those had been changed in place by then.
        autocast: whether products were rounded by autocast, and to what.
    """

    module: nn.Module
    site: CallSite
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    versions: tuple[int, ...]
    autocast: tuple[str, bool, torch.dtype]

    @classmethod
    def begun(
        cls, module: nn.Module, site: CallSite, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Forward:
        """The forward that begins now."""
        given = list(tensors_of((args, kwargs)))
        kind = given[0].device.type if given else "cpu"
        autocast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return cls(module, site, args, kwargs, _versions(given), autocast)

    @property
    def can_run_again(self) -> bool:
        """Whether its arguments are still what they were."""
        return _versions(tensors_of((self.args, self.kwargs))) == self.versions

    def run_again(self) -> Any:
        """Run it once more; returns what the transformer returns."""
        kind, enabled, dtype = self.autocast
        with torch.no_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
            return self.module(*self.args, **self.kwargs)


Watcher: TypeAlias = Callable[[Forward, Tensor, bool], object]
"""Called with a forward, a tensor, and whether the forward returned that tensor: if not, it is the
output of one of its attention calls. A returned tensor may be filled until the step is over."""


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a forward was given or has returned."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_of(each)


def _versions(given: Iterator[Tensor] | list[Tensor]) -> tuple[int, ...]:
    # tensors of inference mode are not counted.
    return tuple(0 if one.is_inference() else one._version for one in given)
