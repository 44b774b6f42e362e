"""SpargeAttn: pooled top-cdf with a judge of self-similarity, then a gate on the product with V."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from vidsparse.errors import OptionError
from vidsparse.grouping import check_merge
from vidsparse.kernels.attention.gates import PIECE_ROWS, Gate, RelativeGate
from vidsparse.masks import (
    PooledTopP,
    choose_tiles,
    choosing_bytes,
    pooled_scores,
    self_similarity,
)
from vidsparse.methods.base import (
    Selection,
    SparseMethod,
    as_tile,
    check_eight_bits,
    check_plans,
    eight_bit_option,
    means_option,
    merge_option,
    option,
    optional_number,
    plans_option,
    settle_means,
    settle_share,
    share_option,
    tile_option,
    topk_option,
)
from vidsparse.methods.numbers import Numbers
from vidsparse.methods.studied import Ablation, CallAblation, Knob, Settings
from vidsparse.plan import SparsePlan
from vidsparse.site import CallSite

# keys that the gate decides for together; the paper's b_k.
GATE_KEYS: Final = 64


class PooledScores(NamedTuple):
    """Scores of mean tokens ``[B, H, Tq, Tk]``, and how alike the tokens of a block are.

    The self-similarities are ``[B, H, Tq]`` and ``[B, H, Tk]``.
    """

    scores: Tensor
    q_similarity: Tensor
    k_similarity: Tensor


@dataclass(frozen=True, kw_only=True)
class SpargeAttn(SparseMethod):
    """SpargeAttn (arXiv 2502.18137), sections 3.2 to 3.6 and algorithm 1.

    Symbols: b_q x b_k block, tau the kept cumulative mass, theta the least self-similarity at which
    a mean may stand for its block, lambda the distance below the running row maximum from which a
    product with V is skipped, c_w the warps that share the rows of a block: each decides for its
    own ``b_q / c_w`` rows, here ``gate_rows``.

    First stage: columns of non-self-similar key blocks leave the softmax (their score is -inf) and
    are always computed; so are rows of non-self-similar query blocks. The pooled scores are scaled
    by 1/sqrt(d), which the printed algorithm omits, and the block that crosses tau is kept. Second
    stage: a piece is skipped where max(m_local - m) < lambda, as section 3.4 has it (line 15 of the
    printed algorithm is inverted). q·k runs in int8 with a scale for every block, as in
    SageAttention, where that is faster. ``topk`` keeps that share of the key blocks instead of
    top-cdf, rounded up, and what the judge keeps beside them.

    Tau, theta and lambda of every layer and head come from a preset, else these options hold.

    Raises:
        OptionError: ``tau`` or ``topk`` is outside (0, 1], or both are given; ``theta`` is outside
            [-1, 1]; ``lambda_`` is not negative; ``gate_rows``, ``quantize``, ``tile`` or ``merge``
            has an unknown value.
    """

    name: ClassVar[str] = "spargeattn"
    title: ClassVar[str] = "SpargeAttn"
    paper: ClassVar[str] = "SpargeAttn: Accurate Sparse Attention (arXiv 2502.18137)"
    summary: ClassVar[str] = (
        "the blocks that hold most of the attention, judged by their means where those speak for "
        "them; then a gate that leaves out values that would hardly count"
    )
    free_options: ClassVar[tuple[str, ...]] = ("quantize", "merge")
    as_published: ClassVar[Settings] = {"means": None, "plans": "own"}
    knobs: ClassVar[tuple[Knob, ...]] = (Knob("tau", 0.0, 1.0), Knob("topk", 0.01, 1.0))
    masks: ClassVar[tuple[Settings, ...]] = ({}, {"topk": 0.3})
    eight_bits: ClassVar[tuple[Settings, ...]] = (
        {"tau": None, "topk": 0.3, "means": 64},
        {"tau": 0.9},
    )
    ablations: ClassVar[tuple[Ablation, ...]] = (
        # with and without the judge of self-similarity.
        Ablation(
            name="judge",
            lines={"theta 0.3": ({"theta": 0.3},), "theta -1.0": ({"theta": -1.0},)},
            columns=("theta", "order"),
            orders=(None, "random"),
        ),
        # M_g selects blocks, M_pv gates products with V.
        Ablation(
            name="stages",
            lines={
                "only M_g": ({"tau": 0.9, "lambda_": None},),
                "only M_pv": ({"tau": 1.0, "lambda_": -5.0},),
                "both": ({"tau": 0.9, "lambda_": -5.0},),
            },
            columns=("tau", "lambda_"),
            sparsity=True,
        ),
    )
    call_ablations: ClassVar[tuple[CallAblation, ...]] = (
        # Table 10, whose cases are those that the judge changes by more than this.
        CallAblation(
            name="judge-l1",
            measured="difference",
            settings={"with": {}, "without": {"theta": -1}},
            telling=0.05,
        ),
        # Table 3.
        CallAblation(name="lengths", measured="mask"),
    )

    tau: float | None = share_option(
        0.9, "--tau", "cumulative pooled attention kept per row, in (0, 1]"
    )
    topk: float | None = topk_option()
    theta: float = option(
        0.3,
        flag="--theta",
        metavar="T",
        help="blocks less self-similar than this are always computed, in [-1, 1]",
    )
    lambda_: float | None = option(
        None,
        flag="--lambda",
        metavar="L",
        help="skip products with V this far below the row maximum, negative; none: no gate",
        convert=optional_number,
    )
    gate_rows: int = option(
        64,
        flag="--gate-rows",
        metavar="ROWS",
        help="query rows that the gate decides for together: 32, 64 or 128",
        convert=int,
    )
    quantize: str = eight_bit_option()
    tile: tuple[int, int] = tile_option((128, 64))
    merge: str = merge_option()
    means: int | None = means_option()
    plans: str = plans_option()
    numbers: Numbers | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        settle_share(self, "tau", self.tau, self.topk)
        if not _is_number(self.theta) or not -1 <= self.theta <= 1:
            raise OptionError(f"theta must lie in [-1, 1], got {self.theta!r}")
        if self.lambda_ is not None and not (_is_number(self.lambda_) and self.lambda_ < 0):
            raise OptionError(
                f"lambda must be a negative number or none, got {self.lambda_!r}. Hint: -6."
            )
        if self.lambda_ == -math.inf:
            # a gate that never closes is none, and JSON has no infinity.
            object.__setattr__(self, "lambda_", None)
        if self.gate_rows not in PIECE_ROWS:
            sizes = ", ".join(map(str, PIECE_ROWS))
            raise OptionError(f"gate_rows must be one of {sizes}, got {self.gate_rows!r}")
        check_eight_bits(self.quantize)
        object.__setattr__(self, "tile", as_tile(self.tile))
        check_merge(self.merge)
        settle_means(self)
        check_plans(self)

    def select(self, q: Tensor, k: Tensor, site: CallSite, *, v: Tensor | None = None) -> Tensor:
        """Top-cdf with the self-similarity judge, bool ``[B, H, Tq, Tk]`` (equations 4 and 5)."""
        heads = q.shape[1]
        tau = self.number("tau", site, q.device)
        theta = self.number("theta", site, q.device)
        if isinstance(tau, Tensor):
            tau = tau[:heads, None, None]
        if isinstance(theta, Tensor):
            theta = theta[:heads, None]
        return self.choose(self.pooled(q, k), tau, theta, self.topk)

    def pooled(self, q: Tensor, k: Tensor) -> PooledScores:
        """What the first stage looks at, whatever tau and theta are."""
        return PooledScores(
            pooled_scores(q, k, self.tile),
            self_similarity(q, self.tile[0]),
            self_similarity(k, self.tile[1]),
        )

    @staticmethod
    def choose(
        pooled: PooledScores, tau: float | Tensor, theta: float | Tensor, topk: float | None = None
    ) -> Tensor:
        """The mask ``[..., B, H, Tq, Tk]`` that tau and theta select.

        Each is a number or a tensor: tau broadcasts against ``[B, H, Tq, Tk]``, theta against
        ``[B, H, T]``.
        """
        stray_q = pooled.q_similarity < theta
        stray_k = (pooled.k_similarity < theta).unsqueeze(-2)
        scores = pooled.scores.masked_fill(stray_k, -torch.inf)
        # a row whose every column is stray has no softmax; all of it is computed.
        return choose_tiles(scores, tau, topk) | stray_q.unsqueeze(-1) | stray_k

    @property
    def mask_bytes(self) -> int:
        """Least bytes that ``select`` takes for a tile of its mask."""
        return choosing_bytes(None if self.topk is not None else self.tau)

    def selection(self, q: Tensor) -> Selection:
        """``rule``: the project's kernels follow it."""
        return "rule"

    def rule(self, site: CallSite, device: torch.device) -> PooledTopP:
        """Top-cdf or top-k, with the judge of self-similarity."""
        tau, theta = (self.number(name, site, device) for name in ("tau", "theta"))
        return PooledTopP(1.0 if tau is None else tau, theta, self.topk)

    @property
    def gate_keys(self) -> int | None:
        """64 keys, or None without a lambda."""
        calibrated = self.numbers is not None and "lambda_" in self.numbers
        return None if self.lambda_ is None and not calibrated else GATE_KEYS

    @property
    def can_do_without_gate(self) -> bool:
        """True: the gate only saves time."""
        return True

    def gate(self, q: Tensor, site: CallSite, plan: SparsePlan, kv_index: Tensor) -> Gate | None:
        """Lambda of every head, where there is any (section 3.4)."""
        lambda_ = self.number("lambda_", site, q.device)
        if lambda_ is None:
            return None
        if isinstance(lambda_, Tensor):
            lambda_ = lambda_[: q.shape[1]]
        # a block of fewer rows than the gate's decides as a whole.
        rows = min(self.gate_rows, plan.block_rows)
        return RelativeGate(lambda_, rows=rows, keys=GATE_KEYS)


def _is_number(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and not math.isnan(value)  # type: ignore[arg-type]
