"""Factors between natural logarithms and those to base 2, which GPUs have instructions for."""

from __future__ import annotations

import math

import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
