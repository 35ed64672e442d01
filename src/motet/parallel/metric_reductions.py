"""The table of the numbers that ranks add in each step, and of the ranks that report them, so that each counts once."""

from collections.abc import Mapping

from motet.parallel.parallel_dims import ParallelDims

# Metric -> the coordinates of the ranks that report it, where -1 is the index at which the model ends. Along the other
# dimensions each rank reports its own share. The squared norm is reported by the first rank of each copy group of
# `sync_groups`.
METRIC_REPORTERS: Mapping[str, Mapping[str, int]] = {
    "loss": {"pp": -1, "tp": 0},
    "targets": {"pp": -1, "tp": 0},
    "tokens": {"pp": 0, "cp": 0, "tp": 0},
    "rows": {"pp": 0, "cp": 0, "tp": 0},
    "stop": {},  # Of any rank: more than 0 counts
}


def reports(metric: str, coordinates: Mapping[str, int], dims: ParallelDims) -> bool:
    """Whether the rank at these coordinates adds its number to the sum; other ranks add 0."""
    reporters = METRIC_REPORTERS[metric].items()
    return all(coordinates.get(name, 0) == (dims.end(name) if index < 0 else index) for name, index in reporters)
