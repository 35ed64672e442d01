"""Sequence parallelism: the proof that ranks may split residual streams along tokens."""
