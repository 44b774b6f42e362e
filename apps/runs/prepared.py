"""From a prompt file and options to checked requests: all that can be wrong is found here.

Nothing heavy runs and nothing is written before all prompts and options have been looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vidsparse.apps.runs.prompts import Prompt, PromptFile
from vidsparse.apps.terminal.console import Terminal
from vidsparse.apps.terminal.options import build_request
from vidsparse.apps.terminal.progress import plain_bar
from vidsparse.errors import OptionError

if TYPE_CHECKING:
    from vidsparse.pipelines.models import LoadedPipeline, ModelRef
    from vidsparse.pipelines.request import GenerateRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedPrompt:
    """One prompt and its request with every default filled in."""

    prompt: Prompt
    request: GenerateRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedPrompts:
    """The prompts of one file, all with one model and one set of settings; at least one."""

    model: ModelRef
    prompts: tuple[PreparedPrompt, ...]

    @property
    def request(self) -> GenerateRequest:
        """The settings that all prompts share; only the prompt is the first one's own."""
        return self.prompts[0].request

    def load(self, terminal: Terminal, *, linear: str | None = None) -> LoadedPipeline:
        """Load the model, once for all prompts; ``linear`` as asked for, or the request's.

        Raises:
            VidsparseError: the model cannot be loaded, or is not the one of the preset.
        """
        from vidsparse.pipelines.generate import check_preset
        from vidsparse.pipelines.models import load

        request = self.request
        linear = linear or request.linear or "none"
        terminal.say(f"Loading {request.model} on {request.device} ...")
        loaded = load(
            self.model,
            device=request.device,
            dtype=request.dtype,
            offload=request.offload,
            lora=request.lora,
            compile=bool(request.compile),
            linear=linear,
            image=request.image is not None,
        )
        if linear != "none":
            terminal.say(f"{loaded.linear_facts}.")
        # of all prompts alike: not to be found out by each.
        check_preset(loaded, request)
        return loaded


def _say_what_a_cpu_makes(
    model: ModelRef, asked: GenerateRequest, settled: GenerateRequest, terminal: Terminal
) -> None:
    """Say that a model makes a smaller video here than is its own, and what that would cost.

    Nothing is said where frames, width and height were all asked for.
    """
    own = model.defaults
    if settled.device != "cpu" or not own.on_cpu:
        return
    if None not in (asked.frames, asked.width, asked.height):
        return
    small = own.on("cpu")
    times = own.tokens_beyond(small)
    terminal.say(
        f"On a CPU {model.name} makes {small.frames} frames of {small.width}x{small.height} unless "
        f"others are asked for. Its own {own.frames} of {own.width}x{own.height} are {times:.1f} "
        f"times the tokens, and a step of them takes up to {times**2:.0f} times as long."
    )


def prepare(
    source: PromptFile, options: Mapping[str, Any], terminal: Terminal, *, ready: bool = True
) -> PreparedPrompts:
    """Check every prompt against the options and the model, and warn of words it never learned.

    ``ready``: the method must be able to run; before its calibration it may not be.

    Raises:
        VidsparseError: an option, a combination or the model cannot be used.
    """
    from vidsparse.pipelines.caching import check_family
    from vidsparse.pipelines.models import check_takes, resolve_model, unknown_words
    from vidsparse.pipelines.request import (
        check_kernels,
        check_ready,
        resolve,
        runs_as_calibrated,
        runs_as_measured,
        with_prompt,
    )
    from vidsparse.pipelines.speed import described, measured
    from vidsparse.presets import load_preset

    # the prompts share everything else, which is looked at once.
    first = build_request(source.prompts[0].text, options)
    model = resolve_model(first.model)
    check_takes(
        model,
        image=first.image is not None,
        last_image=first.last_image is not None,
        keyframes=bool(first.keyframes),
    )
    if first.preset is not None:
        preset = load_preset(first.preset)
        if not preset.may_fit(model.transformers):
            raise OptionError(
                f"{preset.source} was calibrated for {preset.model['name']}, and {model.name} has "
                "another transformer. Hint: calibrate for this model."
            )
    settled = resolve(first, model.defaults, own_presets=ready)
    check_kernels(settled)
    if ready:
        check_ready(settled, model.defaults)
    _say_what_a_cpu_makes(model, first, settled, terminal)
    if settled.preset is not None and first.preset is None:
        own = load_preset(settled.preset)
        quality = ""
        if (promised := own.measured.get("psnr")) is not None:
            quality = f", made for {promised:.1f} dB"
            if not runs_as_calibrated(settled, own):
                quality += " with other settings than these"
        terminal.say(f"Numbers of {settled.method}: those that come with {model.name}{quality}.")
    if settled.speed is not None:
        changed = not runs_as_measured(settled, model.defaults)
        assert settled.linear is not None
        known = measured(
            first.model, settled.speed, model.defaults, changed=changed, linear=settled.linear
        )
        terminal.say(f"speed {settled.speed}: {described(settled.options())}; {known}.")
    assert settled.cache is not None
    check_family(settled.cache, model.family)
    prepared = []
    with plain_bar(terminal, "Reading prompts") as progress:
        for prompt in source.prompts:
            prepared.append(
                PreparedPrompt(prompt=prompt, request=with_prompt(settled, prompt.text))
            )
            progress("", prompt.number, len(source.prompts))
            unknown = unknown_words(model, prompt.text)
            if unknown:
                words = ", ".join(unknown)
                terminal.warn(
                    f"prompt {prompt.number}: the model {first.model} never learned {words}. "
                    "Hint: `vidsparse models` lists the words it knows."
                )
    return PreparedPrompts(model=model, prompts=tuple(prepared))
