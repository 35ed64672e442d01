"""Hooks that record the tensors of a step, and the sketches that keep the records small."""
