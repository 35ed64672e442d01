"""The base of all other packages: units, dtype names, errors, settings, and the trace of spans."""
