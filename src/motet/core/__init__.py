"""What every other room stands on: units, dtype names, errors, settings, and the trace of spans."""
