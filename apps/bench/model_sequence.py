"""One model after the other: one that fails does not keep the others from being measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vidsparse.apps.bench.model_settings import Setting


def measure_each(
    settings: Sequence[Setting],
    rows_of: Callable[[Setting], Iterator[Any] | None],
    take: Callable[[Any], None],
    say: Callable[[str], None],
) -> None:
    """Measure one model after the other; one that fails does not keep the others from it.

    Args:
        settings: at least one.
        rows_of: measures as it is gone through; None where nothing is missing.
        take: given each row as soon as it is there.
        say: where notes go.

    Raises:
        UnsupportedError: a model cannot run or is not right. Where there are others, their rows
            come first.
    """
    from vidsparse.errors import UnsupportedError

    failed: list[str] = []
    for setting in settings:
        rows = rows_of(setting)
        if rows is None:
            say(f"{setting.family} {setting.shape}: measured already")
            continue
        say(f"{setting.family} {setting.shape}, one step is {setting.model.step}")
        try:
            with layers_hint(setting):
                for row in rows:
                    take(row)
        except UnsupportedError as error:
            if len(settings) == 1:
                raise
            # the others are still worth having; the command fails at the end.
            failed.append(f"{setting.family}: {error}")
            say(failed[-1])
    if failed:
        raise UnsupportedError(f"{len(failed)} of {len(settings)} models failed: {failed[0]}")


@contextmanager
def layers_hint(setting: Setting) -> Iterator[None]:
    """Turn what torch says where memory is short into a sentence with a hint."""
    import torch

    from vidsparse.errors import UnsupportedError

    try:
        yield
    except torch.OutOfMemoryError as error:
        layers = setting.layers or setting.model.full_layers()
        raise UnsupportedError(
            f"{setting.family} at {setting.shape} does not fit the device: {error}. "
            f"Hint: --layers {max(1, layers // 2)}."
        ) from None
