"""How much each layer of a transformer errs by itself, in one forward for each of them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from vidsparse.pipelines.again import Forward
from vidsparse.pipelines.handle import SparseHandle


class LayersAlone:
    """Runs forwards again, each layer once the only one to go by its plan, and tells its error.

    From then on the runs of the pipeline are dense, but for refreshes, and each of these forwards
    takes as many more as the transformer has layers.

    Args:
        handle: of a sparse pipeline, whose method says what a plan is.
        steps: whose forwards; of guidance's two branches the conditional one is enough.
        tell: told which transformer it was, and the mean squared error of what it gives back by
            layer.
    """

    def __init__(
        self, handle: SparseHandle, steps: Collection[int], tell: Callable[[int, list[float]], None]
    ) -> None:
        self._handle, self._steps, self._tell = handle, steps, tell
        self._last: Forward | None = None
        for engine in handle.engines:
            engine.only = ()
        handle.watch(self._take)

    def _take(self, forward: Forward, out: Tensor, given_back: bool) -> None:
        site = forward.site
        # the first that it gives back is the video.
        if forward is self._last or not given_back:
            return
        if site.step not in self._steps or site.branch.startswith("unconditional"):
            return
        self._last = forward
        errors = []
        for layer in range(self._handle.engines[site.part].layers):
            sparse = self._handle.outputs_with(forward, (layer,))[0]
            errors.append(float((sparse.double() - out.double()).square().mean()))
        self._tell(site.part, errors)
