"""Memory of a training step: recomputation of activations, and the policies that choose it."""
