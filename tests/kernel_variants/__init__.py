"""Specialisations of the GPU kernels, for compiling them where their GPUs are not."""
