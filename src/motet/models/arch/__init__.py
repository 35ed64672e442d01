"""The modules of our own architectures."""
