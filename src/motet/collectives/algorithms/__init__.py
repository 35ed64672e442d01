"""The library of collectives. One file holds one idea; importing this fills the table of `registry`."""

from importlib import import_module

from motet.collectives.algorithms.registry import (
    Algorithm,
    AlphaBetaGammaCost,
    algorithm,
    algorithm_names,
    build,
    closed_form,
    collective_names,
    find_algorithm,
)

# In the order in which lists show their algorithms.
for _file in (
    "direct",
    "ring",
    "tree",
    "double_binary_tree",
    "recursive_doubling",
    "hierarchical",
    "torus",
    "point_to_point",
):
    import_module(f"motet.collectives.algorithms.{_file}")

__all__ = [
    "Algorithm",
    "AlphaBetaGammaCost",
    "algorithm",
    "algorithm_names",
    "build",
    "closed_form",
    "collective_names",
    "find_algorithm",
]
