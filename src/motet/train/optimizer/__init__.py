"""Optimizers on sharded master parameters, parameter groups, and the learning rate schedule."""
