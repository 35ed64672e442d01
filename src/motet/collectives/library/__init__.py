"""The library of collectives. One file holds one idea; importing this fills the table of `registry`."""

from importlib import import_module

from motet.collectives.library.registry import (
    Algorithm,
    Terms,
    algorithm,
    algorithms,
    closed_form,
    collectives,
    find,
    program,
)

# In the order in which lists show their algorithms.
for _file in ("flat", "ring", "tree", "double_tree", "butterfly", "hierarchical", "torus", "point"):
    import_module(f"motet.collectives.library.{_file}")

__all__ = ["Algorithm", "Terms", "algorithm", "algorithms", "closed_form", "collectives", "find", "program"]
