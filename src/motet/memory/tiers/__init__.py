"""Memory tiers: what of a step lies on the device, and what on the host."""
