"""Time the suite of `vidsparse bench attention` in several versions of the package, in turns.

    python tests/suite_in_turns.py before=/tmp/before after=/tmp/after --json turns.json
    python tests/suite_in_turns.py --show turns.json

Every NAME=FOLDER is a version and a folder that it can be imported from (`pip install --no-deps
--target FOLDER CHECKOUT`). Each has a process of its own, which makes a case's inputs, checks every
output against fp64 and then waits; the processes take turns to time one call, so that the GPU's
clock and heat meet all versions alike. Printed are the first version's medians in milliseconds,
what the others take of them, and for each kind of call the geometric mean over its cases. Where
tensors lie in memory differs by process and moves a single case by up to 3 %: name a folder twice
to see by how much. Exits with 1 where a mean is off by more than ``--within``, or a case failed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

# where the bench lies, and before apps had rooms: the module, its class, its cases, its clock.
PLACES = (
    ("vidsparse.apps.bench.attention", "AttentionBench", "attention_cases", "time_in_turns"),
    ("vidsparse.apps.bench_attention", "Bench", "attention_cases", "time_together"),
)
MINE = ("gluon", "triton")


class Served(Exception):
    """A case has been timed as often as was asked for."""


def key(case: Any) -> str:
    """What tells a case from others, in any version."""
    told = {name: value for name, value in asdict(case).items() if name != "implementations"}
    return json.dumps(told, sort_keys=True)


def facts(case: str) -> dict[str, Any]:
    """What a key is of."""
    return dict(json.loads(case))


def work(warmup: int, rep: int) -> None:
    """Serve the process that reads what this one writes: a line asked, a line told."""
    # what libraries print must not reach the reader.
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import torch

    # not by trying to import: an editable install knows files that this version lacks.
    (found,) = importlib.import_module("vidsparse").__path__
    place, kind, cases, clock = next(
        each for each in PLACES if Path(found, *each[0].split(".")[1:]).with_suffix(".py").exists()
    )
    module = importlib.import_module(place)
    suite = importlib.import_module(f"{place.rpartition('.')[0]}.{cases}").SUITE

    def tell(**facts: Any) -> None:
        print(json.dumps(facts), file=told, flush=True)

    def timed(call: Callable[[], Any]) -> float:
        if torch.cuda.is_available():
            from triton.testing import do_bench

            return float(do_bench(call, warmup=warmup, rep=rep, return_mode="median"))
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def serve(calls: dict[str, Callable[[], Any]], *_: Any) -> dict[str, float]:
        tell(calls=list(calls))
        for line in sys.stdin:
            if not (name := json.loads(line)["time"]):
                raise Served
            tell(ms=timed(calls[name]))
        raise Served

    setattr(module, clock, serve)
    bench_type = getattr(module, kind)
    # dense kernels are the same for all versions.
    bench_type._dense = lambda *_: []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bench = bench_type(
        device=device,
        dtype=dtype,
        repeats=1,
        peers=False,
        say=lambda text: print(text, file=sys.stderr),
    )
    known = {key(case): case for case in suite}
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    tell(
        cases=list(known),
        machine={"hardware": hardware, "torch": torch.__version__, "triton": version("triton")},
    )
    for line in sys.stdin:
        case = known[json.loads(line)["case"]]
        if not case.implementations and case.counts != "plan and mask":
            case = replace(case, implementations=MINE if device.type == "cuda" else ())
        try:
            bench.rows(case)
        except Served:
            pass
        except Exception as error:
            tell(failed=f"{type(error).__name__}: {error}")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


class Version:
    """The process of a NAME=FOLDER."""

    def __init__(self, place: str, warmup: int, rep: int) -> None:
        self.name, _, where = place.partition("=")
        folder = str(Path(where).resolve())
        folders = [folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", str(warmup), str(rep)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        )

    def ask(self, **facts: Any) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        print(json.dumps(facts), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """The next line; waits for it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with {self._process.wait()}")
        return dict(json.loads(line))

    def end(self) -> None:
        """Let it go."""
        self._process.kill()
        self._process.wait()


@contextmanager
def versions(places: Sequence[str], warmup: int, rep: int) -> Iterator[list[Version]]:
    """The processes of all NAME=FOLDER."""
    made = [Version(place, warmup, rep) for place in places]
    try:
        yield made
    finally:
        for one in made:
            one.end()


def time_case(case: str, all_of_them: Sequence[Version], rounds: int) -> list[dict[str, Any]]:
    """A row for every call that all versions time in ``case``: medians, and ratios to the first.

    A ratio is the median of the rounds' own, so that a slow round counts for all versions or none.
    """
    for one in all_of_them:
        one.ask(case=case)
    ready = [one.answer() for one in all_of_them]
    row = {"case": facts(case)}
    failed = {
        one.name: told["failed"]
        for one, told in zip(all_of_them, ready, strict=True)
        if "failed" in told
    }
    calls = [name for name in ready[0].get("calls", ()) if not failed]
    calls = [name for name in calls if all(name in told["calls"] for told in ready)]
    rows = [{**row, "failed": failed}] if failed else []
    for name in calls:
        taken: dict[str, list[float]] = {one.name: [] for one in all_of_them}
        for turn in range(rounds):
            for place in range(len(all_of_them)):
                one = all_of_them[(place + turn) % len(all_of_them)]
                one.ask(time=name)
                taken[one.name].append(one.answer()["ms"])
        first = taken[all_of_them[0].name]
        rows.append(
            {
                **row,
                "call": name,
                "ms": {each: statistics.median(ms) for each, ms in taken.items()},
                "ratio": {
                    each: statistics.median(a / b for a, b in zip(ms, first, strict=True))
                    for each, ms in taken.items()
                },
            }
        )
    for one, told in zip(all_of_them, ready, strict=True):
        if "calls" in told:
            one.ask(time=None)
    return rows


def summarise(
    rows: Sequence[dict[str, Any]], within: float
) -> dict[str, dict[str, dict[str, float]]]:
    """Of each kind of call and version: mean, least and largest ratio, and how many are near 1."""
    kinds: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        if "ratio" in row:
            kind = f"{row['call']}, {row['case']['counts']}, {row['case']['quantize'] or '16 bits'}"
            kinds.setdefault(kind, []).append(row["ratio"])
    return {
        kind: {
            name: {
                "cases": len(ratios),
                "mean": statistics.geometric_mean(each[name] for each in ratios),
                "least": min(each[name] for each in ratios),
                "largest": max(each[name] for each in ratios),
                "near": sum(abs(each[name] - 1) <= within for each in ratios),
                "slower": sum(each[name] - 1 > within for each in ratios),
            }
            for name in ratios[0]
        }
        for kind, ratios in kinds.items()
    }


def show(rows: Sequence[dict[str, Any]], within: float) -> int:
    """Print what ``summarise`` finds; how many means are off and cases failed."""
    wrong = sum("failed" in row for row in rows)
    for kind, of_versions in summarise(rows, within).items():
        first = next(iter(of_versions))
        for name, told in list(of_versions.items())[1:]:
            wrong += abs(told["mean"] - 1) > within
            print(
                f"{kind}, {told['cases']} cases: {name} takes {told['mean']:.4f} of {first} "
                f"({told['least']:.3f} to {told['largest']:.3f}), {told['near']} within "
                f"{within:.0%}, {told['slower']} slower by more"
            )
    return wrong


def main() -> int:
    """Exit code of the whole."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("versions", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=20, metavar="MS")
    parser.add_argument("--rep", type=int, default=80, metavar="MS")
    parser.add_argument("--tokens", type=int, metavar="N", help="only cases of at most so many")
    parser.add_argument("--within", type=float, default=0.01, metavar="SHARE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--show", type=Path, metavar="FILE", help="time nothing: print its means")
    asked = parser.parse_args()
    if asked.show is not None:
        told = json.loads(asked.show.read_text(encoding="utf-8"))
        return 1 if show(told["rows"], asked.within) else 0
    if not asked.versions:
        parser.error("name versions, or a file to --show")
    for place in asked.versions:
        if not Path(place.partition("=")[2] or "/", "vidsparse").is_dir():
            parser.error(f"{place!r} is no NAME=FOLDER with a folder vidsparse in FOLDER")
    rows: list[dict[str, Any]] = []
    with versions(asked.versions, asked.warmup, asked.rep) as made:
        offered = [one.answer() for one in made]
        shared = [
            case
            for case in offered[0]["cases"]
            if all(case in each["cases"] for each in offered)
            and (asked.tokens is None or facts(case)["seq_len"] <= asked.tokens)
        ]
        for case in shared:
            for row in time_case(case, made, asked.rounds):
                rows.append(row)
                shown = row.get("failed") or " ".join(
                    [f"{row['call']}: {row['ms'][made[0].name]:.3f} ms"]
                    + [f"{each.name} {row['ratio'][each.name]:.4f}" for each in made[1:]]
                )
                print(*row["case"].values(), shown, flush=True)
            if asked.json is not None:
                told = {"machine": offered[0]["machine"], "rounds": asked.rounds, "rows": rows}
                asked.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 1 if show(rows, asked.within) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*map(int, sys.argv[2:]))
    else:
        sys.exit(main())
