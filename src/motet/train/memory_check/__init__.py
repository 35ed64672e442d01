"""The memory check before training."""
