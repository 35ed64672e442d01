"""The protocol of the parameter server, in every interleaving of small systems; and what is found when it is wrong."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from motet.parallel.parameter_server.protocol.coordinator_state_machine import CoordinatorStateMachine
from motet.parallel.parameter_server.protocol.messages import ConsistencyPolicy
from server.explore import Explorer, Found, Ways, explore
from server.numbered import key_of, with_names
from server.system import NONE, System
from server.systems import LARGE, SMALL, WRONG, alike, mistake_row, row, rules_of, with_rule

PAGE = Path(__file__).parents[2] / "docs/reference/server-protocol.md"
SYNC = ConsistencyPolicy(2, 1, 2, 0)
UNEQUAL = "run: python scripts/docs.py reference/server-protocol.md small"


def _each(systems: dict[str, System]) -> list[tuple[str, str]]:
    return [(name, rule) for name, system in systems.items() for rule in rules_of(system)]


@pytest.mark.parametrize(("name", "rule"), _each(SMALL))
@pytest.mark.no_cover
def test_promises_are_kept(name: str, rule: str) -> None:
    """And from wherever it comes to, it can come to an end. What is found is what the page says."""
    system, ways = with_rule(SMALL[name], rule), Ways()
    found = explore(system, ways=ways)
    assert found.ends and len(ways.lead_to_an_end()) == found.states
    assert row(name, system, found) in PAGE.read_text(encoding="utf-8"), UNEQUAL


@pytest.mark.proof
@pytest.mark.parametrize(("name", "rule"), _each(LARGE))
def test_promises_are_kept_by_larger_systems(name: str, rule: str) -> None:
    """Some are so large that the page says nothing of them."""
    system = with_rule(LARGE[name], rule)
    found = explore(system)
    assert found.ends
    told = row(name, system, found)
    known = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if alike(line) == alike(told)]
    assert known in ([], [told]), UNEQUAL


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.no_cover
def test_what_is_wrong_is_found(wrong: str) -> None:
    found = Found()
    with pytest.raises(AssertionError):
        explore(WRONG[wrong].system, 100_000, found=found)
    assert mistake_row(wrong, found) in PAGE.read_text(encoding="utf-8"), UNEQUAL


@pytest.mark.proof
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found_with_nothing_left_out(wrong: str) -> None:
    with pytest.raises(AssertionError):
        explore(WRONG[wrong].system, 1_000_000, all_of_it=True)


ALIKE = ["each piece has two servers", "a worker ends"]
ALIKE_LARGE = {
    "a message comes twice, one server": System(SYNC._replace(steps=2), 2, 1, doubles=1),
    "a server ends": System(SYNC._replace(steps=2, work_items_per_step=1, quorum=1), 1, 2, copies=2, crashes=1),
    "a message comes twice, and a worker ends": System(SYNC, 2, 2, doubles=1, crashes=1),
    "a worker or a server ends": System(SYNC, 2, 2, copies=2, crashes=1),
    "a message comes twice": System(SYNC, 2, 2, copies=2, doubles=1),
    "a server comes with nothing": System(
        SYNC._replace(work_items_per_step=1, quorum=1), 1, 2, copies=2, crashes=1, returns=True
    ),
}


@pytest.mark.parametrize(("name", "rule"), _each({name: SMALL[name] for name in ALIKE}))
@pytest.mark.no_cover
def test_what_is_left_out_leads_to_no_other_end(name: str, rule: str) -> None:
    system = with_rule(SMALL[name], rule)
    assert _ends(system, all_of_it=False) == _ends(system, all_of_it=True)


@pytest.mark.proof
@pytest.mark.parametrize(("name", "rule"), _each(ALIKE_LARGE))
def test_what_is_left_out_leads_to_no_other_end_of_larger_systems(name: str, rule: str) -> None:
    system = with_rule(ALIKE_LARGE[name], rule)
    assert _ends(system, all_of_it=False) == _ends(system, all_of_it=True)


def _ends(system: System, all_of_it: bool) -> set[tuple[str, ...]]:
    """What everybody knows in the end, but for the desk's history, with the least of all names of workers."""
    explorer, found = Explorer(system, all_of_it), set()
    orders = [dict(zip(explorer.crew.workers, order, strict=True)) for order in permutations(explorer.crew.workers)]
    for state in explorer.states():
        if explorer.is_end(state):
            machines = [explorer.crew.machines[number] for number in state[0] if number != NONE]
            known = [
                replace(machine, decision_log=[]) if isinstance(machine, CoordinatorStateMachine) else machine
                for machine in machines
            ]
            found.add(min(tuple(sorted(repr(key_of(with_names(m, names))) for m in known)) for names in orders))
    return found
