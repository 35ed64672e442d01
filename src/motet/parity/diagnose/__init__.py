"""The place and the likely cause of a difference from the reference."""
