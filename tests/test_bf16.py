"""Linear layers in bf16 on a CPU: which, how exactly, what becomes of them, and what is refused."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from diffusers import WanTransformer3DModel
from linear_cases import LAYERS_OF_A_BLOCK, compared
from support_matrix import VARIANTS
from tiny_families import TINY, latents
from tiny_parts import Fitting, unfitted
from tiny_pipelines import latents_of, tiny_wan

from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.pipelines import accelerate
from vidsparse.pipelines.adapter import transformers_of
from vidsparse.pipelines.bf16 import Bf16Linear, decoder_to_bf16, to_bf16
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.linear import LinearFacts, quantize_linear
from vidsparse.pipelines.lookup import find_adapter
from vidsparse.pipelines.models import load
from vidsparse.pipelines.placement import has_bf16_products
from vidsparse.pipelines.request import GenerateRequest, settings_hash

pytestmark = pytest.mark.usefixtures("one_thread", "bf16_cpu")


def in_bf16(pipe: Any) -> set[str]:
    return {
        name
        for transformer in transformers_of(pipe, find_adapter(pipe))
        for name, module in transformer.named_modules()
        if isinstance(module, Bf16Linear)
    }


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_errs_by_half_a_unit_of_what_is_multiplied_and_gives_back_the_format(
    dtype: torch.dtype, bias: bool
) -> None:
    layer = torch.nn.Linear(48, 32, bias=bias)
    exact = layer.weight.detach().double()
    added = layer.bias.detach().double() if bias else torch.zeros(32, dtype=torch.double)
    to_bf16(layer)
    x = torch.randn(2, 37, 48, dtype=dtype)
    out = layer(x)
    assert out.dtype == dtype
    x = x.double()
    # a rounding to bf16 errs by half a unit in the last of 8 bits: of either factor, of the bias
    # and of the sum.
    half = 2.0**-9
    terms = x.abs() @ exact.abs().T + added.abs()
    budget = (2 * half + half**2) * terms + half * (1 + 3 * half) * terms
    # products are summed in fp32.
    budget += 48 * torch.finfo(torch.float32).eps * terms
    error = (out.double() - (x @ exact.T + added)).abs()
    assert bool((error <= budget).all())
    assert error.max() > 0


@pytest.mark.parametrize("name", list(VARIANTS.values()))
def test_every_family_runs_with_projections_inside_all_its_blocks_in_bf16(name: str) -> None:
    pipe = TINY[name].build()
    transformers = [unfitted(each) for each in transformers_of(pipe, find_adapter(pipe))]
    dtypes = [transformer.dtype for transformer in transformers]
    exact = latents(name, pipe, num_inference_steps=2)
    facts = quantize_linear(pipe, "bf16", smallest=16)
    changed = in_bf16(pipe)
    assert len(changed) == facts.layers
    inside = ("blocks.", "transformer_blocks.", "single_", "visual_transformer_blocks.", "layers.")
    assert all(each.startswith(inside) for each in changed)
    assert not [each for each in changed if ".norm" in each or "modulation" in each]
    # pipelines make their latents in it.
    assert [transformer.dtype for transformer in transformers] == dtypes
    made = latents(name, pipe, num_inference_steps=2)
    assert made.dtype == exact.dtype
    assert 0 < (made - exact).norm() < 0.02 * exact.norm()


def test_the_first_and_the_last_block_are_in_it_too() -> None:
    pipe = tiny_wan(layers=3)
    assert quantize_linear(pipe, "bf16", smallest=32).layers == 3 * LAYERS_OF_A_BLOCK
    assert {each.split(".")[1] for each in in_bf16(pipe)} == {"0", "1", "2"}


def test_where_no_layer_is_large_enough_all_stay_and_that_is_said() -> None:
    pipe = tiny_wan()
    expected = latents_of(pipe)
    facts = quantize_linear(pipe, "bf16")
    assert (facts.layers, facts.bytes_after) == (0, facts.bytes_before)
    assert str(facts).startswith(f"none of {facts.of} linear layers gains by bf16")
    assert torch.equal(latents_of(pipe), expected)


def convolutions(dims: int) -> Any:
    kind = torch.nn.Conv3d if dims == 3 else torch.nn.Conv2d
    return torch.nn.Sequential(kind(4, 8, 3, padding=1), torch.nn.SiLU(), kind(8, 3, 3, padding=1))


@pytest.mark.parametrize("dims", [2, 3])
def test_convolutions_of_a_decoder_compute_in_bf16_and_give_back_fp32(dims: int) -> None:
    vae: Any = torch.nn.Module()
    vae.encoder, vae.decoder = convolutions(dims), convolutions(dims)
    x = torch.randn(2, 4, *(5, 12, 12)[-dims:])
    exact = vae.decoder(x)
    assert decoder_to_bf16(vae) == 2
    made = vae.decoder(x)
    assert made.dtype == torch.float32
    assert 0 < (made - exact).norm() < 0.01 * exact.norm()
    # once is enough, and what makes latents of pictures stays exact.
    assert decoder_to_bf16(vae) == 2
    assert torch.equal(vae.decoder(x), made)
    assert {each.dtype for each in vae.encoder.parameters()} == {torch.float32}
    # moved back into fp32 as a whole, it computes in that by its rounded weights.
    again = vae.float().decoder(x)
    assert again.dtype == torch.float32
    assert 0 < (again - exact).norm() < (made - exact).norm()


# Allegro's decodes in tiles alone, and MiniMax-H3's has weights of another kind.
DECODERS = [name for name in VARIANTS.values() if name not in ("allegro", "minimax")]


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_every_family_s_decoder_runs_so(name: str) -> None:
    pipe = TINY[name].build()
    exact = np.asarray(latents(name, pipe, num_inference_steps=2, output_type="np"))
    assert decoder_to_bf16(pipe.vae) > 5
    made = np.asarray(latents(name, pipe, num_inference_steps=2, output_type="np"))
    assert pipe.vae.dtype == torch.float32
    assert 0 < np.sqrt(np.square(made - exact).mean()) < 0.01


def test_a_model_without_a_decoder_or_with_one_in_16_bits_stays_as_it_is() -> None:
    assert decoder_to_bf16(None) == 0
    vae: Any = torch.nn.Module()
    vae.decoder = convolutions(3).half()
    assert decoder_to_bf16(vae) == 0


def test_what_is_told_of_layers_in_bf16_names_the_decoder() -> None:
    facts = LinearFacts(
        format="bf16", layers=3, of=4, bytes_before=2**21, bytes_after=2**20, convolutions=7
    )
    assert str(facts) == (
        "3 of 4 linear layers in bf16, and the decoder's 7 convolutions: the transformer's weights "
        "take 1.0 MiB instead of 2.0"
    )
    assert str(replace(facts, layers=0)) == (
        "none of 4 linear layers gains by bf16, in which are the decoder's 7 convolutions"
    )


def test_layers_in_bf16_stay_so_and_take_no_other_format() -> None:
    pipe = tiny_wan(layers=3)
    first = quantize_linear(pipe, "bf16", smallest=32)
    again = quantize_linear(pipe, "bf16", smallest=32)
    assert again.layers == first.layers
    assert again.bytes_before == again.bytes_after == first.bytes_after < first.bytes_before
    with pytest.raises(OptionError, match="in bf16 already"):
        quantize_linear(pipe, "int8", smallest=32)


def test_layers_that_are_no_plain_ones_in_fp32_are_left_alone() -> None:
    pipe = tiny_wan(layers=3)
    wrapped, derived, halved = (block.ffn.net[2] for block in pipe.transformer.blocks)
    wrapped.forward = wrapped.forward
    derived.__class__ = Fitting
    halved.to(torch.bfloat16)
    kinds = [type(each) for each in (wrapped, derived, halved)]
    assert quantize_linear(pipe, "bf16", smallest=32).layers == 3 * LAYERS_OF_A_BLOCK - 3
    assert [type(each) for each in (wrapped, derived, halved)] == kinds


def test_a_speed_leaves_layers_in_8_bits_as_they_are() -> None:
    pipe = tiny_wan(layers=3)
    quantize_linear(pipe, "int8", smallest=32, edges=0)
    expected = latents_of(pipe)
    with accelerate(pipe, "high", method="dense", dense_steps=1) as held:
        assert held.linear is None
    assert torch.equal(latents_of(pipe), expected)


def test_weights_are_saved_and_copied_as_they_are(tmp_path: Path) -> None:
    pipe = tiny_wan(layers=3)
    names = set(pipe.transformer.state_dict())
    quantize_linear(pipe, "bf16", smallest=32)
    expected = latents_of(pipe)
    state = pipe.transformer.state_dict()
    assert set(state) == names
    assert state["blocks.1.ffn.net.2.weight"].dtype == torch.bfloat16
    pipe.transformer.save_pretrained(tmp_path)
    read = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.float32)
    assert read.dtype == torch.float32
    # rounded weights, in layers as the host has them.
    assert all(torch.equal(read.state_dict()[name], state[name].to(read.dtype)) for name in names)
    for copied in (copy.deepcopy(pipe.transformer), pickle.loads(pickle.dumps(pipe.transformer))):
        pipe.register_modules(transformer=copied)
        assert torch.equal(latents_of(pipe), expected)


# what it goes with


@pytest.mark.parametrize("rank", [2, 32])
def test_a_lora_beside_them_stays_in_its_own_format(rank: int) -> None:
    def styled() -> Any:
        pipe = tiny_wan(layers=3)
        torch.manual_seed(3)
        pipe.transformer.add_adapter(
            peft.LoraConfig(r=rank, target_modules=["to_q", "to_v"], init_lora_weights=False)
        )
        return pipe

    pipe = styled()
    exact = latents_of(pipe)
    quantize_linear(pipe, "bf16", smallest=32)
    assert len(in_bf16(pipe)) == 3 * LAYERS_OF_A_BLOCK
    beside = [m for n, m in pipe.transformer.named_parameters() if "lora" in n]
    assert beside
    assert {each.dtype for each in beside} == {torch.float32}
    made = latents_of(pipe)
    assert made.dtype == torch.float32
    assert 0 < (made - exact).norm() < 0.02 * exact.norm()


def a_request(**changes: Any) -> GenerateRequest:
    given = {"prompt": "a red circle", "frames": 5, "width": 32, "height": 32, "steps": 2}
    return GenerateRequest(**{**given, **changes})


def test_a_record_says_what_became_of_the_linear_layers(wide_model: Path) -> None:
    loaded = load(wide_model, device="cpu", linear="bf16")
    record = generate(loaded, a_request(linear="bf16", model=str(wide_model))).record
    assert record["options"]["linear"] == "bf16"
    facts = LinearFacts(**record["linear"])
    assert facts == loaded.linear_facts
    assert (facts.format, facts.layers) == ("bf16", 3 * LAYERS_OF_A_BLOCK)
    assert facts.bytes_after < facts.bytes_before


def test_another_format_is_another_video(wide_model: Path) -> None:
    hashes = [
        settings_hash(a_request(model=str(wide_model), device="cpu", linear=linear))
        for linear in (None, "none", "bf16")
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_accelerate_takes_it_by_name_and_by_speed(wide_model: Path) -> None:
    for linear in ("bf16", None):
        pipe = load(wide_model, device="cpu").pipe
        held = accelerate(pipe, "high", linear=linear)
        assert held.linear is not None
        assert held.linear.layers == 3 * LAYERS_OF_A_BLOCK
        assert "linear layers in bf16" in str(held)
        held.remove()
        # rounded weights stay.
        assert len(in_bf16(pipe)) == 3 * LAYERS_OF_A_BLOCK
    assert accelerate(load(wide_model, device="cpu").pipe, "exact").linear is None
    # nothing is large enough.
    narrow = accelerate(tiny_wan(), "high")
    assert narrow.linear is None
    assert "linear layers" not in str(narrow)


def test_compare_holds_a_speed_s_bf16_layers_against_the_models_own(
    wide_model: Path, tmp_path: Path
) -> None:
    options = ("--speed", "high", "--parts", "--steps", "3")
    report, _ = compared(wide_model, tmp_path, *options)
    assert report["settings"]["linear"] == "bf16"
    sides = report["prompts"][0]
    assert sides["dense"]["linear"] is None
    assert sides["sparse"]["linear"]["layers"] == 3 * LAYERS_OF_A_BLOCK
    stages = [stage["name"] for stage in report["summary"]["stages"]]
    assert stages == ["sparse attention (foresight)", "linear layers in bf16"]
    assert [note for note in report["notes"] if "linear layers in bf16" in note]


# refusals, and what the machine says


def test_it_is_refused_on_a_cpu_without_such_products(plain_cpu: None) -> None:
    message = (
        "linear bf16 needs a CPU with AVX512-BF16 or AMX-BF16, and this one has neither. "
        "Hint: leave --linear out."
    )
    with pytest.raises(UnsupportedError) as caught:
        quantize_linear(tiny_wan(), "bf16")
    assert str(caught.value) == message


def test_it_is_refused_on_a_gpu_and_in_a_model_that_is_in_16_bits() -> None:
    with pytest.raises(UnsupportedError, match=r"and this is a GPU\. Hint: use --dtype bf16"):
        quantize_linear(tiny_wan(), "bf16", device="cuda", smallest=32)
    with pytest.raises(OptionError, match="linear bf16 needs dtype fp32, got bf16"):
        quantize_linear(tiny_wan().to(torch.bfloat16), "bf16", smallest=32)


@pytest.mark.parametrize(
    ("features", "gains"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_bf16": False, "amx_bf16": True}, True),
        ({"avx512_f": True, "avx512_bf16": False}, False),
        ({}, False),
    ],
)
def test_torch_says_what_the_cpu_has(
    monkeypatch: pytest.MonkeyPatch, features: dict[str, bool], gains: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
    assert has_bf16_products() is gains
    # an older torch.
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not has_bf16_products()
