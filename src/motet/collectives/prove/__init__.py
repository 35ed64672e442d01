"""The checker of Programs: the result of their collective at every rank, without deadlock."""
