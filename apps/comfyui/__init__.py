"""Nodes for ComfyUI: sparse attention for the video models that it loads itself.

ComfyUI imports this when it starts, so nothing heavy is: neither torch nor diffusers. The folder
works as a custom node as it stands, and ``vidsparse comfyui install`` writes one that imports it.
"""

from __future__ import annotations

from vidsparse.apps.comfyui.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
