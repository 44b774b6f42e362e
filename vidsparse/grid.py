"""The shape of a token sequence: a video grid, and where text stands beside it."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from vidsparse.errors import OptionError


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """A sequence of ``frames * height * width`` video tokens, with ``text`` tokens beside them.

    The video part runs in T, H, W order with W fastest (as in every supported model family).
    Sizes are in tokens, after patching: a 33-frame 256x256 Wan clip is ``TokenGrid(9, 16, 16)``.

    Args:
        frames: tokens along time, at least 1.
        height: tokens along height, at least 1.
        width: tokens along width, at least 1.
        text: text tokens in the same sequence.
        text_first: text stands before the video (CogVideoX) instead of after it.
        lead: text tokens before the video, when the rest of the text stands after it.

    Raises:
        OptionError: a number is not whole; a size is below 1; ``text`` is negative; ``lead`` is not
            from 0 to ``text``, or given together with ``text_first``.
    """

    frames: int
    height: int
    width: int
    text: int = 0
    text_first: bool = False
    lead: int = 0

    def __post_init__(self) -> None:
        for name in ("frames", "height", "width", "text", "lead"):
            number = getattr(self, name)
            # attention calls make grids, too: the usual type first.
            if type(number) is not int and not isinstance(number, Integral):
                raise OptionError(
                    f"a token grid is counted in whole tokens, got {name} {number!r}. "
                    "Hint: sizes are what is left after patching, such as TokenGrid(9, 16, 16)."
                )
        if min(self.frames, self.height, self.width) < 1 or self.text < 0:
            raise OptionError(
                "a token grid needs frames, height and width of at least 1 and text of at least 0, "
                f"got {self.frames}x{self.height}x{self.width} with {self.text} text tokens"
            )
        if not 0 <= self.lead <= self.text or (self.lead and self.text_first):
            most = f"from 0 to {self.text}, the number of text tokens"
            raise OptionError(
                f"lead must be {'0 with text_first' if self.text_first else most}, "
                f"got {self.lead}. Hint: text_first alone puts all text before the video."
            )

    @property
    def video(self) -> int:
        """Number of video tokens."""
        return self.frames * self.height * self.width

    @property
    def tokens(self) -> int:
        """Number of tokens of the whole sequence."""
        return self.video + self.text

    @property
    def before(self) -> int:
        """Number of text tokens in front of the video."""
        return self.text if self.text_first else self.lead

    def video_tiles(self, size: int) -> int:
        """Number of tiles of ``size`` tokens that hold no text.

        Without any text the last of them may be short.
        """
        return self.video // size if self.text else -(-self.video // size)
