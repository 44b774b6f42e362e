"""Videos by a model that is loaded once: what commands and their workers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vidsparse.apps.runs.prepared import PreparedPrompts
from vidsparse.apps.terminal.console import Terminal
from vidsparse.apps.terminal.progress import step_bar

if TYPE_CHECKING:
    from vidsparse.pipelines.family import Defaults
    from vidsparse.pipelines.generate import Generated
    from vidsparse.pipelines.models import LoadedPipeline
    from vidsparse.pipelines.request import GenerateRequest


class Maker:
    """Loads the model of prepared prompts and makes the videos of batches of requests.

    Args:
        terminal: shows each run's steps.
        prepared: the prompts.
        ring: where several processes make each video, as ``generate_batch`` has it.
        apart: likewise.

    Raises:
        VidsparseError: the model cannot be loaded, or is not the one of the preset.
    """

    def __init__(
        self,
        terminal: Terminal,
        prepared: PreparedPrompts,
        ring: int | None = None,
        apart: bool | None = False,
    ) -> None:
        self._terminal, self._prepared = terminal, prepared
        self._ring, self._apart = ring, apart
        self._loaded = prepared.load(terminal)
        self._stock: LoadedPipeline | None = None

    @property
    def defaults(self) -> Defaults:
        """The model's own settings."""
        return self._loaded.defaults

    def __call__(self, requests: Sequence[GenerateRequest], label: str) -> list[Generated]:
        """Make the videos of a batch; ``label`` says which, beside its steps.

        Requests whose linear layers are not those of the prepared prompts run on the model with
        its own, which is loaded when first asked for.

        Raises:
            VidsparseError: as ``generate_batch``.
        """
        from vidsparse.pipelines.generate import generate_batch

        loaded = self._loaded
        if (requests[0].linear or "none") != loaded.linear:
            if self._stock is None:
                self._stock = self._prepared.load(self._terminal, linear="none")
            loaded = self._stock
        with step_bar(self._terminal, label, loaded.compile) as progress:
            return generate_batch(
                loaded, requests, progress=progress, ring=self._ring, apart=self._apart
            )
