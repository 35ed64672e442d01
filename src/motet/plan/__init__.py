"""Predictions of memory and time of a training step on hardware that nobody has rented yet."""
