"""The checker: a Program computes what its collective requires, at every rank, without deadlock."""
