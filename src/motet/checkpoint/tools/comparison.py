"""Compares two checkpoints tensor by tensor, a few megabytes at a time."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.checkpoint.reader import CheckpointReader
from motet.checkpoint.tools.boxes import cut_box
from motet.core.units import dtype_name


@dataclass(frozen=True)
class StoredDifference:
    """A tensor that is not the same in two checkpoints."""

    name: str
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]  # None: the tensor is not there
    dtypes: tuple[str | None, str | None]
    elements: int = 0  # Elements that differ, by their bits if the dtypes are equal
    max_abs_difference: float = 0.0  # NaN if one of such a pair is NaN

    @property
    def is_comparable(self) -> bool:
        """Whether the elements were compared: the tensor is in both, with the same shape."""
        return None not in self.shapes and self.shapes[0] == self.shapes[1]


def compare_checkpoints(
    a: CheckpointReader, b: CheckpointReader, report: Callable[[int], None]
) -> Iterator[StoredDifference]:
    """The tensors that differ, in the order of their names; `report` gets the bytes that were compared."""
    for name in sorted({*a.names, *b.names}):
        shapes = tuple(each.shape(name) if name in each else None for each in (a, b))
        dtypes = tuple(dtype_name(each.dtype(name)) if name in each else None for each in (a, b))
        difference = StoredDifference(name, (shapes[0], shapes[1]), (dtypes[0], dtypes[1]))
        if difference.is_comparable:
            difference = _compare_elements(a, b, difference, report=report)
        if not difference.is_comparable or difference.elements or dtypes[0] != dtypes[1]:
            yield difference


def _compare_elements(
    a: CheckpointReader, b: CheckpointReader, difference: StoredDifference, *, report: Callable[[int], None]
) -> StoredDifference:
    name, elements, largest = difference.name, 0, 0.0
    for stored in a.boxes(name):
        for box in cut_box(stored):
            x, y = (each.read_box(name, box).view(-1) for each in (a, b))
            differs = _differing(x, y)
            if count := int(differs.sum()):
                elements += count
                largest = _larger(largest, _largest_difference(x[differs], y[differs]))
            report(x.nbytes)
    return StoredDifference(name, difference.shapes, difference.dtypes, elements, largest)


def _differing(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype != y.dtype:
        x, y = _widened(x), _widened(y)
        return (x != y) & ~(x.isnan() & y.isnan())
    x, y = (values.view(torch.uint8).view(values.numel(), values.itemsize) for values in (x, y))
    return (x != y).any(dim=1)


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _largest_difference(x: Tensor, y: Tensor) -> float:
    return float((_widened(x) - _widened(y)).abs().max())


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
