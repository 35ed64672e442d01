"""The three transformer architectures as single-device modules."""
