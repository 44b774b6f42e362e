"""Linear layers of a pipeline's transformers in another number format: 8 bits or bf16.

Weights are rounded once; what a layer is given is rounded anew in every call. In 8 bits (torchao)
weights are rounded by row and the rest by token, every product runs on 8-bit units, and weights
take half the memory of bf16. In bf16 a model in fp32 has its products on a CPU's bf16 units.

In bf16 the convolutions of the decoder go with them.

Of the transformer inside its blocks only: narrow projections and those of adaptive norms stay as
they are, and so does everything around the blocks. In 8 bits the first and the last block stay,
too.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vidsparse.dtypes import dtype_name
from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.logs import logger
from vidsparse.pipelines.placement import check_choice, check_linear

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vidsparse.pipelines.adapter import Adapter

SMALLEST: Final[Mapping[str, int]] = {"fp8": 256, "int8": 256, "bf16": 128}
"""Narrower layers stay as they are: rounding what goes in costs more than the product saves."""

EDGES: Final[Mapping[str, int]] = {"fp8": 1, "int8": 1, "bf16": 0}
"""Blocks left as they are at either end: all others, or the output, meet what they err by."""

_ROUNDED: Final[weakref.WeakKeyDictionary[Any, str]] = weakref.WeakKeyDictionary()
"""The format of each layer that was rounded."""

_UNITS: Final[Mapping[str, int]] = {"fp8": 16, "int8": 16, "bf16": 1}
"""8-bit products on a GPU want both sides of a weight in multiples of it."""

_ADAPTIVE: Final = re.compile("^norm|modulation$")
"""Parts of names that adaptive norms have; Kandinsky calls them modulation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearFacts:
    """What ``quantize_linear`` did.

    Args:
        format: ``fp8``, ``int8`` or ``bf16``.
        layers: number of linear layers in it.
        of: number of linear layers in the transformers.
        bytes_before: bytes of all the transformers' weights before.
        bytes_after: and after.
        convolutions: number of the decoder's that compute in it.
    """

    format: str
    layers: int
    of: int
    bytes_before: int
    bytes_after: int
    convolutions: int = 0

    def __str__(self) -> str:
        decoder = f"the decoder's {self.convolutions} convolutions" if self.convolutions else ""
        if not self.layers:
            return f"none of {self.of} linear layers gains by {self.format}" + (
                f", in which are {decoder}" if decoder else ""
            )
        beside = f", and {decoder}" if decoder else ""
        before, after = (count / 2**20 for count in (self.bytes_before, self.bytes_after))
        return (
            f"{self.layers} of {self.of} linear layers in {self.format}{beside}: the transformer's "
            f"weights take {after:,.1f} MiB instead of {before:,.1f}"
        )


def quantize_linear(
    pipe: Any,
    linear: str,
    *,
    device: str = "cpu",
    rest: str | None = None,
    edges: int | None = None,
    smallest: int | None = None,
) -> LinearFacts:
    """Put the large linear layers of a pipeline's transformers into 8 bits or bf16, for good.

    In bf16 the convolutions of its decoder compute in that, too.

    A LoRA that is not fused before stays separate, in its own format. Layers that are in the format
    already stay as they are.

    Args:
        pipe: a pipeline of a supported class, in the number format that it is to run in.
        linear: ``fp8`` (weights in bf16 only), ``int8`` or ``bf16`` (weights in fp32 only, on CPUs
            with such products).
        device: where weights are rounded.
        rest: where they are moved afterwards; None: they stay on ``device``.
        edges: number of blocks at either end that stay as they are; None: one in 8 bits, none in
            bf16.
        smallest: least number of features on both sides of a layer that is rounded; None: 256 in 8
            bits, 128 in bf16.

    Raises:
        UnsupportedError: the pipeline's class is not supported, torchao is missing, the device
            cannot run such layers, or no layer is large enough for 8 bits. (Where none is for bf16,
            all stay as they are and nothing is raised.)
        OptionError: layers are in another such format already, or weights of this dtype cannot be
            put into the format.
    """
    from vidsparse.pipelines.adapter import transformers_of
    from vidsparse.pipelines.lookup import find_adapter

    check_choice("linear", linear, tuple(EDGES))
    adapter = find_adapter(pipe)
    transformers = transformers_of(pipe, adapter)
    edges = EDGES[linear] if edges is None else edges
    smallest = SMALLEST[linear] if smallest is None else smallest
    chosen = [
        module
        for transformer in transformers
        for module in _chosen(transformer, adapter, edges)
        if _fits(module, linear, smallest)
    ]
    if not chosen and linear != "bf16":
        raise UnsupportedError(
            f"this model has no linear layer of {smallest} features or more between its first and "
            f"its last block, so none would run in {linear}. Hint: leave --linear out."
        )
    other = {_ROUNDED.get(module, linear) for module in chosen} - {linear}
    if other:
        raise OptionError(
            f"this model's linear layers are in {other.pop()} already, so they cannot be put into "
            f"{linear}. Hint: load the model anew."
        )
    missing = [module for module in chosen if module not in _ROUNDED]
    # a model in 16 bits may keep layers in fp32, which are not to be rounded.
    own = not missing or linear == "bf16"
    dtype: Any = transformers[0].dtype if own else missing[0].weight.dtype
    check_linear(linear, device, dtype_name(dtype))
    before = _bytes_of(transformers)
    rounded = _rounding(linear, device)
    for module in missing:
        # one by one, so that a GPU never holds more than one of them in 16 bits.
        rounded(module)
        _ROUNDED[module] = linear
        if rest is not None:
            module.to(rest)
    facts = LinearFacts(
        format=linear,
        layers=len(chosen),
        of=sum(1 for one in transformers for module in one.modules() if _is_linear(module)),
        bytes_before=before,
        bytes_after=_bytes_of(transformers),
        convolutions=_decoder(pipe) if linear == "bf16" else 0,
    )
    logger.info("%s", facts)
    return facts


def bytes_spared(transformer: nn.Module, kind: str = "cuda") -> int:
    """Bytes that a transformer's weights in 8 bits take less than they did.

    Of those that are on a device of that ``kind``.
    """
    weights = [
        module.weight for module in transformer.modules() if _ROUNDED.get(module, "bf16") != "bf16"
    ]
    return sum(one.nbytes - _bytes(one) for one in weights if one.device.type == kind)


def _decoder(pipe: Any) -> int:
    from vidsparse.pipelines.bf16 import decoder_to_bf16

    return decoder_to_bf16(getattr(pipe, "vae", None))


def _rounding(linear: str, device: str) -> Callable[[nn.Linear], None]:
    """What puts a layer into a format."""
    if linear == "bf16":
        from vidsparse.pipelines.bf16 import to_bf16

        return to_bf16
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int8DynamicActivationInt8WeightConfig,
        PerRow,
        quantize_,
    )

    # by row and token. torchao would also change the compiler's settings for the whole process.
    config = (
        Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
        if linear == "fp8"
        else Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    )
    return lambda module: quantize_(module, config, device=device)


def fuse_lora(pipe: Any) -> None:
    """Add a pipeline's LoRA to the weights, for good.

    What is rounded afterwards is the sum: beside rounded weights a LoRA would cost two more
    products a layer, in the model's own format.
    """
    from vidsparse.pipelines.lookup import find_adapter

    names = [
        name
        for name in find_adapter(pipe).transformers
        if getattr(getattr(pipe, name, None), "peft_config", None)
    ]
    pipe.fuse_lora(components=names)
    pipe.unload_lora_weights()


def _chosen(transformer: nn.Module, adapter: Adapter, edges: int) -> Iterator[nn.Linear]:
    from vidsparse.pipelines.adapter import transformer_blocks

    blocks = transformer_blocks(transformer, adapter)
    for block in blocks[edges : len(blocks) - edges]:
        for name, module in block.named_modules():
            # the rows of an adaptive norm's projection are samples, too few for such products.
            adaptive = any(_ADAPTIVE.search(part) for part in name.split("."))
            if not adaptive and _is_linear(module):
                yield module


def _is_linear(module: Any) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear)


def _fits(module: nn.Linear, linear: str, smallest: int) -> bool:
    if linear == "bf16":
        from vidsparse.pipelines.bf16 import can_be_bf16

        if not can_be_bf16(module):
            return False
    sides = (module.in_features, module.out_features)
    return min(sides) >= smallest and not any(side % _UNITS[linear] for side in sides)


def _bytes_of(transformers: list[nn.Module]) -> int:
    return sum(_bytes(one) for each in transformers for one in each.state_dict().values())


def _bytes(tensor: Tensor) -> int:
    # the size that a tensor of torchao's gives is that of what it stands for.
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    names, _ = flatten()
    return sum(_bytes(getattr(tensor, name)) for name in names)
