"""Processes of one job as torchrun starts them, but forked, so that one import serves them all."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
from collections.abc import Callable


def fork_ranks(count: int, take_part: Callable[[int], object]) -> list[int]:
    """Have ``count`` processes, told by torchrun's variables which they are, call ``take_part``.

    Returns their exit codes.
    """
    sys.stdout.flush()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            # where a library aborts, every thread says where it was.
            faulthandler.enable()
            code = 1
            try:
                take_part(rank)
                code = 0
            except SystemExit as left:
                code = left.code if isinstance(left.code, int) else 1
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
