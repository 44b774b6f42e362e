"""Time the suite of `vidsparse bench attention` in several versions of the package, in turns.

    python tests/suite_in_turns.py before=/tmp/before after=/tmp/after --json turns.json
    python tests/suite_in_turns.py --show turns.json

Every NAME=FOLDER is a version and a folder that it can be imported from (`pip install --no-deps
--target FOLDER CHECKOUT`). Each has a process of its own, which makes a case's inputs, checks every
output against fp64 and then waits; the processes take turns to time one call, so that the GPU's
clock and heat meet all versions alike. Printed are the first version's medians in milliseconds,
what the others take of them, and for each kind of call the geometric mean over its cases.

Where tensors lie in memory moves a single call by up to 3 %: with ``--layouts`` all cases are made
that often, behind fillers of random size, and a ratio is the median over them. Name a folder twice
to see what is left of that. The file is written after each layout; ``--show`` takes those of
several runs of the same versions together. Exits with 1 where a mean is off by more than
``--within``, or a case failed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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

FILLER = 4096
"""The most MiB in front of a case's tensors, so that they lie elsewhere each time."""


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
    checked = bench_type._checked
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
    seen = set()
    for line in sys.stdin:
        case = known[json.loads(line)["case"]]
        if case in seen:
            # it was right the first time, and its inputs are the same.
            bench_type._checked = lambda *_: 0.0
        else:
            seen.add(case)
            bench_type._checked = checked
        filler = torch.empty(random.randrange(FILLER) << 20, dtype=torch.int8, device=device)
        if not case.implementations and case.counts != "plan and mask":
            case = replace(case, implementations=MINE if device.type == "cuda" else ())
        try:
            bench.rows(case)
        except Served:
            pass
        except Exception as error:
            tell(failed=f"{type(error).__name__}: {error}")
        del filler
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


def time_case(
    case: str, all_of_them: Sequence[Version], rounds: int, first: int, only: str | None
) -> list[dict[str, Any]]:
    """A row for every call that all versions time in ``case``, or for ``only`` that one.

    It holds medians, and ratios to the first version.

    The version at place ``first`` begins. The ratio of a layout is the median of its rounds, so
    that a slow round counts for all versions or none.
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
    calls = [name for name in calls if only in (None, name)]
    rows = [{**row, "failed": failed}] if failed else []
    for name in calls:
        taken: dict[str, list[float]] = {one.name: [] for one in all_of_them}
        for turn in range(rounds):
            for place in range(len(all_of_them)):
                one = all_of_them[(place + turn + first) % len(all_of_them)]
                one.ask(time=name)
                taken[one.name].append(one.answer()["ms"])
        base = taken[all_of_them[0].name]
        rows.append(
            {
                **row,
                "call": name,
                "ms": {each: [round(statistics.median(ms), 4)] for each, ms in taken.items()},
                "ratios": {
                    each: [
                        round(statistics.median(a / b for a, b in zip(ms, base, strict=True)), 4)
                    ]
                    for each, ms in taken.items()
                },
            }
        )
    for one, told in zip(all_of_them, ready, strict=True):
        if "calls" in told:
            one.ask(time=None)
    return rows


def gathered(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each case and call, of all that were measured of it, with its medians."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = found.setdefault(
            json.dumps([row["case"], row.get("call"), row.get("failed")], sort_keys=True),
            {name: told for name, told in row.items() if name not in ("ms", "ratios", "ratio")},
        )
        for name in ("ms", "ratios"):
            # a file from before layouts has one of each.
            told = row.get(name) or (row.get("ratio", {}) if name == "ratios" else {})
            for version_, of_it in told.items():
                several = of_it if isinstance(of_it, list) else [of_it]
                one.setdefault(name, {}).setdefault(version_, []).extend(several)
    for one in found.values():
        if "ratios" in one:
            one["ratio"] = {name: statistics.median(each) for name, each in one["ratios"].items()}
    return list(found.values())


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
    for row in rows:
        for name, ratio in row.get("ratio", {}).items():
            if abs(ratio - 1) > within:
                each = sorted(row["ratios"][name])
                of_case = " ".join(str(fact) for fact in row["case"].values())
                print(
                    f"{row['call']} of {of_case}: {name} takes {ratio:.4f}, median of {len(each)} "
                    f"layouts from {each[0]:.4f} to {each[-1]:.4f}"
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
    parser.add_argument("--tile", metavar="MxN", help="only cases of this tile")
    parser.add_argument("--call", metavar="NAME", help="time only this of a case's calls")
    parser.add_argument("--within", type=float, default=0.01, metavar="SHARE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--layouts", type=int, default=1, metavar="N")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin no layout after so many")
    parser.add_argument(
        "--show", type=Path, nargs="+", metavar="FILE", help="time nothing: print their means"
    )
    asked = parser.parse_args()
    if asked.show is not None:
        files = [json.loads(file.read_text(encoding="utf-8")) for file in asked.show]
        return (
            1 if show(gathered(row for each in files for row in each["rows"]), asked.within) else 0
        )
    if not asked.versions:
        parser.error("name versions, or a file to --show")
    for place in asked.versions:
        if not Path(place.partition("=")[2] or "/", "vidsparse").is_dir():
            parser.error(f"{place!r} is no NAME=FOLDER with a folder vidsparse in FOLDER")
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with versions(asked.versions, asked.warmup, asked.rep) as made:
        offered = [one.answer() for one in made]
        shared = [
            case
            for case in offered[0]["cases"]
            if all(case in each["cases"] for each in offered)
            and (asked.tokens is None or facts(case)["seq_len"] <= asked.tokens)
            and (asked.tile is None or "x".join(map(str, facts(case)["tile"])) == asked.tile)
        ]
        for layout in range(asked.layouts):
            if asked.seconds is not None and time.monotonic() - began > asked.seconds:
                break
            measured = []
            for case in shared:
                measured += time_case(case, made, asked.rounds, layout, asked.call)
            for row in measured:
                shown = row.get("failed") or " ".join(
                    [f"{row['call']}: {row['ms'][made[0].name][0]:.3f} ms"]
                    + [f"{each.name} {row['ratios'][each.name][0]:.4f}" for each in made[1:]]
                )
                print(*row["case"].values(), shown, flush=True)
            rows = gathered([*rows, *measured])
            if asked.json is not None:
                facts_of_run = {"rounds": asked.rounds, "layouts": layout + 1}
                told = {"machine": offered[0]["machine"], **facts_of_run, "rows": rows}
                # a row a line.
                text = json.dumps(told).replace('{"case"', '\n{"case"')
                asked.json.write_text(text + "\n", encoding="utf-8")
    return 1 if show(rows, asked.within) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*map(int, sys.argv[2:]))
    else:
        sys.exit(main())
