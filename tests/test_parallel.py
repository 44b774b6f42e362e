"""One video over two processes on a CPU (gloo), against the same video in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("parallel_worker.py")
CASES = ("dense", "sparsify before", "sparsify after")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """What two processes found, all cases by one pair of them."""
    out = tmp_path_factory.mktemp("parallel") / "found.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(WORKER), str(out)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, dict[str, float]] = json.loads(out.read_text(encoding="utf-8"))
    return result


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(found: dict[str, dict[str, float]], case: str) -> None:
    # fp32 sums in another order, through two layers and two steps: 64 units in the last place.
    budget = 64 * torch.finfo(torch.float32).eps * found[case]["largest"]
    assert found[case]["error"] <= budget


@pytest.mark.parametrize("case", CASES)
def test_each_process_held_half_of_the_tokens(
    found: dict[str, dict[str, float]], case: str
) -> None:
    # 3 x 4 x 4 tokens in all.
    assert found[case]["tokens"] == 24


@pytest.mark.parametrize("case", CASES[1:])
def test_the_compared_runs_were_sparse(found: dict[str, dict[str, float]], case: str) -> None:
    assert found[case]["computed"] < 0.9


@pytest.mark.parametrize("case", CASES)
def test_removal_keeps_the_stock_pipeline_parallel_and_right(
    found: dict[str, dict[str, float]], case: str
) -> None:
    budget = 64 * torch.finfo(torch.float32).eps * found[case]["largest"]
    assert found[case]["stock_error"] <= budget
