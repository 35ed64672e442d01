"""Sizes, FLOPs and saved activations of a model, from its settings alone."""
