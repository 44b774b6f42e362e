"""Linear layers in 8 bits: which, how exactly, how small, and what is refused."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from click.testing import CliRunner
from diffusers import WanPipeline
from linear_cases import LAYERS_OF_A_BLOCK, compared
from support_matrix import VARIANTS
from tiny_families import TINY, latents
from tiny_pipelines import latents_of, tiny_wan

from vidsparse.apps.cli import main
from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.pipelines import accelerate, sparsify
from vidsparse.pipelines.adapter import transformers_of
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.linear import LinearFacts, bytes_spared, fuse_lora, quantize_linear
from vidsparse.pipelines.lookup import find_adapter
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest, settings_hash

pytestmark = pytest.mark.usefixtures("one_thread")


def in_8_bits(pipe: Any) -> set[str]:
    """The names of the linear layers whose weights are torchao's."""
    return {
        name
        for transformer in transformers_of(pipe, find_adapter(pipe))
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and type(module.weight.data) is not torch.Tensor
    }


@pytest.mark.parametrize("name", list(VARIANTS.values()))
def test_only_projections_inside_blocks_are_put_into_8_bits(name: str) -> None:
    pipe = TINY[name].build()
    facts = quantize_linear(pipe, "int8", edges=0, smallest=16)
    changed = in_8_bits(pipe)
    assert len(changed) == facts.layers > 0
    # what lies outside, and adaptive norms, whose rows are samples.
    inside = ("blocks.", "transformer_blocks.", "single_", "visual_transformer_blocks.", "layers.")
    assert all(each.startswith(inside) for each in changed)
    assert not [each for each in changed if ".norm" in each or "modulation" in each]
    kinds = {each.rpartition(".")[2] for each in changed}
    assert kinds >= {"to_q", "to_k", "to_v"} or kinds >= {"to_query", "to_key", "to_value"}


def test_the_first_and_the_last_block_stay() -> None:
    pipe = tiny_wan(layers=4)
    quantize_linear(pipe, "int8", smallest=32)
    changed = in_8_bits(pipe)
    assert {each.split(".")[1] for each in changed} == {"1", "2"}
    assert len(changed) == 2 * LAYERS_OF_A_BLOCK


def test_both_transformers_of_a_two_stage_model_are_changed() -> None:
    pipe = tiny_wan(layers=3, two_stage=True)
    assert quantize_linear(pipe, "int8", smallest=32).layers == 2 * LAYERS_OF_A_BLOCK


def in_int8(edges: int = 1) -> Any:
    pipe = tiny_wan(layers=3)
    quantize_linear(pipe, "int8", smallest=32, edges=edges)
    return pipe


def test_layers_in_8_bits_stay_so_and_take_no_other_format() -> None:
    pipe = tiny_wan(layers=4).to(torch.bfloat16)
    first = quantize_linear(pipe, "int8", smallest=32)
    again = quantize_linear(pipe, "int8", smallest=32)
    assert again.layers == first.layers
    assert again.bytes_before == again.bytes_after == first.bytes_after
    # on a GPU that has fp8, where it would be the other format that is the matter.
    with (
        mock.patch("vidsparse.pipelines.linear.check_linear"),
        pytest.raises(OptionError, match="in int8 already"),
    ):
        quantize_linear(pipe, "fp8", smallest=32)


def test_what_is_in_few_bits_by_others_is_left_alone() -> None:
    copied = copy.deepcopy(in_int8())
    with pytest.raises(UnsupportedError, match="whose weights are in 16 or 32 bits"):
        quantize_linear(copied, "int8", smallest=32)
    cast = tiny_wan(layers=3)
    cast.transformer.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
    )
    with pytest.raises(UnsupportedError, match="whose weights are in 16 or 32 bits"):
        quantize_linear(cast, "int8", smallest=32)
    # nobody asked for a format: it goes on as it is.
    expected = latents_of(copied)
    with accelerate(copied, "high", method="dense", dense_steps=1) as held:
        assert held.linear is None
    assert torch.equal(latents_of(copied), expected)


@pytest.mark.parametrize("edges", [0, 1])
def test_a_model_in_8_bits_is_put_into_bf16_in_no_part(edges: int) -> None:
    pipe = in_int8(edges)
    with pytest.raises(OptionError, match="in int8 already, so they cannot be put into bf16"):
        quantize_linear(pipe, "bf16", smallest=32)
    assert {p.dtype for p in pipe.transformer.parameters()} == {torch.float32}


def test_the_matrices_of_a_lora_stay_however_large() -> None:
    pipe = tiny_wan(layers=3)
    pipe.transformer.add_adapter(peft.LoraConfig(r=32, target_modules=["to_q", "to_v"]))
    facts = quantize_linear(pipe, "int8", smallest=32)
    beside = [m for n, m in pipe.transformer.named_modules() if n.endswith(("lora_A", "lora_B"))]
    weights = [layer.weight for each in beside for layer in each.values()]
    assert len(weights) == 3 * 2 * 2 * 2
    assert {(type(each.data), each.dtype) for each in weights} == {(torch.Tensor, torch.float32)}
    # nor are they counted among those that could have been.
    alone = quantize_linear(tiny_wan(layers=3), "int8", smallest=32)
    assert (facts.layers, facts.of) == (alone.layers, alone.of)


@pytest.mark.parametrize(("smallest", "layers"), [(32, 8 + 2), (33, 0), (48, 0)])
def test_narrow_layers_stay(smallest: int, layers: int) -> None:
    # 32 wide, with a feed-forward of 48.
    pipe = tiny_wan(layers=3)
    if layers:
        assert quantize_linear(pipe, "int8", smallest=smallest).layers == layers
    else:
        with pytest.raises(UnsupportedError, match=f"no linear layer of {smallest} features"):
            quantize_linear(pipe, "int8", smallest=smallest)
        assert not in_8_bits(pipe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_errs_by_half_a_unit_of_each_factor(dtype: torch.dtype) -> None:
    pipe = tiny_wan(layers=3).to(dtype)
    layer = pipe.transformer.blocks[1].ffn.net[2]
    exact = layer.weight.detach().double()
    quantize_linear(pipe, "int8", smallest=32)
    x = torch.randn(2, 37, 48, dtype=dtype)
    out = layer(x).double()
    x = x.double()
    unit_x = x.abs().amax(-1, keepdim=True) / 127
    unit_w = exact.abs().amax(-1) / 127
    # |x w - x' w'| for |x - x'| <= unit_x / 2, |w - w'| <= unit_w / 2, summed over the features.
    budget = (
        x.abs().sum(-1, keepdim=True) * unit_w / 2
        + unit_x / 2 * exact.abs().sum(-1)
        + 48 * unit_x * unit_w / 4
    )
    expected = x @ exact.T + layer.bias.double()
    # scales, the sum and the bias are rounded to the model's format.
    rounding = 4 * torch.finfo(dtype).eps * (expected.abs() + budget + layer.bias.abs().double())
    error = (out - expected).abs()
    assert bool((error <= budget + rounding).all())
    assert error.max() > 0


def test_the_bytes_are_those_of_weights_and_their_scales() -> None:
    pipe = tiny_wan(layers=3)
    weights = [one for _, one in pipe.transformer.state_dict().items()]
    before = sum(one.numel() * one.element_size() for one in weights)
    facts = quantize_linear(pipe, "int8", smallest=32)
    block = pipe.transformer.blocks[1]
    changed = [m for m in block.modules() if isinstance(m, torch.nn.Linear)]
    elements = sum(m.in_features * m.out_features for m in changed)
    rows = sum(m.out_features for m in changed)
    assert facts.bytes_before == before
    # of each row torchao keeps a scale in fp32 and a zero point in int8.
    assert facts.bytes_after == before - 3 * elements + 5 * rows
    assert bytes_spared(pipe.transformer, "cpu") == facts.bytes_before - facts.bytes_after
    # what waits in the machine's memory leaves a GPU nothing.
    assert bytes_spared(pipe.transformer) == 0
    assert f"{facts.layers} of {facts.of} linear layers in int8" in str(facts)


def test_what_weights_spare_is_what_refreshes_may_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny_wan(layers=3)
    with sparsify(pipe, "foresight", share=0.1) as handle:
        facts = quantize_linear(pipe, "int8", smallest=32)
        monkeypatch.setattr(
            "vidsparse.pipelines.handle.bytes_spared", partial(bytes_spared, kind="cpu")
        )
        assert handle.engine.spared is not None
        assert handle.engine.spared() == facts.bytes_before - facts.bytes_after > 0
    assert handle.engine.spared is None


# what it goes with


def lora_of(pipe: Any, folder: Path) -> Path:
    pipe.transformer.add_adapter(
        peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    layers = peft.get_peft_model_state_dict(pipe.transformer)
    WanPipeline.save_lora_weights(folder, transformer_lora_layers=layers)
    (file,) = folder.glob("*.safetensors")
    return file


def test_a_lora_is_part_of_what_is_rounded(tmp_path: Path) -> None:
    file = lora_of(tiny_wan(layers=3), tmp_path)

    def styled(*, rounded: bool) -> tuple[Any, torch.Tensor]:
        pipe = tiny_wan(layers=3)
        pipe.load_lora_weights(file.parent, weight_name=file.name)
        if rounded:
            fuse_lora(pipe)
            quantize_linear(pipe, "int8", smallest=32)
        return pipe, latents("wan", pipe)

    plain = latents("wan", tiny_wan(layers=3))
    _, exact = styled(rounded=False)
    pipe, ours = styled(rounded=True)
    assert pipe.get_active_adapters() == []
    # nothing of the host's LoRA layers is left: two more products each.
    assert not [name for name, _ in pipe.transformer.named_modules() if "lora" in name]
    assert (ours - exact).norm() < 0.2 * (plain - exact).norm()


def a_request(**changes: Any) -> GenerateRequest:
    given = {"prompt": "a red circle", "frames": 5, "width": 32, "height": 32, "steps": 2}
    return GenerateRequest(**{**given, **changes})


def test_a_record_says_what_became_of_the_linear_layers(wide_model: Path) -> None:
    loaded = load(wide_model, device="cpu", linear="int8")
    record = generate(loaded, a_request(linear="int8", model=str(wide_model))).record
    assert record["options"]["linear"] == "int8"
    facts = LinearFacts(**record["linear"])
    assert facts == loaded.linear_facts
    assert facts.layers == LAYERS_OF_A_BLOCK
    assert facts.bytes_after < facts.bytes_before
    assert record["versions"]["torchao"]
    # as loaded, whatever is asked for: weights are rounded once.
    assert generate(loaded, a_request()).record["options"]["linear"] == "int8"


def test_a_lora_is_fused_where_a_model_is_loaded_for_8_bits(
    wide_model: Path, tmp_path: Path
) -> None:
    pipe = WanPipeline.from_pretrained(wide_model, local_files_only=True)
    file = lora_of(pipe, tmp_path)
    loaded = load(wide_model, device="cpu", linear="int8", lora=str(file))
    assert loaded.pipe.get_active_adapters() == []
    assert loaded.linear_facts.layers == LAYERS_OF_A_BLOCK
    record = generate(loaded, a_request()).record
    assert record["options"]["lora"] == str(file)


def test_another_format_is_another_video(wide_model: Path) -> None:
    hashes = [
        settings_hash(a_request(model=str(wide_model), linear=linear))
        for linear in (None, "none", "int8")
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_compare_holds_8_bit_layers_against_the_models_own(
    wide_model: Path, tmp_path: Path
) -> None:
    options = ("--method", "dense", "--steps", "2", "--linear", "int8")
    report, printed = compared(wide_model, tmp_path, *options)
    assert f"{LAYERS_OF_A_BLOCK} of" in printed
    # both sides dense: all that they differ by is the format.
    assert report["settings"]["linear"] == "int8"
    sides = report["prompts"][0]
    assert sides["dense"]["linear"] is None
    assert sides["sparse"]["linear"]["layers"] == LAYERS_OF_A_BLOCK
    assert not sides["identical"]
    assert [note for note in report["notes"] if "linear layers in int8" in note]


# refusals


def test_fp8_is_refused_on_a_cpu() -> None:
    with pytest.raises(UnsupportedError, match=r"compute capability 8\.9 .* this is a CPU"):
        quantize_linear(tiny_wan(layers=3), "fp8", smallest=32)


def test_fp8_is_refused_on_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(UnsupportedError, match=r"8\.9 or higher, and NVIDIA A100 has 8\.0"):
        quantize_linear(tiny_wan(layers=3), "fp8", device="cuda", smallest=32)


def test_fp8_is_refused_for_weights_other_than_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(OptionError, match="needs dtype bf16, got fp32"):
        quantize_linear(tiny_wan(layers=3), "fp8", device="cuda", smallest=32)


def test_without_torchao_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wide_model: Path
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "torchao" else found(name, *a)
    )
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n", encoding="utf-8")
    command = ["generate", str(prompts), "--model", str(wide_model), "--linear", "int8"]
    result = CliRunner().invoke(main, [*command, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    message = "linear int8 needs torchao. Hint: pip install 'vidsparse[linear]'."
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["none", "model", "group"])
@pytest.mark.parametrize("linear", ["fp8", "int8"])
def test_8_bits_on_a_gpu(wide_model: Path, linear: str, offload: str) -> None:
    request = a_request(device="cuda", frames=9)
    plain = generate(load(wide_model, device="cuda", offload=offload), request)
    held = load(wide_model, device="cuda", linear=linear, offload=offload)
    made = generate(held, request)
    assert held.linear_facts.layers == LAYERS_OF_A_BLOCK
    assert held.linear_facts.bytes_after < held.linear_facts.bytes_before
    away = abs(made.frames.astype(float) - plain.frames).mean()
    assert 0 < away < 16
