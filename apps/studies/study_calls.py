"""Attention calls of a study's dense runs: a few that are kept, or all of them as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from vidsparse.errors import OptionError
from vidsparse.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor

    from vidsparse.calls import RecordedCall
    from vidsparse.pipelines.models import LoadedPipeline
    from vidsparse.pipelines.request import GenerateRequest
    from vidsparse.site import CallSite

# prompts whose attention calls are kept for statistics and calibration, and how many steps of the
# sparse part they are taken from: every layer of these is 24 calls on the bundled model.
RECORDED_PROMPTS = 2
RECORDED_STEPS = 3


class StudyCalls:
    """The attention calls of dense runs of a study.

    Args:
        loaded: the study's model.
        requests: for its dense videos.
        batch: prompts that are denoised at once.
    """

    def __init__(
        self, loaded: LoadedPipeline, requests: Sequence[GenerateRequest], batch: int
    ) -> None:
        self._loaded = loaded
        self._requests = requests
        self._batch = batch

    @cached_property
    def recorded(self) -> list[RecordedCall]:
        """Attention inputs of a dense run, the same for every order; made once."""
        from vidsparse.calls import record_calls
        from vidsparse.pipelines import sparsify

        window = self._sparse_steps()
        # the middles of equal parts of the sparse steps.
        share = [(2 * part + 1) / (2 * RECORDED_STEPS) for part in range(RECORDED_STEPS)]
        chosen = {window[int(part * len(window))] for part in share}
        with (
            sparsify(self._loaded.pipe, "dense") as handle,
            record_calls(
                handle.engine,
                steps=chosen,
                layers=range(handle.engine.layers),
                rows=RECORDED_PROMPTS,
            ) as calls,
        ):
            self._denoise(self._requests[:RECORDED_PROMPTS])
        return calls

    def watch(self, see: Callable[[RecordedCall], None]) -> None:
        """Show ``see`` the calls of every second sparse step of a dense run of all prompts.

        They are as they come, both guidance branches, and none is kept.
        """
        from vidsparse.calls import RecordedCall
        from vidsparse.pipelines import sparsify

        steps = set(self._sparse_steps()[::2])

        def look(q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
            if site.step in steps:
                see(RecordedCall(q=q, k=k, v=v, site=site))

        with sparsify(self._loaded.pipe, "dense") as handle:
            for engine in handle.engines:
                engine.observer = look
            for start in range(0, len(self._requests), self._batch):
                self._denoise(self._requests[start : start + self._batch])

    def _sparse_steps(self) -> range:
        first = self._requests[0]
        assert first.steps is not None
        assert first.dense_steps is not None
        window = Schedule(dense_steps=first.dense_steps).sparse_window(first.steps)
        if not window:
            raise OptionError(
                f"all {first.steps} steps are dense with dense_steps={first.dense_steps}, "
                "so there is no sparse call to look at. Hint: more --steps."
            )
        return window

    def _denoise(self, requests: Sequence[GenerateRequest]) -> None:
        """Run the pipeline as it is on ``requests`` at once; decoding is left out."""
        import torch

        from vidsparse.pipelines.quiet import quiet_hosts

        first = requests[0]
        with quiet_hosts():
            self._loaded.pipe(
                prompt=[request.prompt for request in requests],
                negative_prompt=[request.negative_prompt for request in requests],
                num_frames=first.frames,
                width=first.width,
                height=first.height,
                num_inference_steps=first.steps,
                guidance_scale=first.guidance,
                generator=[torch.Generator().manual_seed(one.seed) for one in requests],
                output_type="latent",
            )
