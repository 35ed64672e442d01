"""From a corpus to the samples of a step, the same for every layout."""
