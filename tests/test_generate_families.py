"""``generate`` on saved tiny pipelines of every family, from text and from an image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from quick import slow_but
from saved_families import Opened, a_request, check_made
from tiny_families import TINY, latents, wan_image_to_video
from tiny_ltx import ltx2
from tiny_parts import IMAGE, LAST_IMAGE

from vidsparse.apps.cli import main
from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.families import FAMILIES
from vidsparse.pipelines.generate import GenerationCancelled, generate, generate_batch
from vidsparse.pipelines.models import LoadedPipeline, load

pytest_plugins = ["saved_families"]
pytestmark = pytest.mark.usefixtures("one_thread")

FROM_TEXT = [
    "skyreels-v2",
    "anyflow",
    "hunyuan",
    "hunyuan15",
    "cogvideox-dpm",
    "cogvideox1.5",
    "mochi",
    "allegro",
    "easyanimate",
    "ltx",
    "ltx2",
    "kandinsky5",
    "motif",
]

# the weights, and whether they are loaded for videos from an image.
FROM_IMAGE = [
    "wan-image",
    "wan-two-experts",
    "wan-ti2v",
    "skyreels-v2-image",
    "hunyuan-image",
    "hunyuan-image-concat",
    "hunyuan15-image",
    "cogvideox-image",
    "ltx",
    "kandinsky5-image",
    "motif",
]


def processors_of(loaded: LoadedPipeline) -> list[Any]:
    return [getattr(module, "processor", None) for module in loaded.pipe.transformer.modules()]


@pytest.mark.parametrize("name", slow_but(["wan", "hunyuan"], FROM_TEXT))
def test_videos_from_text(opened: Opened, name: str) -> None:
    frames = TINY[name].size[0]
    loaded = opened(name)
    before = processors_of(loaded)
    record = check_made(loaded, a_request(frames=frames, dense_steps=1), frames)
    assert record["dense_step_share"] == pytest.approx(1 / 3)
    assert record["images"] == {}
    assert processors_of(loaded) == before
    assert "step" not in vars(loaded.pipe.scheduler)


@pytest.mark.parametrize("name", slow_but(["wan-image", "hunyuan-image"], FROM_IMAGE))
def test_videos_from_an_image(opened: Opened, name: str, image: str) -> None:
    loaded = opened(name, image=True)
    assert loaded.takes_image
    frames = TINY[name].size[0]
    request = a_request(image=image, frames=frames, dense_steps=1, width=96)
    record = check_made(loaded, request, frames)
    content = hashlib.sha256(Path(image).read_bytes()).hexdigest()
    assert record["images"] == {"image": content}
    assert record["options"]["image"] == image


def test_the_image_changes_the_video(opened: Opened, tmp_path: Path) -> None:
    loaded = opened("wan-image", image=True)
    IMAGE.save(tmp_path / "a.png")
    LAST_IMAGE.save(tmp_path / "b.png")
    a, b = (generate(loaded, a_request(image=str(tmp_path / f"{n}.png"))).frames for n in "ab")
    assert not np.array_equal(a, b)


def test_the_first_and_the_last_frame(tmp_path: Path) -> None:
    wan_image_to_video(last=True).save_pretrained(tmp_path / "model")
    IMAGE.save(tmp_path / "first.png")
    LAST_IMAGE.save(tmp_path / "last.png")
    loaded = load(tmp_path / "model", device="cpu", image=True)
    first, last = str(tmp_path / "first.png"), str(tmp_path / "last.png")
    both = generate(loaded, a_request(image=first, last_image=last))
    assert set(both.record["images"]) == {"image", "last_image"}
    same = generate(loaded, a_request(image=first, last_image=first))
    with pytest.raises(OptionError, match="makes videos between two images"):
        generate(loaded, a_request(image=first))
    assert not np.array_equal(both.frames, same.frames)


@pytest.mark.parametrize("name", ["hunyuan", "hunyuan15", "cogvideox-dpm", "ltx"])
def test_a_batch_and_its_prompts_alone(opened: Opened, name: str) -> None:
    loaded = opened(name)
    requests = [a_request(prompt=p) for p in ("a red circle", "a blue square that moves left")]
    together = generate_batch(loaded, requests)
    alone = generate(loaded, requests[1])
    difference = np.abs(together[1].frames.astype(int) - alone.frames.astype(int))
    assert difference.max() <= 1


def test_guidance_that_is_a_component_is_set_for_the_call_alone(
    opened: Opened,
) -> None:
    loaded = opened("hunyuan15")
    guider = loaded.pipe.guider
    assert loaded.defaults.guidance == 3.0
    one = generate(loaded, a_request(guidance=1.0))
    two = generate(loaded, a_request(guidance=2.0))
    assert loaded.pipe.guider is guider
    assert not np.array_equal(one.frames, two.frames)
    assert two.record["options"]["guidance"] == 2.0


def test_cancelling_works_without_a_callback_of_the_pipeline(
    opened: Opened,
) -> None:
    loaded, steps = opened("hunyuan15"), []
    with pytest.raises(GenerationCancelled, match="after step 1 of 3"):
        generate(
            loaded,
            a_request(),
            progress=lambda step, *_: steps.append(step),
            cancel=lambda: bool(steps),
        )
    assert "step" not in vars(loaded.pipe.scheduler)
    assert generate(loaded, a_request()).record["notes"] == []


def test_ltx_is_told_the_frame_rate(opened: Opened) -> None:
    loaded = opened("ltx")
    slow, fast = (generate(loaded, a_request(fps=fps, guidance=1.0)).frames for fps in (5, 50))
    assert not np.array_equal(slow, fast)


def test_a_lora_that_the_host_does_not_load_is_refused(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match="cannot load a LoRA into a HunyuanVideo15Pipeline"):
        load(folders("hunyuan15"), device="cpu", lora=str(tmp_path / "style.safetensors"))


# the command line


def test_generate_from_an_image_by_command(
    folders: Callable[[str], Path], image: str, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n")
    arguments = ["generate", str(prompts), "--model", str(folders("ltx")), "--image", image]
    arguments += ["--size", "96x64", "--frames", "9", "--steps", "2", "--out", str(tmp_path / "o")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    (record,) = (tmp_path / "o").glob("*/*.json")
    assert json.loads(record.read_text())["images"]["image"]
    # without the image, the settings are others and so is the folder.
    result = CliRunner().invoke(main, [a for a in arguments if a not in ("--image", image)])
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "o").glob("*/*.mp4"))) == 2
    arguments[3] = str(folders("mochi"))
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "makes videos from text alone" in result.output


def test_the_catalog_shows_the_families_and_their_settings() -> None:
    shown = CliRunner().invoke(main, ["models"]).output
    for family in FAMILIES:
        assert family.name in shown
        assert all(name in shown for name in family.pipelines)
    assert "dense steps 0.1" in shown
    assert "top_p 0.9, tile 16x16" in shown


def test_guidance_by_more_forwards_has_names_of_its_own() -> None:
    pipe = ltx2(perturbed_attn=True)
    with sparsify(pipe, dense_steps=0, reuse=2) as handle:
        latents("ltx2-guidance", pipe)
        actions = {(c.branch, c.step, c.action) for c in handle.trace.cells}
    # a plan made for one forward of a step serves no other.
    assert ("uncond_modality", 1, "reuse") in actions
    assert {branch for branch, step, _ in actions if step == 1} == {
        "conditional",
        "uncond_stg",
        "uncond_modality",
    }
