"""The library's logger: silent until the host program (or ``-v``) gives it a handler."""

from __future__ import annotations

import logging

logger = logging.getLogger("vidsparse")
logger.addHandler(logging.NullHandler())
