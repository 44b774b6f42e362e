"""Methods as sets of options: values, errors that name the owner, JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pkgutil
from typing import Any

import pytest
import torch

import vidsparse
from vidsparse import methods
from vidsparse.grid import TokenGrid
from vidsparse.masks import pooled_scores
from vidsparse.methods import (
    METHODS,
    SPARSE_METHODS,
    Dense,
    FgAttn,
    Method,
    Sale,
    SpargeAttn,
    SparseMethod,
    XAttention,
    make_method,
)
from vidsparse.site import CallSite


def test_every_method_that_has_a_file_is_registered_the_default_first() -> None:
    found = set()
    for module in pkgutil.iter_modules(methods.__path__, "vidsparse.methods."):
        own = vars(importlib.import_module(module.name)).values()
        classes = (each for each in own if isinstance(each, type) and issubclass(each, Method))
        found |= {
            cls.name for cls in classes if cls.__module__ == module.name and hasattr(cls, "name")
        }
    assert set(METHODS) == found
    assert len(found) >= 6
    assert next(iter(METHODS)) == "fg-attn"


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_found_by_its_own_name_and_describes_itself(name: str) -> None:
    method = make_method(name)
    assert method.name == name
    assert method.title
    assert method.summary
    assert isinstance(method, METHODS[name])


def test_defaults_are_the_papers() -> None:
    assert make_method("fg-attn") == FgAttn(top_p=0.9, tile=(16, 16), merge="xor-window")
    sparge = make_method("spargeattn")
    assert isinstance(sparge, SpargeAttn)
    assert (sparge.tau, sparge.tile) == (0.9, (128, 64))
    assert make_method("xattention") == XAttention(
        tau=0.9, stride=8, pattern="antidiagonal", tile=(128, 128)
    )
    assert make_method("sale") == Sale(tau=0.004, local=256, tile=(64, 32))
    assert make_method("dense") == Dense()


@pytest.mark.parametrize("name", METHODS)
def test_options_survive_json(name: str) -> None:
    method = make_method(name)
    stored = json.loads(json.dumps(method.options()))
    assert make_method(name, **stored) == method


def test_a_tile_is_written_as_on_the_command_line() -> None:
    assert make_method("fg-attn", tile=(32, 8)).options() == {
        "top_p": 0.9,
        "topk": None,
        "score": "mass",
        "tile": "32x8",
        "merge": "xor-window",
        "means": 64,
        "plans": "shared",
    }


@pytest.mark.parametrize("tile", [(32, 8), [32, 8], "32x8"])
def test_a_tile_may_be_a_pair_or_text(tile: object) -> None:
    assert make_method("fg-attn", tile=tile) == FgAttn(tile=(32, 8))


@pytest.mark.parametrize("name", METHODS)
def test_fields_carry_what_a_command_line_needs(name: str) -> None:
    for field in METHODS[name].option_fields():
        assert set(field.metadata) == {"help", "flag", "metavar", "convert", "choices", "absent"}
        assert field.metadata["flag"] == "--" + field.name.rstrip("_").replace("_", "-")
        written = make_method(name).options()[field.name]
        read = field.metadata["convert"](str(written))
        assert make_method(name, **{field.name: read}) == make_method(name)


def test_options_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FgAttn().top_p = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        FgAttn(0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "sparge",
            {},
            r"unknown method 'sparge'\. Hint: choose from fg-attn, .*, dense",
        ),
        (
            "fg-attn",
            {"tau": 0.5},
            r"no option 'tau': it belongs to spargeattn, xattention, sale "
            r"and sol-attn\. Hint: .*top_p",
        ),
        ("spargeattn", {"top_p": 0.5}, r"no option 'top_p': it belongs to fg-attn\. Hint: .*tau"),
        ("dense", {"tile": "16x16"}, r"it belongs to fg-attn, spargeattn,.*takes no options"),
        ("fg-attn", {"topp": 0.5}, r"no option 'topp': no method has it"),
    ],
)
def test_an_option_of_another_method_names_its_owner(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(vidsparse.OptionError, match=message):
        make_method(name, **options)


@pytest.mark.parametrize("bad", [0, 0.0, -0.1, 1.01, math.nan, math.inf, "0.9", True, None])
@pytest.mark.parametrize(("name", "option"), [("fg-attn", "top_p"), ("spargeattn", "tau")])
def test_a_share_lies_above_0_up_to_1(name: str, option: str, bad: object) -> None:
    with pytest.raises(vidsparse.OptionError, match=rf"{option} must lie in \(0, 1\], got"):
        make_method(name, **{option: bad})


@pytest.mark.parametrize("bad", [0, -0.1, 1.01, math.nan, "0.3", True])
@pytest.mark.parametrize(("name", "share"), [("fg-attn", "top_p"), ("spargeattn", "tau")])
def test_topk_is_a_share_and_takes_the_place_of_the_other(
    name: str, share: str, bad: object
) -> None:
    with pytest.raises(vidsparse.OptionError, match=r"topk must lie in \(0, 1\], got"):
        make_method(name, topk=bad)
    with pytest.raises(vidsparse.OptionError, match=rf"selects by {share} or by topk, .* Hint"):
        make_method(name, **{"topk": 0.3, share: 0.8})
    assert make_method(name, topk=0.3).options()[share] is None


@pytest.mark.parametrize(("topk", "kept"), [(0.001, 1), (0.3, 3), (0.31, 4), (1.0, 10)])
@pytest.mark.parametrize(("name", "more"), [("fg-attn", {}), ("spargeattn", {"theta": -1})])
def test_topk_keeps_the_best_share_of_key_tiles_rounded_up(
    name: str, more: dict[str, object], topk: float, kept: int
) -> None:
    q, k = torch.randn(2, 3, 160, 16), torch.randn(2, 3, 160, 16)
    method = make_method(name, tile="16x16", topk=topk, **more)
    assert isinstance(method, SparseMethod)
    mask = method.select(q, k, CallSite(0, 0, 0.0, TokenGrid(1, 1, 160)))
    assert bool((mask.sum(-1) == kept).all())
    scores = pooled_scores(q, k, (16, 16))
    least = scores.masked_fill(~mask, math.inf).amin(-1)
    assert bool((scores.masked_fill(mask, -math.inf).amax(-1) <= least).all())


def test_topk_counts_what_the_judge_left_and_keeps_the_strays_beside_it() -> None:
    q = k = torch.randn(1, 1, 160, 16)
    k = torch.cat([k[:, :, :32], torch.ones(1, 1, 128, 16)], 2)
    method = SpargeAttn(tile=(16, 16), topk=0.2, theta=0.9)
    mask = method.select(torch.ones_like(q), k, CallSite(0, 0, 0.0, TokenGrid(1, 1, 160)))
    assert mask[0, 0, 0].tolist() == [True] * 4 + [False] * 6


@pytest.mark.parametrize("bad", [-1.01, 1.01, math.nan, "0.5", True, None])
def test_theta_lies_between_minus_1_and_1(bad: Any) -> None:
    with pytest.raises(vidsparse.OptionError, match=r"theta must lie in \[-1, 1\], got"):
        SpargeAttn(theta=bad)
    assert SpargeAttn(theta=-1).theta == -1
    assert SpargeAttn(theta=1.0).theta == 1.0


@pytest.mark.parametrize("bad", [(8, 16), (16, 2), (16,), (16, 16, 16), 16, None, (16.0, 16), "x"])
@pytest.mark.parametrize("name", ["fg-attn", "spargeattn"])
def test_a_tile_that_no_kernel_has_is_refused(name: str, bad: object) -> None:
    with pytest.raises(vidsparse.OptionError, match="tile must"):
        make_method(name, tile=bad)


@pytest.mark.parametrize("name", ["fg-attn", "spargeattn"])
def test_an_unknown_merge_is_refused(name: str) -> None:
    with pytest.raises(vidsparse.OptionError, match="unknown merge 'hash'"):
        make_method(name, merge="hash")


@pytest.mark.parametrize("name", [n for n, cls in METHODS.items() if issubclass(cls, SparseMethod)])
@pytest.mark.parametrize("tile", [(16, 16), (128, 1), (32, 64)])
def test_a_selection_has_a_row_of_key_tiles_for_every_query_tile(
    name: str, tile: tuple[int, int]
) -> None:
    q, k, v = torch.randn(3, 2, 3, 100, 16)
    if name == "bsfa":
        tile = (128, 64)  # the only query blocks it has
    if name == "xattention" and tile[1] == 1:
        tile = (128, 8)  # its stride
    method = make_method(name, tile=tile)
    assert isinstance(method, SparseMethod)
    mask = method.select(q, k, CallSite(0, 0, 0.0, TokenGrid(1, 10, 10)), v=v)
    assert mask.dtype == torch.bool
    assert mask.shape == (2, 3, -(-100 // tile[0]), -(-100 // tile[1]))
    assert bool(mask.any(-1).all())


@pytest.mark.parametrize("name", SPARSE_METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_what_a_method_says_it_selects_by_is_its_own(name: str, dtype: torch.dtype) -> None:
    # the base class has these for methods that never name them, and refuses.
    needed = {"rule": "rule", "words": "words", "blocks": "choose_blocks", "select": "select"}
    cls = SPARSE_METHODS[name]
    for dim in (64, 128):
        own = needed[cls().selection(torch.empty(1, 2, 300, dim, dtype=dtype))]
        assert getattr(cls, own) is not getattr(SparseMethod, own)
