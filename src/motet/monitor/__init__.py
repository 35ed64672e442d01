"""Events and spans of a run, and the sinks that show them."""
