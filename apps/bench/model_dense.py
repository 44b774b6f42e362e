"""Stock transformer steps: the dense attention of PyTorch, cuDNN and FlashAttention-4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from vidsparse.apps.bench.model_forward import (
    Stopwatch,
    Timing,
    first_blocks,
    time_step,
    watched_attention,
)
from vidsparse.apps.bench.model_shapes import Latent, ModelShape
from vidsparse.errors import UnsupportedError

STOCK: Final = "stock"
CUDNN: Final = "cuDNN"
FA4: Final = "FlashAttention-4"

# layers that run before anything is timed.
_WARM_LAYERS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSteps:
    """Steps of a stock model, each by one dense kernel.

    Args:
        model: the transformer.
        pipe: the pipeline around it.
        shape: what it is.
        latent: its video.
        device: where it is.
        say: where notes go.
    """

    model: Any
    pipe: Any
    shape: ModelShape
    latent: Latent
    device: torch.device
    say: Callable[[str], None]

    def timings(self, run: Callable[[], list[Tensor]]) -> dict[str, Timing]:
        """One step, ``run``, by every dense kernel that there is.

        Raises:
            UnsupportedError: an output is not finite.
        """
        found = {STOCK: self._timed(STOCK, run)}
        if self.device.type != "cuda":
            return found
        found[CUDNN] = self._timed(CUDNN, run)
        try:
            found[FA4] = self._timed(FA4, run)
        except ImportError as error:
            self.say(f"  without {FA4}: not installed ({error.name or error})")
        except Exception as error:  # a foreign kernel may fail in any way it likes.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self.say(f"  without {FA4}: {reason[:160]}")
        return found

    def _timed(self, name: str, run: Callable[[], list[Tensor]]) -> Timing:
        watch = Stopwatch(self.device)
        with self.by(name, watch):
            with first_blocks(self.model, self.shape.blocks, _WARM_LAYERS):
                run()
            timing, out = time_step(run, watch, self.device)
        refuse_non_finite(out, name)
        self.say(f"  {name}: {timing.ms:.0f} ms, attention {timing.attention_ms:.0f} ms")
        return timing

    @contextmanager
    def by(self, name: str, watch: Stopwatch | None = None) -> Iterator[None]:
        """Attend by the kernel of that name.

        ``stock`` keeps the mask of a family that has one. The others have no masks: they leave
        padding out, as our adapter does.
        """
        attention = None
        if name == FA4:
            from vidsparse.apps.bench.attention_peers import flash_attention_4

            attention = flash_attention_4
        with ExitStack() as stack:
            if self.shape.masked and name != STOCK:
                from vidsparse.pipelines import sparsify

                stack.enter_context(sparsify(self.pipe, "dense", dense_kernel="stock"))
            stack.enter_context(cudnn_first(name != STOCK and self.device.type == "cuda"))
            watch = watch or Stopwatch(self.device)
            stack.enter_context(watched_attention(watch, video_tokens(self.latent), attention))
            yield


def video_tokens(latent: Latent) -> int:
    """At most as many as the video has: what tells its attention from that to text."""
    # every family cuts patches of at most 2x2 latent pixels.
    return latent.latent_frames * (latent.latent_height // 2) * (latent.latent_width // 2)


def cudnn_first(wanted: bool) -> AbstractContextManager[None]:
    """cuDNN attention wherever it can run, PyTorch's own choice where it cannot."""
    if not wanted:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)


def refuse_non_finite(out: Sequence[Tensor], name: str) -> None:
    """Raise an ``UnsupportedError`` where an output is NaN or infinite."""
    if not all(bool(x.isfinite().all()) for x in out):
        raise UnsupportedError(f"{name} gave NaN or Inf; no speed is reported for it")
