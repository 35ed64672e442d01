"""Fixed-length training samples from shards of tokens: shuffling, packing, objectives, loading."""
