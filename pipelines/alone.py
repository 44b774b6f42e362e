"""How much each layer of a transformer errs by itself, in one forward for each of them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from vidsparse.pipelines.again import Forward
from vidsparse.pipelines.handle import SparseHandle


class LayersAlone:
    """Runs forwards again, once for each layer, and tells how much that layer errs.

    Each time one layer goes by its plan and all others are dense. From then on the runs of the
    pipeline are dense, but for refreshes, and each of the forwards that are looked at takes as many
    more as the transformer has layers.

    Args:
        handle: of a sparse pipeline, whose method says what a plan is.
        steps: whose forwards; of guidance's two branches the conditional one is enough.
        tell: called with the number of the transformer, from 0, and the mean squared error of its
            output for each layer.
    """

    def __init__(
        self, handle: SparseHandle, steps: Collection[int], tell: Callable[[int, list[float]], None]
    ) -> None:
        self._handle, self._steps, self._tell = handle, steps, tell
        self._last: Forward | None = None
        for engine in handle.engines:
            engine.only = ()
        handle.watch(self._take)

    def _take(self, forward: Forward, out: Tensor, returned: bool) -> None:
        site = forward.site
        # the first tensor that it returns is the video.
        if forward is self._last or not returned:
            return
        if site.step not in self._steps or site.branch.startswith("unconditional"):
            return
        self._last = forward
        errors = []
        for layer in range(self._handle.engines[site.part].layers):
            sparse = self._handle.outputs_with(forward, (layer,))[0]
            errors.append(float((sparse.double() - out.double()).square().mean()))
        self._tell(site.part, errors)
