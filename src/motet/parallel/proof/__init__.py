"""Proofs that parts of a model, on their ranks, compute the same as the model on one device."""
