"""Kernels that choose tiles and plan blocks of rows."""
