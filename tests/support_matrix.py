"""What is tested together with what, and the page that says so.

``test_combinations.py`` (for ``--cache`` ``test_caching.py`` and ``test_guidance_cache.py``) runs
every cell of this table: what is not in ``LIMITS`` must work beside sparse attention, and what is
must fail just as the reason says. So the page is as true as the tests. Write it anew after a change
with

    python tests/support_matrix.py docs/support.md
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vidsparse.markdown import markdown_table
from vidsparse.pipelines.families import FAMILIES

VARIANTS: Final = {
    "Wan": "wan",
    "SkyReels-V2": "skyreels-v2",
    "AnyFlow": "anyflow",
    "HunyuanVideo": "hunyuan",
    "HunyuanVideo 1.5": "hunyuan15",
    "Helios": "helios",
    "CogVideoX": "cogvideox",
    "Mochi": "mochi",
    "Allegro": "allegro",
    "EasyAnimate": "easyanimate",
    "LTX-Video": "ltx",
    "LTX-2": "ltx2",
    "Cosmos": "cosmos2.5",
    "Cosmos 3": "cosmos3",
    "Kandinsky 5": "kandinsky5",
    "Kandinsky 6": "kandinsky6",
    "Motif-Video": "motif",
    "MiniMax-H3": "minimax",
}
"""The variant of each family that combinations are tried on, by the family's name."""

COMBINATIONS: Final = {
    "compile": "`torch.compile(pipe.transformer, fullgraph=True)`",
    "compile-blocks": "regional compilation, `fullgraph=True` (`--compile`)",
    "lora": "LoRA: load, scale, fuse, unload",
    "layerwise-casting": "`enable_layerwise_casting` with fp8 weights",
    "torchao": "torchao int8 weights",
    "linear": "`--linear int8`",
    "linear-offload": "the same with group offload, by block and by leaf, and model offload",
    "linear-compile": "the same with regional compilation",
    "linear-bf16": "`--linear bf16`, on a CPU in fp32",
    "linear-bf16-compile": "the same with regional compilation",
    "group-offload": "`enable_group_offload`, by block and by leaf",
    "model-offload": "model offload (accelerate's hooks)",
    "vae-tiling": "VAE tiling",
    "first-block": "`--cache first-block`",
    "taylorseer": "`--cache taylorseer`",
    "guidance": "`--cache guidance`",
    "first-block-cache": "`FirstBlockCacheConfig`",
    "mag-cache": "`MagCacheConfig`",
    "fuse-qkv": "`fuse_qkv_projections`, before and after",
    "save": "`save_pretrained` while sparse: a clean model",
    "context-parallel": "diffusers' `enable_parallelism`, by Ulysses or ring",
    "parallelize": "several processes, `SparseHandle.parallelize`",
}
"""What is combined with sparse attention."""


@dataclass(frozen=True)
class Limit:
    """Why a combination does not work.

    Args:
        reason: as the page prints it.
        error: matches what is raised.
        host: diffusers itself cannot do it, with or without sparse attention.
    """

    reason: str
    error: str
    host: bool = True


_NO_WHOLE_GRAPH: Final = Limit(
    "diffusers' own forward branches on data here; compile its blocks instead",
    "Data-dependent branching",
)
_NO_BLOCKS: Final = Limit("diffusers' step caches do not know these blocks", "not registered")
_OTHER_NAMES: Final = Limit(
    "diffusers' own cache looks for an argument that these blocks name otherwise",
    "hidden_states",
)
_NO_CACHE: Final = Limit(
    "refused: diffusers' cache does not know these blocks",
    "does not know the blocks",
    host=False,
)
_ONE_FORWARD: Final = Limit(
    "refused: a step with guidance is one forward, or parts of the video have their own",
    "does not run its unconditional branch in a forward of its own",
    host=False,
)
_NOT_OFFERED: Final = Limit("diffusers does not offer it here", "has no attribute")
_CROSS_TEXT: Final = Limit(
    "diffusers' own fusing fails on cross-attention to text", "has no attribute 'use_bias'"
)
_CROSS_WIDTHS: Final = Limit(
    "diffusers' own fusing fails on cross-attention between video and audio",
    "Sizes of tensors must match",
)
_OTHER_PROJECTIONS: Final = Limit(
    "diffusers' own fusing looks for projections that are named otherwise here",
    "has no attribute 'to_q'",
)
_NO_SIGNATURE: Final = Limit(
    "diffusers' own loop asks the wrapper for the transformer's parameters; compile it in place, "
    "`pipe.transformer.compile(fullgraph=True)`, or its blocks",
    # of torch 2.13, and of others.
    "failed to bind arguments|[Mm]issing required positional argument",
)
_PARALLEL: Final = Limit(
    "refused: `SparseHandle.parallelize` has the plan that is right here",
    "context parallelism",
    host=False,
)

_CACHES: Final = ("first-block-cache", "mag-cache")
_UNKNOWN: Final = ("helios", "cosmos3", "kandinsky6")
_TOGETHER: Final = (
    *("anyflow", "cogvideox", "mochi", "allegro", "easyanimate", "ltx", "ltx2", "minimax"),
)
_WITHOUT_CACHE: Final = ("anyflow", "allegro", "easyanimate", "cosmos2.5", "kandinsky5")


LIMITS: Final[dict[tuple[str, str], Limit]] = {
    ("compile", "hunyuan15"): _NO_WHOLE_GRAPH,
    ("compile", "minimax"): _NO_SIGNATURE,
    ("first-block", "skyreels-v2"): _NO_CACHE,
    ("first-block", "hunyuan15"): _NO_CACHE,
    ("first-block", "ltx2"): _NO_CACHE,
    ("first-block", "minimax"): _NO_CACHE,
    ("first-block-cache", "hunyuan15"): _NO_BLOCKS,
    ("first-block-cache", "ltx2"): _NO_BLOCKS,
    ("first-block-cache", "minimax"): _NO_BLOCKS,
    ("mag-cache", "hunyuan15"): _NO_BLOCKS,
    ("mag-cache", "ltx2"): _NO_BLOCKS,
    ("mag-cache", "minimax"): _NO_BLOCKS,
    ("first-block-cache", "skyreels-v2"): _NO_BLOCKS,
    ("mag-cache", "skyreels-v2"): _NO_BLOCKS,
    **{("first-block", one): _NO_CACHE for one in (*_WITHOUT_CACHE, *_UNKNOWN)},
    **{
        (cache, one): _NO_BLOCKS for cache in _CACHES for one in ("allegro", "helios", "kandinsky6")
    },
    **{
        (cache, one): _NOT_OFFERED
        for cache in _CACHES
        for one in ("anyflow", "easyanimate", "cosmos2.5")
    },
    ("first-block-cache", "kandinsky5"): _OTHER_NAMES,
    **{(cache, "cosmos3"): _OTHER_NAMES for cache in _CACHES},
    **{("guidance", one): _ONE_FORWARD for one in _TOGETHER},
    **{("lora", one): _NOT_OFFERED for one in ("allegro", "easyanimate")},
    **{("fuse-qkv", one): _NOT_OFFERED for one in _WITHOUT_CACHE},
    ("fuse-qkv", "mochi"): _NOT_OFFERED,
    ("fuse-qkv", "ltx2"): _CROSS_WIDTHS,
    ("fuse-qkv", "kandinsky6"): _OTHER_PROJECTIONS,
    ("fuse-qkv", "motif"): _CROSS_TEXT,
    # what runs on several processes: test_parallel.py.
    **{("context-parallel", one): _PARALLEL for one in VARIANTS.values() if one != "wan"},
}
"""Cells that do not work."""


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


VERSIONS: Final = (
    ("torch", "2.10", "2.9 brings Triton 3.5, and the kernels want 3.6"),
    ("diffusers", "0.42", "0.41 has no Kandinsky 6; 0.40 fails in most step caches"),
    ("transformers", "5.10.1", "LTX-2 cannot be imported with older ones"),
    ("gradio (`ui`)", "6.31", "the page was made with it"),
)


def page() -> str:
    """The page, in Markdown."""
    lines = [
        "# What works together",
        "",
        "Written by `tests/support_matrix.py` from the table that `tests/test_combinations.py` and",
        "`tests/test_families.py` run, on tiny random pipelines on a CPU. Do not edit by hand.",
        "",
        "## Pipelines",
        "",
        markdown_table(
            ("family", "`vidsparse generate`", "`sparsify` takes as well"),
            (
                (
                    family.name,
                    _code(*family.text_to_video, *family.image_to_video),
                    _code(*family.other),
                )
                for family in FAMILIES
            ),
        ),
        "",
        "Any other pipeline is refused, and the error names these. For every family: batches of",
        "prompts of different lengths, guidance on and off, sizes whose token grid has odd sides,",
        "and a second run. A full mask is held to twice the stock transformer's rounding error,",
        "and removal must restore every processor object and every bit of the video. MiniMax-H3",
        "takes one prompt a call and has no guidance, so its transformer alone runs in batches;",
        "`tests/test_modular.py` runs the other families' modular pipelines.",
        "",
        "## Versions",
        "",
        "Python 3.11 to 3.13. `.ci/versions` runs the tests that reach into the hosts with the",
        "oldest, the pinned and the newest of them; what came out is in",
        "[reliability](reliability.md#versions).",
        "",
        markdown_table(("host", "oldest", "why not older"), VERSIONS),
        "",
        "`sparsify`, step caches and their removal may come before compilation or after it. Under",
        "Python 3.13.0 alone, torch 2.10 and 2.11 do not see by themselves that anything was set",
        "on a module they have compiled; what vidsparse sets is shown to them. diffusers' own",
        "changes are not: with such a pair, call `enable_cache` and the like before compiling, or",
        "take Python 3.13.1. Code that looks at no module at all (`skip_all_guards_unsafe`,",
        "blocks that were captured or exported before) cannot be shown anything: the first",
        "forward whose attention calls do not arrive is an error that says how to go on.",
        "",
        "## Combinations",
        "",
    ]
    notes: list[str] = []
    rows = []
    for combination, label in COMBINATIONS.items():
        cells = []
        for variant in VARIANTS.values():
            limit = LIMITS.get((combination, variant))
            if limit is None:
                cells.append("yes")
                continue
            if limit.reason not in notes:
                notes.append(limit.reason)
            cells.append(f"no ({notes.index(limit.reason) + 1})")
        rows.append((label, *cells))
    lines += [markdown_table(("", *VARIANTS), rows), ""]
    lines += [f"{place}. {note}." for place, note in enumerate(notes, 1)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
