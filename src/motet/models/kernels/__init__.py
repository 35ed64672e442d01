"""Kernels of a model's layers: which implementation of each runs, and those in Triton."""
