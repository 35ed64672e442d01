"""The dtype of each kind of tensor, and the code that enforces it."""
