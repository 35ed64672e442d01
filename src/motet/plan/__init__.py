"""Decisions about a run before it starts: so far, collectives as stages that can overlap with computation."""
