"""Keeping the host libraries' progress bars and warnings out of our own calls."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vidsparse.logs import logger


@contextmanager
def quiet_hosts() -> Iterator[None]:
    """Silence diffusers and transformers inside the block, and leave them as they were after it.

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
        for host in (diffusers_logging, transformers_logging):
            stack.callback(host.set_verbosity, host.get_verbosity())
            host.set_verbosity_error()
            if host.is_progress_bar_enabled():
                stack.callback(host.enable_progress_bar)
                host.disable_progress_bar()
        yield
