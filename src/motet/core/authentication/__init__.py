"""Processes of a run prove to each other that they belong to it before one believes what the other sends."""
