"""Proofs that parts of a model, on their ranks, compute what the model computes on one device."""
