"""Long runs in one process: memory, threads and open files stay flat, and bytes the same."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_runs import Commands, form
from tiny_pipelines import latents_of, tiny_wan

from vidsparse import sparsify
from vidsparse.methods import METHODS, SparseMethod
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.models import LoadedPipeline, load
from vidsparse.pipelines.request import GenerateRequest

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

GENERATIONS = form(short=30, long=300)
CYCLES = form(short=60, long=500)
GROWTH = 1.05
PLAIN = [
    name
    for name, method in METHODS.items()
    if issubclass(method, SparseMethod) and not method.needs_numbers
]


def a_request(method: str = "fg-attn", seed: int = 0) -> GenerateRequest:
    return GenerateRequest(
        prompt="a red circle", method=method, frames=9, width=64, height=64, steps=2,
        guidance=3.0, dense_steps=0, device="cpu", seed=seed,
    )  # fmt: skip


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> LoadedPipeline:
    return load(tiny_model, device="cpu")


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def handles() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def stays_flat(
    work: Callable[[int], object], times: int, told: Callable[[str, object], None]
) -> None:
    """Do it so often; from a third of the way on nothing may grow."""
    for number in range(times // 3):
        work(number)
    memory, held = resident(), handles()
    for number in range(times // 3, times):
        work(number)
    after = resident()
    told("megabytes", f"{memory / 2**20:.0f} to {after / 2**20:.0f}")
    assert handles() == held
    assert after <= memory * GROWTH, f"{memory:,} bytes became {after:,}"


def test_generations_one_after_the_other_keep_nothing(
    loaded: LoadedPipeline, record_property: Callable[[str, object], None]
) -> None:
    def one(number: int) -> None:
        generate(loaded, a_request(PLAIN[number % len(PLAIN)], seed=number))

    stays_flat(one, GENERATIONS, record_property)


def test_pipelines_made_sparse_and_stock_again_keep_nothing(
    record_property: Callable[[str, object], None],
) -> None:
    pipe = tiny_wan()
    processors = dict(pipe.transformer.attn_processors)
    before = latents_of(pipe)

    def one(number: int) -> None:
        handle = sparsify(pipe, PLAIN[number % len(PLAIN)], dense_steps=0)
        if number % 10 == 0:
            latents_of(pipe, num_inference_steps=2)
        handle.remove()

    stays_flat(one, CYCLES, record_property)
    assert all(each is processors[name] for name, each in pipe.transformer.attn_processors.items())
    assert latents_of(pipe).equal(before)


def test_two_pipelines_in_two_threads_make_what_each_makes_alone(tiny_model: Path) -> None:
    pipelines = [load(tiny_model, device="cpu") for _ in range(2)]
    requests = [a_request(PLAIN[0], seed=1), a_request(PLAIN[-1], seed=2)]
    alone = [generate(*each).frames for each in zip(pipelines, requests, strict=True)]
    wrong: list[int] = []

    def work(place: int) -> None:
        for number in range(form(short=4, long=50)):
            made = generate(pipelines[place], requests[place]).frames
            if not (made == alone[place]).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("method", ["dense", *PLAIN])
def test_the_same_seed_gives_the_same_bytes_in_a_process_again(
    method: str, loaded: LoadedPipeline
) -> None:
    # in between another run, which leaves plans, caches and random numbers behind.
    first = generate(loaded, a_request(method)).frames
    generate(loaded, a_request(PLAIN[0], seed=7))
    assert (generate(loaded, a_request(method)).frames == first).all()
    assert (generate(loaded, a_request(method, seed=1)).frames != first).any()


def test_the_same_seed_gives_the_same_bytes_in_another_process(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text("a red circle\n", encoding="utf-8")
    commands = Commands(tmp_path)
    for method in PLAIN[: form(short=1, long=len(PLAIN))]:
        hashes = set()
        for turn in range(2):
            ended = commands.run(
                (
                    "generate", "one.txt", "--model", str(tiny_model), "--method", method,
                    "--frames", "9", "--size", "64x64", "--steps", "2", "--device", "cpu", "--out",
                    f"{method}-{turn}",
                )
            )  # fmt: skip
            assert ended.status == 0, ended.said
            (video,) = tmp_path.glob(f"{method}-{turn}/*/*.mp4")
            hashes.add(hashlib.sha256(video.read_bytes()).hexdigest())
        assert len(hashes) == 1
