"""What the quality study measures: configurations, a row of its file each.

The first steps are dense in all of them, as many as the model's family asks for. The studies:

- ``tiles``: FG-Attn's square tiles of four sizes, ``top_p`` swept, so that curves can be compared.
- ``merging``: the same fine tiles merged into 128-row blocks in other ways than by XOR distance.
- ``orders``: token orders. FG-Attn's ``top_p`` is set for each order so that all of them compute
  the same density; SpargeAttn's numbers are the same for all, as in its Tables 4 and 9.
- ``equal``: methods at the same selected density, in the order that is the model's own.
- ``curves``: every method over a range of computed densities, in the order that is the model's own.
  BSFA, which cannot do without, is calibrated.
- ``judge``: SpargeAttn with and without its judge of self-similarity.
- ``stages``: SpargeAttn's two stages, M_g that selects blocks and M_pv that gates values, and both.
- ``patterns``: XAttention's antidiagonals, diagonals and random elements.
- ``strides``: XAttention's strides.
- ``selections``: XAttention's threshold, top-ratio and top-k at one selected density.
- ``calibration``: methods with their paper's one number for all heads, and calibrated.
- ``defaults``: what a model's defaults are chosen from: FG-Attn in its own order, ``top_p``,
  the steps that a plan serves, and the first and last layer dense or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from vidsparse.order import ORDERS

STUDIES: Final = ("tiles", "merging", "orders", "equal", "curves", "defaults")
ABLATIONS: Final = ("judge", "stages", "patterns", "strides", "selections", "calibration")

TILES: Final = ("16x16", "32x32", "64x64", "128x128")
TOP_P: Final = (0.5, 0.65, 0.8, 0.9, 0.95)
# a 128-row tile is a block of its own: there is nothing to merge.
MERGED_TILES: Final = ("16x16", "32x32", "64x64")
MERGES: Final = ("consecutive", "xor-window")
MERGED_TOP_P: Final = (0.65, 0.9)
GATE_LAMBDA: Final = -5.0
COMPUTED_TARGETS: Final = (0.35, 0.55)
EQUAL_SELECTED: Final = 0.35
DEFAULT_TOP_P: Final = (0.6, 0.7, 0.8, 0.9)
REUSED: Final = (1, 2, 4)
CURVE_COMPUTED: Final = (0.25, 0.4, 0.55, 0.7)
CURVE_KEEP: Final = (0.1, 0.2, 0.3, 0.5)
CALIBRATED: Final = ("spargeattn", "xattention", "sale")
"""Methods that can do with calibrated numbers and without."""


@dataclass(frozen=True, slots=True)
class Aim:
    """A density to reach, ``selected`` or ``computed``, by setting a method's ``Knob``.

    It is met within ``tolerance``, or by the best of a few trials with a corrected aim: the calls
    of a dense run, which the first number is taken from, are not those of a sparse one.
    """

    density: str
    value: float
    tolerance: float = field(default=0.01, compare=False)

    def __str__(self) -> str:
        return f"{self.density}={self.value:g}"


@dataclass(frozen=True, slots=True)
class Knob:
    """The number of a method that moves its density.

    ``low`` gives the least density and ``high`` the most, whichever is the larger number; places
    between them are spaced evenly, or evenly in the logarithm.
    """

    name: str
    low: float
    high: float
    logarithmic: bool = False
    whole: bool = False

    def at(self, share: float) -> float:
        """The number at ``share`` of the way from ``low`` to ``high``, four digits of it."""
        if self.logarithmic:
            number = self.low * (self.high / self.low) ** share
        else:
            number = self.low + share * (self.high - self.low)
        return round(number) if self.whole else float(f"{number:.4g}")


KNOBS: Final[Mapping[str, Knob]] = {
    "fg-attn": Knob("top_p", 0.0, 1.0),
    "spargeattn": Knob("tau", 0.0, 1.0),
    "xattention": Knob("tau", 0.0, 1.0),
    # from a score as high as all of a neighbourhood's down to a millionth of it.
    "sale": Knob("tau", 1.0, 1e-6, logarithmic=True),
}

# a method at its own tile size, and FG-Attn at the coarse one that the others are near.
_COMPARED: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("fg-attn", {"tile": "16x16", "merge": "xor"}),
    ("fg-attn", {"tile": "128x128"}),
    ("spargeattn", {}),
    ("xattention", {}),
    ("sale", {}),
)

# XAttention's other ways to select, set to the same density: a share of the key blocks of each row,
# and a number of them (no more than the longest sequence here has).
_SELECTIONS: Final = (
    KNOBS["xattention"],
    Knob("topk", 0.01, 1.0),
    Knob("blocks", 1, 58, whole=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One row to measure.

    Args:
        study: the study it belongs to.
        method: the method's name.
        options: the method's own numbers; without its knob where there is an aim.
        order: token order; None is the model's own.
        aim: what the knob is to be set for, or None.
        reuse: steps that a plan serves.
        dense_ends: layers kept dense at each end of the transformer.
        knob: the number that is set where there is an aim; None is the method's own of ``KNOBS``.
        calibrated: whether the numbers of each layer and head come from a preset.
    """

    study: str
    method: str
    options: Mapping[str, Any]
    order: str | None = "hilbert"
    aim: Aim | None = None
    reuse: int = 1
    dense_ends: int = 0
    knob: Knob | None = None
    calibrated: bool = False

    def describes(self, row: Mapping[str, Any]) -> bool:
        """Whether ``row`` was measured with this configuration, whatever the knob was set to."""
        aim = Aim(row.get("aim", "computed"), row["target"]) if row["target"] else None
        own = row.get("own_order", False)
        same = (row["study"], row["method"], aim, own, row.get("calibrated", False)) == (
            self.study,
            self.method,
            self.aim,
            self.order is None,
            self.calibrated,
        )
        mine = dict(self.options) if self.order is None else {**self.options, "order": self.order}
        theirs = {"reuse": 1, "dense_ends": 0, **row["options"]}
        # a method that selects in another way leaves its usual number out.
        if self.knob is not None and theirs.get(self.knob.name) is None:
            return False
        return (
            same
            and (theirs["reuse"], theirs["dense_ends"]) == (self.reuse, self.dense_ends)
            and all(theirs.get(name) == value for name, value in mine.items())
        )

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.options.items()]
        words += [f"by {self.knob.name}"] if self.knob is not None else []
        words += [str(word) for word in (self.aim, self.order) if word is not None]
        words += ["calibrated"] if self.calibrated else []
        words += [f"reuse={self.reuse}"] if self.reuse != 1 else []
        words += [f"dense ends={self.dense_ends}"] if self.dense_ends else []
        return f"{self.study}: {' '.join([self.method, *words])}"


def configurations(studies: tuple[str, ...]) -> Iterator[Configuration]:
    """The rows of ``studies``, the most telling first within each."""
    if "tiles" in studies:
        for top_p in TOP_P:
            for tile in TILES:
                options = {"top_p": top_p, "tile": tile, "merge": "xor"}
                yield Configuration(study="tiles", method="fg-attn", options=options)
    if "merging" in studies:
        for top_p in MERGED_TOP_P:
            for tile in MERGED_TILES:
                for merge in MERGES:
                    options = {"top_p": top_p, "tile": tile, "merge": merge}
                    yield Configuration(study="merging", method="fg-attn", options=options)
    if "orders" in studies:
        for order in ORDERS:
            yield Configuration(study="orders", method="spargeattn", options={}, order=order)
        for target in COMPUTED_TARGETS:
            for order in ORDERS:
                yield Configuration(
                    study="orders",
                    method="fg-attn",
                    options={"tile": "16x16", "merge": "xor"},
                    order=order,
                    aim=Aim("computed", target),
                )
    if "equal" in studies:
        for method, own in _COMPARED:
            aim = Aim("selected", EQUAL_SELECTED)
            yield Configuration(study="equal", method=method, options=own, order=None, aim=aim)
    if "curves" in studies:
        for value in CURVE_COMPUTED:
            for method, own in _COMPARED:
                # a curve needs points that lie apart, not at exact places.
                aim = Aim("computed", value, tolerance=0.05)
                yield Configuration(study="curves", method=method, options=own, order=None, aim=aim)
        for keep in CURVE_KEEP:
            yield Configuration(
                study="curves", method="bsfa", options={"keep": keep}, order=None, calibrated=True
            )
    if "judge" in studies:
        for its_order in (None, "random"):
            for theta in (0.3, -1.0):
                yield Configuration(
                    study="judge",
                    method="spargeattn",
                    options={"theta": theta},
                    order=its_order,
                )
    if "stages" in studies:
        for tau, lambda_ in ((0.9, None), (1.0, GATE_LAMBDA), (0.9, GATE_LAMBDA)):
            yield Configuration(
                study="stages",
                method="spargeattn",
                options={"tau": tau, "lambda_": lambda_},
                order=None,
            )
    if "patterns" in studies:
        for stride in (8, 16):
            for pattern in ("antidiagonal", "diagonal", "random"):
                own = {"pattern": pattern, "stride": stride}
                yield Configuration(study="patterns", method="xattention", options=own, order=None)
    if "strides" in studies:
        for stride in (4, 8, 16, 64):
            own = {"stride": stride}
            yield Configuration(study="strides", method="xattention", options=own, order=None)
    if "selections" in studies:
        for knob in _SELECTIONS:
            yield Configuration(
                study="selections",
                method="xattention",
                options={},
                order=None,
                aim=Aim("selected", EQUAL_SELECTED, tolerance=0.05),
                knob=knob,
            )
    if "calibration" in studies:
        for calibrated in (False, True):
            for method in CALIBRATED:
                yield Configuration(
                    study="calibration",
                    method=method,
                    options={},
                    order=None,
                    calibrated=calibrated,
                )
    if "defaults" in studies:
        for top_p in DEFAULT_TOP_P:
            for reuse, ends in (*((reuse, 0) for reuse in REUSED), (2, 1)):
                yield Configuration(
                    study="defaults",
                    method="fg-attn",
                    options={"top_p": top_p},
                    order=None,
                    reuse=reuse,
                    dense_ends=ends,
                )
