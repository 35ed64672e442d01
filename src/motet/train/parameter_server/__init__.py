"""Runs with a parameter server: the desk, its servers and the workers, each a process of its own."""
