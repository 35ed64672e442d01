"""Context parallelism: ranks that split each sequence, and exchange keys and values in attention."""
