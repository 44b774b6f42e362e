"""The command that serves the page: logins and bad settings."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from vidsparse.apps.cli import main


@pytest.mark.parametrize("flag", ["--share", "--listen"])
def test_others_are_let_in_with_a_password_only(flag: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["ui", flag, "--out", str(tmp_path / "o")])
    assert done.exit_code == 2
    assert f"{flag} lets others run jobs" in done.stderr
    assert "Hint: add --auth USER:PASSWORD" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("auth", ["anna", ":secret", "anna:", ""])
def test_a_login_needs_both_its_parts(auth: str, tmp_path: Path) -> None:
    options = ["ui", "--listen", "--out", str(tmp_path / "o")]
    done = CliRunner().invoke(main, options, env={"VIDSPARSE_AUTH": auth})
    assert done.exit_code == 2
    assert "needs a password" in done.stderr or "must be USER:PASSWORD" in done.stderr
    done = CliRunner().invoke(main, [*options, "--auth", auth])
    assert done.exit_code == 2


def test_a_password_may_hold_colons() -> None:
    from vidsparse.apps.page.start import check_login

    assert check_login("anna:a:b", listen=True, share=False) == ("anna", "a:b")
    assert check_login(" anna :a b ", listen=True, share=False) == ("anna", "a b ")
    assert check_login(None, listen=False, share=False) is None


def test_without_gradio_the_extra_is_named(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = CliRunner().invoke(main, ["ui", "--out", str(tmp_path / "o")])
    assert done.exit_code == 2
    assert "pip install 'vidsparse[ui]'" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--allow-host", "http://box:7860"], "--allow-host cannot be 'http://box:7860'"),
        (["--port", "99999"], "--port must lie between 1 and 65535, got 99999"),
        (["--port", "0"], "--port must lie between 1 and 65535, got 0"),
        (["--port", "9" * 30], "--port must lie between 1 and 65535"),
        (["--auth", " : "], "--auth must be USER:PASSWORD"),
        (["--auth", "anna: "], "--auth must be USER:PASSWORD"),
        (["--model", ""], "--model is empty"),
        (["--model", "shapes", "--model", "  "], "--model is empty"),
        (["--allow-host", ""], "--allow-host cannot be ''"),
        (["--max-steps", "0"], "limit of steps"),
        (["--model", "no-such-model"], "there is no model"),
        (["--device", "tpu"], "unknown device"),
        (["--dtype", "fp16", "--device", "cpu"], "fp16 does not run on the CPU"),
    ],
)
def test_bad_settings_of_the_host_are_found_at_once(
    options: list[str], words: str, tmp_path: Path
) -> None:
    pytest.importorskip("gradio")
    done = CliRunner().invoke(main, ["ui", "--out", str(tmp_path / "o"), *options])
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("options", [[], ["--listen", "--auth", "anna:secret"]])
def test_a_port_in_use_is_said_before_anything_is_loaded(
    options: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("gradio")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = ["ui", "--port", str(port), "--out", str(tmp_path / "o"), *options]
        done = CliRunner().invoke(main, command)
    assert done.exit_code == 2
    assert f"port {port} cannot be used: address already in use. Hint: give another" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals of POSIX")
def test_the_command_serves_from_its_own_start_until_it_is_ended(tmp_path: Path) -> None:
    # other tests fork their pages from a process that has imported everything.
    pytest.importorskip("gradio")
    from page_server import free_port

    command = [sys.executable, "-m", "vidsparse", "ui", "--port", str(free_port())]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "o")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            page = httpx.get(process.stdout.readline().split()[1])
        finally:
            process.send_signal(signal.SIGTERM)
    assert page.status_code == 200
    assert process.returncode == 0
