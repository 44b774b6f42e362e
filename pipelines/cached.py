"""Which step cache a transformer has: it has one at most."""

from __future__ import annotations

from typing import Any, Final

from vidsparse.errors import UnsupportedError

GUIDANCE_HOOK: Final = "vidsparse_guidance"
"""The name under which diffusers keeps the hook of the cache ``guidance``."""

TAYLORSEER_HOOK: Final = "taylorseer_cache"
"""The host's name of that cache's hooks."""

FIRST_BLOCK_HOOK: Final = "fbc_leader_block_hook"
"""The host's name of the first-block cache's hook around a first block."""


_OF_HOOKS: Final = {TAYLORSEER_HOOK: "TaylorSeerCache", FIRST_BLOCK_HOOK: "FirstBlockCache"}


def cache_hooks(transformer: Any) -> list[tuple[str, Any]]:
    """The host's hooks that keep something from one step to the next, and their names.

    They hold what they were told: the cache itself cannot be taken off and put on again in a run.
    """
    return [
        (name, hook)
        for module in transformer.modules()
        if hasattr(module, "_diffusers_hook")
        for name, hook in module._diffusers_hook.hooks.items()
        if name in _OF_HOOKS
    ]


def cache_of(transformer: Any) -> str | None:
    """What a transformer's step cache is called; None where it has none."""
    registry = getattr(transformer, "_diffusers_hook", None)
    if registry is not None and GUIDANCE_HOOK in registry.hooks:
        return "guidance"
    config = getattr(transformer, "_cache_config", None)
    if config is not None:
        return type(config).__name__.removesuffix("Config")
    # not every class knows its cache, nor does one that was put on by a function of the host's.
    names = [_OF_HOOKS[name] for name, _ in cache_hooks(transformer)]
    return names[0] if names else None


def check_uncached(transformer: Any) -> None:
    """Raise an ``UnsupportedError`` if a transformer that is to get a step cache has one.

    Two would not know of each other: one takes what the other extrapolated for a step's output.
    """
    if (cache := cache_of(transformer)) is not None:
        raise UnsupportedError(
            f"this pipeline has the cache {cache} already, and two do not work together. "
            "Hint: call its remove() first (disable_cache() of the transformer, if it was put on "
            'by diffusers), or leave the other out: cache="none".'
        )
