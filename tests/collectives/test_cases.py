"""What `prove --all` covers: every algorithm at every count it takes, all shapes of hosts and grids; corruptions."""

from math import prod

import pytest

from motet.collectives.algorithms import algorithm_names, collective_names, find_algorithm
from motet.collectives.cases import all_cases, check_mutations, option_sets
from motet.collectives.prove.program_checker import is_proven


def test_every_algorithm_is_covered_at_every_count_that_it_takes() -> None:
    covered = {(case.args[0], case.args[1], case.args[2]) for case in all_cases(range(2, 65))}
    wanted = {
        (collective, name, ranks)
        for collective in collective_names()
        for name in algorithm_names(collective)
        for ranks in range(2, 65)
        if find_algorithm(collective, name).supports(ranks)
    }
    assert covered == wanted
    assert {name for _, name, _ in covered} >= {"torus-5d", "mesh-2d", "hierarchical-sharded", "double-tree"}


@pytest.mark.parametrize(
    ("name", "ranks", "dims"),
    [
        ("torus-2d", 24, {(2, 12), (3, 8), (4, 6)}),
        ("torus-3d", 24, {(2, 2, 6), (2, 3, 4)}),
        ("torus-2d", 6, {(2, 3)}),
        ("torus", 24, {(2, 2, 2, 3)}),
        ("torus", 16, {(2, 2, 2, 2)}),
    ],
)
def test_all_grids_are_tried(name: str, ranks: int, dims: set[tuple[int, ...]]) -> None:
    found = {options["dims"] for options in option_sets(find_algorithm("all-reduce", name), ranks) if "dims" in options}
    assert found == dims
    assert all(prod(lengths) == ranks for lengths in dims)


def test_all_hosts_and_the_last_root_are_tried() -> None:
    assert option_sets(find_algorithm("all-gather", "hierarchical"), 12) == [
        {},
        *({"hosts": hosts} for hosts in (2, 3, 4, 6)),
    ]
    assert option_sets(find_algorithm("broadcast", "tree"), 5) == [{}, {"root": 4}]
    assert option_sets(find_algorithm("all-reduce", "ring"), 5) == [{}]


def test_every_case_of_a_few_counts_is_proven() -> None:
    cases = all_cases([2, 3, 6, 8])
    assert len(cases) > 200
    assert [case for case in cases if not is_proven(case())] == []


def test_corruptions_are_spread_over_the_cases_and_judged() -> None:
    cases = all_cases([4, 6])
    planted = list(check_mutations(cases, 60))
    assert len(planted) >= 55
    assert len({(one.program, str(one.options)) for one in planted}) >= 55
    assert {one.verdict for one in planted} <= {"rejected", "equivalent"}
    assert sum(one.verdict == "rejected" for one in planted) > 40
    assert planted == list(check_mutations(cases, 60))
    assert list(check_mutations(cases, 0)) == []
