"""Try on a GPU what could harm it: broken plans, all kernels under compute-sanitizer, full memory.

    python tests/gpu_faults.py                          # everything, four to five minutes
    python tests/gpu_faults.py plans --plans 1000       # broken plans alone
    python tests/gpu_faults.py --sanitize 0             # without compute-sanitizer
    python tests/gpu_faults.py plans kernels --only-sanitizer

Cases run in processes of their own, several at a time: one that hangs, or that takes its process or
the GPU's context with it, is a failed case, and the others go on in a new process. What has come
out is in the file of ``--json`` at any time. Exits with 1 where a case failed or did not run.

Without a GPU Triton's interpreter runs what it can, which is for trying the program out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("plans", "kernels", "memory", "guard")
# seconds for one case, its kernels' compilation included.
PATIENCE = 90.0
# new processes that a group gets before it is given up.
MOST_STARTS = 12


def load_cases() -> Any:
    """The module of cases, with Triton told where to run before any kernel is defined."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ.get("TRITON_INTERPRET") == "1":
        from interpreter import make_quick

        make_quick()
    import gpu_fault_cases

    return gpu_fault_cases


# ---- a process that runs the cases of a group ----


def work(part: str, count: int, group: str, first: int, path: Path) -> int:
    """Run the cases of a group from ``first`` on, with a line in ``path`` before and after each."""
    cases = load_cases()
    with path.open("a", encoding="utf-8") as file:

        def tell(**facts: Any) -> None:
            file.write(json.dumps(facts) + "\n")
            file.flush()

        for number, (name, body) in enumerate(cases.PARTS[part](count)[group][first:], first):
            tell(begin=number, name=name)
            began, how, said = time.monotonic(), "passed", ""
            found = None
            try:
                found = body()
                cases.wait()
            except cases.SKIPPED as reason:
                how, said = "skipped", str(reason)
            except Exception as error:
                how, said = "failed", f"{type(error).__name__}: {error}"[:2000]
            seconds = round(time.monotonic() - began, 3)
            tell(end=number, name=name, how=how, said=said, seconds=seconds, found=found)
            if how == "failed":
                try:
                    cases.wait()
                except Exception:
                    # the context is lost: what comes after needs another process.
                    return 3
    return 0


# ---- the one that watches over them ----


@dataclass
class Group:
    """Cases that one process at a time runs, and what has come out of them.

    Args:
        part: one of ``NAMES``.
        count: what the part is asked for.
        name: of the group.
        cases: their names.
        sanitized: whether compute-sanitizer looks on.
    """

    part: str
    count: int
    name: str
    cases: list[str]
    sanitized: bool
    ended: list[dict[str, Any]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    file: Path | None = None
    begun: tuple[int, float] | None = None
    starts: int = 0
    given_up: bool = False
    _read: int = 0

    @property
    def title(self) -> str:
        return f"{self.part}{' (sanitizer)' if self.sanitized else ''}"

    @property
    def is_done(self) -> bool:
        return self.given_up or len(self.ended) == len(self.cases)

    def start(self, folder: Path, sanitizer: Sequence[str]) -> None:
        """Start a process at the first case that has not ended."""
        self.starts += 1
        stem = f"{self.title}-{self.name}-{self.starts}".replace(" ", "-")
        self.file, self._read = folder / f"{stem}.jsonl", 0
        command = [
            sys.executable, str(Path(__file__).resolve()), "--work", self.part, self.name,
            str(len(self.ended)), str(self.file), "--count", str(self.count),
        ]  # fmt: skip
        environment = dict(os.environ)
        if self.part in ("plans", "kernels"):
            # each tensor is memory of its own: what is read or written beside it shows.
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        if self.sanitized:
            log = folder / f"{stem}.log"
            self.logs.append(log)
            command = [*sanitizer, "--log-file", str(log), *command]
        self.begun = None
        with (folder / f"{stem}.txt").open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def look(self, patience: float) -> None:
        """Read what has come, and end a process that hangs or a group that cannot go on."""
        assert self.process is not None
        status = self.process.poll()
        self._take()
        if status is None:
            waited = time.monotonic() - self.begun[1] if self.begun else 0.0
            if waited > patience:
                self.stop()
                self._lost(f"hangs: nothing for {waited:.0f} s")
            return
        self.process = None
        if self.is_done:
            return
        if self.begun is not None:
            self._lost(f"the process ended with status {status}: {self._last_words()}")
        elif status not in (0, 3):
            self.given_up = self.starts >= 2
            print(f"{self.title}, {self.name}: no start: {self._last_words()}", flush=True)
        if self.starts >= MOST_STARTS and not self.is_done:
            self.given_up = True

    def stop(self) -> None:
        """End the process and all that it has started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _take(self) -> None:
        if self.file is None or not self.file.exists():
            return
        text = self.file.read_text(encoding="utf-8")
        whole = text[self._read :].rpartition("\n")[0]
        self._read += len(whole) + bool(whole)
        for line in whole.splitlines():
            facts = json.loads(line)
            if "begin" in facts:
                self.begun = facts["begin"], time.monotonic()
            else:
                self.begun = None
                del facts["end"]
                self._end(facts)

    def _lost(self, said: str) -> None:
        assert self.begun is not None
        name = self.cases[self.begun[0]]
        seconds = round(time.monotonic() - self.begun[1], 3)
        self.begun = None
        self._end({"name": name, "how": "failed", "said": said, "seconds": seconds})

    def _end(self, facts: dict[str, Any]) -> None:
        self.ended.append(facts)
        if facts["how"] == "failed":
            print(f"FAILED {self.title}, {self.name}, {facts['name']}: {facts['said']}", flush=True)

    def _last_words(self) -> str:
        assert self.file is not None
        text = self.file.with_suffix(".txt").read_text(encoding="utf-8", errors="replace")
        return " | ".join(text.strip().splitlines()[-3:])[-600:]

    def count_of(self, how: str) -> int:
        """How many cases came out so."""
        return sum(facts["how"] == how for facts in self.ended)

    def errors(self) -> int | None:
        """Errors that compute-sanitizer counted; None where a log has no sum."""
        total = 0
        for log in self.logs:
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            found = re.findall(r"ERROR SUMMARY: (\d+) error", text)
            if not found:
                return None
            total += sum(map(int, found))
        return total


@dataclass
class Watch:
    """Runs groups, and tells what has come out.

    Args:
        folder: of the processes' files.
        json_path: where results are written, or None.
        jobs: processes at a time.
        sanitizer: the command that looks on.
    """

    folder: Path
    json_path: Path | None
    jobs: int
    sanitizer: Sequence[str]
    groups: list[Group] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def run(self, groups: list[Group], *, jobs: int, seconds: float, patience: float) -> None:
        """Run groups to their end, or until ``seconds`` are over."""
        self.groups += groups
        began = told = time.monotonic()
        try:
            while not all(group.is_done for group in groups):
                now = time.monotonic()
                if now - began > seconds:
                    print(f"{seconds:.0f} s are over", flush=True)
                    break
                for group in groups:
                    if group.process is not None:
                        group.look(patience)
                running = sum(group.process is not None for group in groups)
                for group in groups:
                    if group.process is None and not group.is_done and running < jobs:
                        group.start(self.folder, self.sanitizer)
                        running += 1
                if now - told > 5:
                    told = now
                    self.say(groups, now - began)
                    self.write()
                time.sleep(0.1)
        finally:
            for group in groups:
                # a sanitizer writes its sum after the last case.
                if group.process is not None and group.is_done:
                    with suppress(subprocess.TimeoutExpired):
                        group.process.wait(20)
                        group.process = None
                group.stop()
            self.say(groups, time.monotonic() - began)
            self.write()

    def say(self, groups: list[Group], seconds: float) -> None:
        """One line of how far it is."""
        done = sum(len(group.ended) for group in groups)
        failed = sum(group.count_of("failed") for group in groups)
        of = sum(len(group.cases) for group in groups)
        parts = "+".join(dict.fromkeys(group.title for group in groups))
        print(f"{seconds:4.0f} s  {parts}: {done} of {of} cases, {failed} failed", flush=True)

    def rows(self) -> list[dict[str, Any]]:
        """One row a group."""
        rows = []
        for group in self.groups:
            slowest = max(group.ended, key=lambda facts: facts["seconds"], default=None)
            row: dict[str, Any] = {"part": group.title, "group": group.name}
            row["cases"] = len(group.cases)
            row |= {how: group.count_of(how) for how in ("passed", "skipped", "failed")}
            row["not_run"] = len(group.cases) - len(group.ended)
            row["seconds"] = round(sum(facts["seconds"] for facts in group.ended), 1)
            row["slowest"] = None if slowest is None else [slowest["name"], slowest["seconds"]]
            row["errors"] = group.errors() if group.sanitized else None
            row["bad"] = [facts for facts in group.ended if facts["how"] == "failed"]
            row["found"] = {
                facts["name"]: facts["found"] for facts in group.ended if facts.get("found")
            }
            rows.append(row)
        return rows

    def write(self) -> None:
        """The file of results, as far as they go."""
        if self.json_path is not None:
            made = {**self.facts, "groups": self.rows()}
            part = self.json_path.with_suffix(".part")
            part.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
            part.replace(self.json_path)

    def table(self) -> bool:
        """Print all rows; whether everything is right."""
        right = True
        form = "{:22} {:22} {:>6} {:>7} {:>7} {:>7} {:>7} {:>8} {:>7}"
        heads = ("part", "group", "cases", "passed", "skipped", "failed", "not run", "seconds")
        print(form.format(*heads, "errors"))
        for row in self.rows():
            errors = "" if row["part"] == row["part"].split()[0] else str(row["errors"])
            numbers = [row[name] for name in ("cases", "passed", "skipped", "failed", "not_run")]
            print(form.format(row["part"], row["group"], *numbers, row["seconds"], errors))
            right &= not (row["failed"] or row["not_run"] or errors not in ("", "0"))
            for name, found in row["found"].items():
                print(f"    {name}: {json.dumps(found)}")
        return right


def sanitizer_command() -> list[str]:
    """compute-sanitizer's memcheck, for accesses alone; empty where it is not installed."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return []
    told = subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout
    command = [program, "--tool", "memcheck"]
    for option, value in (
        # what a host asks of the driver on purpose is no fault of a kernel.
        ("--report-api-errors", "no"),
        ("--launch-timeout", "120"),
        ("--max-connections", "100"),
        ("--target-processes", "application-only"),
    ):
        if option in told:
            command += [option, value]
    return command


def main() -> int:
    """Run what is asked for; the exit status says whether all of it is right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(NAMES)}; all of them by default")
    parser.add_argument("--plans", type=int, default=1000, help="broken plans")
    parser.add_argument("--sanitize", type=int, default=40, help="broken plans under the sanitizer")
    parser.add_argument("--only-sanitizer", action="store_true", help="nothing without it")
    parser.add_argument("--every", type=int, default=6, help="of the cases of planning")
    parser.add_argument("--turns", type=int, default=7, help="of timings")
    parser.add_argument("--jobs", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--seconds", type=float, default=150, help="for what runs side by side")
    parser.add_argument("--sanitizer-seconds", type=float, default=110)
    parser.add_argument("--json", type=Path, help="where results are written")
    parser.add_argument("--keep", type=Path, help="folder for the processes' own files")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        part, group, first, path = arguments.work
        return work(part, arguments.count, group, int(first), Path(path))
    parts = arguments.parts or list(NAMES)
    if unknown := set(parts) - set(NAMES):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(NAMES)}")

    cases = load_cases()
    counts = {"plans": arguments.plans, "kernels": arguments.every, "memory": 0}
    counts["guard"] = arguments.turns

    def groups(part: str, count: int, *, sanitized: bool = False) -> list[Group]:
        made = cases.PARTS[part](count).items()
        return [
            Group(part, count, name, [case for case, _ in bodies], sanitized)
            for name, bodies in made
            if bodies
        ]

    with tempfile.TemporaryDirectory() as own:
        folder = arguments.keep or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        sanitizer = sanitizer_command() if arguments.sanitize else []
        if arguments.only_sanitizer and not sanitizer:
            parser.error("compute-sanitizer is not installed")
        watch = Watch(folder, arguments.json, arguments.jobs, sanitizer)
        watch.facts = cases.machine()
        print(watch.facts, flush=True)
        together = [part for part in parts if part not in cases.ALONE]
        limits = {"seconds": arguments.seconds, "patience": PATIENCE}
        if not arguments.only_sanitizer:
            beside = [group for part in together for group in groups(part, counts[part])]
            watch.run(beside, jobs=arguments.jobs, **limits)
            for part in parts:
                if part in cases.ALONE:
                    watch.run(groups(part, counts[part]), jobs=1, **limits)
        if sanitizer:
            counts["plans"] = arguments.sanitize
            beside = [
                group for part in together for group in groups(part, counts[part], sanitized=True)
            ]
            limits = {"seconds": arguments.sanitizer_seconds, "patience": 2 * PATIENCE}
            watch.run(beside, jobs=arguments.jobs, **limits)
        elif arguments.sanitize:
            print("without compute-sanitizer: it is not installed")
        return 0 if watch.table() else 1


if __name__ == "__main__":
    sys.exit(main())
