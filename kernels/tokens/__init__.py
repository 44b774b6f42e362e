"""Kernels over tokens: order, tile means, rounding, rotary embedding."""
