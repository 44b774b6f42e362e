"""What a method is: it looks at queries and keys and says which tiles to compute."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

from vidsparse.errors import OptionError
from vidsparse.grouping import MERGES
from vidsparse.masks import KEY_TILES, QUERY_TILES, PooledTopP, check_tile, parse_tile
from vidsparse.remainder import FADING
from vidsparse.schedule import OF_METHOD, check_steps

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vidsparse.kernels.attention.gates import Gate
    from vidsparse.methods.numbers import Numbers
    from vidsparse.methods.studied import Ablation, CallAblation, Knob, Settings
    from vidsparse.order import TokenOrder
    from vidsparse.plan import SparsePlan
    from vidsparse.site import CallSite

Selection = Literal["rule", "words", "blocks", "select"]
"""Which of a method's four ways its tiles are selected by; see ``SparseMethod.selection``."""

MEANS: Final = (32, 64, 128)
"""What a ``means`` option can be, beside None and ``auto``."""

USUAL_MEANS: Final = 64
"""What ``auto`` is, or the tile's keys where those are more."""

PLANS: Final = ("shared", "own")
"""What a ``plans`` option can be."""

MOST_FADING: Final = 1000
"""Of a ``fading`` option: nothing is left of a remainder in the step after it."""

TEXT_ROWS: Final = ("dense", "sparse")
"""What a ``text_rows`` option can be."""

QUANTIZE: Final = ("auto", "int8", "fp8", "none")
"""What a ``quantize`` option can be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """Base of the methods: a frozen set of options, and the tiles that they select.

    Subclasses are dataclasses whose fields are the method's own options; ``option(...)`` declares
    them with the help text, flag and text conversion that command line and page show.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    free_options: ClassVar[tuple[str, ...]] = ()
    token_order: ClassVar[str | None] = None
    """The token order it is best in, where that is not the model's to say."""
    refresh: ClassVar[int | float] = 0
    """``Schedule.refresh`` where neither the user nor the model says another."""

    def options(self) -> dict[str, Any]:
        """The options as JSON values, tiles written as ``"16x16"``."""
        values = {f.name: getattr(self, f.name) for f in self.option_fields()}
        return {k: "x".join(map(str, v)) if isinstance(v, tuple) else v for k, v in values.items()}

    @property
    def of_schedule(self) -> dict[str, Any]:
        """What of a ``Schedule`` the method's options say."""
        return {name: getattr(self, name) for name in OF_METHOD if hasattr(self, name)}

    @classmethod
    def option_fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        """The fields that are options: all but calibrated numbers, which come from a preset."""
        return tuple(f for f in dataclasses.fields(cls) if "flag" in f.metadata)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockChoice:
    """Tokens in order, and the key chunks of every block of query rows.

    Attributes:
        q: queries ``[B, H, S, D]`` in order.
        k: keys, likewise.
        v: values, likewise.
        words: a block's chunks, int32 ``[B, H, G, ceil(Tk / 32)]``, the first in the lowest bit.
        count: how many they are, int32 ``[B, H, G]``.
        means: mean keys and values of groups of ``means`` tokens ``[B, H, P, D]``, where they were
            made on the way and hold no text.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    words: Tensor
    count: Tensor
    means: tuple[Tensor, Tensor] | None = None


class SparseMethod(Method):
    """A method that selects tiles; it has at least the options ``tile`` and ``merge``.

    ``quantize`` is the 8-bit format of the products q·k: ``int8``, ``fp8``, ``auto`` (int8 where
    the kernels are faster for it), ``none``, or None for a method without this option. ``means`` is
    the number of tokens of a group whose mean key and value stand for those that are not computed;
    with None these are left out. ``plans`` is ``shared`` if both guidance branches attend by the
    conditional one's plan, and ``own`` if each has its own. Guidance of strength g adds g times the
    error of one branch and 1 - g times the error of the other: an error that both share stays as it
    is, and what they differ by is magnified. ``text_rows`` is ``dense`` if query tiles that hold
    text attend to everything, and ``sparse`` if they attend to what the method selects for them, as
    those of the video do. Keys of text are attended by all either way. ``fading`` is how fast what
    a refresh keeps stops being right (``remainder.likeness``), ``reach`` how many steps after it
    add it at most (``Schedule``), and ``slope`` how far steps follow the change between what the
    last two refreshes kept (``remainder.weights``). ``unconditional_every`` says in which of the
    dense steps and refreshes the unconditional branch of guidance computes all pairs itself
    (``Schedule``).

    A method that can be calibrated has a field ``numbers`` too. ``free_options`` names the options
    that may change without new numbers, and ``needs_numbers`` says that it cannot run without any.

    Studies and benchmarks find a method by what it declares: its ``knobs``, of which the first is
    the usual one; the settings in which it is ``compared`` with other methods (each brought to one
    density by the knob, or as it stands without a knob); the settings whose ``masks`` are timed;
    those in which q·k is compared in 16 and in ``eight_bits``, where its paper has these; and its
    paper's ``ablations``, of videos, and ``call_ablations``, of single attention calls. All of
    these are measured with ``as_published``, the options that make the method the one of its paper,
    unless the settings say otherwise.
    """

    tile: tuple[int, int]
    merge: str
    quantize: str | None = None
    means: int | None = None
    plans: str = "own"
    text_rows: str = "dense"
    fading: float = FADING
    reach: int | None = None
    slope: float = 0.0
    unconditional_every: int = 1
    numbers: Numbers | None = None
    needs_numbers: ClassVar[bool] = False
    knobs: ClassVar[tuple[Knob, ...]] = ()
    as_published: ClassVar[Settings] = {}
    compared: ClassVar[tuple[Settings, ...]] = ({},)
    masks: ClassVar[tuple[Settings, ...]] = ({},)
    eight_bits: ClassVar[tuple[Settings, ...]] = ()
    ablations: ClassVar[tuple[Ablation, ...]] = ()
    call_ablations: ClassVar[tuple[CallAblation, ...]] = ()

    @property
    def looks_at_values(self) -> bool:
        """Whether ``select`` needs ``v``."""
        return False

    @abstractmethod
    def select(self, q: Tensor, k: Tensor, site: CallSite, *, v: Tensor | None = None) -> Tensor:
        """The tiles to compute, bool ``[B, H, Tq, Tk]``, of ``q``, ``k`` ``[B, H, S, D]``.

        ``v`` ``[B, H, S, D]`` is given to methods that look at values (``looks_at_values``).

        Tokens are in the chosen order already. Nothing may wait for the device. Where plans are
        reused, ``site`` is that of the call which made the plan.
        """

    def selection(self, q: Tensor) -> Selection:
        """How tiles are selected where Triton's kernels run.

        Args:
            q: queries ``[B, H, S, D]``, for their shape and dtype.

        Returns:
            ``rule`` where kernels follow ``rule``; ``words`` or ``blocks`` where the method has
            kernels of its own; ``select`` (always right) where its ``select`` has to run, in torch.
        """
        return "select"

    def rule(self, site: CallSite, device: torch.device) -> PooledTopP:
        """The selection as top-p or top-k over pooled scores.

        Needed only where ``selection`` says ``rule``.
        """
        raise NotImplementedError(f"{self.name} has no rule")

    def words(self, q: Tensor, k: Tensor, site: CallSite) -> tuple[Tensor, Tensor]:
        """The selection by kernels of the method's own, with the tiles of text kept.

        Needed only where ``selection`` says ``words``. ``q``, ``k`` are ``[B, H, S, D]``. Nothing
        waits for the device.

        Returns:
            The mask in words of 32 key tiles, int32 ``[B, H, Tq, ceil(Tk / 32)]``, the first tile
            in the lowest bit; and how many key tokens each query tile keeps, int32 ``[B, H, Tq]``.
        """
        raise NotImplementedError(f"{self.name} has no kernels of its own")

    def choose_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, site: CallSite, order: TokenOrder
    ) -> BlockChoice:
        """Order the tokens and select by kernels, for methods whose tiles are whole blocks of rows.

        Needed only where ``selection`` says ``blocks``. ``q``, ``k``, ``v`` ``[B, H, S, D]`` come
        in the pipeline's order. Chunks and blocks that hold text are kept. Nothing waits for the
        device.
        """
        raise NotImplementedError(f"{self.name} does not choose by blocks")

    @property
    def block_rows(self) -> int | None:
        """Query rows that share a list, if the method asks for a number; else None.

        It is used where a kernel can run blocks of so few rows. Otherwise, and with None, the
        device decides: smaller tiles are joined in blocks, and a block computes what any of its
        tiles keeps.
        """
        return None

    @property
    def equal_heads(self) -> bool:
        """Whether these options make all heads of a layer compute equally many pairs."""
        return False

    @property
    def mask_bytes(self) -> int:
        """Least bytes that ``select`` takes for a tile of its mask.

        Every method takes five: the flag, and the flag as fp32, by which a plan counts what was
        kept.
        """
        return 5

    @property
    def gate_keys(self) -> int | None:
        """Keys of the pieces that ``gate`` judges, or None without a gate.

        It is asked before there is a plan, because not every kernel has room for every size.
        """
        return None

    @property
    def can_do_without_gate(self) -> bool:
        """Whether the gate only saves work: without it outputs are nearer to dense ones."""
        return False

    def gate(self, q: Tensor, site: CallSite, plan: SparsePlan, kv_index: Tensor) -> Gate | None:
        """The gate of a call, which skips products with V once scores are known; None: no gate.

        It is asked for at every sparse call, also where a plan is reused. Only shape, dtype and
        device of ``q`` ``[B, H, S, D]`` count: its tokens need not be in order. ``kv_index``
        ``[B, H, G, C]`` are the plan's lists. Nothing waits for the device.
        """
        return None

    def check_numbers(self) -> None:
        """Raise an ``OptionError`` where the method needs calibrated numbers and has none."""
        if self.needs_numbers and self.numbers is None:
            raise OptionError(
                f"{self.name} needs calibrated numbers and has none. Hint: make a preset with "
                f"`vidsparse calibrate --method {self.name}` and give it with --preset."
            )

    @classmethod
    def calibratable(cls) -> bool:
        """Whether it takes calibrated numbers."""
        return any(f.name == "numbers" for f in dataclasses.fields(cls))

    def with_numbers(self, numbers: Numbers) -> Self:
        """The same method with calibrated numbers.

        Raises:
            OptionError: the method cannot be calibrated.
        """
        if not self.calibratable():
            raise OptionError(f"{self.name} takes no calibrated numbers")
        change: dict[str, Any] = {"numbers": numbers}
        return dataclasses.replace(self, **change)

    def number(self, name: str, site: CallSite, device: torch.device) -> Any:
        """An option, or the calibrated numbers in its place, ``[H]`` from the site's first head."""
        if self.numbers is not None and name in self.numbers:
            return self.numbers.of(name, site, device)
        return getattr(self, name)


def option(
    default: Any,
    *,
    flag: str,
    metavar: str,
    help: str,
    convert: Callable[[str], Any] = float,
    choices: tuple[str, ...] = (),
    absent: str = "none",
) -> Any:
    """A dataclass field that carries its own command line flag, help and text conversion.

    ``choices`` are all its values as a user types them, if they can be listed, and ``absent`` is
    how None is typed.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "flag": flag,
            "metavar": metavar,
            "help": help,
            "convert": convert,
            "choices": choices,
            "absent": absent,
        },
    )


def tile_option(default: tuple[int, int]) -> Any:
    """The tile field shared by the pooled methods."""
    return option(
        default,
        flag="--tile",
        metavar="MxN",
        help="tile of M queries x N keys that is computed or skipped as one",
        convert=parse_tile,
        choices=tuple(f"{rows}x{keys}" for rows in QUERY_TILES for keys in KEY_TILES),
    )


def optional_number(text: str) -> float | None:
    """Read a number, or None from ``none``."""
    return None if text.strip().lower() == "none" else float(text)


def share_option(default: float, flag: str, help: str) -> Any:
    """The share of attention that a pooled method keeps; ``none`` beside ``--topk``."""
    return option(default, flag=flag, metavar="P", help=help, convert=optional_number)


def topk_option() -> Any:
    """The top-k field shared by the pooled methods."""
    return option(
        None,
        flag="--topk",
        metavar="SHARE",
        help="keep this share of key tiles in every row instead, in (0, 1]",
        convert=optional_number,
    )


def settle_share(method: Method, name: str, value: object, topk: object) -> None:
    """Check a method's share of attention against ``topk``, which takes its place.

    Where ``topk`` is given, the field ``name`` becomes None. Both are an error, and a share other
    than the default counts as given.

    Raises:
        OptionError: either is out of range, or both were given.
    """
    if topk is None:
        check_share(name, value)
        return
    check_share("topk", topk)
    default = next(f.default for f in dataclasses.fields(method) if f.name == name)
    if value is not None and value != default:
        raise OptionError(
            f"{method.name} selects by {name} or by topk, got {name}={value!r} and topk={topk!r}. "
            "Hint: leave one out."
        )
    object.__setattr__(method, name, None)


def merge_option(default: str = "xor-window") -> Any:
    """The merge field shared by the pooled methods."""
    return option(
        default,
        flag="--merge",
        metavar="NAME",
        help="how query tiles form blocks of rows: xor, xor-window or consecutive",
        convert=str,
        choices=tuple(MERGES),
    )


def optional_count(text: str) -> int | str | None:
    """Read a whole number, None from ``none``, or ``auto``."""
    word = text.strip().lower()
    return {"none": None, "auto": "auto"}[word] if word in ("none", "auto") else int(text)


def count_or_auto(text: str) -> int | None:
    """Read a whole number, or None from ``auto``."""
    return None if text.strip().lower() in ("auto", "none") else int(text)


def means_option() -> Any:
    """The field of what becomes of keys that are not computed; see ``settle_means``."""
    return option(
        "auto",
        flag="--means",
        metavar="C",
        help="tokens of a group whose mean stands for what is skipped: 32, 64, 128, none (skipped "
        "keys are left out, as papers before have it), or auto: 64 or the tile's keys",
        convert=optional_count,
    )


def settle_means(method: SparseMethod) -> None:
    """Check ``method.means``, and put the number of tokens in the place of ``auto``.

    Raises:
        OptionError: it is no group of tokens that fits the tile.
    """
    keys = method.tile[1]
    given: object = method.means
    if given == "auto":
        object.__setattr__(method, "means", max(USUAL_MEANS, keys))
    if method.means is None:
        return
    sizes = [size for size in MEANS if size % keys == 0]
    if method.means not in sizes:
        raise OptionError(
            f"means must be a multiple of the tile's {keys} keys, got {method.means!r}. "
            f"Hint: choose from {', '.join(map(str, sizes))}, none."
        )


def plans_option() -> Any:
    """The field of whether guidance branches share a plan; see ``SparseMethod``."""
    return option(
        "shared",
        flag="--plans",
        metavar="NAME",
        help="plans of guidance branches: shared, so that they err alike and guidance does not "
        "magnify how they differ, or own, as in the papers",
        convert=str,
        choices=PLANS,
    )


def check_plans(method: SparseMethod) -> None:
    """Raise an ``OptionError`` where ``method.plans`` is nothing that it can be."""
    _check_word(method, "plans", PLANS)


def text_rows_option() -> Any:
    """The field of what rows of text attend to; see ``SparseMethod``."""
    return option(
        "dense",
        flag="--text-rows",
        metavar="NAME",
        help="rows of text in the video's sequence: dense, which attend to everything, or sparse, "
        "which choose their keys as the video's rows do",
        convert=str,
        choices=TEXT_ROWS,
    )


def check_text_rows(method: SparseMethod) -> None:
    """Raise an ``OptionError`` where ``method.text_rows`` is nothing that it can be."""
    _check_word(method, "text_rows", TEXT_ROWS)


def fading_option() -> Any:
    """The field of how fast what a refresh keeps stops being right; see ``SparseMethod``."""
    return option(
        FADING,
        flag="--fading",
        metavar="F",
        help="how fast what a refresh keeps stops being right: S of a run's N steps later "
        "exp(-F S / N) of it is added",
    )


def reach_option() -> Any:
    """The field of how many steps after a refresh add what it kept; see ``SparseMethod``."""
    return option(
        None,
        flag="--reach",
        metavar="N",
        help="steps after a refresh that add what it kept, those beyond make plans of their own; "
        "auto: all up to the next refresh",
        convert=count_or_auto,
        absent="auto",
    )


def slope_option() -> Any:
    """The field of how far steps follow what refreshes change; see ``SparseMethod``."""
    return option(
        0.0,
        flag="--slope",
        metavar="B",
        help="how much of the change from one refresh to the next is expected to go on after it, "
        "0 to 1; keeps what the last two refreshes kept",
    )


def unconditional_every_option() -> Any:
    """The field of when the unconditional branch computes all pairs; see ``Schedule``."""
    return option(
        1,
        flag="--unconditional-every",
        metavar="N",
        convert=int,
        help="of the dense steps and refreshes the unconditional branch of guidance computes every "
        "Nth; in the others it takes what the conditional one lacked. 1: all of them",
    )


def check_refreshing(method: SparseMethod) -> None:
    """Raise an ``OptionError`` where what is said of refreshes is out of range."""
    for name, most in (("fading", MOST_FADING), ("slope", 1)):
        value = getattr(method, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value <= most:
            raise OptionError(f"{name} must be a number from 0 to {most}, got {value!r}")
    if method.reach is not None:
        check_steps("reach", method.reach)
    check_steps("unconditional_every", method.unconditional_every)
    if method.unconditional_every > 1 and method.plans != "shared":
        raise OptionError(
            "unconditional_every is for branches of guidance that share plans, and plans is "
            f"{method.plans!r}. Hint: --plans shared."
        )


def _check_word(method: SparseMethod, name: str, words: tuple[str, ...]) -> None:
    value = getattr(method, name)
    if value not in words:
        raise OptionError(f"{name} must be one of {', '.join(words)}, got {value!r}")


def eight_bit_option() -> Any:
    """The format of q·k shared by the methods whose papers compute it in 8 bits."""
    return option(
        "auto",
        flag="--quantize",
        metavar="FORMAT",
        help="q·k in int8, fp8 or none; auto: int8 where the kernels are faster for it",
        convert=str,
    )


def check_eight_bits(value: object) -> None:
    """Raise an ``OptionError`` unless ``value`` is one that ``eight_bit_option`` takes."""
    if value not in QUANTIZE:
        raise OptionError(f"unknown quantize {value!r}. Hint: choose from {', '.join(QUANTIZE)}.")


def as_tile(value: object) -> tuple[int, int]:
    """Accept ``(16, 16)``, ``[16, 16]`` or ``"16x16"`` as a tile.

    Raises:
        OptionError: anything else, or sizes that no kernel handles.
    """
    if isinstance(value, str):
        return parse_tile(value)
    if isinstance(value, (tuple, list)) and all(isinstance(n, int) for n in value):
        tile = tuple(value)
        check_tile(tile)
        return tile
    raise OptionError(f"tile must be (M, N) or 'MxN', got {value!r}. Hint: (16, 16).")


def check_share(name: str, value: object, *, low: float = 0.0, low_open: bool = True) -> None:
    """Raise an ``OptionError`` unless ``value`` is a number in (low, 1] or [low, 1]."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (low < value <= 1 or (value == low and not low_open)):  # type: ignore[operator]
        bracket = "(" if low_open else "["
        raise OptionError(f"{name} must lie in {bracket}{low:g}, 1], got {value!r}")


def check_whole(name: str, value: object) -> None:
    """Raise an ``OptionError`` unless ``value`` is a whole number from 1 that a tensor can hold."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name} must be a whole number from 1, got {f'{value!r}'[:60]}")
    if value >= 2**31:
        raise OptionError(f"{name} must be below 2^31, got {f'{value!r}'[:60]}")
