"""What every world draws: coloured bodies with rounded rims, lit from one side, and patterns.

A body is a signed distance. Its rim is a bevel, which the distance and its slope towards the light
shade; its patterns are brightness alone, so that a colour stays what it is called. Lengths have no
unit here: worlds bring their own.

Shapes: planes of distances and brightness broadcast, pictures have three channels in dimension 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.13, 0.16),
    "orange": (1.00, 0.50, 0.06),
    "yellow": (0.98, 0.85, 0.12),
    "green": (0.15, 0.70, 0.26),
    "cyan": (0.12, 0.80, 0.88),
    "blue": (0.16, 0.32, 0.95),
    "purple": (0.60, 0.20, 0.85),
    "white": (0.95, 0.95, 0.95),
}
SHAPES: tuple[str, ...] = ("ball", "square", "ring", "triangle", "star", "heart")
TEXTURES: tuple[str, ...] = ("plain", "gradient", "striped", "checkered", "dotted")

# width of the rounded rim as a share of the half extent; 1 makes the disc a sphere
BEVELS: dict[str, float] = {
    "ball": 1.0,
    "square": 0.34,
    "ring": 0.27,
    "triangle": 0.34,
    "star": 0.26,
    "heart": 0.50,
}
# a turning ball or ring looks the same all the way round
TURNABLE: frozenset[str] = frozenset({"square", "triangle", "star", "heart"})

LIGHT_PLANE = (-0.6, -0.8)
"""Unit direction towards the light in the picture plane: up and left."""
# how far that light leans, and its height
_LIGHT_SLOPE, _LIGHT_HEIGHT = 0.62, 0.78
# the half-way vector between that light and a viewer straight above
_HALF_SLOPE, _HALF_HEIGHT = 0.33, 0.944
_PROBE = 0.02


def _rounded_polygon(planes: Tensor, sharpness: float) -> Tensor:
    # a smooth maximum rounds the corners and softens the creases of the bevel
    return torch.logsumexp(planes * sharpness, dim=0) / sharpness


def distance(shape: str, x: Tensor, y: Tensor) -> Tensor:
    """Signed distance to a shape of half extent about 1, negative inside, any broadcast shape."""
    if shape == "ball":
        return torch.hypot(x, y) - 1.0
    if shape == "ring":
        return (torch.hypot(x, y) - 0.73).abs() - 0.27
    if shape == "square":
        corner = 0.18
        u, v = x.abs() - (0.86 - corner), y.abs() - (0.86 - corner)
        outside = torch.hypot(u.clamp_min(0), v.clamp_min(0))
        return outside + torch.maximum(u, v).clamp_max(0) - corner
    if shape == "triangle":
        y = y - 0.18
        planes = [y, -0.5 * y + 0.866 * x, -0.5 * y - 0.866 * x]
        return _rounded_polygon(torch.stack(planes), 9.0) - 0.60
    if shape == "star":
        # fold the plane ten times over onto one edge of a five-pointed star
        angle = torch.atan2(x, -y)
        sector = 2 * math.pi / 5
        folded = (torch.remainder(angle + sector / 2, sector) - sector / 2).abs()
        radius = torch.hypot(x, y)
        u, v = radius * torch.sin(folded), radius * torch.cos(folded)
        tip, waist = 1.0, 0.5
        inner_u, inner_v = waist * math.sin(sector / 2), waist * math.cos(sector / 2)
        edge_u, edge_v = inner_u, inner_v - tip
        length_squared = edge_u**2 + edge_v**2
        along = ((u * edge_u + (v - tip) * edge_v) / length_squared).clamp(0, 1)
        gap = torch.hypot(u - along * edge_u, v - tip - along * edge_v)
        inside = u * -edge_v + (v - tip) * edge_u < 0
        return torch.where(inside, -gap, gap) - 0.06
    # heart: two arcs above, a corner below; its own frame has y up and the tip at the origin
    u, v = 0.62 * x.abs(), 0.62 * -y + 0.56
    lobe = torch.hypot(u - 0.25, v - 0.75) - math.sqrt(2) / 4
    foot = 0.5 * (u + v).clamp_min(0)
    gap = torch.minimum(torch.hypot(u, v - 1), torch.hypot(u - foot, v - foot))
    return torch.where(u + v > 1, lobe, torch.where(u > v, gap, -gap)) / 0.62 - 0.03


def pattern(texture: str, x: Tensor, y: Tensor) -> Tensor:
    """Brightness [H, W] of a texture, about -1 to 1, on the grid ``x`` [1, W], ``y`` [H, 1].

    A caption names a texture completely: its place is fixed, so that the model need not guess it.
    """
    if texture == "gradient":
        return 1.5 * y + 0.0 * x
    if texture == "striped":
        return torch.tanh(2.0 * torch.sin(2 * math.pi * (x + y) / 0.58))
    if texture == "checkered":
        return torch.tanh(3.0 * torch.sin(math.pi * x / 0.33) * torch.sin(math.pi * y / 0.33))
    if texture == "dotted":
        near_x = torch.remainder(x / 0.40, 1.0) - 0.5
        near_y = torch.remainder(y / 0.40, 1.0) - 0.5
        return torch.tanh((0.27 - torch.hypot(near_x, near_y)) / 0.07)
    return torch.zeros_like(x + y)


def placed(shape: str, dx: Tensor, dy: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> Tensor:
    """Signed distance, in the world's lengths, to a shape of half extent ``scale``.

    ``dx`` and ``dy`` lead from its centre; ``cos`` and ``sin`` are those of its rotation.
    """
    u, v = (cos * dx + sin * dy) / scale, (cos * dy - sin * dx) / scale
    return scale * distance(shape, u, v)


def slope_towards(
    shape: str,
    dx: Tensor,
    dy: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor,
    here: Tensor,
    towards: tuple[Tensor | float, Tensor | float],
) -> Tensor:
    """How fast the distance ``here`` grows ``towards`` the light: a surface normal's stand-in."""
    there = placed(shape, dx + _PROBE * towards[0], dy + _PROBE * towards[1], cos, sin, scale)
    return (there - here) / _PROBE


def shaded(colours: Tensor, here: Tensor, slope: Tensor, rim: Tensor) -> Tensor:
    """Picture [B, 3, ...] of bodies of ``colours`` [B, 3, ...], not yet clamped.

    ``here`` and ``slope`` [B, ...] are their distances and the slopes of these towards the light,
    ``rim`` the width of their bevels, broadcast.
    """
    depth = (-here / rim).clamp(0, 1)
    tilt = 1 - depth
    upright = (1 - tilt**2).clamp_min(0).sqrt()
    lean = tilt * slope.clamp(-1, 1)
    light = 0.50 + 0.55 * (lean * _LIGHT_SLOPE + upright * _LIGHT_HEIGHT).clamp_min(0)
    gloss = 0.55 * (lean * _HALF_SLOPE + upright * _HALF_HEIGHT).clamp(0, 1) ** 48
    return colours * light.unsqueeze(1) + gloss.unsqueeze(1)


def coverage(here: Tensor, pixel: float) -> Tensor:
    """Share of each pixel of size ``pixel`` that lies inside, from its distance ``here``."""
    return torch.sigmoid(-here / (0.45 * pixel))
