"""The writers of a checkpoint: each element has one, and the ranks that hold the same elements share the bytes."""

from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import NamedTuple

from motet.parallel.step_plan.plan import HeldRun

# A longer run is written in parts, which a reader holds one at a time.
MAX_PART_NUMEL = 2**22


class _WritePart(NamedTuple):
    size_bytes: int
    name: str
    first: int
    stop: int


def parts_to_write(
    runs: Mapping[str, tuple[HeldRun, int]], rank: int, *, max_numel: int = MAX_PART_NUMEL
) -> dict[str, tuple[HeldRun, list[tuple[int, int]]]]:
    """The elements, (first, stop), that a rank writes of the runs that it holds, by the name of the tensor.

    `runs` are all that the rank holds, with the bytes of an element. Ranks that hold the same runs divide them: the
    largest part first, each to the rank with the fewest bytes so far. All of them compute the same answer.
    """
    parts = [
        _WritePart((stop - first) * itemsize, name, first, stop)
        for name, (run, itemsize) in runs.items()
        for first, stop in _cut_between_rows(run, max_numel)
    ]
    written_bytes: dict[tuple[int, ...], dict[int, int]] = {}
    by_name: dict[str, tuple[HeldRun, list[tuple[int, int]]]] = {}
    for part in sorted(parts, key=lambda part: (-part.size_bytes, part.name, part.first)):
        run, _ = runs[part.name]
        by_rank = written_bytes.setdefault(run.ranks, dict.fromkeys(run.ranks, 0))
        writer = min(by_rank, key=by_rank.__getitem__)
        by_rank[writer] += part.size_bytes
        if writer == rank:
            by_name.setdefault(part.name, (run, []))[1].append((part.first, part.stop))
    return by_name


def _cut_between_rows(run: HeldRun, max_numel: int) -> list[tuple[int, int]]:
    """(first, stop) of parts of at most `max_numel` elements, or of one row where a row has more."""
    row = max(1, prod(run.spec.local_shape[1:]))
    length = max(1, max_numel // row) * row
    edges = [run.start, *range((run.start // length + 1) * length, run.stop, length), run.stop]
    return list(pairwise(edges))
