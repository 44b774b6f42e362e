"""Nothing is looked up or connected to where no model is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.slow]

# an audit hook hears every attempt, of any library, before it is made, and cannot be taken off.
WATCHED = """
import sys
def hear(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        # a pair of sockets inside the machine is no network.
        if not (event == "socket.connect" and isinstance(args[1], (str, bytes))):
            print("NETWORK", event, args, file=sys.stderr, flush=True)
sys.addaudithook(hear)
"""
USES = {
    "imports": "import vidsparse, vidsparse.kernels, vidsparse.pipelines.generate\n"
    "import vidsparse.pipelines.models, vidsparse.apps.cli, diffusers\n"
    "from diffusers import WanPipeline",
    "doctor": "from vidsparse.apps.cli import main\nmain(['doctor'])",
    "a bundled model": "from vidsparse.pipelines.models import load\nload('shapes', device='cpu')",
}


def said(code: str, folder: Path) -> str:
    """What a fresh process says on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED + code], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("use", USES)
def test_no_network_is_touched(use: str, tmp_path: Path) -> None:
    assert "NETWORK" not in said(USES[use], tmp_path)


def test_an_attempt_would_be_heard(tmp_path: Path) -> None:
    code = "import socket\ntry: socket.create_connection(('127.0.0.1', 9), 1)\nexcept OSError: pass"
    assert "NETWORK socket.connect" in said(code, tmp_path)
