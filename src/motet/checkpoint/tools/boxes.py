"""Boxes of a tensor that are small enough to be held. Nothing here imports torch."""

from collections.abc import Iterator
from math import prod

from motet.checkpoint.tensor_index import Box
from motet.checkpoint.writers import MAX_PART_NUMEL


def cut_box(box: Box, max_numel: int = MAX_PART_NUMEL) -> Iterator[Box]:
    """Boxes of at most `max_numel` elements that fill a box, in the order of its elements."""
    offsets, lengths = box
    if prod(lengths) <= max_numel:
        if prod(lengths):
            yield box
        return
    row = prod(lengths[1:])
    rows = max(1, max_numel // row)
    for first in range(0, lengths[0], rows):
        count = min(rows, lengths[0] - first)
        inner = (offsets[1:], lengths[1:])
        for rest in cut_box(inner, max_numel) if row > max_numel else [inner]:
            yield (offsets[0] + first, *rest[0]), (count, *rest[1])
