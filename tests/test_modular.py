"""``sparsify`` on diffusers' modular pipelines: what the families' other tests show, in short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch
from diffusers import guiders
from diffusers.hooks import LayerSkipConfig
from family_checks import state_of
from quick import slow_but
from tiny_cosmos import Unguarded
from tiny_families import TINY, wan_vace
from tiny_ltx_kin import KIN
from tiny_parts import IMAGE, flow_scheduler, ready
from tiny_pipelines import tiny_wan
from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines import is_sparse, restore, sparsify
from vidsparse.pipelines.families import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Modular:
    """A modular pipeline.

    Args:
        parts: makes what it is made of.
        call: arguments beside those of ``made``.
        forwards: transformer forwards in a step.
        exact: dense calls are the stock ones bit for bit.
    """

    parts: Callable[[], dict[str, Any]]
    call: Callable[[], dict[str, Any]] = dict
    forwards: tuple[str, ...] = ("conditional", "unconditional")
    exact: bool = True


def with_image() -> dict[str, Any]:
    return {"image": IMAGE}


def parts_of(kind: str) -> Callable[[], dict[str, Any]]:
    """Those of a variant in ``TINY``."""
    return lambda: dict(TINY[kind].build().components)


def sections() -> dict[str, Any]:
    """Two of them."""
    return {"num_frames": 18, "num_latent_frames_per_chunk": 3}


def stages() -> dict[str, Any]:
    return {**sections(), "pyramid_num_inference_steps_list": [3, 3, 3]}


def distilled() -> dict[str, Any]:
    return parts_of("helios-pyramid")() | {"scheduler": diffusers.HeliosDMDScheduler(gamma=0.3)}


def few_steps() -> dict[str, Any]:
    return parts_of("cosmos3")() | {"scheduler": flow_scheduler()}


def two_vace_experts() -> dict[str, Any]:
    return {**wan_vace().components, "transformer_2": wan_vace().transformer}


LTX2_FORWARDS = ("conditional", "unconditional", "pred_cond_stg", "pred_cond_modality")

# MiniMax-H3 has no other pipeline, and every test of families runs it.
MODULAR = {
    "WanModularPipeline": Modular(parts_of("wan")),
    "WanImage2VideoModularPipeline": Modular(parts_of("wan-image"), with_image),
    "Wan22ModularPipeline": Modular(lambda: tiny_wan(two_stage=True).components),
    "Wan22Image2VideoModularPipeline": Modular(parts_of("wan-two-experts"), with_image),
    "Wan22VaceModularPipeline": Modular(two_vace_experts),
    "Cosmos3OmniModularPipeline": Modular(parts_of("cosmos3"), exact=False),
    "Cosmos3DistilledModularPipeline": Modular(few_steps, forwards=("conditional",), exact=False),
    "HeliosModularPipeline": Modular(parts_of("helios"), sections),
    "HeliosPyramidModularPipeline": Modular(parts_of("helios-pyramid"), stages),
    "HeliosPyramidDistilledModularPipeline": Modular(distilled, stages),
    "HunyuanVideo15ModularPipeline": Modular(parts_of("hunyuan15"), exact=False),
    "LTXModularPipeline": Modular(parts_of("ltx")),
    "LTX2ModularPipeline": Modular(parts_of("ltx2"), forwards=LTX2_FORWARDS),
    # it decodes by another diffusion, which is no part of this.
    "LTX25ModularPipeline": Modular(
        parts_of("ltx2"), lambda: {"output_type": "latent"}, LTX2_FORWARDS
    ),
}

EVERY = pytest.mark.parametrize("name", slow_but(["Wan22ModularPipeline"], MODULAR))


def built(name: str) -> Any:
    pipe = getattr(diffusers, name)()
    parts = MODULAR[name].parts()
    wanted = [part for part in pipe.null_component_names if parts.get(part) is not None]
    pipe.update_components(**{part: parts[part] for part in wanted})
    if name.startswith("Cosmos3"):
        pipe.enable_safety_checker(Unguarded())
    if name == "Cosmos3DistilledModularPipeline":
        pipe.update_components(distilled_sigmas=[1.0, 0.7, 0.4])
    return ready(pipe)


def made(name: str, pipe: Any) -> Tensor:
    """The denoised latents of a run of three steps."""
    call = {
        "prompt": "a red circle",
        "height": 64,
        "width": 64,
        "num_frames": 9,
        "num_inference_steps": 3,
        "output_type": "pt",
        **MODULAR[name].call(),
    }
    state = pipe(generator=torch.Generator().manual_seed(0), **call)
    latents: Tensor = state.get("latents")
    return latents


def test_every_modular_pipeline_that_is_taken_is_run() -> None:
    taken = {name for family in FAMILIES for name in family.pipelines if "Modular" in name}
    assert taken == {*MODULAR, "MiniMaxH3ModularPipeline"}


def test_every_other_pipeline_that_is_taken_is_held_to_the_stock_one_at_full_mask() -> None:
    builders = [one.build for one in TINY.values()] + [one.build for one in KIN.values()]
    built = {type(build()).__name__ for build in builders}
    taken = {name for family in FAMILIES for name in family.pipelines if name not in MODULAR}
    assert built == taken


@EVERY
def test_dense_calls_are_the_stock_ones_and_removal_is_bit_for_bit(name: str) -> None:
    pipe = built(name)
    stock = made(name, pipe)
    # the host's own hooks, for its step caches, are there from the first run on.
    before = state_of(pipe)
    with sparsify(pipe, "dense"):
        ours = made(name, pipe)
    if MODULAR[name].exact:
        assert torch.equal(ours, stock)
    else:
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
    sparsify(pipe, top_p=0.3, dense_steps=0)
    assert is_sparse(pipe)
    assert not torch.equal(made(name, pipe), stock)
    assert restore(pipe)
    assert state_of(pipe) == before
    assert torch.equal(made(name, pipe), stock)


@EVERY
def test_steps_and_guidance_branches_are_followed(name: str) -> None:
    pipe, forwards = built(name), MODULAR[name].forwards
    with sparsify(pipe, top_p=0.5, dense_steps=1) as handle:
        assert bool(made(name, pipe).isfinite().all())
        assert handle.summary().notes == ()
        seen = [c for c in handle.trace.cells if c.layer == 0]
    assert [(c.step, c.branch) for c in seen] == [(s, b) for s in range(3) for b in forwards]
    # a branch goes by the plan of the first one of its step, whatever text it has.
    for cell in seen:
        first = cell.branch == forwards[0]
        assert cell.action == ("dense" if cell.step == 0 else "replan" if first else "reuse")


def test_a_third_forward_of_a_guider_keeps_what_it_lacks_apart() -> None:
    # with another layer left out it lacks other things than the conditional branch.
    pipe = built("WanModularPipeline")
    layers = LayerSkipConfig(indices=[1], fqn="blocks")
    pipe.guider = guiders.SkipLayerGuidance(
        guidance_scale=3.0,
        skip_layer_guidance_start=0.0,
        skip_layer_guidance_stop=1.0,
        skip_layer_config=layers,
    )
    with sparsify(pipe, "foresight", tile="16x16", dense_steps=1, refresh=1) as handle:
        made("WanModularPipeline", pipe)
        seen = [(c.step, c.branch) for c in handle.trace.cells if c.layer == 0]
        assert not handle.engine._lacking
    # the guider leaves none out in the first step.
    branches = ("conditional", "unconditional", "conditional 2")
    assert seen == [(step, one) for step in range(3) for one in branches if step or one[-1] != "2"]


@pytest.mark.parametrize("name", ["WanModularPipeline", "LTXModularPipeline"])
def test_a_step_without_guidance_is_one_forward(name: str) -> None:
    pipe = built(name)
    # the first half of the steps is guided.
    pipe.guider = pipe.guider.new(stop=0.5)
    with sparsify(pipe, dense_steps=1) as handle:
        made(name, pipe)
        seen = [(c.step, c.branch) for c in handle.trace.cells if c.layer == 0]
    guided = [(0, branch) for branch in MODULAR[name].forwards]
    assert seen == [*guided, (1, "conditional"), (2, "conditional")]


def test_a_modular_pipeline_that_has_loaded_nothing_is_told_how() -> None:
    with pytest.raises(UnsupportedError, match=r"has no transformer.*load_components\(\)"):
        sparsify(diffusers.WanModularPipeline())


def test_a_modular_pipeline_of_another_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="FluxModularPipeline is not a supported pipeline"):
        sparsify(diffusers.FluxModularPipeline())
