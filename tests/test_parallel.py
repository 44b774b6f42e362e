"""One video over two processes on a CPU (gloo), against the same video in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support_matrix import LIMITS, VARIANTS
from tiny_families import TINY

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines import sparsify

WORKER = Path(__file__).with_name("parallel_worker.py")

# every family that is said to run on several processes, with what differs in how it is dealt; and
# the tokens of its video that each of two processes holds.
DEALT = {
    "wan": 24,
    "wan-ti2v-image": 24,
    "wan-two-experts": 24,
    "chronoedit": 16,
    "skyreels-v2": 24,
    "hunyuan": 96,
    "hunyuan-image-concat": 96,
    "hunyuan15": 96,
    "cogvideox": 96,
    "cogvideox-2b": 96,
    "cogvideox1.5": 64,
    "mochi": 96,
    "easyanimate": 128,
    "ltx": 64,
    "ltx-condition": 64,
    "ltx2": 64,
    "ltx2-guidance": 64,
    "ltx2-image": 64,
    "cosmos": 24,
    "cosmos2.5": 24,
    "cosmos2.5-video": 24,
    "kandinsky5": 24,
    "motif": 96,
    "motif-image": 96,
}
REFUSED = {
    "hunyuan-image": "token replacement",
    "framepack": "FramePack's frames of the past",
    "helios": "Helios cannot be dealt",
    "cosmos3": "Cosmos 3 cannot be dealt",
    "wan-vace": "has no plan",
    "wan-animate": "has no plan",
    "consisid": "looks at faces",
    "anyflow": "AnyFlow cannot be dealt",
    "allegro": "Allegro cannot be dealt",
    "kandinsky6": "Kandinsky 6 cannot be dealt",
    "minimax": "MiniMax-H3 cannot be dealt",
}
SPARSE = [f"{name}/sparse/parallelize" for name in DEALT]
HOST = ["wan/dense/host-after", "wan/sparse/host-before", "wan/sparse/host-after"]
# a processor of the host's own that is put in later must not leave its process alone.
SWAPPED = [f"{name}/sparse/swapped" for name in ("wan", "hunyuan", "ltx")]
DENSE = [f"{name}/dense/parallelize" for name in DEALT if name in VARIANTS.values()]
CALIBRATED = ["wan/calibrated/parallelize", "wan/calibrated/host-after"]
CASES = [*SPARSE, *DENSE, *SWAPPED, *HOST, *CALIBRATED]
BY_HOST = [f"{name}/sparse/host-refused" for name in ("hunyuan", "ltx2", "helios")]
CACHED = [f"{name}/sparse/cached" for name in ("wan", "hunyuan", "ltx")]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What two processes found, all cases by one pair of them."""
    out = tmp_path_factory.mktemp("parallel") / "found.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    refused = [f"{name}/sparse/parallelize" for name in REFUSED]
    done = subprocess.run(
        [*torchrun, str(WORKER), str(out), *CASES, *CACHED, *BY_HOST, *refused],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return result


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(found: dict[str, dict[str, Any]], case: str) -> None:
    # fp32 sums in another order, through two layers and two steps: 64 units in the last place.
    budget = 64 * torch.finfo(torch.float32).eps * found[case]["largest"]
    assert found[case]["error"] <= budget


@pytest.mark.parametrize("case", CASES)
def test_each_process_held_half_of_the_video(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["tokens"] == DEALT[case.split("/")[0]]


@pytest.mark.parametrize("case", [*SPARSE, *HOST[1:], *CALIBRATED])
def test_the_compared_runs_were_sparse(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["computed"] < 0.9


@pytest.mark.parametrize("case", CASES)
def test_the_densities_of_all_processes_are_those_of_one(
    found: dict[str, dict[str, Any]], case: str
) -> None:
    assert found[case]["computed"] == pytest.approx(found[case]["alone"], rel=1e-5)


@pytest.mark.parametrize("case", SPARSE)
def test_removal_takes_the_plan_back_and_leaves_the_stock_pipeline(
    found: dict[str, dict[str, Any]], case: str
) -> None:
    assert found[case]["stock_error"] == 0


@pytest.mark.parametrize("case", HOST[1:])
def test_removal_keeps_a_plan_that_the_user_asked_diffusers_for(
    found: dict[str, dict[str, Any]], case: str
) -> None:
    budget = 64 * torch.finfo(torch.float32).eps * found[case]["largest"]
    assert found[case]["stock_error"] <= budget


@pytest.mark.parametrize("case", CACHED)
def test_every_process_leaves_out_the_steps_of_one(
    found: dict[str, dict[str, Any]], case: str
) -> None:
    one = found[case]
    assert one["left_out"] == [3, 5]
    assert one["same"]
    assert one["error"] <= 64 * torch.finfo(torch.float32).eps * one["largest"]


@pytest.mark.parametrize("case", CACHED)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cache_that_decides_by_a_part_of_the_video_is_refused(
    found: dict[str, dict[str, Any]], case: str, when: str
) -> None:
    assert "decides by what a process holds" in found[case][when]


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_dealt_is_refused_in_a_sentence(
    found: dict[str, dict[str, Any]], name: str
) -> None:
    assert REFUSED[name] in found[f"{name}/sparse/parallelize"]["refused"]


@pytest.mark.parametrize("case", BY_HOST)
def test_a_call_of_the_hosts_that_is_refused_leaves_nothing(
    found: dict[str, dict[str, Any]], case: str
) -> None:
    assert "context parallelism" in found[case]["refused"]
    assert found[case]["left"] == []


def test_the_page_of_what_works_together_says_the_same() -> None:
    limits = {name for row, name in LIMITS if row == "parallelize"}
    assert limits == set(VARIANTS.values()) & set(REFUSED)
    assert set(VARIANTS.values()) - limits <= set(DEALT)


def test_parallelize_without_processes_says_how_to_start_them() -> None:
    with sparsify(TINY["wan"].build()) as handle, pytest.raises(UnsupportedError, match="torchrun"):
        handle.parallelize()
