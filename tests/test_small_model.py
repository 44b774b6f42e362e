"""The small models before they are trained: what their layouts declare, and what a step learns."""

from __future__ import annotations

import math
import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import seen_by_the_pipeline

from vidsparse.apps.small_model import (
    muon,
    train,
    vae,
    words,
)
from vidsparse.apps.small_model.cogvideox import SHAPES_JOINT, rotary_angles
from vidsparse.apps.small_model.drawing import SHAPES as SHAPES_DRAWN
from vidsparse.apps.small_model.export import build_tokenizer
from vidsparse.apps.small_model.model import ClipSize, Recipe, SmallModel
from vidsparse.apps.small_model.registry import SMALL_MODELS
from vidsparse.apps.small_model.scenes import world as scenes_world
from vidsparse.apps.small_model.together import Together
from vidsparse.apps.small_model.wan import SHAPES
from vidsparse.apps.small_model.wan_scenes import SCENES
from vidsparse.apps.small_model.worlds import World

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=SMALL_MODELS.values(), ids=list(SMALL_MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize(("frames", "height", "width"), [(9, 16, 32), (17, 32, 16), (25, 16, 16)])
def test_the_forward_of_training_equals_that_of_diffusers(
    model: SmallModel, frames: int, height: int, width: int
) -> None:
    torch.manual_seed(0)
    stock = model.build_vae().eval()
    clip = torch.rand(2, 3, frames, height, width) * 2 - 1
    with torch.no_grad():
        posterior = stock.encode(clip).latent_dist
        expected = stock.decode(posterior.mean).sample
        fast = model.prepare_vae(deepcopy(stock))
        mean, log_variance = model.encode(fast, clip)
        rebuilt = model.decode(fast, mean)
    scale = posterior.mean.abs().max()
    assert (mean - posterior.mean).abs().max() < 1e-4 * scale
    assert (log_variance - posterior.logvar).abs().max() < 1e-4 * posterior.logvar.abs().max()
    # Wan's pictures come clamped
    assert (rebuilt.clamp(-1, 1) - expected.clamp(-1, 1)).abs().max() < 1e-4


def test_an_autoencoder_is_trained_in_the_precision_of_its_clip(model: SmallModel) -> None:
    torch.manual_seed(0)
    net = model.prepare_vae(model.build_vae())
    clip = torch.rand(1, 3, 9, 16, 16) * 2 - 1
    exact, _ = model.encode(net, clip)
    mean, _ = model.encode(net, clip.to(torch.bfloat16))
    assert mean.dtype == torch.bfloat16
    assert 0 < (mean - exact).abs().max() < 0.1 * exact.abs().max()
    model.decode(net, mean).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


def test_known_moments_change_what_the_pipeline_sees_and_not_the_picture(
    model: SmallModel,
) -> None:
    torch.manual_seed(0)
    net = model.build_vae().eval()
    clip = torch.rand(1, 3, 9, 16, 16) * 2 - 1
    with torch.no_grad():
        latents, spread = model.encode(net, clip)
        picture = model.decode(net, latents)
        channels = latents.shape[1]
        mean, deviation = torch.rand(channels) - 0.5, torch.rand(channels) + 0.5
        shift, scale = (x.view(-1, 1, 1, 1) for x in model.normalise(net, mean, deviation))
        after, its_spread = model.encode(net, clip)
        wanted = (latents - shift) / scale
        assert torch.allclose(seen_by_the_pipeline(net, after), wanted, atol=1e-4)
        assert torch.allclose(model.decode(net, after), picture, atol=1e-4)
        if model is SHAPES_JOINT:
            assert torch.allclose(its_spread, spread - 2 * scale.log(), atol=1e-4)
    assert torch.equal(scale.flatten(), deviation)


def stock_pipeline(model: SmallModel) -> Any:
    torch.manual_seed(0)
    return model.pipeline_class(
        tokenizer=build_tokenizer(model.world.vocabulary),
        text_encoder=model.build_text_encoder(),
        vae=model.build_vae(),
        transformer=model.build_transformer(),
        scheduler=model.build_scheduler(),
    )


def test_training_embeds_prompts_as_the_pipeline_does(model: SmallModel) -> None:
    pipe = stock_pipeline(model)
    known = model.world.vocabulary
    prompts = [model.world.example_prompts[0], ""]
    ids = [known.token_ids(prompt) for prompt in prompts]
    padded = torch.tensor([row + [words.PAD_ID] * (known.caption_tokens - len(row)) for row in ids])
    with torch.no_grad():
        expected = pipe.encode_prompt(
            prompts,
            do_classifier_free_guidance=False,
            max_sequence_length=226 if model is SHAPES_JOINT else 512,
        )[0]
        assert torch.allclose(model.embed(pipe.text_encoder, padded), expected, atol=1e-5)


@pytest.mark.parametrize("place", [0.02, 0.5, 0.999])
def test_a_perfect_prediction_is_where_the_sampler_finds_the_picture(
    model: SmallModel, place: float
) -> None:
    torch.manual_seed(0)
    clean, noise = torch.randn(2, 4, 3, 4, 4), torch.randn(2, 4, 3, 4, 4)
    noisy, timestep, target = model.corrupt(clean, noise, torch.full((2,), place))
    scheduler = model.build_scheduler()
    if model is not SHAPES_JOINT:
        sigma = timestep / 1000
        assert torch.allclose(noisy - sigma.view(-1, 1, 1, 1, 1) * target, clean, atol=1e-5)
        # the shift of the scheduler is that of the training times
        scheduler.set_timesteps(1000)
        nearest = (scheduler.timesteps - timestep[0]).abs().argmin()
        assert scheduler.sigmas[nearest] == pytest.approx(sigma[0].item(), abs=2e-3)
    else:
        scheduler.set_timesteps(25)
        step = scheduler.step(target, int(timestep[0]), noisy)
        assert torch.allclose(step.pred_original_sample, clean, atol=1e-4)


def test_training_sees_the_positions_of_the_pipeline() -> None:
    pipe = stock_pipeline(SHAPES_JOINT)
    for frames, height, width in ((9, 256, 256), (9, 128, 128), (5, 192, 320)):
        expected = pipe._prepare_rotary_positional_embeddings(
            height, width, frames, torch.device("cpu")
        )
        angles = rotary_angles(
            frames,
            height // 4,
            width // 4,
            patch=4,
            base=(64, 64),
            channels=64,
            device=torch.device("cpu"),
        )
        assert all(torch.equal(a, b) for a, b in zip(angles, expected, strict=True))


def test_muon_gets_every_projection_of_the_blocks_and_nothing_else(model: SmallModel) -> None:
    transformer, encoder = model.build_transformer(), model.build_text_encoder()
    chosen = muon.hidden_matrices(transformer, encoder)
    per_layer = 6 if model is SHAPES_JOINT else 10
    # four of attention and three of the gated feed-forward
    words = 7 * encoder.config.num_layers
    assert len(chosen) == per_layer * transformer.config.num_layers + words
    assert all(matrix.ndim == 2 for matrix in chosen)


@pytest.mark.parametrize("shape", [(12, 8), (8, 4, 3, 3, 3), (6, 4, 1, 1, 1)])
def test_muon_moves_every_direction_of_a_matrix_or_kernel_alike(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(2)]
    # directions of very different strength
    for layer in layers:
        layer.grad = torch.randn(shape) * torch.logspace(0, -2, shape[0]).view(
            -1, *[1] * (len(shape) - 1)
        )
    muon.Muon(layers, weight_decay=0.0).step(0.1)
    for layer in layers:
        rows = layer.detach().flatten(1)
        strengths = torch.linalg.svdvals(rows) / (0.1 * 0.2 * max(rows.shape) ** 0.5)
        assert 0.3 < strengths.min() < strengths.max() < 1.5
        assert layer.grad is not None
        assert (rows * layer.grad.flatten(1)).sum() < 0


def test_psnr_of_a_known_error() -> None:
    black = torch.full((2, 3, 1, 4, 4), -1.0)
    # an error of a tenth of the range, and values beyond the range
    other = torch.stack([black[0] + 0.2, black[1] - 5])
    assert vae.clip_psnr(black, other).tolist() == pytest.approx([20.0, 106.02], abs=0.01)


def latents_of(model: SmallModel, weight: float) -> train.Latents:
    """What a moment of drawing leaves, at 9 frames of 64x64."""
    size = ClipSize(frames=9, side=64)
    plans = (train.LatentPlan(size=size, batch=2, batches=1),)
    torch.manual_seed(0)
    return train.draw_latents(
        model,
        model.build_vae(),
        seconds=0.001,
        device=torch.device("cpu"),
        seed=0,
        log=lambda _: None,
        plans=plans,
        body_weight=weight,
    )[0]


def test_the_loss_weighs_places_where_bodies_are() -> None:
    drawn = latents_of(SCENES, 6.0)
    assert drawn.weights is not None
    assert drawn.weights.shape == (2, 1, *drawn.values.shape[2:])
    assert drawn.weights.min() == 1
    assert 6 / 3 <= drawn.weights[drawn.weights > 1].min() <= drawn.weights.max() <= 6 * 3
    assert (drawn.weights > 1).float().mean() < 0.7
    # one draw takes place before a caption's words do
    shown = SCENES.world.sample(random.Random(0))
    for places in SCENES.world.centres(shown, 9):
        for latent, (x, y) in enumerate((places[[0, 4, 8]] * 8).astype(int)):
            assert drawn.weights[0, 0, latent, y, x] > 1
    assert latents_of(SCENES, 1.0).weights is None
    # nothing there says where bodies are
    assert latents_of(SHAPES, 6.0).weights is None


def test_a_small_body_counts_as_much_as_a_large_one_in_all() -> None:
    kinds = torch.zeros(1, 5, 80, 80, dtype=torch.uint8)
    kinds[..., 8:16, 8:16] = 3
    kinds[..., 40:56, 40:56] = 7
    kinds[..., 72:74, 72:74] = 9
    weights = train._weights(kinds, (2, 10, 10), 6.0)[0, 0, 0]
    # a hundredth of the picture, a twenty-fifth, and one of which hardly anything is seen
    assert weights[1, 1] == pytest.approx(6 * 2.5)
    assert weights[6, 6] == pytest.approx(6 / 1.6)
    assert weights[9, 9] == pytest.approx(6 * 3)
    # beside it too, and no further
    assert weights[1, 2] == weights[1, 1]
    assert weights[1, 4] == 1
    assert train._weights(torch.zeros(1, 5, 80, 80), (2, 10, 10), 6.0).eq(1).all()


@pytest.mark.parametrize("world", [SCENES.world, SHAPES.world], ids=["scenes", "shapes"])
def test_a_beginning_is_that_of_the_whole_clip(world: World) -> None:
    drawn = [world.sample(random.Random(3))]
    whole = world.render(drawn, 9, 48, 48)
    beginning = world.render(drawn, 3, 48, 48, course=9)
    assert beginning.shape[2] == 3
    # the ground of a longer way is sampled on another grid
    apart = (beginning - whole[:, :, :3]).abs().mean()
    assert apart < 0.1 * (beginning - world.render(drawn, 3, 48, 48)).abs().mean()


def smaller(model: SmallModel) -> SmallModel:
    """The model with a transformer of two small blocks."""
    sizes = {"heads": 1, "layers": 2, "feed_forward": 64}
    made: SmallModel = type("Smaller", (type(model),), sizes)()
    return made


def learner_of(model: SmallModel, *, rate: float = 0.0, naming: float = 0.0) -> train.Learner:
    """A learner on a CPU whose weights and draws are the same each time."""
    torch.manual_seed(0)
    learner = train.Learner(
        model,
        model.build_transformer(),
        model.build_text_encoder(),
        device=torch.device("cpu"),
        learning_rate=rate,
        muon_rate=rate,
        naming=naming,
        together=Together(),
    )
    torch.manual_seed(1)
    return learner


def test_the_loss_is_the_mean_by_weight() -> None:
    drawn = latents_of(SHAPES, 1.0)
    plan = train.StepPlan(source=0, batch=2, share=1.0)
    first = torch.zeros(2, 1, *drawn.values.shape[2:])
    first[:, :, 0] = 1
    model = smaller(SHAPES)

    def loss(weights: torch.Tensor | None) -> float:
        return learner_of(model).step(replace(drawn, weights=weights), plan, 1.0).item()

    plain, one, others = loss(None), loss(first), loss(1 - first)
    assert one != pytest.approx(others, rel=1e-3)
    # one latent frame of three
    assert (one + 2 * others) / 3 == pytest.approx(plain, rel=1e-5)
    assert (2 * one + 2 * others) / 4 == pytest.approx(loss(1 + first), rel=1e-5)


def test_latents_say_which_kind_of_body_is_where() -> None:
    drawn = latents_of(SCENES, 1.0)
    assert drawn.kinds is not None
    assert drawn.kinds.shape == (2, *drawn.values.shape[2:])
    colours, shapes = list(scenes_world.COLOURS), list(SHAPES_DRAWN)
    shown = SCENES.world.sample(random.Random(0))
    wanted = {
        1 + colours.index(b.colour) * len(shapes) + shapes.index(b.shape) for b in shown.bodies
    }
    assert set(drawn.kinds[0].unique().tolist()) == {0, *wanted}
    # the latent's middle frames: 0, then those of 1 to 4 and of 5 to 8
    places = SCENES.world.centres(shown, 9)
    tops = shown.bodies[-1]
    for latent, (x, y) in enumerate((places[-1][[0, 2, 6]] * 8).astype(int)):
        if tops.shape != "ring":
            # nothing covers the last one.
            kind = 1 + colours.index(tops.colour) * len(shapes) + shapes.index(tops.shape)
            assert drawn.kinds[0, latent, y, x] == kind
    assert drawn.kinds.max() < SCENES.world.kinds
    assert latents_of(SHAPES, 1.0).kinds is None


def test_which_body_is_where_is_learnt_beside_the_loss_that_is_told() -> None:
    drawn = latents_of(SCENES, 6.0)
    plan = train.StepPlan(source=0, batch=2, share=1.0)
    model = smaller(SCENES)

    def learnt(naming: float, steps: int) -> tuple[float, float | None]:
        learner = learner_of(model, rate=1e-2, naming=naming)
        losses = [learner.step(drawn, plan, 1.0).item() for _ in range(steps)]
        return losses[0], None if learner.misnamed is None else learner.misnamed.item()

    plain, untold = learnt(0.0, 1)
    first, told = learnt(0.5, 1)
    assert untold is None
    assert first == plain
    # it begins with zeros: every kind is as likely
    assert told is not None
    assert told == pytest.approx(math.log(SCENES.world.kinds), rel=1e-5)
    _, later = learnt(0.5, 12)
    assert later is not None
    assert later < 0.8 * told


@pytest.mark.parametrize("recipe", [SCENES.recipe, SCENES.further])
def test_a_session_of_scenes_fits_half_an_hour_and_reaches_the_long_size(recipe: Recipe) -> None:
    # the autoencoder has a session of its own, and two to three minutes of each go to starting,
    # compiling and checking
    assert recipe.vae_minutes <= 27
    assert recipe.latent_minutes + recipe.transformer_minutes <= 27
    for plan in recipe.step_plans:
        assert plan.source < len(recipe.latent_plans)
    last = [plan for plan in recipe.step_plans if plan.ends == 1.0]
    sizes = {recipe.latent_plans[plan.source].size for plan in last}
    assert sizes >= set(recipe.sizes)
    # some plan is ready at any time
    for progress in np.linspace(0, 0.999, 50):
        assert any(plan.begins <= progress < plan.ends for plan in recipe.step_plans)
