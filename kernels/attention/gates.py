"""Gates: which products with V a block of scores is worth, once the scores are known.

A gate looks at pieces of ``rows`` query rows by ``keys`` listed keys and skips the product with V
of a piece whose scores are too low for all of its rows. Where the pieces lie is defined here and
nowhere else, so that implementations with other block sizes skip the same ones:

- **Rows** of a block are counted in the order of its tiles, ``rows`` at a time. Rows that hold no
  token (a place without a tile, or past the end of the sequence) have no say.
- **Keys** are counted along the block's list, dead tokens of a short last chunk left out: the run.
  It is cut into groups of 128, visited *last group first*, then from the first on; pieces inside a
  group come in rising order. Only the last group can be short, and kernels start with it because
  it needs a mask and the others do not.
- **The running maximum** that SpargeAttn compares with is, for every row, the largest score of this
  piece and of those visited before it.

A kernel that cannot leave out a piece by itself gives its weights the value zero instead: the
output is the same, only the time is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

KEY_GROUP: Final = 128
"""Listed keys that a kernel visits together at most; see the order of visits above."""

PIECE_ROWS: Final = (32, 64, 128)
PIECE_KEYS: Final = (64, 128)


@dataclass(frozen=True, slots=True, eq=False)
class RelativeGate:
    """SpargeAttn's λ: skip pieces that lie far below the running maximum of all their rows.

    A piece is skipped when, for every row, its largest score minus the running maximum (which
    includes this piece) is below λ. Its scores stay in the maximum and in the sum, so the
    log-sum-exp is that of no gate at all.

    Attributes:
        lambda_: λ, a negative number, or a tensor of them that broadcasts to ``[B, H]``; -inf
            skips nothing. In units of the scaled scores, natural logarithm.
        rows: query rows of a piece, 32, 64 or 128.
        keys: listed keys of a piece, 64 or 128.

    Raises:
        ValueError: λ is a number that is not negative, or no kernel knows the size of pieces.
    """

    lambda_: float | Tensor
    rows: int = 64
    keys: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.lambda_, Tensor) and not self.lambda_ < 0:
            raise ValueError(f"lambda_ must be negative, got {self.lambda_!r}. Hint: -10.")
        _check_piece(self.rows, self.keys)

    def to(self, device: torch.device | str) -> RelativeGate:
        """The same gate on ``device``."""
        moved = self.lambda_.to(device) if isinstance(self.lambda_, Tensor) else self.lambda_
        return replace(self, lambda_=moved)

    def thresholds(self, q: Tensor, tiles: int) -> Tensor:
        """λ of every query tile, fp32 ``[B, H, tiles]``, tiles in the order of the sequence."""
        if isinstance(self.lambda_, Tensor):
            given = self.lambda_.to(q.device, torch.float32).expand(q.shape[:2]).unsqueeze(-1)
        else:
            given = torch.full((1, 1, 1), self.lambda_, dtype=torch.float32, device=q.device)
        return given.expand(*q.shape[:2], tiles)


@dataclass(frozen=True, slots=True, eq=False)
class AbsoluteGate:
    """BSFA's thresholds: skip pieces whose scores are all below a calibrated threshold.

    A piece is skipped when every row's largest score is below the threshold of the row's query
    tile. It enters neither the maximum nor the sum. A row that loses all its pieces gives zeros
    and a log-sum-exp of -inf, like one without keys: mark what must stay in ``keep``.

    Attributes:
        threshold: thresholds on the scaled scores, one for every query tile in the order of the
            sequence, or fewer that broadcast to ``[B, H, ceil(S / M)]``; -inf skips nothing. BSFA's
            T for one layer and one sparsity is ``[H, ceil(S / M)]``.
        keep: which chunks of ``kv_index`` are never skipped, bool ``[B, H, G, C]`` (for all rows of
            the block); a piece with one such key is computed. None: any may be skipped.
        rows: query rows of a piece, 32, 64 or 128.
        keys: listed keys of a piece, 64 or 128.

    Raises:
        ValueError: no kernel knows the size of pieces.
    """

    threshold: Tensor
    keep: Tensor | None = None
    rows: int = 128
    keys: int = 64

    def __post_init__(self) -> None:
        _check_piece(self.rows, self.keys)

    def to(self, device: torch.device | str) -> AbsoluteGate:
        """The same gate on ``device``."""
        keep = None if self.keep is None else self.keep.to(device)
        return replace(self, threshold=self.threshold.to(device), keep=keep)

    def thresholds(self, q: Tensor, tiles: int) -> Tensor:
        """The threshold of every query tile, fp32 ``[B, H, tiles]``."""
        return self.threshold.to(q.device, torch.float32).expand(*q.shape[:2], tiles)


Gate = RelativeGate | AbsoluteGate


def _check_piece(rows: int, keys: int) -> None:
    if rows not in PIECE_ROWS or keys not in PIECE_KEYS:
        wanted = (" or ".join(map(str, sizes)) for sizes in (PIECE_ROWS, PIECE_KEYS))
        raise ValueError(
            f"a gate's pieces must have {' rows and '.join(wanted)} keys, got {rows} and {keys}."
        )


def check_gate(gate: Gate, q: Tensor, q_tiles: Tensor, kv_index: Tensor, rows: int) -> None:
    """Raise a ``ValueError`` unless the gate's tensors and sizes fit the plan's.

    ``rows`` are the M query rows of a tile. Reads shapes only, never values.
    """
    block_rows = q_tiles.shape[-1] * rows
    if block_rows % gate.rows:
        raise ValueError(
            f"the rows of a gate's pieces must divide the {block_rows} rows of a block, "
            f"got {gate.rows}. Hint: a plan of larger blocks, or fewer rows."
        )
    tiles = -(-q.shape[2] // rows)
    if isinstance(gate, AbsoluteGate):
        _check_broadcast("threshold", gate.threshold, (*q.shape[:2], tiles))
        if gate.keep is not None and gate.keep.shape != kv_index.shape:
            raise ValueError(
                f"keep must have the shape of kv_index, {tuple(kv_index.shape)}, "
                f"got {tuple(gate.keep.shape)}."
            )
    elif isinstance(gate.lambda_, Tensor):
        _check_broadcast("lambda_", gate.lambda_, tuple(q.shape[:2]))


def _check_broadcast(name: str, given: Tensor, shape: tuple[int, ...]) -> None:
    try:
        fits = given.expand(shape).shape == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{name} of shape {tuple(given.shape)} does not broadcast to {shape}")


def gate_kind(gate: Gate | None) -> str | None:
    """The kernel's name for a gate."""
    if gate is None:
        return None
    return "relative" if isinstance(gate, RelativeGate) else "absolute"


def kept_pieces(keep: Tensor, kv_count: Tensor, chunk: int, keys: int) -> Tensor:
    """Which pieces of ``keys`` listed keys hold a kept chunk of ``chunk`` keys.

    ``keep`` is ``[..., C]``, of which the first ``kv_count`` ``[...]`` are read; the answer is
    ``[..., ceil(C * chunk / keys)]``.
    """
    keep = keep & (torch.arange(keep.shape[-1], device=keep.device) < kv_count.unsqueeze(-1))
    if chunk >= keys:
        return keep.repeat_interleave(chunk // keys, -1)
    each = keys // chunk
    padded = torch.nn.functional.pad(keep, (0, -keep.shape[-1] % each))
    return padded.view(*padded.shape[:-1], -1, each).any(-1)


def skipped_pairs(
    gate: Gate,
    scores: Tensor,
    lengths: Tensor,
    thresholds: Tensor,
    row_alive: Tensor,
    kept: Tensor | None,
) -> Tensor:
    """The pairs whose product with V a gate leaves out: the definition, in plain torch.

    Args:
        gate: its kind and the size of its pieces.
        scores: scaled scores of P blocks, ``[P, R, L]``: R rows, and the listed keys in order;
            -inf past the end of a run.
        lengths: keys of every block's run, ``[P]``.
        thresholds: of every row, ``[P, R]``.
        row_alive: rows that hold a token, bool ``[P, R]``.
        kept: pieces never skipped, bool ``[P, >= ceil(L / keys)]``, or None.

    Returns:
        bool ``[P, R, L]``.
    """
    blocks, rows, run = scores.shape
    if run == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    padded = torch.nn.functional.pad(scores, (0, -run % gate.keys), value=-torch.inf)
    largest = padded.view(blocks, rows, -1, gate.keys).amax(-1)
    closed = skipped_pieces(gate, largest, lengths, thresholds, row_alive, kept)
    return closed.repeat_interleave(gate.rows, 1).repeat_interleave(gate.keys, 2)[..., :run]


def skipped_pieces(
    gate: Gate,
    largest: Tensor,
    lengths: Tensor,
    thresholds: Tensor,
    row_alive: Tensor,
    kept: Tensor | None,
) -> Tensor:
    """``skipped_pairs`` by pieces, from the largest score of every row in each.

    Args:
        gate: its kind and the size of its pieces.
        largest: of the pieces of P blocks' lists in order, ``[P, R, pieces]``; -inf past the end.
        lengths: keys of every block's run, ``[P]``.
        thresholds: of every row, ``[P, R]``.
        row_alive: rows that hold a token, bool ``[P, R]``.
        kept: pieces never skipped, bool ``[P, >= pieces]``, or None.

    Returns:
        bool ``[P, R / gate.rows, pieces]``.
    """
    blocks, rows, pieces = largest.shape
    compared = largest
    if isinstance(gate, RelativeGate):
        piece = torch.arange(pieces, device=largest.device)
        last_group = (lengths - 1).clamp_min(0) // KEY_GROUP * (KEY_GROUP // gate.keys)
        late = (piece >= last_group.unsqueeze(-1)).unsqueeze(1)
        in_last_group = largest.masked_fill(~late, -torch.inf)
        running = torch.where(
            late,
            in_last_group.cummax(-1).values,
            torch.maximum(largest.cummax(-1).values, in_last_group.amax(-1, keepdim=True)),
        )
        compared = largest - running
    below = (compared < thresholds.unsqueeze(-1)) | ~row_alive.unsqueeze(-1)
    closed = below.view(blocks, rows // gate.rows, gate.rows, pieces).all(2)
    if kept is not None:
        closed &= ~kept[:, None, :pieces]
    return closed


def weigh(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """``weights @ values``, where a value that is not finite shows in the rows that see it alone.

    Zero times NaN is NaN: in a plain product one such value reaches every row.

    Args:
        weights: ``[..., R, L]``, zero where a row does not see a key.
        values: ``[..., L, D]``.
        seen: which pairs are multiplied, bool ``[..., R, L]``.

    Returns:
        ``[..., R, D]``.
    """
    broken = ~values.isfinite()
    if not broken.any():
        return weights @ values
    out = weights @ values.masked_fill(broken, 0)
    pairs = seen.to(weights.dtype)
    for number, is_it in (
        (torch.inf, values == torch.inf),
        (-torch.inf, values == -torch.inf),
        (torch.nan, values.isnan()),
    ):
        # infinities of both signs add up to NaN.
        out = torch.where(pairs @ is_it.to(weights.dtype) > 0, out + number, out)
    return out
