"""The two nodes as ComfyUI reads them: what goes in, what comes out, and what runs.

What a node does is imported when it runs: ComfyUI starts with this file. Their inputs are asked for
later, when its page opens.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from vidsparse.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from vidsparse.methods import Method
    from vidsparse.presets import Preset

_AUTO: Final = "auto"


class SparseModel:
    """The node "vidsparse": a model in, the same model with sparse attention out."""

    CATEGORY = "vidsparse"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    DESCRIPTION = (
        "Sparse attention for Wan, HunyuanVideo, LTX and MiniMax-H3. Put it behind loaders and "
        "LoRAs, in front of the sampler. The node 'vidsparse report' says what it did."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The inputs with their defaults, as ComfyUI wants them described."""
        from vidsparse.masks import KEY_TILES, QUERY_TILES
        from vidsparse.methods import SPARSE_METHODS
        from vidsparse.methods.base import MEANS

        tiles = [f"{rows}x{keys}" for rows in QUERY_TILES for keys in KEY_TILES]
        share = {"min": 0.0, "max": 1.0, "step": 0.01}
        return {
            "required": {
                "model": ("MODEL",),
                "method": (
                    list(SPARSE_METHODS),
                    {"tooltip": "What chooses which part of attention is computed."},
                ),
                "quality": (
                    "FLOAT",
                    {
                        "default": 0.0,
                        **share,
                        "tooltip": "How much is kept, up to 1, which is everything: top_p of "
                        "fg-attn, tau of spargeattn and xattention, share of foresight. 0 leaves "
                        "it to the method.",
                    },
                ),
                "tile": (
                    [_AUTO, *tiles],
                    {"tooltip": "Queries x keys that are computed or skipped as one."},
                ),
                "means": (
                    [_AUTO, "none", *map(str, MEANS)],
                    {"tooltip": "Tokens of a group whose mean stands for what is skipped."},
                ),
                "start_percent": (
                    "FLOAT",
                    {
                        "default": 0.2,
                        **share,
                        "tooltip": "Steps before this point are dense; they fix the layout of the "
                        "video. With 4 steps, 0.2 keeps the first one dense.",
                    },
                ),
                "end_percent": (
                    "FLOAT",
                    {"default": 1.0, **share, "tooltip": "Steps after this point are dense."},
                ),
                "min_tokens": (
                    "INT",
                    {
                        "default": 4096,
                        "min": 0,
                        "max": 10_000_000,
                        "tooltip": "Shorter sequences stay dense: they gain nothing.",
                    },
                ),
            },
            "optional": {
                "options": (
                    "STRING",
                    {
                        "default": "",
                        "tooltip": "Further options of the method, such as topk=0.3 merge=xor; "
                        "`vidsparse methods` lists them.",
                    },
                ),
                "preset": (
                    "STRING",
                    {
                        "default": "",
                        "tooltip": "File of a preset by `vidsparse calibrate`. It brings its own "
                        "method and numbers.",
                    },
                ),
                "part": (
                    "INT",
                    {
                        "default": 0,
                        "min": 0,
                        "max": 1,
                        "tooltip": "Which transformer of the preset this is: 1 for the low-noise "
                        "model of Wan 2.2.",
                    },
                ),
            },
        }

    def run(
        self,
        model: Any,
        method: str,
        quality: float,
        tile: str,
        means: str,
        start_percent: float,
        end_percent: float,
        min_tokens: int,
        options: str = "",
        preset: str = "",
        part: int = 0,
    ) -> tuple[Any]:
        """A clone of ``model`` with sparse attention.

        Raises:
            OptionError: a number or an option that is not valid, or a preset that cannot be read.
            UnsupportedError: this ComfyUI is too old.
        """
        from vidsparse.apps.comfyui.session import NodeSession, SessionSettings, install
        from vidsparse.presets import load_preset

        given = read_options(method, quality=quality, tile=tile, means=means, text=options)
        found = load_preset(preset.strip()) if preset.strip() else None
        chosen = _method(method, given, found)
        session = NodeSession(
            SessionSettings(
                method=chosen,
                order=found.order if found else getattr(chosen, "token_order", None) or "hilbert",
                start_percent=start_percent,
                end_percent=end_percent,
                min_tokens=min_tokens,
                part=part,
                schedule=found.schedule if found else {},
            )
        )
        return (install(model, session),)


class SparseReport:
    """The node "vidsparse report": what the attention of the last sampling did."""

    CATEGORY = "vidsparse"
    RETURN_TYPES = ("LATENT", "STRING", "IMAGE")
    RETURN_NAMES = ("latent", "report", "picture")
    FUNCTION = "run"
    OUTPUT_NODE = True
    DESCRIPTION = (
        "What sparse attention did: sparse and dense calls and why, densities, seconds. Connect "
        "the sampler's latent, so that it runs after it, and the model that the sampler was given."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The inputs, as ComfyUI wants them described."""
        return {"required": {"latent": ("LATENT",), "model": ("MODEL",)}}

    def run(self, latent: Any, model: Any) -> dict[str, Any]:
        """The latent as it came, the report as text, and as a picture ``[1, H, W, 3]``."""
        from vidsparse.apps.comfyui.report import draw_report, write_report
        from vidsparse.apps.comfyui.session import session_of
        from vidsparse.logs import logger

        session = session_of(model)
        text = write_report(session)
        sparse = session is not None and session.ran_sparse
        logger.log(logging.INFO if sparse else logging.WARNING, "%s", text)
        picture: Tensor = draw_report(session, text)
        return {"ui": {"text": (text,)}, "result": (latent, text, picture)}


def read_options(
    method: str, *, quality: float = 0.0, tile: str = _AUTO, means: str = _AUTO, text: str = ""
) -> dict[str, Any]:
    """The options of ``method`` that the node's inputs stand for; open ones are left out.

    Raises:
        OptionError: an unknown method, a quality that it has no number for, or text that is no
            ``name=value``.
    """
    from vidsparse.methods import METHODS

    if method not in METHODS:
        raise OptionError(f"unknown method {method!r}. Hint: choose from {', '.join(METHODS)}.")
    fields = {field.name: field for field in METHODS[method].option_fields()}
    given: dict[str, Any] = {}
    if quality:
        # what a method calls the share that it keeps.
        names = [name for name, field in fields.items() if field.metadata["metavar"] == "P"]
        if not names:
            raise OptionError(
                f"{method} has no share to keep, so quality must be 0. "
                "Hint: give its own numbers in options, such as tau=0.5."
            )
        given[names[0]] = quality
    words = [f"{name}={value}" for name, value in (("tile", tile), ("means", means))]
    for word in [word for word in words if not word.endswith(f"={_AUTO}")] + text.split():
        name, equals, value = word.strip(",;").partition("=")
        if not equals:
            raise OptionError(f"options are written name=value, got {word!r}. Hint: topk=0.3.")
        if name in given:
            raise OptionError(f"{name} is given twice. Hint: leave it out of options.")
        try:
            # an unknown one is the method's to refuse.
            given[name] = fields[name].metadata["convert"](value) if name in fields else value
        except ValueError as error:
            raise OptionError(f"{name} cannot be {value!r}: {error}") from None
    return given


def _method(name: str, given: dict[str, Any], preset: Preset | None) -> Method:
    from vidsparse.methods import make_method

    if preset is None:
        return make_method(name, **given)
    if name != preset.method:
        raise OptionError(
            f"{preset.source} is for {preset.method}, not for {name}. Hint: choose that method."
        )
    return preset.make_method(**given)


NODE_CLASS_MAPPINGS: Final[dict[str, Any]] = {
    "VidsparseModel": SparseModel,
    "VidsparseReport": SparseReport,
}
NODE_DISPLAY_NAME_MAPPINGS: Final = {
    "VidsparseModel": "vidsparse",
    "VidsparseReport": "vidsparse report",
}
