"""Text and records tokenised once into memory-mapped shards of tokens."""
