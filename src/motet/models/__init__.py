"""Models as single-device code, and their sizes as pure values."""
