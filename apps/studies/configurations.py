"""What the quality study measures: configurations, a row of its file each.

The first steps are dense in all of them, as many as the model's family asks for unless a study says
another number. The studies:

- ``tiles``: FG-Attn's square tiles of four sizes, ``top_p`` swept, so that curves can be compared.
- ``merging``: the same fine tiles merged into 128-row blocks in other ways than by XOR distance.
- ``orders``: token orders. FG-Attn's ``top_p`` is set for each order so that all of them compute
  the same density; SpargeAttn's numbers are the same for all, as in its Tables 4 and 9.
- ``equal``: methods at the same selected density, in the order that is the model's own.
- ``curves``: every method over a range of computed densities, in the order that is the model's own.
  A method that cannot do without is calibrated, and measured in the settings that it declares.
- ``defaults``: what a model's defaults are chosen from: FG-Attn in its own order, ``top_p``,
  the steps that a plan serves, and the first and last layer dense or not.
- ``refreshes``: what sparse attention lacks, added from an earlier step or not, at equal work.
- ``plans``: guidance branches that share a plan, and each with its own.
- ``precision``: q·k in 16 bits, int8 and fp8 where the methods' papers compute it in 8 bits, by the
  same numbers. Of a model whose heads have 64 channels 16 bits are what ``auto`` means.
- ``dense-steps``: how many first steps are dense, from none to the papers' quarter, at two shares,
  so that runs of equal work can be compared.
- ``block-rows``: lists for blocks of 128, 64, 32 and 16 rows, which compute as much of a short
  sequence in all, at three schedules of the model `shapes` and one of `shapes-joint`.
- ``text-rows``: rows of text that attend to everything and that choose their keys, and what finer
  tiles add; for models whose text stands in the video's sequence, such as `shapes-joint`.
- ``fading``: how fast what a refresh keeps stops being right, and how many steps add it.
- ``guidance``: dense steps and refreshes that one branch of guidance computes for both, and steps
  that follow the slope of two refreshes.
- ``few-steps``: what a run of four to eight steps bears: how many of them are dense, whether the
  rest adds what it lacks, at what share. For ``--steps 4`` and ``--steps 8``.
- ``bundles``: the attention of ``balanced`` and ``fast`` on a model without a card of its own, and
  with fewer steps that compute everything. For ``--steps 50``, with ``--guidance 1`` and without.
- ``seconds``: every method as it runs where nobody asks for more than a density, and dense
  attention by our own kernels, for the time that each takes.
- ``speeds``: the bundles of ``--speed`` as they run on the machine, each in decibels and seconds.
- ``promises``: presets made for a quality on the calibration prompts, and what they have on others.
- ``calibration``: methods with their paper's one number for all heads, and calibrated.
- the ablations that methods declare (``SparseMethod.ablations``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from vidsparse.calibration import CALIBRATORS
from vidsparse.methods import SPARSE_METHODS
from vidsparse.methods.base import PLANS
from vidsparse.methods.studied import Ablation, Knob
from vidsparse.order import ORDERS
from vidsparse.pipelines.speed import SPEEDS
from vidsparse.remainder import FADING

DECLARED: Final[Mapping[str, tuple[str, Ablation]]] = {
    ablation.name: (name, ablation)
    for name, cls in SPARSE_METHODS.items()
    for ablation in cls.ablations
}
"""Methods' own ablations by their names, each with the method's."""

CALIBRATED: Final = tuple(
    name
    for name, cls in CALIBRATORS.items()
    if not cls.needs_target and not cls.calibrates.needs_numbers
)
"""Methods that can do with calibrated numbers and without."""

KNOBS: Final[Mapping[str, Knob]] = {
    name: cls.knobs[0] for name, cls in SPARSE_METHODS.items() if cls.knobs
}
"""The number that a method's density is set by, where it has one."""

STUDIES: Final = (
    "tiles",
    "merging",
    "orders",
    "equal",
    "curves",
    "defaults",
    "refreshes",
    "plans",
    "precision",
    "dense-steps",
    "block-rows",
    "text-rows",
    "fading",
    "guidance",
    "few-steps",
    "bundles",
    "seconds",
    "speeds",
    "promises",
)
ABLATIONS: Final = (*DECLARED, "calibration")

TILES: Final = ("16x16", "32x32", "64x64", "128x128")
TOP_P: Final = (0.5, 0.65, 0.8, 0.9, 0.95)
# a 128-row tile is a block of its own: there is nothing to merge.
MERGED_TILES: Final = ("16x16", "32x32", "64x64")
COMPARED_MERGES: Final = ("consecutive", "xor-window")
MERGED_TOP_P: Final = (0.65, 0.9)
COMPUTED_TARGETS: Final = (0.35, 0.55)
EQUAL_SELECTED: Final = 0.35
DEFAULT_TOP_P: Final = (0.6, 0.7, 0.8, 0.9)
REUSED: Final = (1, 2, 4)
CURVE_COMPUTED: Final = (0.25, 0.4, 0.55, 0.7)
# studies of refreshes, shared plans, text, fading, few steps and promises name their methods: they
# ask what the method of the shipped models gains by a schedule, and set shares and refreshes
# against each other so that runs do equal work. Others stand beside it where it must be seen that
# the gain is not its own alone. No method could declare that by itself.
REFRESHED: Final[tuple[tuple[str, Mapping[str, Any], int], ...]] = (
    ("foresight", {"share": 0.08}, 4),
    ("foresight", {"share": 0.28}, 0),
    ("foresight", {"share": 0.09}, 2),
    ("foresight", {"share": 0.17}, 0),
    ("foresight", {"share": 0.05}, 4),
    ("foresight", {"share": 0.16}, 4),
    ("fg-attn", {"top_p": None, "topk": 0.1, "tile": "16x16"}, 4),
    ("fg-attn", {"top_p": None, "topk": 0.3, "tile": "16x16"}, 0),
)
"""Methods, their options and refreshes; the first four are pairs of equal work in 20 steps."""

PLANNED: Final[tuple[tuple[str, Mapping[str, Any], int], ...]] = (
    ("foresight", {"share": 0.09}, 2),
    ("foresight", {"share": 0.08}, 4),
    ("foresight", {"share": 0.2}, 0),
    ("fg-attn", {"top_p": None, "topk": 0.3, "means": 64}, 0),
    ("fg-attn", {"top_p": None, "topk": 0.3}, 0),
    ("xattention", {"tau": None, "topk": 0.3}, 0),
)
"""Methods, their options and refreshes, each with a plan for all branches and a plan for each."""

PRECISIONS: Final = ("none", "int8", "fp8")
DENSE_STEPS: Final = (0.12, 0.0, 0.24, 0.04, 0.16, 0.08)
DENSE_STEPS_SHARES: Final = (0.1, 0.2)
BLOCK_TILES: Final = ("32x16", "128x16", "64x16", "16x16")
BLOCK_SCHEDULES: Final[tuple[tuple[float, Mapping[str, Any]], ...]] = (
    (0.08, {"dense_steps": 0.15, "refresh": 0.2}),
    (0.09, {"dense_steps": 0.15, "refresh": 0.1}),
    (0.06, {"dense_steps": 0.15, "refresh": 0.2}),
    (0.2, {"dense_steps": 4, "reuse": 2}),
)
"""Shares of ``foresight`` and their schedules."""

TEXT_SETTINGS: Final[tuple[tuple[float, str, int, int, str], ...]] = (
    (0.12, "16x8", 3, 4, "sparse"),
    (0.146, "16x8", 2, 0, "sparse"),
    (0.15, "32x16", 3, 4, "dense"),
    (0.15, "32x16", 3, 4, "sparse"),
    (0.134, "32x16", 3, 4, "sparse"),
    (0.148, "32x16", 2, 0, "sparse"),
    (0.28, "16x8", 3, 0, "sparse"),
    (0.105, "16x8", 3, 0, "sparse"),
)
"""Shares and tiles of ``foresight``, dense steps, refreshes, and what rows of text attend to."""

FADED: Final[tuple[tuple[str, Mapping[str, Any], int, int], ...]] = (
    ("16x8", {"share": 0.12, "fading": 2.5}, 3, 4),
    ("16x8", {"share": 0.12, "fading": 0.6}, 3, 4),
    ("16x8", {"share": 0.12, "fading": 4.0}, 3, 4),
    ("16x8", {"share": 0.135, "fading": 2.5, "reach": 3}, 2, 1),
    ("16x8", {"share": 0.135, "fading": 0.6, "reach": 3}, 2, 1),
    ("16x8", {"share": 0.135, "fading": 0.6, "reach": None}, 2, 1),
    ("16x8", {"share": 0.097, "fading": 4.0, "reach": 5}, 3, 1),
    ("32x16", {"share": 0.15, "fading": 0.6}, 3, 4),
    ("32x16", {"share": 0.15, "fading": 4.0}, 3, 4),
    ("32x16", {"share": 0.15, "fading": 2.5, "reach": 4}, 3, 2),
    ("128x16", {"share": 0.1, "fading": 0.6, "text_rows": "dense"}, 3, 4),
    ("128x16", {"share": 0.1, "fading": 0.3, "text_rows": "dense"}, 3, 4),
    ("16x8", {"share": 0.062, "fading": 0.6, "text_rows": "dense"}, 1, 3),
)
"""Tiles of ``foresight``, its numbers, dense steps and refreshes; the last three for ``scenes``."""

# of its rows, which has no text in the video's sequence.
SCENES: Final[Mapping[str, Any]] = {"fading": 0.3, "slope": 0.5, "text_rows": "dense"}

GUIDED: Final[tuple[tuple[str, Mapping[str, Any], int, int], ...]] = (
    ("16x8", {"share": 0.12, "fading": 2.5}, 3, 4),
    ("16x8", {"share": 0.12, "fading": 2.5, "slope": 0.5}, 3, 4),
    ("16x8", {"share": 0.12, "fading": 2.5, "unconditional_every": 2}, 3, 4),
    ("16x8", {"share": 0.09, "fading": 2.5, "unconditional_every": 10}, 3, 4),
    ("32x16", {"share": 0.15, "fading": 2.5, "slope": 0.5}, 3, 4),
    ("16x8", {**SCENES, "share": 0.042, "unconditional_every": 10}, 3, 4),
    ("16x8", {**SCENES, "share": 0.062, "unconditional_every": 10}, 3, 3),
    ("128x16", {**SCENES, "share": 0.1, "slope": 0.0}, 3, 4),
    ("32x16", {**SCENES, "share": 0.08, "fading": FADING, "unconditional_every": 10}, 3, 3),
)
"""Tiles of ``foresight``, its numbers, dense steps and refreshes."""

REFRESHED_DENSE_STEPS: Final = 3
FEW_STEPS: Final[tuple[tuple[str, Mapping[str, Any], int, int], ...]] = (
    ("foresight", {"share": 0.1}, 1, 1),
    ("foresight", {"share": 0.1}, 1, 0),
    ("foresight", {"share": 0.1}, 1, 2),
    ("foresight", {"share": 0.1}, 2, 1),
    ("foresight", {"share": 0.1}, 2, 0),
    ("foresight", {"share": 0.1}, 0, 0),
    ("foresight", {"share": 0.3}, 1, 1),
    ("foresight", {"share": 0.3}, 1, 0),
    ("fg-attn", {"top_p": None, "topk": 0.3, "tile": "16x16"}, 1, 0),
)
"""Methods, their options, dense steps and refreshes. The first refresh is the last dense step."""

BUNDLED: Final[tuple[tuple[float, int, int], ...]] = (
    (0.11, 6, 4),
    (0.11, 4, 4),
    (0.11, 5, 3),
    (0.11, 4, 3),
    (0.09, 4, 3),
    (0.11, 3, 3),
)
"""Shares of ``foresight``, dense steps and refreshes; the first are those of ``pipelines.speed`` in
50 steps."""

# what comes nearest, in a short sequence, to the tiles of models of tens of thousands of tokens.
BUNDLED_TILES: Final = ("32x16", "128x16")

PROMISED: Final[tuple[tuple[str, float], ...]] = (
    ("foresight", 32.0),
    ("foresight", 36.0),
    ("foresight", 28.0),
)
"""Methods and the PSNR that a preset of theirs is made for."""

TIMED_COMPUTED: Final = (0.2, 0.35, 0.1, 0.5)
TIMED_REUSE: Final = 2


@dataclass(frozen=True, slots=True)
class Aim:
    """A density to reach, ``selected`` or ``computed``, by setting a method's ``Knob``.

    It is met within ``tolerance``, or by the best of a few trials. The first number is taken from
    the calls of a dense run, which are not those of a sparse one; from there the densities of the
    videos narrow the bracket down.
    """

    density: str
    value: float
    tolerance: float = field(default=0.01, compare=False)

    def __str__(self) -> str:
        return f"{self.density}={self.value:g}"


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
        refresh: steps that compute everything again; none unless said, whatever the method's own.
        dense_steps: first steps kept dense, a number or a share; None is the model's own.
        dense_ends: layers kept dense at each end of the transformer.
        knob: the number that is set where there is an aim; None is the method's own of ``KNOBS``.
        calibrated: whether the numbers of each layer and head come from a preset.
        promise: the PSNR that the preset is made for, which settles the schedule and all numbers.
        speed: the bundle that settles the method and everything else.
        by_card: whether the model's card settles the schedule (``reuse``, ``refresh``, what is
            dense) and the method's numbers, all but its knob.
    """

    study: str
    method: str
    options: Mapping[str, Any]
    order: str | None = "hilbert"
    aim: Aim | None = None
    reuse: int = 1
    refresh: int | float = 0
    dense_steps: int | float | None = None
    dense_ends: int = 0
    knob: Knob | None = None
    calibrated: bool = False
    promise: float | None = None
    speed: str | None = None
    by_card: bool = False

    def describes(self, row: Mapping[str, Any]) -> bool:
        """Whether ``row`` was measured with this configuration, whatever the knob was set to."""
        if self.speed is not None or row.get("speed") is not None:
            return (row["study"], row.get("speed")) == (self.study, self.speed)
        aim = Aim(row.get("aim", "computed"), row["target"]) if row["target"] else None
        own = row.get("own_order", False)
        same = (
            (row["study"], row["method"], aim, own)
            == (self.study, self.method, self.aim, self.order is None)
        ) and (row.get("calibrated", False), row.get("promise"), row.get("by_card", False)) == (
            self.calibrated,
            self.promise,
            self.by_card,
        )
        # what a preset or a card had is not known before it is made or the model is loaded.
        if self.promise is not None or self.by_card:
            return same
        mine = dict(self.options) if self.order is None else {**self.options, "order": self.order}
        # what a row does not tell is what versions did that did not know of it.
        before = {
            "reuse": 1,
            "dense_ends": 0,
            "refresh": 0,
            "plans": "own",
            "text_rows": "dense",
            "fading": FADING,
            "slope": 0.0,
            "unconditional_every": 1,
        }
        theirs = {**before, **row["options"]}
        # a method that selects in another way leaves its usual number out.
        if self.knob is not None and theirs.get(self.knob.name) is None:
            return False
        return (
            same
            and (theirs["reuse"], theirs["refresh"]) == (self.reuse, self.refresh)
            and theirs["dense_ends"] == self.dense_ends
            and self.dense_steps in (None, theirs["dense_steps"])
            and all(theirs.get(name) == value for name, value in mine.items())
        )

    def __str__(self) -> str:
        if self.speed is not None:
            return f"{self.study}: {self.speed}"
        words = [f"{name}={value}" for name, value in self.options.items()]
        words += [f"by {self.knob.name}"] if self.knob is not None else []
        words += [str(word) for word in (self.aim, self.order) if word is not None]
        words += ["calibrated"] if self.calibrated else []
        words += ["by the model's schedule"] if self.by_card else []
        words += [f"for {self.promise:g} dB"] if self.promise is not None else []
        words += [f"reuse={self.reuse}"] if self.reuse != 1 else []
        words += [f"refresh={self.refresh}"] if self.refresh else []
        words += [f"dense steps={self.dense_steps}"] if self.dense_steps is not None else []
        words += [f"dense ends={self.dense_ends}"] if self.dense_ends else []
        return f"{self.study}: {' '.join([self.method, *words])}"


def configurations(studies: tuple[str, ...]) -> Iterator[Configuration]:
    """The rows of ``studies``, the most telling first within each; methods as they are published.

    A method's settings say where it is measured otherwise.
    """
    for one in _configurations(studies):
        published = SPARSE_METHODS[one.method].as_published
        yield replace(one, options={**published, **one.options})
    if "speeds" in studies:
        for speed in SPEEDS:
            # the model says which method that is.
            yield Configuration(study="speeds", method="dense", options={}, order=None, speed=speed)
    if "seconds" in studies:
        yield Configuration(study="seconds", method="dense", options={}, order=None)
        # every point is of use in a picture over seconds, wherever it falls.
        aims = [Aim("computed", value, tolerance=1.0) for value in TIMED_COMPUTED]
        timed = [
            Configuration(study="seconds", method=method, options={}, order=None, aim=aim)
            for aim in aims
            for method in KNOBS
        ]
        for one in timed:
            refresh = SPARSE_METHODS[one.method].refresh
            yield replace(one, reuse=TIMED_REUSE, refresh=refresh)
        for method, own, calibrated in _without_a_knob():
            yield Configuration(
                study="seconds",
                method=method,
                options=own,
                order=None,
                reuse=TIMED_REUSE,
                calibrated=calibrated,
            )
        # a method that brings refreshes has a schedule of its own on models that ship, with fewer
        # dense steps than the others need.
        yield from (
            replace(one, by_card=True) for one in timed if SPARSE_METHODS[one.method].refresh
        )


def _configurations(studies: tuple[str, ...]) -> Iterator[Configuration]:
    if "tiles" in studies:
        for top_p in TOP_P:
            for tile in TILES:
                options = {"top_p": top_p, "tile": tile, "merge": "xor"}
                yield Configuration(study="tiles", method="fg-attn", options=options)
    if "merging" in studies:
        for top_p in MERGED_TOP_P:
            for tile in MERGED_TILES:
                for merge in COMPARED_MERGES:
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
        for order in ORDERS:
            # where what is skipped is approximated, neighbours count for more.
            yield Configuration(
                study="orders",
                method="foresight",
                options={"share": 0.1},
                order=order,
                refresh=4,
                dense_steps=3,
            )
    if "equal" in studies:
        aim = Aim("selected", EQUAL_SELECTED)
        for method, own in _compared():
            yield Configuration(study="equal", method=method, options=own, order=None, aim=aim)
    if "curves" in studies:
        for value in CURVE_COMPUTED:
            for method, own in _compared():
                # a curve needs points that lie apart, not at exact places.
                aim = Aim("computed", value, tolerance=0.05)
                yield Configuration(study="curves", method=method, options=own, order=None, aim=aim)
        for method, own, calibrated in _without_a_knob():
            yield Configuration(
                study="curves", method=method, options=own, order=None, calibrated=calibrated
            )
    for name, (method, ablation) in DECLARED.items():
        if name in studies:
            yield from _of_ablation(method, ablation)
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
    if "precision" in studies:
        for method, cls in SPARSE_METHODS.items():
            for own in cls.eight_bits:
                for quantize in PRECISIONS:
                    yield Configuration(
                        study="precision",
                        method=method,
                        options={**own, "quantize": quantize},
                        order=None,
                    )
    if "dense-steps" in studies:
        for share in DENSE_STEPS_SHARES:
            for dense_steps in DENSE_STEPS:
                yield Configuration(
                    study="dense-steps",
                    method="foresight",
                    options={"share": share},
                    order=None,
                    dense_steps=dense_steps,
                )
    if "block-rows" in studies:
        for share, schedule in BLOCK_SCHEDULES:
            for tile in BLOCK_TILES:
                yield Configuration(
                    study="block-rows",
                    method="foresight",
                    options={"share": share, "tile": tile, "plans": "shared"},
                    order=None,
                    **schedule,
                )
    if "text-rows" in studies:
        for share, tile, dense_steps, refresh, text_rows in TEXT_SETTINGS:
            yield Configuration(
                study="text-rows",
                method="foresight",
                options={"share": share, "tile": tile, "plans": "shared", "text_rows": text_rows},
                refresh=refresh,
                dense_steps=dense_steps,
            )
    if "fading" in studies:
        for tile, own, dense_steps, refresh in FADED:
            yield Configuration(
                study="fading",
                method="foresight",
                options={"tile": tile, "plans": "shared", "text_rows": "sparse", **own},
                refresh=refresh,
                dense_steps=dense_steps,
            )
    if "guidance" in studies:
        usual = {"plans": "shared", "text_rows": "sparse", "slope": 0.0, "unconditional_every": 1}
        for tile, own, dense_steps, refresh in GUIDED:
            yield Configuration(
                study="guidance",
                method="foresight",
                options={"tile": tile, **usual, **own},
                refresh=refresh,
                dense_steps=dense_steps,
            )
    if "few-steps" in studies:
        for method, own, dense_steps, refresh in FEW_STEPS:
            yield Configuration(
                study="few-steps",
                method=method,
                # as the first rows, which are from before branches could share one.
                options={**own, "plans": "own"},
                order=None,
                refresh=refresh,
                dense_steps=dense_steps,
            )
    if "bundles" in studies:
        for tile in BUNDLED_TILES:
            for share, dense_steps, refresh in BUNDLED:
                yield Configuration(
                    study="bundles",
                    method="foresight",
                    options={"share": share, "tile": tile},
                    order=None,
                    refresh=refresh,
                    dense_steps=dense_steps,
                )
    if "promises" in studies:
        for method, psnr in PROMISED:
            yield Configuration(
                study="promises",
                method=method,
                options={},
                order=None,
                calibrated=True,
                promise=psnr,
            )
    if "refreshes" in studies:
        for method, own, refresh in REFRESHED:
            yield Configuration(
                study="refreshes",
                method=method,
                # as the first rows, which are from before branches could share one.
                options={**own, "plans": "own"},
                order=None,
                refresh=refresh,
                dense_steps=REFRESHED_DENSE_STEPS,
            )
    if "plans" in studies:
        for method, own, refresh in PLANNED:
            for plans in PLANS:
                yield Configuration(
                    study="plans",
                    method=method,
                    options={**own, "plans": plans},
                    order=None,
                    refresh=refresh,
                    dense_steps=REFRESHED_DENSE_STEPS,
                )


def _compared() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Methods that can be set to a density, in the settings that they declare."""
    for method in KNOBS:
        for own in SPARSE_METHODS[method].compared:
            yield method, own


def _without_a_knob() -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Methods that no one number sets, in the settings that they declare; whether calibrated.

    Those that can do without calibrated numbers come first.
    """
    for calibrated in (False, True):
        for method, cls in SPARSE_METHODS.items():
            if method not in KNOBS and cls.needs_numbers == calibrated:
                for own in cls.compared:
                    yield method, own, calibrated


def _of_ablation(method: str, ablation: Ablation) -> Iterator[Configuration]:
    aim = Aim("selected", EQUAL_SELECTED, tolerance=0.05) if ablation.knobs else None
    for order in ablation.orders:
        for settings in ablation.lines.values():
            for own in settings:
                for knob in ablation.knobs or (None,):
                    yield Configuration(
                        study=ablation.name,
                        method=method,
                        options=own,
                        order=order,
                        aim=aim,
                        knob=knob,
                    )
