"""Modules that hold the weights of all experts of a layer as stacked tensors, recognised by their shapes.

Nothing here imports torch.
"""

from collections.abc import Iterable, Mapping

Shape = tuple[int, ...]


def stacked_count(shapes: Iterable[Shape]) -> int:
    """The first length E above 1 that all parameters of a module share, if one of them has three dimensions; else 0."""
    every = [*shapes]
    lengths = {shape[0] if shape else 0 for shape in every}
    is_stacked = len(lengths) == 1 and any(len(shape) == 3 for shape in every)
    return max(lengths) if is_stacked and max(lengths) > 1 else 0


def stacked_vectors(shapes: Mapping[str, Shape]) -> set[str]:
    """The parameters [E, n] of a model that are a vector of each expert, such as a bias."""
    by_module = dict[str, dict[str, Shape]]()
    for name, shape in shapes.items():
        by_module.setdefault(name.rpartition(".")[0], {})[name] = shape
    stacked = (members for members in by_module.values() if stacked_count(members.values()))
    return {name for members in stacked for name, shape in members.items() if len(shape) == 2}
