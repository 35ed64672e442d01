"""Tensor and sequence parallelism for modules that were written for one device."""
