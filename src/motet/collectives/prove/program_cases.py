"""The Programs that the library can make: every algorithm at every rank count, on every shape of hosts and grid."""

from collections.abc import Iterator, Sequence
from functools import partial

from motet.collectives.algorithms import algorithm_names, build, collective_names, find_algorithm
from motet.collectives.algorithms.registry import Algorithm
from motet.collectives.program import Program

# A call makes the Program, since all Programs together would fill gigabytes. `keywords` are the options.
ProgramCase = partial[Program]


def all_cases(rank_counts: Sequence[int]) -> list[ProgramCase]:
    """Every algorithm at each supported rank count, with all shapes that the ranks can have."""
    return [
        partial(build, collective, name, ranks, **options)
        for collective in collective_names()
        for name in algorithm_names(collective)
        for algorithm in [find_algorithm(collective, name)]
        for ranks in rank_counts
        if algorithm.supports(ranks)
        for options in option_sets(algorithm, ranks)
    ]


def option_sets(algorithm: Algorithm, ranks: int) -> list[dict[str, object]]:
    """Options worth a separate proof: the defaults, the last root, all host counts and all grids."""
    sets: list[dict[str, object]] = [{}]
    if "root" in algorithm.options:
        sets.append({"root": ranks - 1})
    if "pieces" in algorithm.options:
        sets += [{"pieces": 1}, {"pieces": 3}]
    if "hosts" in algorithm.options:
        sets += [{"hosts": hosts} for hosts in range(2, ranks) if ranks % hosts == 0]
    # A free number of dimensions is one ring by default, and 2, 3 and 5 have separate algorithms.
    axes = algorithm.axes if len(algorithm.axes) == 1 else [n for n in algorithm.axes if n in (4, 6)]
    sets += [{"dims": dims} for count in axes for dims in _factorizations(ranks, count, 2)]
    return sets


def _factorizations(ranks: int, factor_count: int, min_length: int) -> Iterator[tuple[int, ...]]:
    if factor_count == 1:
        if ranks >= min_length:
            yield (ranks,)
        return
    for length in range(min_length, ranks + 1):
        if ranks % length == 0:
            yield from ((length, *rest) for rest in _factorizations(ranks // length, factor_count - 1, length))
