"""One video over several processes, against one's: on a CPU (gloo) and on two GPUs (NCCL)."""

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
from vidsparse.pipelines.lookup import find_adapter
from vidsparse.pipelines.parallel import deal

WORKER = Path(__file__).with_name("parallel_worker.py")

# every family that is said to run on several processes, with what differs in how it is dealt; and
# the tokens of its video that each of two processes holds.
DEALT = {
    "wan": 24,
    "wan-ti2v-image": 24,
    "wan-two-experts": 24,
    "wan-vace": 24,
    "chronoedit": 16,
    "skyreels-v2": 24,
    "anyflow": 24,
    "hunyuan": 96,
    "hunyuan-image-concat": 96,
    "framepack": 48,
    "helios": 48,
    "helios-pyramid": 192,
    "hunyuan15": 96,
    "cogvideox": 96,
    "cogvideox-2b": 96,
    "cogvideox1.5": 64,
    "mochi": 96,
    "allegro": 24,
    "easyanimate": 128,
    "ltx": 64,
    "ltx-condition": 64,
    "ltx2": 64,
    "ltx2-guidance": 64,
    "ltx2-image": 64,
    "cosmos": 24,
    "cosmos2.5": 24,
    "cosmos2.5-video": 24,
    "cosmos3": 96 + 8,
    "kandinsky5": 24,
    "kandinsky6": 32,
    "motif": 96,
    "motif-image": 96,
    "minimax": 719,
}
REFUSED = {
    "hunyuan-image": "token replacement",
    "wan-animate": "has no plan",
    "consisid": "looks at faces",
}
SPARSE = [f"{name}/sparse/parallelize" for name in DEALT]
HOST = ["wan/dense/host-after", "wan/sparse/host-before", "wan/sparse/host-after"]
# a processor of the host's own that is put in later must not leave its process alone.
SWAPPED = [f"{name}/sparse/swapped" for name in ("wan", "hunyuan", "ltx")]
DENSE = [f"{name}/dense/parallelize" for name in DEALT if name in VARIANTS.values()]
CALIBRATED = ["wan/calibrated/parallelize", "wan/calibrated/host-after"]
CASES = [*SPARSE, *DENSE, *SWAPPED, *HOST, *CALIBRATED]
# rings of all processes: every family but one, and what is different in them.
FAMILIES = [name for name in DEALT if name in VARIANTS.values() and name != "cosmos3"]
METHODS = ("sparse", "reused", "refreshed", "sol-attn", "xattention", "layers", "dense")
RINGS = [
    *(f"{name}/fine/ring" for name in (*FAMILIES, "helios-pyramid")),
    *(f"hunyuan/{method}/ring" for method in METHODS),
    *(f"cogvideox/{method}/ring" for method in ("dense", "sparse")),
    "wan/calibrated/ring",
    "wan/sale/ring",
    "wan/sparse/host-ring",
]
# two by two; rings of more processes than there are heads; what is chosen where nothing is said.
FOUR = [
    # of Helios the first process has nothing of the section, frames of the past alone.
    *(f"{name}/fine/both" for name in ("wan", "hunyuan", "cogvideox", "helios")),
    "hunyuan/dense/both",
    "wan/calibrated/both",
    *(f"{name}/fine/ring" for name in ("wan", "hunyuan")),
    "wan/fine/parallelize",
]
BALANCED = ["wan/balanced/one/2", "wan/balanced/reuse/2", "wan/balanced/both/4"]
# guidance branches on different processes: alone, by heads, in a ring.
APART = [
    "wan/dense/apart",
    "wan/sparse/apart",
    "wan/fine/apart",
    "wan/kept/apart",
    "wan/refreshed/apart",
    "wan-two-experts/fine/apart",
    "wan-vace/fine/apart",
    "chronoedit/fine/apart",
    # every other pipeline around these transformers: commands have branches apart by themselves.
    "wan-image/fine/apart",
    "wan-ti2v/fine/apart",
    "wan-ti2v-image/fine/apart",
    "lucy-edit/fine/apart",
    "wan/fine/apart/4",
    "wan/fine/apart-ring/4",
]
# whose blocks are compiled: dealt by diffusers' plans, by ours around a packed sequence, apart.
COMPILED = ["wan/fine/compiled", "cosmos3/fine/compiled", "wan/fine/apart-compiled"]
BY_HOST = [f"{name}/sparse/host-refused" for name in ("hunyuan", "ltx2", "helios")]
# what all of them have to decide alike.
ROOM = ("room", "room-apart")
OFF = ("off", "off-on", "off-planned")
AGREED = [f"wan/agreement/{when}" for when in ("slope", *ROOM, *OFF)]
EXCHANGE = "exchange/of/heads"
NO_RING = "cosmos3/fine/ring-refused"
# of which text is encoded by the pipeline, so that all of it follows to a GPU.
ON_GPUS = ("wan", "wan-two-experts", "wan-vace", "chronoedit", "hunyuan", "skyreels-v2")
# what is heard beside the video.
SOUNDS = [f"{name}/sparse/parallelize" for name in ("ltx2", "cosmos3", "kandinsky6", "minimax")]
CACHED = [f"{name}/sparse/cached" for name in ("wan", "hunyuan", "ltx")]

# all cases at once, before the first test.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What two processes found, all cases by one pair of them."""
    out = tmp_path_factory.mktemp("parallel") / "found.json"
    refused = [f"{name}/sparse/refused" for name in REFUSED]
    balanced = {n: [one[:-2] for one in BALANCED if one.endswith(n)] for n in ("2", "4")}
    two = [
        *CASES,
        *CACHED,
        "kandinsky6/sparse/cached",
        *BY_HOST,
        *COMPILED,
        *refused,
        *RINGS,
        NO_RING,
        "wan/gated/ring",
        *balanced["2"],
        *(case for case in APART if not case.endswith("/4")),
        "wan/sparse/apart-unguided",
        "hunyuan/sparse/apart",
        *AGREED,
    ]
    four = [*FOUR, "ltx2/fine/both", *balanced["4"], "wan/balanced/apart", EXCHANGE]
    four += [case.removesuffix("/4") for case in APART if case.endswith("/4")]
    # two unless the name says another number.
    return compared("cpu", ["2", *two, "4", *four], out)


def compared(device: str, cases: list[str], out: Path) -> dict[str, dict[str, Any]]:
    """What processes found that compute on ``device``: numbers of them and their ``cases``."""
    done = subprocess.run(
        [sys.executable, str(WORKER), device, str(out), *cases],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return {case.removesuffix("/2"): one for case, one in result.items()}


# one unit in the last place, where queries and keys are rounded to 16 bits on the way.
OF_16_BITS = torch.finfo(torch.bfloat16).eps
# a GPU's kernels multiply fp32 as tf32: weights are rounded to 11 bits, by another maximum in
# each part of a ring. Over tens of keys most of that cancels; a quarter is left.
OF_TF32 = 2.0**-13


def budget(one: dict[str, Any], unit: float = 64 * torch.finfo(torch.float32).eps) -> float:
    """What sums in another order may cost, through two layers and two steps."""
    rounding: float = max(unit * one["largest"], 2 * one.get("rounding", 0.0))
    # a remainder is rounded to one of 127 steps of what is lacking, and may go either way.
    remainder: float = one["lost"] / 127
    return rounding + remainder


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one(tmp_path: Path) -> None:
    every = [*CASES, *COMPILED, *RINGS, *(case for case in APART if not case.endswith("/4"))]
    cases = [case for case in every if case.split("/")[0] in ON_GPUS]
    for case, one in compared("cuda", ["2", *cases], tmp_path / "found.json").items():
        limit = budget(one, OF_TF32) if "ring" in case else budget(one)
        assert one["error"] <= limit, case
        assert one["computed"] == pytest.approx(one["alone"], rel=1e-5), case


def test_heads_come_for_tokens_and_go_back_bit_for_bit(found: dict[str, dict[str, Any]]) -> None:
    one = found[f"{EXCHANGE}/4"]
    assert (one["wrong"], one["tried"]) == ([], 48)


@pytest.mark.parametrize("case", [*RINGS, *(f"{case}/4" for case in FOUR)])
def test_a_ring_equals_one_process(found: dict[str, dict[str, Any]], case: str) -> None:
    one = found[case]
    limit = budget(one, OF_16_BITS) if case.startswith("kandinsky5") else budget(one)
    assert one["error"] <= limit
    assert found[case]["computed"] == pytest.approx(found[case]["alone"], rel=1e-5)
    if "dense" not in case:
        assert found[case]["computed"] < 0.9


def test_a_gate_that_saves_time_alone_is_left_out_of_a_ring(
    found: dict[str, dict[str, Any]],
) -> None:
    assert found["wan/gated/ring"]["notes"] == [
        "without spargeattn's gate: a ring has a part of the scores at a time"
    ]


@pytest.mark.parametrize("case", APART)
def test_guidance_branches_on_different_processes_equal_one(
    found: dict[str, dict[str, Any]], case: str
) -> None:
    one = found[case]
    assert one["error"] <= budget(one)
    # each half computed one branch, and together they tell of both as one process does.
    assert one["calls"] == one["calls_alone"] / 2
    assert one["same_calls"]
    assert one["computed"] == pytest.approx(one["alone"], rel=1e-5)
    assert one["stock_error"] == 0


def test_without_guidance_both_halves_compute_the_same(found: dict[str, dict[str, Any]]) -> None:
    one = found["wan/sparse/apart-unguided"]
    assert one["error"] <= budget(one)
    assert one["calls"] == one["calls_alone"]
    assert one["same_calls"]


def test_both_halves_deal_heads_alike(found: dict[str, dict[str, Any]]) -> None:
    for balance in ("on", "off"):
        one = found["wan/balanced/apart/4"][balance]
        assert one["error"] <= budget({**one, "lost": 0.0})
        assert one["density_error"] <= 1e-6
    assert found["wan/balanced/apart/4"]["on"]["moved"]


def test_branches_that_a_pipeline_computes_at_once_are_not_shared_out(
    found: dict[str, dict[str, Any]],
) -> None:
    assert "HunyuanVideoTransformer3DModel" in found["hunyuan/sparse/apart"]["refused"]


def test_what_would_mix_branches_is_refused(found: dict[str, dict[str, Any]]) -> None:
    twice, host, cache = found["wan/sparse/apart"]["refused"]
    assert twice == host
    assert "run in different processes already" in twice
    assert "a step cache does not work" in cache


@pytest.mark.parametrize("case", BALANCED)
@pytest.mark.parametrize("balance", ["on", "off"])
def test_outputs_and_densities_are_the_same_however_heads_are_dealt(
    found: dict[str, dict[str, Any]], case: str, balance: str
) -> None:
    one = found[case.removesuffix("/2")][balance]
    assert one["error"] <= budget({**one, "lost": 0.0})
    assert one["density_error"] <= 1e-6


@pytest.mark.parametrize("case", BALANCED)
def test_skewed_heads_are_dealt_by_the_work_of_the_step_before(
    found: dict[str, dict[str, Any]], case: str
) -> None:
    on, off = (found[case.removesuffix("/2")][name] for name in ("on", "off"))
    # the first sparse step knows nothing yet, and a plan that serves two steps keeps its heads.
    assert on["moved"] == ([3, 4] if "reuse" in case else [2, 3, 4])
    assert off["moved"] == []
    assert off["dealt"] == off["in_order"] == pytest.approx(on["in_order"])
    assert off["dealt"] > 1.8
    assert on["dealt"] < (1.5 if "reuse" in case else 1.25)


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_blocks_of_two_processes_equal_one_that_is_not(
    found: dict[str, dict[str, Any]], case: str
) -> None:
    one = found[case]
    assert one["compiled"] > 0
    assert one["error"] <= budget(one)
    assert one["computed"] == pytest.approx(one["alone"], rel=1e-5)


def test_sound_behind_the_video_cannot_be_in_a_ring(found: dict[str, dict[str, Any]]) -> None:
    assert "on both sides of the video cannot be divided in a ring" in found[NO_RING]["refused"]


@pytest.mark.parametrize("case", SOUNDS)
def test_two_processes_hear_what_one_does(found: dict[str, dict[str, Any]], case: str) -> None:
    one = found[case]
    assert one["sound_error"] <= budget({**one, "largest": max(one["loudest"], one["largest"])})
    assert one["loudest"] > 0


def test_four_processes_cannot_share_two_heads_of_sound(found: dict[str, dict[str, Any]]) -> None:
    assert "which 4 processes cannot share equally" in found["ltx2/fine/both/4"]["refused"]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["error"] <= budget(found[case])


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
    assert found[case]["stock_error"] <= budget(found[case])


@pytest.mark.parametrize(
    ("case", "cache"),
    [
        *((case, cache) for case in CACHED for cache in ("taylorseer", "first-block")),
        ("kandinsky6/sparse/cached", "taylorseer"),
        ("wan/sparse/cached", "guidance"),
    ],
)
def test_every_process_leaves_out_the_steps_of_one(
    found: dict[str, dict[str, Any]], case: str, cache: str
) -> None:
    one = found[case][cache]
    assert 0 < len(one["left_out"]) < 6
    assert one["same"]
    counted, told = one["share_left_out"]
    assert counted == pytest.approx(told)
    assert one["error"] <= budget(one)


@pytest.mark.parametrize("case", CACHED)
def test_a_cache_that_decides_by_a_part_of_the_video_is_refused(
    found: dict[str, dict[str, Any]], case: str
) -> None:
    assert "call parallelize() first" in found[case]["before"]


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_dealt_is_refused_in_a_sentence(
    found: dict[str, dict[str, Any]], name: str
) -> None:
    assert REFUSED[name] in found[f"{name}/sparse/refused"]["refused"]


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


def test_a_transformer_that_is_compiled_as_a_whole_is_not_dealt() -> None:
    pipe = TINY["wan"].build()
    pipe.transformer.compile(backend="eager")
    adapter = find_adapter(pipe)
    with pytest.raises(UnsupportedError, match="compile_repeated_blocks"):
        deal([pipe.transformer], adapter.shares, None, lambda: None)


def test_heads_dealt_by_their_work_follow_a_slope_as_one_process_does(found: Any) -> None:
    one = found["wan/agreement/slope"]
    assert one["error"] <= 1e-4 * one["largest"]
    assert one["same_calls"]


@pytest.mark.parametrize("when", ROOM)
def test_where_one_process_has_no_room_none_keeps_what_a_plan_lacks(found: Any, when: str) -> None:
    one = found[f"wan/agreement/{when}"]
    assert "refresh" not in one["kinds"]
    assert one["between"] == 0
    assert one["gathered"]
    assert "nothing was kept of refreshes: another process has no room for it" in one["notes"]


@pytest.mark.parametrize("when", OFF)
def test_guidance_that_ends_in_a_run_leaves_both_halves_alike(found: Any, when: str) -> None:
    one = found[f"wan/agreement/{when}"]
    assert one["between"] == 0
    assert one["gathered"]
    assert one["same_calls"]
    if when == "off-planned":
        assert one["error"] <= 1e-4 * one["largest"]


@pytest.mark.parametrize("when", ROOM)
def test_groups_of_processes_are_made_once(found: Any, when: str) -> None:
    assert found[f"wan/agreement/{when}"]["more_groups"] == 0
