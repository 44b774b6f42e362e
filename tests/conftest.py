"""How the tests share a machine, and the fixtures that many of them use."""

from __future__ import annotations

import gc
import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# what stands in helpers is asserted for tests, and says as much where it fails.
HELPERS = (file.stem for file in Path(__file__).parent.glob("*.py"))
pytest.register_assert_rewrite(*(name for name in HELPERS if not name.startswith("test_")))

# a busy machine is no failure of a test.
settings.register_profile("vidsparse", deadline=None)
settings.load_profile("vidsparse")

# what one worker of pytest-xdist takes in memory is a gigabyte, and more of them than this wait for
# the longest tests.
MOST_WORKERS = 4


def pytest_configure(config: pytest.Config) -> None:
    """Share out the cores, spare Python work, and choose how this process runs Triton's kernels."""
    if config.getoption("numprocesses", None):
        # the workers do all this for themselves.
        return
    # half a million objects of the libraries are looked through at every full collection, and
    # building pipelines sets off many of them: an eighth of the time.
    gc.set_threshold(10_000, 20, 20)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        # inherited by the programs that tests start.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    import torch

    if not torch.cuda.is_available():
        # Triton looks once, when a kernel is defined.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        from interpreter import make_quick, pause_tracing

        make_quick()
        pause_tracing()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means: the processor's threads, for a core's two are worth two workers."""
    return min(MOST_WORKERS, os.cpu_count() or 1)


def pytest_collection_finish() -> None:
    """Leave out of Python's garbage collections what stays until the end: all that is imported."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mix the files that wait for others among those that compute, and skip what needs a GPU."""
    import torch

    items[:] = _mixed(items, float(config.getini("timeout")))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def _mixed(items: list[pytest.Item], usual: float) -> list[pytest.Item]:
    """Every third file, from the first on, is one whose tests may take longer than is usual.

    These start browsers, compilers and other processes: they wait for them while others compute,
    or take more cores than their own where many run at once, and are long enough to hold up the
    end.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kinds: dict[bool, list[list[pytest.Item]]] = {True: [], False: []}
    for tests in files.values():
        marks = [test.get_closest_marker("timeout") for test in tests]
        kinds[any(mark is not None and mark.args[0] > usual for mark in marks)].append(tests)
    patient, others = kinds[True], kinds[False]
    for place, tests in enumerate(patient):
        others.insert(3 * place, tests)
    return [test for tests in others for test in tests]


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised float memory holds NaN, so that an output nobody wrote shows."""
    import torch

    def poisoned(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            fresh = allocate(*args, **kwargs)
            return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

        return call

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch on one thread: the tensors of these tests are too small for two."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection fails."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was asked for something")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that was compiled before is known, nor after."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def ffmpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in ffmpeg's place, in which ``$FFMPEG`` is the real one."""
    import imageio_ffmpeg

    if os.name != "posix":
        pytest.skip("needs a POSIX shell: a script stands before ffmpeg")
    monkeypatch.setenv("FFMPEG", imageio_ffmpeg.get_ffmpeg_exe())

    def replace(script: str) -> None:
        file = tmp_path / "ffmpeg"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(file))

    return replace


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny pipeline, for tests that read it."""
    from tiny_pipelines import save_tiny_wan

    return save_tiny_wan(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline whose linear layers are as wide as 8 bits take."""
    from tiny_pipelines import tiny_transformer, tiny_wan

    pipe = tiny_wan()
    pipe.register_modules(
        transformer=tiny_transformer(
            layers=3, num_attention_heads=4, attention_head_dim=64, ffn_dim=256
        )
    )
    folder = tmp_path_factory.mktemp("model") / "wide"
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture
def bf16_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is said to multiply bf16 faster than fp32; any can do it."""
    monkeypatch.setattr("vidsparse.pipelines.placement.has_bf16_products", lambda: True)


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is said to have no such products."""
    monkeypatch.setattr("vidsparse.pipelines.placement.has_bf16_products", lambda: False)


@pytest.fixture(params=["triton", "gluon"])
def kernel(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A kernel of attention that this GPU can run."""
    from kernel_cases import skip_without

    from vidsparse.kernels.dispatch import _KNOWN

    skip_without(request.param)
    return _KNOWN[request.param].load()
