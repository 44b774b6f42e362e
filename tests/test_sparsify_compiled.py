"""``sparsify`` beside compiled code, and where gradients are asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from counting_backend import CountingBackend
from quick import slow_but
from tiny_pipelines import latents_of, tiny_wan, transformer_inputs

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.compilation import compile_blocks

pytestmark = pytest.mark.usefixtures("one_thread")


def gradients(transformer: Any) -> dict[str, torch.Tensor | None]:
    """Of a transformer's sum, by parameter; forwards and backwards with gradients on."""
    transformer.zero_grad()
    with torch.enable_grad():
        out = transformer(**transformer_inputs(5, 32, 32))[0]
        torch.autograd.backward(out.sum())
    return {name: p.grad for name, p in transformer.named_parameters()}


def test_dense_steps_have_their_gradients_and_sparse_ones_say_no_in_the_forward() -> None:
    pipe = tiny_wan()
    stock = gradients(pipe.transformer)
    assert any(grad is not None and bool(grad.any()) for grad in stock.values())
    for options in ({"method": "dense"}, {"dense_steps": 1.0}):
        with sparsify(pipe, **options):
            ours = gradients(pipe.transformer)
        for name, grad in stock.items():
            torch.testing.assert_close(ours[name], grad, rtol=1e-5, atol=1e-6)
    with sparsify(pipe, dense_steps=0):
        with pytest.raises(UnsupportedError, match="for inference only, and gradients are asked"):
            gradients(pipe.transformer)
        assert all(p.grad is None for p in pipe.transformer.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_a_compiled_block_says_so_too(implementation: str) -> None:
    pipe = tiny_wan()
    with sparsify(pipe, dense_steps=0, implementation=implementation):
        compile_blocks(pipe, backend="eager")
        with pytest.raises(Exception, match="for inference only, and gradients are asked"):
            gradients(pipe.transformer)
        assert all(p.grad is None for p in pipe.transformer.parameters())


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", slow_but(["aot_eager"], ["aot_eager", "inductor"]))
def test_dense_steps_have_their_gradients_compiled_too(backend: str) -> None:
    stock = gradients(tiny_wan().transformer)
    pipe = tiny_wan()
    with sparsify(pipe, dense_steps=1.0) as handle:
        compile_blocks(pipe, backend=backend)
        ours = gradients(pipe.transformer)
        assert handle.summary().dense_call_share == 1.0
    for name, grad in stock.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("how", slow_but(["blocks", "whole"], ["whole", "in place", "blocks"]))
def test_a_full_graph_serves_all_layers_steps_and_branches(how: str) -> None:
    pipe, backend = tiny_wan(layers=4), CountingBackend()
    stock = latents_of(pipe)
    with sparsify(pipe, top_p=1.0, dense_steps=2) as handle:
        if how == "whole":
            pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=backend)
        elif how == "in place":
            pipe.transformer.compile(fullgraph=True, backend=backend)
        else:
            pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
        for _ in range(2):
            compiled = latents_of(pipe)
        assert backend.graphs == 1
        assert handle.summary().calls == 4 * 4 * 2
        assert handle.summary().dense_step_share == 0.5
    torch.testing.assert_close(compiled, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_dynamo")
def test_new_options_and_a_second_pipeline_need_no_new_graph() -> None:
    first, second, backend = tiny_wan(), tiny_wan(seed=5), CountingBackend()
    for pipe in (first, second):
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
    for top_p in (0.9, 0.3):
        with sparsify(first, top_p=top_p), sparsify(second, "spargeattn", order="rowmajor"):
            latents_of(first)
            latents_of(second)
    assert backend.graphs == 1


def compile_before(pipe: Any, how: str, **options: Any) -> None:
    if how == "whole":
        pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, **options)
    else:
        compile_blocks(pipe, **options)


# under Python 3.13.0 with torch 2.10 or 2.11 nothing tells compiled code of a new processor.
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_a_pipeline_compiled_before_is_made_sparse_and_restored(how: str) -> None:
    pipe, backend = tiny_wan(), CountingBackend()
    compile_before(pipe, how, backend=backend)
    stock = latents_of(pipe)
    for _ in range(2):
        with sparsify(pipe, top_p=0.3, dense_steps=0) as handle:
            assert not torch.equal(latents_of(pipe), stock)
            assert handle.summary().calls == 4 * 2 * 2
        assert torch.equal(latents_of(pipe), stock)
    assert backend.graphs == 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_compiled_code_that_looks_at_no_processor_is_an_error_and_not_a_dense_video(
    how: str,
) -> None:
    pipe = tiny_wan()
    unsafe = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    compile_before(pipe, how, backend="eager", options=unsafe)
    stock = latents_of(pipe)
    handle = sparsify(pipe, top_p=0.3, dense_steps=0)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"none of its attention calls came here.*reset"):
            latents_of(pipe)
    torch.compiler.reset()
    latents_of(pipe)
    assert handle.summary().calls == 4 * 2 * 2
    handle.remove()
    torch.compiler.reset()
    assert torch.equal(latents_of(pipe), stock)


@pytest.mark.parametrize("options", [{"dense_steps": 0}, {"dense_steps": 1.0}, {"method": "dense"}])
def test_blocks_that_run_what_was_captured_before_are_an_error(options: dict[str, Any]) -> None:
    pipe = tiny_wan()
    for block in pipe.transformer.blocks:
        captured = copy.deepcopy(block)
        block.forward = captured.forward
    stock = latents_of(pipe)
    with (
        sparsify(pipe, **options),
        pytest.raises(UnsupportedError, match=r"none of its attention calls came here.*made anew"),
    ):
        latents_of(pipe)
    assert torch.equal(latents_of(pipe), stock)


def test_showing_changes_to_compiled_code_leaves_modules_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vidsparse.pipelines.forwards._MUTE", True)
    pipe = tiny_wan()
    before = [(name, list(vars(one)["_modules"])) for name, one in pipe.transformer.named_modules()]
    stock = latents_of(pipe)
    with sparsify(pipe, top_p=1.0):
        latents_of(pipe)
    after = [(name, list(vars(one)["_modules"])) for name, one in pipe.transformer.named_modules()]
    assert after == before
    assert torch.equal(latents_of(pipe), stock)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_compiles_the_blocks() -> None:
    pipe = tiny_wan()
    stock = latents_of(pipe)
    with sparsify(pipe, top_p=1.0, dense_steps=1):
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
        compiled = latents_of(pipe)
    torch.testing.assert_close(compiled, stock, rtol=1e-4, atol=1e-4)
