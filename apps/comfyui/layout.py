"""What the tokens of a forward are: the video's grid, and what may stand beside it.

ComfyUI hands an attention call q, k, v and a dictionary. Newer Wan models put their grid into that
dictionary; for all others it follows from the latent's shape and the model's patch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from vidsparse.grid import TokenGrid

FRAMES, TEXT_AFTER, ALL_BEFORE, NOTHING = "frames", "text after", "all before", "nothing"

BESIDE: Final[Mapping[str, str]] = {
    "WanModel": FRAMES,
    "LTXBaseModel": FRAMES,
    "LTXVModel": FRAMES,
    "HunyuanVideo": TEXT_AFTER,
    "MiniMaxH3Model": ALL_BEFORE,
}
"""What tokens beyond the latent's are, by the model's class or a base of it: further whole frames
(references, guides), text after the video, or text, conditions and sound in front of it. Models not
named here have none."""

_CONTEXTS: Final = ("c_crossattn", "txt_byt5", "clip_fea")

_NO_VIDEO: Final = "the latent is no video"


@dataclass(frozen=True, slots=True)
class ForwardLayout:
    """The tokens of one forward.

    Args:
        video: frames, height and width of the latent in tokens.
        beside: what further tokens are: one of the values of ``BESIDE``, or nothing.
        contexts: token counts of the texts and images that the video attends to.
    """

    video: tuple[int, int, int]
    beside: str
    contexts: frozenset[int] = frozenset()

    def grid(self, tokens: int, told: Sequence[int] | None = None) -> TokenGrid | str:
        """The grid of a self-attention call over ``tokens`` tokens, or why there is none.

        ``told`` is the grid that the model itself names, where it does.
        """
        frames, height, width = self.video if told is None else (int(size) for size in told)
        area = height * width
        extra = tokens - frames * area
        if extra == 0:
            return TokenGrid(frames, height, width)
        if self.beside == TEXT_AFTER and extra > 0:
            return TokenGrid(frames, height, width, text=extra)
        if self.beside == ALL_BEFORE and extra > 0:
            return TokenGrid(frames, height, width, text=extra, text_first=True)
        if self.beside == FRAMES and tokens and tokens % area == 0:
            return TokenGrid(tokens // area, height, width)
        return f"{tokens} tokens are not the video's {frames}x{height}x{width}"


def read_layout(model: Any, latent: Any, conditions: Mapping[str, Any]) -> ForwardLayout | str:
    """The layout of a forward of ``model``, or in words why there is none.

    Args:
        model: the diffusion model; its ``patch_size`` and class are looked at.
        latent: ``[B, C, T, H, W]``. Where video and audio are packed into one, their shapes are in
            the conditions.
        conditions: what else the forward is given, by name.
    """
    shapes = conditions.get("latent_shapes")
    shape = tuple(shapes[0]) if shapes else tuple(getattr(latent, "shape", ()))
    if len(shape) != 5:
        return _NO_VIDEO
    patch = _patch_size(model)
    if patch is None:
        return f"{type(model).__name__} does not say how it cuts a video into tokens"
    # ComfyUI pads what is no multiple of a patch.
    frames, height, width = (-(-int(n) // p) for n, p in zip(shape[2:], patch, strict=True))
    names = [cls.__name__ for cls in type(model).__mro__]
    beside = next((BESIDE[name] for name in names if name in BESIDE), NOTHING)
    if shapes and len(shapes) > 1 and beside == FRAMES:
        # a stretch of audio may happen to be as long as a few frames.
        beside = NOTHING
    if beside == TEXT_AFTER and conditions.get("ref_latent") is not None:
        # HunyuanVideo sets a reference in front of the video, one frame of it.
        frames += 1
    return ForwardLayout((frames, height, width), beside, frozenset(_context_tokens(conditions)))


def _patch_size(model: Any) -> tuple[int, int, int] | None:
    size = getattr(model, "patch_size", None)
    if size is None:
        size = getattr(getattr(model, "patchifier", None), "patch_size", None)
    if isinstance(size, int):
        return 1, size, size
    if isinstance(size, Sequence) and 1 < len(size) < 4:
        one, *rest = (1, *size) if len(size) == 2 else tuple(size)
        return int(one), int(rest[0]), int(rest[1])
    return None


def _context_tokens(conditions: Mapping[str, Any]) -> Iterator[int]:
    for name in _CONTEXTS:
        value = conditions.get(name)
        if isinstance(value, Tensor) and value.ndim == 3:
            yield value.shape[1]


def count_blocks(model: Any) -> int:
    """Transformer blocks of ``model``, at least 1."""
    names = ("blocks", "double_blocks", "single_blocks", "transformer_blocks", "vace_blocks")
    return max(1, sum(len(getattr(model, name, ())) for name in names))
