"""Which Programs the library can make: every algorithm at every number of ranks, on every shape of hosts and grid."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from motet.collectives.algorithms import Algorithm, algorithm_names, build, collective_names, find_algorithm
from motet.collectives.corrupt import MutationCheckResult, check_mutation, generate_mutations
from motet.collectives.program import Program

# A Program that is made when it is called for, since all at once would fill gigabytes. Its options are `keywords`.
ProgramCase = partial[Program]


def make_case(algorithm: Algorithm, ranks: int, options: dict[str, object]) -> ProgramCase:
    return partial(build, algorithm.collective, algorithm.name, ranks, **options)


def all_cases(rank_counts: Sequence[int]) -> list[ProgramCase]:
    """All algorithms at those numbers of ranks that they take, with all shapes that these can have."""
    all_algorithms = [
        find_algorithm(collective, name) for collective in collective_names() for name in algorithm_names(collective)
    ]
    return [
        make_case(algorithm, ranks, options)
        for algorithm in all_algorithms
        for ranks in rank_counts
        if algorithm.supports(ranks)
        for options in option_sets(algorithm, ranks)
    ]


def option_sets(algorithm: Algorithm, ranks: int) -> list[dict[str, object]]:
    """Options worth a proof of their own: what is chosen by default, the last root, all hosts and all grids."""
    sets_of_options: list[dict[str, object]] = [{}]
    if "root" in algorithm.options:
        sets_of_options.append({"root": ranks - 1})
    if "pieces" in algorithm.options:
        sets_of_options += [{"pieces": 1}, {"pieces": 3}]
    if "hosts" in algorithm.options:
        sets_of_options += [{"hosts": hosts} for hosts in range(2, ranks) if ranks % hosts == 0]
    # A free number of dimensions is one ring by default, and 2, 3 and 5 have algorithms of their own.
    axes = algorithm.axes if len(algorithm.axes) == 1 else [n for n in algorithm.axes if n in (4, 6)]
    sets_of_options += [{"dims": dims} for count in axes for dims in _factorizations(ranks, count, 2)]
    return sets_of_options


def _factorizations(ranks: int, factor_count: int, min_length: int) -> Iterator[tuple[int, ...]]:
    """Lengths, none less than the one before, whose product is the number of ranks."""
    if factor_count == 1:
        if ranks >= min_length:
            yield (ranks,)
        return
    for length in range(min_length, ranks + 1):
        if ranks % length == 0:
            yield from ((length, *rest) for rest in _factorizations(ranks // length, factor_count - 1, length))


@dataclass(frozen=True)
class MutationReport:
    """What became of one corruption."""

    program: str
    options: dict[str, object]
    mutation: str
    verdict: Literal["rejected", "equivalent", "missed"]
    reason: str


def check_mutations(cases: Sequence[ProgramCase], count: int, seed: int = 0) -> Iterator[MutationReport]:
    """Corrupt and judge so many times, spread evenly over the cases; fewer where they cannot be changed so often."""
    for case_index, case_to_mutate in enumerate(cases):
        mutation_count = count * (case_index + 1) // len(cases) - count * case_index // len(cases)
        if mutation_count:
            original = case_to_mutate()
            for mutation in generate_mutations(original, mutation_count, seed):
                verdict: MutationCheckResult = check_mutation(mutation)
                yield MutationReport(
                    str(original), case_to_mutate.keywords, mutation.description, verdict.outcome, verdict.reason
                )
