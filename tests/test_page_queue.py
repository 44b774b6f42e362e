"""The page's queue: order, devices, cancelling, progress."""

from __future__ import annotations

import asyncio
import time
import weakref
from typing import Any

import pytest
from page_jobs import Bench, Gate, queue_of, wait

from vidsparse.apps.page import draw
from vidsparse.apps.page.queue import Cancelled, Job, JobQueue, QueueFullError, Snapshot
from vidsparse.errors import OptionError, UnsupportedError

PATIENCE = 20


def test_jobs_of_one_device_run_one_at_a_time_and_in_order() -> None:
    queue, running, order = queue_of(), [], []

    def work(number: int) -> Any:
        def run(bench: str, job: Job[Any, Any]) -> int:
            running.append(number)
            assert len(running) == 1
            time.sleep(0.005)
            running.remove(number)
            order.append(number)
            return number

        return run

    jobs = [queue.submit(Job(work(number))) for number in range(6)]
    assert [wait(job).state for job in jobs] == ["done"] * 6
    assert order == [0, 1, 2, 3, 4, 5]
    assert [job.result for job in jobs] == order
    queue.close()


def test_every_device_works_at_the_same_time() -> None:
    queue = queue_of(devices=2)
    gates = [Gate(), Gate()]
    jobs = [queue.submit(Job(gate)) for gate in gates]
    assert all(gate.began.wait(PATIENCE) for gate in gates)
    for gate in gates:
        gate.open.set()
    for job in jobs:
        wait(job)
    assert {job.result for job in jobs} == {"by bench 0", "by bench 1"}
    queue.close()


def test_a_cancelled_job_frees_its_device_and_those_behind_move_up() -> None:
    queue = queue_of()
    first, second, third = Gate(), Gate(), Gate()
    running, waiting, last = (queue.submit(Job(gate)) for gate in (first, second, third))
    assert first.began.wait(PATIENCE)
    assert (waiting.snapshot().ahead, last.snapshot().ahead) == (1, 2)
    waiting.cancel()
    assert waiting.snapshot().state == "cancelled"
    queue.forget_cancelled()
    assert last.snapshot().ahead == 1
    running.cancel()
    assert wait(running).state == "cancelled"
    assert third.began.wait(PATIENCE)
    third.open.set()
    assert wait(last).state == "done"
    assert not second.began.is_set()
    queue.close()


def test_a_failed_job_keeps_its_error_and_the_next_one_runs(caplog: Any) -> None:
    def fail(bench: str, job: Job[Any, Any]) -> None:
        raise OptionError("no such thing")

    queue = queue_of()
    failed, fine = queue.submit(Job(fail)), queue.submit(Job(lambda bench, job: 7))
    assert wait(failed).state == "failed"
    assert str(failed.error) == "no such thing"
    assert (wait(fine).state, fine.result) == ("done", 7)
    # a visitor's mistake is nothing for the host's log.
    assert not caplog.records
    queue.close()


def test_a_failed_job_s_error_holds_nothing_of_what_it_had_in_hand() -> None:
    class Latents:
        pass

    held: list[weakref.ref[Latents]] = []
    freed: list[bool] = []

    class Device(Bench):
        def free(self) -> None:
            freed.append(held[-1]() is None)
            raise RuntimeError("the device has failed for good")

    def fail(bench: str, job: Job[Any, Any]) -> None:
        latents = Latents()
        held.append(weakref.ref(latents))
        try:
            try:
                raise MemoryError
            except MemoryError:
                raise RuntimeError("bad_alloc") from KeyError("of another one")
        except RuntimeError:
            raise UnsupportedError("too small") from None

    queue = JobQueue([("cpu", Device())], waiting=4)
    failed = queue.submit(Job(fail))
    assert wait(failed).state == "failed"
    # its visitor reads why, and the device goes on even where nothing can be given back.
    assert str(failed.error) == "too small"
    assert freed == [True]
    assert wait(queue.submit(Job(lambda bench, job: 7))).state == "done"
    queue.close()


def test_no_more_jobs_wait_than_the_host_allows() -> None:
    queue, gate = queue_of(waiting=2), Gate()
    running = queue.submit(Job(gate))
    assert gate.began.wait(PATIENCE)
    waiting = [queue.submit(Job(gate)) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 jobs are waiting"):
        queue.submit(Job(gate))
    # a cancelled one gives its place away.
    waiting[0].cancel()
    queue.submit(Job(gate))
    gate.open.set()
    assert wait(running).state == "done"
    queue.close()


def test_nobody_has_more_than_a_share_of_the_places() -> None:
    queue, gate = queue_of(waiting=8), Gate()
    one, other = {"visit one": 1 / 4}, {"visit two": 1 / 4, "address a": 1 / 2}
    running = queue.submit(Job(gate), one)
    assert gate.began.wait(PATIENCE)
    mine = queue.submit(Job(gate), one)
    with pytest.raises(QueueFullError, match="2 jobs of yours are waiting or running already"):
        queue.submit(Job(gate), one)
    # others have theirs, and new visits of one address have one together.
    for number in range(4):
        queue.submit(Job(gate), {**other, f"visit {number}": 1 / 4, "visit two": 1})
    with pytest.raises(QueueFullError, match="4 jobs of yours"):
        queue.submit(Job(gate), {"visit new": 1 / 4, "address a": 1 / 2})
    mine.cancel()
    queue.submit(Job(gate), one)
    # a share is one job at least.
    gate.open.set()
    assert wait(running).state == "done"
    queue.close()
    small = queue_of(waiting=1)
    assert wait(small.submit(Job(gate), one)).state == "done"
    small.close()


def test_closing_cancels_what_runs_and_what_waits() -> None:
    queue, gate = queue_of(), Gate()
    jobs = [queue.submit(Job(gate)) for _ in range(3)]
    assert gate.began.wait(PATIENCE)
    queue.close()
    assert [job.snapshot().state for job in jobs] == ["cancelled"] * 3
    with pytest.raises(QueueFullError):
        queue.submit(Job(gate))


def test_followers_see_every_stage_and_the_end_at_once() -> None:
    gate, queue = Gate(), queue_of()

    def work(bench: str, job: Job[Any, Any]) -> str:
        job.begin_part("dense")
        for step in range(1, 4):
            job.advance(step, 4, 0.5)
        gate(bench, job)
        job.advance(4, 4, 0.5)
        return "made"

    job: Job[Any, Any] = Job(work, parts=2)

    async def follow() -> list[Snapshot]:
        seen = []
        async for snapshot in job.follow():
            seen.append(snapshot)
            if snapshot.step == 3:
                gate.open.set()
        return seen

    async def both() -> list[Snapshot]:
        following = asyncio.ensure_future(follow())
        await asyncio.sleep(0)
        queue.submit(job)
        return await asyncio.wait_for(following, PATIENCE)

    seen = asyncio.run(both())
    assert seen[0].state == "waiting"
    assert seen[-1].state == "done"
    assert [s.finished for s in seen].count(True) == 1
    (third,) = [s for s in seen if s.step == 3 and s.state == "running"][:1]
    # 3 of 8 steps of two videos, half a second each.
    assert (third.done, third.left, third.phase) == (3 / 8, 2.5, "dense")
    queue.close()


def test_the_time_left_counts_what_follows_the_steps() -> None:
    seen = []

    def work(bench: str, job: Job[Any, Any]) -> None:
        job.expect_after_steps(3.0)
        for _ in range(2):
            job.begin_part("a video")
            job.advance(1, 2, 1.0)
            seen.append(job.snapshot().left)

    queue = queue_of()
    wait(queue.submit(Job(work, parts=2)))
    assert seen == [3 * 1.0 + 2 * 3.0, 1 * 1.0 + 1 * 3.0]
    queue.close()


def test_a_video_that_begins_is_expected_to_take_as_many_steps_as_the_one_before() -> None:
    seen: list[tuple[float, float | None]] = []

    def work(bench: str, job: Job[Any, Any]) -> None:
        job.expect_after_steps(3.0)
        for video in ("dense", "sparse"):
            job.begin_part(video)
            seen.append((job.snapshot().done, job.snapshot().left))
            for step in (1, 2):
                job.advance(step, 2, 10.0)
        job.begin_part("one more than it was said to make")
        seen.append((job.snapshot().done, job.snapshot().left))

    queue = queue_of()
    wait(queue.submit(Job(work, parts=2)))
    assert seen == [(0.0, None), (1 / 2, 2 * 10.0 + 3.0), (2 / 3, 2 * 10.0 + 3.0)]
    queue.close()


def test_what_readies_a_device_is_said_and_not_counted_as_somebody_s_job() -> None:
    queue, gate, mine = queue_of(), Gate(), Gate()
    loader = queue.submit(Job(gate, readies=True))
    assert gate.began.wait(PATIENCE)
    first, second = queue.submit(Job(mine)), queue.submit(Job(mine))
    assert queue.outlook() == (2, None)
    assert (first.snapshot().ahead, second.snapshot().ahead) == (0, 1)
    assert first.snapshot().loading
    assert "Loading the model" in draw.status(first.snapshot())
    assert "1 job before yours" in draw.status(second.snapshot())
    gate.open.set()
    wait(loader)
    assert mine.began.wait(PATIENCE)
    assert not second.snapshot().loading
    mine.open.set()
    wait(second)
    queue.close()


def test_a_stop_heard_by_the_work_is_a_cancel_not_a_failure() -> None:
    def work(bench: str, job: Job[Any, Any]) -> None:
        raise Cancelled("cancelled")

    queue = queue_of()
    assert wait(queue.submit(Job(work))).state == "cancelled"
    queue.close()
