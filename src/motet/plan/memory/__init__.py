"""The memory of a planned step by rank and category."""
