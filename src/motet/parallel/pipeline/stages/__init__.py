"""Stages of a pipeline as parts of a module's own forward: found, proven, balanced and run."""
