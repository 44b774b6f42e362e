"""Other attention kernels, wrapped so that the bench can check and time whichever are installed.

A peer that is absent or cannot run a case is reported with its reason, never left out in silence.
"""

# none of these packages is a requirement, and none is typed.
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vidsparse.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from vidsparse.apps.bench.attention_cases import Tile

Call = Callable[[], "Tensor"]


@dataclass(frozen=True, slots=True)
class Peer:
    """A kernel ready to be called on the case's tensors.

    Args:
        name: as rows show it.
        call: runs it, output ``[1, H, S, D]``.
        plan: prepares its lists from the mask, where that is apart from the call.
        exact: computes in the dtype of q, so that the usual error budget holds for it.
    """

    name: str
    call: Call
    plan: Callable[[], Any] | None = None
    exact: bool = True


Offer = tuple[str, Callable[[], Peer]]


def ready(offers: Iterator[Offer]) -> tuple[list[Peer], dict[str, str]]:
    """The peers that run, each called once, and why the others do not."""
    peers, absent = [], {}
    for name, make in offers:
        try:
            peer = make()
            peer.call()
        except ImportError as error:
            absent[name] = f"not installed ({error.name or error})"
        except Exception as error:  # a foreign kernel may fail in any way it likes.
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        else:
            peers.append(peer)
    return peers, absent


def dense_offers(q: Tensor, k: Tensor, v: Tensor) -> Iterator[Offer]:
    """Dense attention over q, k, v ``[1, H, S, D]``."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if q.device.type != "cuda":
        yield "sdpa", lambda: Peer("sdpa", lambda: F.scaled_dot_product_attention(q, k, v))
        return

    def backend(name: str, which: SDPBackend) -> Offer:
        def call() -> Tensor:
            with sdpa_kernel(which):
                return F.scaled_dot_product_attention(q, k, v)

        return name, lambda: Peer(name, call)

    yield backend("cudnn", SDPBackend.CUDNN_ATTENTION)
    yield backend("flash", SDPBackend.FLASH_ATTENTION)
    yield "flash-attention-4", lambda: _flash_attention_4(q, k, v)
    yield "sageattention", lambda: _sage(q, k, v)


def first_dense(q: Tensor, k: Tensor, v: Tensor, say: Callable[[str], None]) -> Peer:
    """The first dense attention that runs on these; ``say`` gets why those before it do not.

    Raises:
        UnsupportedError: none does.
    """
    for offer in dense_offers(q, k, v):
        # one at a time: others may compile for a minute, and would not be used.
        peers, absent = ready(iter([offer]))
        if peers:
            return peers[0]
        for name, reason in absent.items():
            say(f"  without {name}: {reason}")
    raise UnsupportedError("no dense attention runs on these tensors")


def first_dense_of(
    calls: Sequence[tuple[Tensor, Tensor, Tensor]], say: Callable[[str], None]
) -> list[Peer]:
    """``first_dense`` of each of several calls of one shape; notes are made of the first alone.

    Raises:
        UnsupportedError: none runs.
    """
    return [first_dense(*one, say if not at else lambda _: None) for at, one in enumerate(calls)]


def sparse_offers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, tile: Tile) -> Iterator[Offer]:
    """Block-sparse attention over the tiles of ``mask`` ``[1, H, Tq, Tk]``."""
    if q.device.type != "cuda":
        return
    yield "flash-attention-4 block-sparse", lambda: _flash_attention_4(q, k, v, mask, tile)
    yield "flexattention", lambda: _flex(q, k, v, mask, tile)
    yield "flashinfer", lambda: _flashinfer(q, k, v, mask, tile)


def _lists(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Counts ``[..., Tq]`` and indices ``[..., Tq, Tk]``, int32, kept ones first."""
    import torch

    count = mask.sum(-1, dtype=torch.int32)
    index = mask.to(torch.uint8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count, index


def _coarse_only(tile: Tile) -> None:
    if tile != (128, 128):
        raise ValueError("works on 128x128 tiles")


def flash_attention_4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-4, dense, over q, k, v ``[B, H, S, D]`` as they lie in memory.

    Raises:
        ImportError: it is not installed.
    """
    from flash_attn.cute.interface import flash_attn_func

    answer = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)))
    out: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return out.transpose(1, 2)


def _flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, tile: Tile = (128, 128)
) -> Peer:
    import torch
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import flash_attn_func

    _coarse_only(tile)
    # its own layout, so that it pays for no copy.
    own = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    sparse = None
    if mask is not None:
        count, index = _lists(mask)
        none = torch.zeros_like(count)
        sparse = BlockSparseTensorsTorch(none, torch.zeros_like(index), count, index)

    def call() -> Tensor:
        answer = flash_attn_func(*own, block_sparse_tensors=sparse)
        out: Tensor = answer[0] if isinstance(answer, tuple) else answer
        return out.transpose(1, 2)

    return Peer("flash-attention-4" if mask is None else "flash-attention-4 block-sparse", call)


def _sage(q: Tensor, k: Tensor, v: Tensor) -> Peer:
    from sageattention import sageattn

    def call() -> Tensor:
        out: Tensor = sageattn(q, k, v, tensor_layout="HND")
        return out

    # 8-bit q.k: compared for its speed, with its own error in the row.
    return Peer("sageattention", call, exact=False)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, tile: Tile) -> Peer:
    import torch
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    _coarse_only(tile)
    compiled = torch.compile(flex_attention, dynamic=False)
    count, index = _lists(mask)
    blocks = BlockMask.from_kv_blocks(
        torch.zeros_like(count),
        torch.zeros_like(index),
        count,
        index,
        BLOCK_SIZE=tile,
        seq_lengths=(q.shape[2], k.shape[2]),
    )

    def call() -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=blocks)
        return out

    return Peer("flexattention", call)


def _flashinfer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, tile: Tile) -> Peer:
    import flashinfer
    import torch

    heads, tokens = q.shape[1:3]
    room = torch.empty(512 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(room, backend="fa3")
    listed = int(mask.sum().item()) * tile[1]
    wrapper.reset_workspace_buffer(
        room,
        wrapper._int_workspace_buffer,
        torch.empty(listed + (1 << 20), dtype=torch.int32, device=q.device),
        torch.empty(4 << 20, dtype=torch.int32, device=q.device),
    )

    def sizes(size: int) -> Tensor:
        tiles = -(-tokens // size)
        rows = torch.full((heads, tiles), size, dtype=torch.int32, device=q.device)
        rows[:, -1] -= tiles * size - tokens
        return rows

    def plan() -> None:
        wrapper.plan(
            block_mask_map=mask[0],
            block_row_sz=sizes(tile[0]),
            block_col_sz=sizes(tile[1]),
            num_qo_heads=heads,
            num_kv_heads=heads,
            head_dim=q.shape[-1],
            q_data_type=q.dtype,
        )

    plan()

    def call() -> Tensor:
        out: Tensor = wrapper.run(q[0], k[0], v[0])
        return out.unsqueeze(0)

    return Peer("flashinfer", call, plan)
