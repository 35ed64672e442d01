"""The protocol of the parameter server, in every interleaving of small systems; and what is found when it is wrong."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from motet.parallel.parameter_server.protocol.messages import ConsistencyPolicy
from parallel.parameter_server.explorer import Exploration, Explorer, explore
from parallel.parameter_server.interning import key_of, with_names
from parallel.parameter_server.scenario import NONE, Scenario
from parallel.parameter_server.scenarios import LARGE, MISTAKES, SMALL, alike, mistake_row, modes_of, row, with_mode

PAGE = Path(__file__).parents[3] / "docs/reference/server-protocol.md"
SYNC = ConsistencyPolicy(2, 1, 2, 0)
UNEQUAL = "run: python scripts/docs.py reference/server-protocol.md small"


def _each(scenarios: dict[str, Scenario]) -> list[tuple[str, str]]:
    return [(name, policy) for name, scenario in scenarios.items() for policy in modes_of(scenario)]


@pytest.mark.parametrize(
    ("name", "policy"),
    [*_each(SMALL)[::2], *(pytest.param(*each, marks=pytest.mark.proof) for each in _each(SMALL)[1::2])],
)
@pytest.mark.no_cover
def test_promises_are_kept(name: str, policy: str) -> None:
    """An end can be reached from every state. The counts are those of the page."""
    scenario = with_mode(SMALL[name], policy)
    result = explore(Explorer(scenario), result=Exploration(before={}))
    assert result.ends and len(result.lead_to_an_end()) == result.states
    assert row(name, scenario, result) in PAGE.read_text(encoding="utf-8"), UNEQUAL


@pytest.mark.proof
@pytest.mark.parametrize(("name", "policy"), _each(LARGE))
def test_promises_are_kept_by_larger_systems(name: str, policy: str) -> None:
    """Some are so large that the page says nothing of them."""
    scenario = with_mode(LARGE[name], policy)
    result = explore(Explorer(scenario))
    assert result.ends
    starts_empty = row(name, scenario, result)
    known = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if alike(line) == alike(starts_empty)]
    assert known in ([], [starts_empty]), UNEQUAL


@pytest.mark.parametrize("wrong", MISTAKES)
@pytest.mark.no_cover
def test_what_is_wrong_is_found(wrong: str) -> None:
    result = Exploration()
    with pytest.raises(AssertionError):
        explore(Explorer(MISTAKES[wrong].scenario), 100_000, result)
    assert mistake_row(wrong, result) in PAGE.read_text(encoding="utf-8"), UNEQUAL


@pytest.mark.proof
@pytest.mark.parametrize("wrong", MISTAKES)
def test_what_is_wrong_is_found_with_nothing_left_out(wrong: str) -> None:
    with pytest.raises(AssertionError):
        explore(Explorer(MISTAKES[wrong].scenario, without_reduction=True), 1_000_000)


ALIKE = ["each slice has two servers", "a worker ends"]
ALIKE_LARGE = {
    "a message comes twice, one server": Scenario(SYNC._replace(steps=2), 2, 1, duplicates=1),
    "a server ends": Scenario(SYNC._replace(steps=2, work_items_per_step=1, quorum=1), 1, 2, copies=2, crashes=1),
    "a message comes twice, and a worker ends": Scenario(SYNC, 2, 2, duplicates=1, crashes=1),
    "a worker or a server ends": Scenario(SYNC, 2, 2, copies=2, crashes=1),
    "a message comes twice": Scenario(SYNC, 2, 2, copies=2, duplicates=1),
    "a server comes with nothing": Scenario(
        SYNC._replace(work_items_per_step=1, quorum=1), 1, 2, copies=2, crashes=1, replacements=True
    ),
}


@pytest.mark.parametrize(("name", "policy"), _each({name: SMALL[name] for name in ALIKE}))
@pytest.mark.no_cover
def test_what_is_left_out_leads_to_no_other_end(name: str, policy: str) -> None:
    scenario = with_mode(SMALL[name], policy)
    assert _ends(scenario, without_reduction=False) == _ends(scenario, without_reduction=True)


@pytest.mark.proof
@pytest.mark.parametrize(("name", "policy"), _each(ALIKE_LARGE))
def test_what_is_left_out_leads_to_no_other_end_of_larger_systems(name: str, policy: str) -> None:
    scenario = with_mode(ALIKE_LARGE[name], policy)
    assert _ends(scenario, without_reduction=False) == _ends(scenario, without_reduction=True)


def _ends(scenario: Scenario, without_reduction: bool) -> set[tuple[str, ...]]:
    """The final states without the coordinator's history, under the smallest renaming of workers."""
    explorer, result = Explorer(scenario, without_reduction), set()
    workers = explorer.cluster.workers
    orders = [dict(zip(workers, order, strict=True)) for order in permutations(workers)]
    for machines, _, _ in explore(explorer).ends:
        coordinator, *others = (explorer.cluster.machines[number] for number in machines if number != NONE)
        known = [replace(coordinator, decision_log=[]), *others]
        result.add(min(tuple(sorted(repr(key_of(with_names(m, names))) for m in known)) for names in orders))
    return result
