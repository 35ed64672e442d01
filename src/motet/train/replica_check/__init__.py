"""Comparison of ranks during a run: what must be equal on them, or must add up."""
