"""Keeping the host libraries' progress bars and warnings out of our own calls."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from vidsparse.logs import logger

# what these say when diffusers imports torchao, where it is installed: which of its own kernels do
# not load here, and that torch will drop a function that it calls.
LOUD: Final = ("torchao", "torch.utils._pytree")


def quiet_imports() -> None:
    """Silence, for the rest of the process, what the hosts say where they are imported.

    For programs of our own: a library leaves a process's loggers as they are. Processes that this
    one starts are silent as well, of what diffusers and transformers say.
    """
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
    # read when they are imported.
    for host in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{host}_VERBOSITY", "error")


@contextmanager
def quiet_hosts() -> Iterator[None]:
    """Silence diffusers, transformers and torchao inside the block, and nowhere else.

    With our own logger at debug level nothing is silenced.
    """
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in LOUD:
            loud = logging.getLogger(name)
            stack.callback(loud.setLevel, loud.level)
            loud.setLevel(logging.ERROR)
        for host in (diffusers_logging, transformers_logging):
            stack.callback(host.set_verbosity, host.get_verbosity())
            host.set_verbosity_error()
            if host.is_progress_bar_enabled():
                stack.callback(host.enable_progress_bar)
                host.disable_progress_bar()
        yield
