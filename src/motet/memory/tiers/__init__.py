"""Tiers of memory below the device: state of the optimizer on the host and on disk."""
