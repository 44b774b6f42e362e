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
            cannot run such layers, or no layer whose weights are in 16 or 32 bits is large enough
            for 8 bits. (Where none is for bf16, all stay as they are and nothing is raised.)
        OptionError: layers are in another such format already, or weights of this dtype cannot be
            put into the format.
    """
    check_choice("linear", linear, tuple(EDGES))
    smallest = SMALLEST[linear] if smallest is None else smallest
    transformers, inside, chosen = _candidates(pipe, linear, edges, smallest)
    if other := _others(inside, linear):
        raise OptionError(
            f"this model's linear layers are in {other.pop()} already, so they cannot be put into "
            f"{linear}. Hint: load the model anew."
        )
    if not chosen and linear != "bf16":
        raise UnsupportedError(
            f"this model has no linear layer of {smallest} features or more between its first and "
            f"its last block whose weights are in 16 or 32 bits, so none would run in {linear}. "
            "Hint: leave --linear out."
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
        of=sum(1 for one in transformers for _ in _layers(one)),
        bytes_before=before,
        bytes_after=_bytes_of(transformers),
        convolutions=_decoder(pipe) if linear == "bf16" else 0,
    )
    logger.info("%s", facts)
    return facts


def has_layers_for(pipe: Any, linear: str) -> bool:
    """Whether ``quantize_linear`` finds layers that it can put into ``linear``, or has put there.

    It finds none in a model that is in few bits by another library, or in another format by this.
    """
    _, inside, chosen = _candidates(pipe, linear, None, SMALLEST[linear])
    return bool(chosen) and not _others(inside, linear)


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


def _candidates(
    pipe: Any, linear: str, edges: int | None, smallest: int
) -> tuple[list[nn.Module], list[nn.Linear], list[nn.Linear]]:
    """A pipeline's transformers, the linear layers in their blocks, and those that fit a format."""
    from vidsparse.pipelines.adapter import transformers_of
    from vidsparse.pipelines.lookup import find_adapter

    adapter = find_adapter(pipe)
    transformers = transformers_of(pipe, adapter)
    edges = EDGES[linear] if edges is None else edges
    inside = [module for one in transformers for module in _chosen(one, adapter, edges)]
    return transformers, inside, [one for one in inside if _fits(one, linear, smallest)]


def _others(layers: list[nn.Linear], linear: str) -> set[str]:
    """The formats but ``linear`` that some of ``layers`` have been put into."""
    return {_ROUNDED.get(layer, linear) for layer in layers} - {linear}


def _chosen(transformer: nn.Module, adapter: Adapter, edges: int) -> Iterator[nn.Linear]:
    from vidsparse.pipelines.adapter import transformer_blocks

    blocks = transformer_blocks(transformer, adapter)
    for block in blocks[edges : len(blocks) - edges]:
        for parts, module in _layers(block):
            # the rows of an adaptive norm's projection are samples, too few for such products.
            if not any(map(_ADAPTIVE.search, parts)):
                yield module


def _layers(module: nn.Module) -> Iterator[tuple[list[str], nn.Linear]]:
    """The linear layers in a module, each with the parts of its name; not those of a LoRA."""
    from torch import nn

    for name, each in module.named_modules():
        parts = name.split(".")
        # peft's lora_A and lora_B, and what its kinds of LoRA have beside them.
        if isinstance(each, nn.Linear) and not any(part.startswith("lora_") for part in parts):
            yield parts, each


def _fits(module: nn.Linear, linear: str, smallest: int) -> bool:
    if linear == "bf16":
        from vidsparse.pipelines.bf16 import can_be_bf16

        if not can_be_bf16(module):
            return False
    elif module not in _ROUNDED and not _is_plain(module.weight.data):
        return False
    sides = (module.in_features, module.out_features)
    return min(sides) >= smallest and not any(side % _UNITS[linear] for side in sides)


def _is_plain(weight: Tensor) -> bool:
    """Whether torchao can round it: what others have put into few bits, it cannot."""
    import torch

    plain = torch.float32, torch.bfloat16, torch.float16
    return type(weight) is torch.Tensor and weight.dtype in plain


def _bytes_of(transformers: list[nn.Module]) -> int:
    return sum(_bytes(one) for each in transformers for one in each.state_dict().values())


def _bytes(tensor: Tensor) -> int:
    # the size that a tensor of torchao's gives is that of what it stands for.
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    names, _ = flatten()
    return sum(_bytes(getattr(tensor, name)) for name in names)
