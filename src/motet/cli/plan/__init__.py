"""The commands of `motet plan`."""
