"""Plans that are broken on purpose, and what is said of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from budget import Work, means_for
from torch import Tensor

from vidsparse.kernels import AbsoluteGate, RelativeGate


def damaged(work: Work, kind: str, gen: torch.Generator) -> Work:
    """``work`` with one number of one block made wrong."""
    made = replace(
        work,
        q_tiles=work.q_tiles.clone(),
        kv_count=work.kv_count.clone(),
        kv_index=work.kv_index.clone(),
    )
    b, h, g = (int(torch.randint(size, (), generator=gen)) for size in tuple(work.kv_count.shape))
    count, at = made.kv_count[b, h], made.kv_index[b, h, g]
    chunks = -(-work.tokens // work.tile[1])
    tiles = -(-work.tokens // work.tile[0])
    far = int(torch.randint(1 << 20, (), generator=gen))
    if kind == "length":
        count[g] = chunks + 1 + far
    elif kind == "negative length":
        count[g] = -1 - far
    elif kind == "number":
        count[g] = min(max(1, int(count[g])), len(at))
        at[int(count[g]) - 1] = chunks + far
    elif kind == "negative number":
        count[g] = max(1, int(count[g]))
        at[0] = -1 - far
    elif kind == "twice in a list":
        count[g] = 2
        at[:2] = int(torch.randint(chunks, (), generator=gen))
    elif kind == "falls":
        count[g] = 2
        # a list may have room for one number.
        at[:2] = torch.tensor([1, 0])[: len(at)]
    elif kind == "tile":
        made.q_tiles[b, h, g, 0] = tiles + far
    elif kind == "negative tile":
        made.q_tiles[b, h, g, 0] = -2 - far
    else:
        flat = made.q_tiles[b, h].flatten()
        real = flat[flat >= 0]
        # a fault before may have left no tile that could be named twice.
        if len(real):
            flat[(flat == real[0]).nonzero()[0]] = real[-1]
        made.q_tiles[b, h] = flat.view_as(made.q_tiles[b, h])
    return made


SAID = {
    "length": "length in kv_count is not from 0 to",
    "negative length": "length in kv_count is not from 0 to",
    "number": "chunk number in kv_index is not from 0 to",
    "negative number": "chunk number in kv_index is not from 0 to",
    "twice in a list": "do not rise",
    "falls": "do not rise",
    "tile": "tile number in q_tiles is neither from 0 to",
    "negative tile": "tile number in q_tiles is neither from 0 to",
    "twice": "is in q_tiles twice",
}


def wrecked(work: Work, kinds: Sequence[str], seed: int) -> Work:
    """``work`` with faults of these kinds, and with numbers that overflow.

    The numbers do so where they are multiplied by the size of a tile.
    """
    gen = torch.Generator().manual_seed(seed)
    work = replace(work, q_tiles=work.q_tiles.clone(), kv_index=work.kv_index.clone())
    for kind in kinds:
        work = damaged(work, kind, gen)
    for table in (work.q_tiles.view(-1), work.kv_index.view(-1)):
        table[int(torch.randint(len(table), (), generator=gen))] = 2**31 - 1 - seed % 2
        table[int(torch.randint(len(table), (), generator=gen))] = -(2**31)
    return work


def of_16_bits(work: Work) -> Work:
    """The same plan with chunk numbers of 16 bits, those out of their range at its ends."""
    low, high = -(2**15), 2**15 - 1
    return replace(work, kv_index=work.kv_index.clamp(low, high).to(torch.int16))


EXTRAS = ("", "int8", "relative", "absolute", "means")


def extra_options(extra: str, work: Work, k: Tensor, v: Tensor) -> dict[str, Any]:
    """What a call of ``sparse_attention`` with one of ``EXTRAS`` is given beside a plan."""
    if extra == "int8":
        return {"quantize": "int8"}
    if extra == "relative" or (extra == "absolute" and work.tile[0] < 32):
        return {"gate": RelativeGate(-8.0)}
    if extra == "absolute":
        gate = AbsoluteGate(torch.tensor(-2.0), rows=min(64, work.tile[0]))
        return {"gate": gate.to(k.device)}
    if extra == "means":
        return {"means": means_for(k, v, work, 128)}
    return {}
