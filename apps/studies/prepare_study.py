"""From a prompt file and options to a study: everything that can be wrong is found here."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vidsparse.apps.results.row_file import RowFile
from vidsparse.apps.runs.prompts import read_prompts
from vidsparse.apps.small_model.prompts import held_out_prompts
from vidsparse.apps.studies.quality_study import QualityStudy
from vidsparse.apps.terminal.console import Terminal
from vidsparse.errors import OptionError

STUDIED: Final = "shapes"
TRAINED: Final = (((256, 256), 33), ((384, 384), 49))
"""Sizes and frames that this model was trained at."""


def sizes_of(options: Mapping[str, Any]) -> Sequence[tuple[tuple[int, int] | None, int | None]]:
    """Sizes and frames to study: those asked for, or both that `shapes` was trained at."""
    asked = options["size"], options["frames"]
    return TRAINED if options["model"] == STUDIED and asked == (None, None) else (asked,)


def prepare_study(
    terminal: Terminal, prompts_file: str | None, file: RowFile, options: Mapping[str, Any]
) -> QualityStudy:
    """Check everything that can be wrong before the model loads.

    Raises:
        OptionError: an option, the prompt file or the model is not valid.
    """
    for name in ("batch", "prompts", "ssim_every", "samples"):
        if options.get(name) is not None and options[name] < 1:
            raise OptionError(f"{name} must be at least 1, got {options[name]}")
    from vidsparse.pipelines.models import resolve_model
    from vidsparse.pipelines.request import GenerateRequest, resolve

    model = resolve_model(options["model"])
    if prompts_file is None:
        prompts = held_out_prompts(model)
    else:
        prompts = tuple(prompt.text for prompt in read_prompts(prompts_file).prompts)
    width, height = options["size"] or (None, None)
    requests = [
        resolve(
            GenerateRequest(
                prompt=prompt,
                method="dense",
                # the yardstick is what the pipeline does by itself.
                dense_kernel="stock",
                width=width,
                height=height,
                dense_layers=0,
                dense_last_layers=0,
                reuse=1,
                **{
                    name: options[name]
                    for name in (
                        "model", "frames", "steps", "guidance", "seed", "device", "dtype",
                        "implementation",
                    )
                },
            ),
            model.defaults,
        )
        for prompt in prompts[: options["prompts"]]
    ]  # fmt: skip
    return QualityStudy(
        terminal=terminal,
        file=file,
        model=model,
        requests=requests,
        prompts_hash=_hash_of(prompts),
        batch=options["batch"],
        ssim_every=options["ssim_every"],
        presets=Path(options["presets"]),
        commit=options["commit"] or _commit(),
        compile=options.get("compile", False),
        samples=options.get("samples"),
    )


def _hash_of(prompts: Sequence[str]) -> str:
    """SHA-256 of a list of prompts, all of it: rows are of its first ones, and say of how many."""
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()


def _commit() -> str:
    """The commit of the checkout this file stands in, marked where its code was changed."""
    own = Path(__file__).resolve()
    root = own.parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # an environment may lie within a checkout of something else, which does not hold this file.
        git("ls-files", "--error-unmatch", "--", str(own))
        changed = git("status", "--porcelain", "--", "kernels", "vidsparse", "pipelines")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        raise OptionError(
            "git cannot say which code this is. Hint: name the commit with --commit."
        ) from None
