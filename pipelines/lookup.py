"""Which family's adapter a pipeline is read by."""

from __future__ import annotations

import importlib
from typing import Any

from vidsparse.errors import UnsupportedError, listed
from vidsparse.pipelines.adapter import Adapter
from vidsparse.pipelines.families import FAMILIES, supported_pipelines


def find_adapter(pipe: Any) -> Adapter:
    """The adapter for ``pipe``, by the nearest diffusers class it is or derives from.

    Raises:
        UnsupportedError: no family covers it, or one says why not.
    """
    host_classes = [
        cls.__name__ for cls in type(pipe).__mro__ if cls.__module__.split(".")[0] == "diffusers"
    ]
    for family in FAMILIES:
        if host_classes and host_classes[0] in family.pipelines:
            module = importlib.import_module(f"vidsparse.pipelines.{family.adapter}")
            adapter: Adapter = module.ADAPTER
            return adapter
        if host_classes and host_classes[0] in family.refused:
            raise UnsupportedError(
                f"{host_classes[0]} {family.refused[host_classes[0]]}, which sparse attention does "
                f"not do. Hint: of {family.name}, sparsify takes {listed(family.pipelines)}."
            )
    raise UnsupportedError(
        f"{type(pipe).__name__} is not a supported pipeline. "
        f"Hint: sparsify takes {supported_pipelines()}."
    )
