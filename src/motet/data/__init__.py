"""A corpus and the samples of each step, the same for every layout."""
