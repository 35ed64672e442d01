"""The cases of `prove --all`: every algorithm at every count it takes, all shapes of hosts and grids; mutations."""

from functools import partial
from math import prod

import mutations
import pytest
from mutations import spread_mutations

from motet.collectives.algorithms import build, find_algorithm
from motet.collectives.prove.program_checker import all_cases, option_sets, prove_program
from program_library import supported


def test_every_algorithm_is_covered_at_every_count_that_it_takes() -> None:
    covered = {(case.args[0], case.args[1], case.args[2]) for case in all_cases(range(2, 65))}
    assert covered == {(*names, ranks) for ranks in range(2, 65) for names in supported(ranks)}
    assert {name for _, name, _ in covered} >= {"torus-5d", "mesh-2d", "hierarchical-sharded", "double-tree"}


GRIDS = [
    *(("torus-2d", 24, {(2, 12), (3, 8), (4, 6)}), ("torus-3d", 24, {(2, 2, 6), (2, 3, 4)})),
    *(("torus-2d", 6, {(2, 3)}), ("torus", 24, {(2, 2, 2, 3)}), ("torus", 16, {(2, 2, 2, 2)})),
]


@pytest.mark.parametrize(("name", "ranks", "dims"), GRIDS)
def test_all_grids_are_tried(name: str, ranks: int, dims: set[tuple[int, ...]]) -> None:
    found = {options["dims"] for options in option_sets(find_algorithm("all-reduce", name), ranks) if "dims" in options}
    assert found == dims and all(prod(lengths) == ranks for lengths in dims)


def test_all_hosts_and_the_last_root_are_tried_and_cases_are_proven() -> None:
    all_hosts = [{}, *({"hosts": hosts} for hosts in (2, 3, 4, 6))]
    assert option_sets(find_algorithm("all-gather", "hierarchical"), 12) == all_hosts
    assert option_sets(find_algorithm("broadcast", "tree"), 5) == [{}, {"root": 4}]
    assert option_sets(find_algorithm("all-reduce", "ring"), 5) == [{}]
    cases = all_cases([2, 3, 6, 8])
    assert len(cases) > 200
    for case in cases:
        prove_program(case())


def test_mutations_spread_over_the_cases_are_rejected_or_harmless() -> None:
    checked = list(spread_mutations(all_cases([4, 6]), 60))
    assert len(checked) >= 55 and {result.outcome for result in checked} <= {"rejected", "equivalent"}
    assert sum(result.outcome == "rejected" for result in checked) > 40
    assert checked == list(spread_mutations(all_cases([4, 6]), 60))
    assert list(spread_mutations(all_cases([4, 6]), 0)) == []


@pytest.mark.proof
def test_no_mutation_at_any_rank_count_is_missed() -> None:
    checked = list(spread_mutations(all_cases(range(2, 65)), 300))
    assert len(checked) >= 200 and [result for result in checked if result.outcome == "missed"] == []


def test_a_proof_that_accepts_everything_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "prove_program", lambda program: None)
    checked = spread_mutations([partial(build, "all-reduce", "ring", 4)], 20)
    assert any(result.outcome == "missed" for result in checked)
