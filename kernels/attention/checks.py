"""What a call of attention is checked for: its operands, the shape of its plan, the plan's values.

Shapes, dtypes and devices are known to the host, and are checked in every call. A plan's values are
read once, where it is used for the first time: on a CPU before the call, on a GPU beside it, for a
call never waits there. Until the answer has come from the GPU, kernels get a copy of the plan in
which nothing points outside of the tensors, so that no list can make them read or write elsewhere.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

INDEX_MULTIPLE: Final = 16
"""Places of a key list are a multiple of this: kernels load chunk numbers in vectors."""

DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_SIZES: Final = ("batch", "heads", "tokens", "head dim")

# triton compiles no block of fewer rows, nor of rows that are no power of two.
LEAST_BLOCK_ROWS: Final = 16


# ---- operands and shapes, in every call ----


def check_operands(q: Tensor, k: Tensor, v: Tensor, *, cast: bool = False) -> None:
    """Raise a ``ValueError`` unless q, k and v are alike: shape ``[B, H, S, D]``, dtype, device.

    Any strides will do, and with ``cast`` any dtypes, where autocast will make them one.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor [B, H, S, D], got {type(x).__name__}.")
        if x.dim() != 4 or x.layout != torch.strided:
            layout = "" if x.layout == torch.strided else f", {x.layout}"
            raise ValueError(
                f"{name} must be a dense tensor [B, H, S, D], got shape {tuple(x.shape)}{layout}."
            )
        if x.numel() == 0:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} is empty. Hint: batch, heads, tokens and head "
                "dim must be 1 or more."
            )
        if x.dtype not in DTYPES:
            raise ValueError(
                f"{name} must hold floating point numbers of 16, 32 or 64 bits, got {x.dtype}."
            )
    for name, x in (("k", k), ("v", v)):
        for what, given, wanted in zip(_SIZES, x.shape, q.shape, strict=True):
            if given != wanted:
                raise ValueError(
                    f"q, k and v must have the same {what}: q has {wanted}, {name} has {given}."
                )
        if x.dtype != q.dtype and not cast:
            raise ValueError(
                f"q, k and v must have the same dtype: q is {q.dtype}, {name} is {x.dtype}."
            )
        if x.device != q.device:
            raise ValueError(
                f"q, k and v must be on the same device: q is on {q.device}, "
                f"{name} is on {x.device}."
            )


def check_plan(
    q: Tensor, q_tiles: Tensor, kv_count: Tensor, kv_index: Tensor, tile: tuple[int, int]
) -> None:
    """Raise a ``ValueError`` unless a plan's tables have the shapes that ``q`` wants.

    Shapes, dtypes and devices only, as ``sparse_attention`` has them; never values.
    """
    if (
        not isinstance(tile, tuple)
        or len(tile) != 2
        or not all(type(size) is int and size > 0 for size in tile)
    ):
        raise ValueError(f"tile must be two positive whole numbers (M, N), got {tile!r}.")
    tables = (("q_tiles", q_tiles, 4), ("kv_count", kv_count, 3), ("kv_index", kv_index, 4))
    for name, x, dims in tables:
        if not isinstance(x, Tensor) or x.dim() != dims:
            what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor of {dims} dimensions, got {what}.")
        if x.dtype != torch.int32 and not (x is kv_index and x.dtype == torch.int16):
            types = "int16 or int32" if x is kv_index else "int32"
            raise ValueError(f"{name} must be {types}, got {x.dtype}.")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, and q on {q.device}.")
        if x.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"{name} must have the batch and heads of q, {tuple(q.shape[:2])}, "
                f"got {tuple(x.shape[:2])}."
            )
    blocks = q_tiles.shape[2]
    if blocks == 0 or q_tiles.shape[3] == 0:
        raise ValueError(f"q_tiles of shape {tuple(q_tiles.shape)} is empty.")
    for name, x in (("kv_count", kv_count), ("kv_index", kv_index)):
        if x.shape[2] != blocks:
            raise ValueError(f"{name} has {x.shape[2]} blocks, and q_tiles has {blocks}.")
    tokens = q.shape[2]
    tiles, chunks = -(-tokens // tile[0]), -(-tokens // tile[1])
    if blocks > tiles:
        raise ValueError(
            f"q has {tokens} tokens, which are {tiles} tiles of {tile[0]} rows, but the plan has "
            f"{blocks} blocks. Hint: make the plan for this sequence."
        )
    if kv_index.shape[3] > chunks + -chunks % INDEX_MULTIPLE:
        raise ValueError(
            f"k has {tokens} tokens, which are {chunks} chunks of {tile[1]} keys, but the lists of "
            f"the plan have {kv_index.shape[3]} places. Hint: make the plan for this sequence."
        )


def check_block(rows: int, implementation: str) -> None:
    """Raise a ``ValueError`` unless a kernel in Triton compiles for blocks of ``rows`` rows."""
    if rows < LEAST_BLOCK_ROWS or rows & (rows - 1):
        raise ValueError(
            f"the {implementation!r} implementation needs blocks of 16, 32, 64 or 128 rows, and "
            f"this plan's have {rows}. Hint: tiles of such sizes, or the 'torch' implementation."
        )


# ---- values, once a plan ----


def faults_of_plan(
    q_tiles: Tensor, kv_count: Tensor, kv_index: Tensor, tile: tuple[int, int], tokens: int
) -> tuple[Tensor, Tensor]:
    """What is wrong with a plan's values, found where they are; nothing waits.

    Returns:
        Flags, bool ``[6]``: each of ``_FAULTS``, and whether a tile of queries is in no block. And
        which tiles are in one, bool ``[B, H, ceil(S / M)]``.
    """
    tiles, chunks = -(-tokens // tile[0]), -(-tokens // tile[1])
    places = kv_index.shape[-1]
    off_count = (kv_count < 0) | (kv_count > min(places, chunks))
    listed = torch.arange(places, device=kv_index.device) < kv_count.unsqueeze(-1)
    off_index = listed & ((kv_index < 0) | (kv_index >= chunks))
    falls = listed[..., 1:] & (kv_index[..., 1:] <= kv_index[..., :-1])
    off_tile = (q_tiles < -1) | (q_tiles >= tiles)
    # one place more takes what is no tile.
    home = torch.where(off_tile | (q_tiles < 0), tiles, q_tiles).flatten(2).long()
    in_order = home.sort(-1).values
    twice = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] < tiles)
    covered = torch.zeros(*home.shape[:2], tiles + 1, dtype=torch.bool, device=home.device)
    covered = covered.scatter_(-1, home, True)[..., :tiles]
    found = [x.any() for x in (off_count, off_index, falls, off_tile, twice, ~covered)]
    return torch.stack(found), covered


_FAULTS: Final = (
    "a list's length in kv_count is not from 0 to {longest}",
    "a chunk number in kv_index is not from 0 to {last_chunk}",
    "the chunk numbers of a list in kv_index do not rise (each may be in a list only once)",
    "a tile number in q_tiles is neither from 0 to {last_tile} nor -1",
    "a tile of queries is in q_tiles twice",
)


def _sentence(found: list[bool], places: int, tile: tuple[int, int], tokens: int) -> str | None:
    chunks, tiles = -(-tokens // tile[1]), -(-tokens // tile[0])
    for text, is_so in zip(_FAULTS, found[: len(_FAULTS)], strict=True):
        if is_so:
            said = text.format(
                longest=min(places, chunks), last_chunk=chunks - 1, last_tile=tiles - 1
            )
            return f"the plan does not fit {tokens} tokens in tiles of {tile[0]}x{tile[1]}: {said}."
    return None


@dataclass(slots=True)
class CheckedPlan:
    """What a kernel gets of a plan.

    Attributes:
        q_tiles: as ``sparse_attention`` takes it.
        kv_count: likewise.
        kv_index: likewise.
        covered: tiles of queries that a block holds, bool ``[B, H, ceil(S / M)]``; None where that
            is all of them.
    """

    q_tiles: Tensor
    kv_count: Tensor
    kv_index: Tensor
    covered: Tensor | None = None

    def fill(self, out: Tensor, lse: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """``out`` ``[B, H, S, D]`` and ``lse`` ``[B, H, S]`` with zeros and -inf in other rows."""
        if self.covered is None:
            return out, lse
        lost = ~self.covered.repeat_interleave(rows, -1)[..., : lse.shape[-1]]
        return out.masked_fill(lost.unsqueeze(-1), 0), lse.masked_fill(lost, -torch.inf)


class Event(Protocol):
    """What ``torch.cuda.Event`` says of a stream's work."""

    def query(self) -> bool:
        """Whether the work before the event is done."""


@dataclass(slots=True)
class Answer:
    """Flags of ``faults_of_plan`` on the host, or on their way there until ``event``."""

    flags: Tensor
    event: Event | None
    places: int
    tile: tuple[int, int]
    tokens: int
    told: bool = False

    @property
    def is_there(self) -> bool:
        """Whether the flags may be read; never waits."""
        if self.event is not None and self.event.query():
            self.event = None
        return self.event is None

    def sentence(self) -> str | None:
        """What is wrong with the plan, or None."""
        return _sentence(self.flags.tolist(), self.places, self.tile, self.tokens)


@dataclass(slots=True)
class _Use:
    """A plan that was used before. It lives as long as the plan's ``kv_index``."""

    key: tuple[object, ...]
    q_tiles: weakref.ref[Tensor]
    kv_count: weakref.ref[Tensor]
    kv_index: weakref.ref[Tensor]
    answer: Answer
    covered: Tensor
    safe: tuple[Tensor, Tensor, Tensor] | None


_USES: Final[dict[int, _Use]] = {}
_ON_THE_WAY: Final[list[Answer]] = []


def raise_found(answers: list[Answer] = _ON_THE_WAY) -> None:
    """Raise a ``ValueError`` if a plan of an earlier call has turned out to be broken."""
    for answer in tuple(answers):
        if answer.is_there:
            answers.remove(answer)
            if not answer.told and (said := answer.sentence()) is not None:
                answer.told = True
                raise ValueError(
                    f"an earlier call had a broken plan: {said} Do not use that call's output. "
                    "Hint: validate=True finds the call."
                )


def _version(x: Tensor) -> int:
    # tensors of inference mode do not count their changes.
    return -1 if x.is_inference() else x._version


def checked_plan(
    q_tiles: Tensor,
    kv_count: Tensor,
    kv_index: Tensor,
    tile: tuple[int, int],
    tokens: int,
    validate: bool | None,
) -> CheckedPlan:
    """The plan as a kernel may take it, its values checked as ``sparse_attention`` says.

    Raises:
        ValueError: the plan is broken, or, on a GPU, the plan of an earlier call was.
    """
    given = CheckedPlan(q_tiles, kv_count, kv_index)
    if validate is False:
        return given
    on_gpu = kv_index.is_cuda
    # neither events nor copies to the host are for a graph that is being captured.
    if on_gpu and validate is None and torch.cuda.is_current_stream_capturing():
        return given
    if on_gpu:
        raise_found()
    tables = q_tiles, kv_count, kv_index
    key = *(_version(x) for x in tables), tile, tokens
    use = _USES.get(id(kv_index))
    if (
        use is None
        or validate
        or use.key != key
        or use.kv_index() is not kv_index
        or use.q_tiles() is not q_tiles
        or use.kv_count() is not kv_count
        # who writes to tensors of inference mode leaves no trace.
        or (not on_gpu and -1 in key[:3])
    ):
        use = _first_use(given, key, tile, tokens, wait=bool(validate) or not on_gpu)
        _USES[id(kv_index)] = use
    if use.answer.is_there:
        if (said := use.answer.sentence()) is not None:
            use.answer.told = True
            raise ValueError(said)
        uncovered = bool(use.answer.flags[-1])
        return CheckedPlan(*tables, use.covered if uncovered else None)
    assert use.safe is not None
    return CheckedPlan(*use.safe, use.covered)


def _first_use(
    plan: CheckedPlan, key: tuple[object, ...], tile: tuple[int, int], tokens: int, *, wait: bool
) -> _Use:
    tables = plan.q_tiles, plan.kv_count, plan.kv_index
    found, covered = faults_of_plan(*tables, tile, tokens)
    event: torch.cuda.Event | None = None
    safe = None
    if wait:
        flags = found.cpu()
    else:
        safe = harmless(*tables, tile, tokens)
        flags = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        flags.copy_(found, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(found.device))
    answer = Answer(flags, event, plan.kv_index.shape[-1], tile, tokens)
    if event is not None:
        _ON_THE_WAY.append(answer)
    number = id(plan.kv_index)

    def forget(gone: weakref.ref[Tensor]) -> None:
        # another tensor may have the number by now.
        if (use := _USES.get(number)) is not None and use.kv_index is gone:
            del _USES[number]

    return _Use(
        key,
        weakref.ref(plan.q_tiles),
        weakref.ref(plan.kv_count),
        weakref.ref(plan.kv_index, forget),
        answer,
        covered,
        safe,
    )


def harmless(
    q_tiles: Tensor, kv_count: Tensor, kv_index: Tensor, tile: tuple[int, int], tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The plan's tables with nothing in them that points outside of the tensors; a right plan's.

    The short last chunk of a sequence is left only at the end of a list, where kernels expect it.
    """
    tiles, chunks = -(-tokens // tile[0]), -(-tokens // tile[1])
    places = kv_index.shape[-1]
    count = kv_count.clamp(0, min(places, chunks))
    place = torch.arange(places, device=kv_index.device)
    inner = place < count.unsqueeze(-1) - 1
    index = kv_index.clamp(0, chunks - 1)
    index = torch.where(inner, index.clamp_max(max(chunks - 2, 0)), index)
    return torch.where(q_tiles < tiles, q_tiles, -1), count, index
