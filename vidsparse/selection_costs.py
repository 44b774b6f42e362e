"""What choosing the pairs of a call costs beside computing them, where that was measured.

The shares are the time of mask and plan over the time of dense attention on the same q and k, one
call after the other, so that on a GPU they are no less than the work: short passes wait to be
launched. They are taken with `vidsparse bench masks` and `vidsparse bench attention`; the tests
compare this table with the rows in ``docs/benchmarks``. Two classes of devices have figures: CPUs,
and Hopper GPUs (from an H200) for 26,880 tokens and more. What was not measured is None, never a
guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vidsparse.dtypes import dtype_name
from vidsparse.work import SelectionCost

if TYPE_CHECKING:
    import torch

    from vidsparse.methods import SparseMethod


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One measured share.

    Args:
        device: class of device, as ``device_class`` names it.
        hardware: the very device.
        method: the method's name.
        tile: queries x keys.
        options: the other options that the cost depends on.
        tokens: length of the sequence.
        dtype: of q and k.
        share: time of mask and plan over that of dense attention.
        file: the rows it is from.
    """

    device: str
    hardware: str
    method: str
    tile: str
    options: Mapping[str, object] = field(default_factory=dict)
    tokens: int
    dtype: str
    share: float
    file: str


# options that change how much work choosing is; thresholds only change what is chosen.
# where ``rows`` is left open, as it was measured, the length says it.
COST_OPTIONS: Final = ("merge", "stride", "pattern", "local", "score", "rows")

_WINDOWS: Final[Mapping[str, object]] = {"merge": "xor-window"}
_MASS: Final[Mapping[str, object]] = {**_WINDOWS, "score": "mass"}
_ANTIDIAGONAL: Final[Mapping[str, object]] = {**_WINDOWS, "pattern": "antidiagonal"}
_SALE: Final[Mapping[str, object]] = {**_WINDOWS, "local": 256}


def _h200(
    method: str,
    tile: str,
    options: Mapping[str, object],
    share: float,
    file: str = "masks-h200.json",
    tokens: int = 75_600,
) -> Measured:
    return Measured(
        device="hopper",
        hardware="NVIDIA H200",
        method=method,
        tile=tile,
        options=options,
        tokens=tokens,
        dtype="bf16",
        share=share,
        file=f"docs/benchmarks/{file}",
    )


def _shorter(method: str, tile: str, options: Mapping[str, object], share: float) -> Measured:
    """What it was at 33,600 tokens, where launching the kernels is a part of it."""
    return _h200(method, tile, options, share, "masks-h200-lengths.json", tokens=33_600)


def _cpu(
    method: str, tile: str, options: Mapping[str, object], short: float, long: float
) -> tuple[Measured, ...]:
    """What it was at 2,304 and at 7,488 tokens."""
    return tuple(
        Measured(
            device="cpu",
            hardware="x86_64 CPU, 2 threads",
            method=method,
            tile=tile,
            options=options,
            tokens=tokens,
            dtype="fp32",
            share=share,
            file="docs/benchmarks/masks-cpu.json",
        )
        for tokens, share in ((2304, short), (7488, long))
    )


MEASURED: Final[tuple[Measured, ...]] = (
    _h200("fg-attn", "16x16", _MASS, 0.0287, "attention-h200.json"),
    _h200("spargeattn", "128x64", _WINDOWS, 0.0147),
    _h200("xattention", "128x128", {**_ANTIDIAGONAL, "stride": 4}, 0.1454),
    _h200("xattention", "128x128", {**_ANTIDIAGONAL, "stride": 8}, 0.0663),
    _h200("xattention", "128x128", {**_ANTIDIAGONAL, "stride": 16}, 0.0350),
    _h200("xattention", "128x128", {**_ANTIDIAGONAL, "stride": 64}, 0.0175),
    _h200("sale", "64x32", _SALE, 0.2412),
    _h200("sol-attn", "64x64", {"merge": "consecutive"}, 0.0347, "masks-h200-foresight.json"),
    _h200("foresight", "128x16", {}, 0.0220, "masks-h200-foresight.json"),
    _h200("foresight", "32x16", {}, 0.0326, "masks-h200-foresight.json"),
    _shorter("fg-attn", "16x16", _MASS, 0.1243),
    _shorter("spargeattn", "128x64", _WINDOWS, 0.1639),
    _shorter("xattention", "128x128", {**_ANTIDIAGONAL, "stride": 4}, 0.1483),
    _shorter("xattention", "128x128", {**_ANTIDIAGONAL, "stride": 8}, 0.0958),
    _shorter("xattention", "128x128", {**_ANTIDIAGONAL, "stride": 16}, 0.0876),
    _shorter("xattention", "128x128", {**_ANTIDIAGONAL, "stride": 64}, 0.0981),
    _shorter("sale", "64x32", _SALE, 0.2663),
    _shorter("sol-attn", "64x64", {"merge": "consecutive"}, 0.1913),
    # from before the sums of foresight were of groups of keys: it takes less.
    _shorter("foresight", "128x16", {}, 0.0936),
    _shorter("foresight", "32x16", {}, 0.1145),
    *_cpu("fg-attn", "16x16", _MASS, 0.1901, 0.0920),
    *_cpu("spargeattn", "128x64", _WINDOWS, 0.0475, 0.0168),
    *_cpu("xattention", "128x128", {**_ANTIDIAGONAL, "stride": 4}, 0.2248, 0.2874),
    *_cpu("xattention", "128x128", {**_ANTIDIAGONAL, "stride": 8}, 0.1191, 0.1139),
    *_cpu("xattention", "128x128", {**_ANTIDIAGONAL, "stride": 16}, 0.0981, 0.0433),
    *_cpu("xattention", "128x128", {**_ANTIDIAGONAL, "stride": 64}, 0.0497, 0.0191),
    *_cpu("sale", "64x32", _SALE, 2.4489, 1.5076),
    *_cpu("sol-attn", "64x64", {"merge": "consecutive"}, 0.0351, 0.0116),
    *_cpu("foresight", "128x16", {}, 0.3146, 0.1179),
    *_cpu("foresight", "32x16", {}, 0.3641, 0.1469),
)
"""Every share that is known."""

# a cost is taken for somewhat shorter calls too, and for longer ones up to twice the length: there
# it is an upper bound, because dense attention grows with the square of the length and the passes
# over tokens do not.
SHORTEST: Final = 0.8
LONGEST: Final = 2.0


def device_class(device: torch.device) -> str | None:
    """The class of devices that ``device`` shares its measured costs with, or None."""
    import torch

    if device.type == "cpu":
        return "cpu"
    hopper = (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
    )
    return "hopper" if hopper else None


def selection_cost(
    method: SparseMethod, device: torch.device, dtype: torch.dtype, tokens: int
) -> SelectionCost | None:
    """What it costs ``method`` to choose the pairs of a call, None where that was not measured.

    ``tokens`` is the length of the call, ``dtype`` that of its q and k.
    """
    if not method.masks:
        return SelectionCost(0.0, "nothing is chosen before its scores are computed")
    kind = device_class(device)
    if kind is None:
        return None
    options = method.options()
    mine = {name: options[name] for name in COST_OPTIONS if options.get(name) is not None}
    found = [
        one
        for one in MEASURED
        if (one.device, one.method, one.tile, one.options, one.dtype)
        == (kind, method.name, options["tile"], mine, dtype_name(dtype))
        and SHORTEST <= tokens / one.tokens <= LONGEST
    ]
    if not found:
        return None
    # the longest of those that are not too long is the nearest bound.
    nearest = max(found, key=lambda one: one.tokens)
    return SelectionCost(
        nearest.share,
        f"measured on {nearest.hardware} at {nearest.tokens:,} tokens, {nearest.file}",
    )
