"""The library of collective algorithms. Its import fills the table of `registry`."""

from importlib import import_module

from motet.collectives.algorithms.registry import algorithm_names, build, closed_form, collective_names, find_algorithm

# Imports in the order in which lists show the algorithms.
for _module in ("direct", "ring", "tree", "double_binary_tree", "recursive_doubling", "bruck", "hierarchical", "torus"):
    import_module(f"motet.collectives.algorithms.{_module}")

__all__ = ["algorithm_names", "build", "closed_form", "collective_names", "find_algorithm"]
