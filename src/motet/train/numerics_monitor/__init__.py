"""The numerics monitor: what number formats make of weights, gradients and activations, in some steps of a run."""
