"""Alignment of recorded shards with the single-device reference, and the bounds that they must meet."""
