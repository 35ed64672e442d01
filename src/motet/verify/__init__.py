"""Whether a layout computes the same numbers as one device, and if not, where it begins to differ and why."""
