"""The algorithms of the library, for tests that go through all of them."""

from collections.abc import Iterator

from motet.collectives.algorithms import algorithm_names, build, collective_names, find_algorithm
from motet.collectives.program import Program

ALL = [(collective, name) for collective in collective_names() for name in algorithm_names(collective)]


def supported(ranks: int) -> list[tuple[str, str]]:
    """(collective, algorithm) of all that support this number of ranks."""
    return [names for names in ALL if find_algorithm(*names).supports(ranks)]


def every_program(ranks: int) -> Iterator[Program]:
    for names in supported(ranks):
        yield build(*names, ranks)
