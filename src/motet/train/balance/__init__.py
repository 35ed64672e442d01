"""Balance of the experts of a mixture: routers that are found by running, loads, terms of the loss, corrections."""
