"""The check of a step plan and the definition of its actions accept what is right and no mistake of any kind; each rule
is needed."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import NamedTuple, cast
from unittest.mock import patch

import activation_corruptions
import plan_corruptions
import pytest
from sharded_inventory import PLANS, inventory, make_layout, make_plan, model_sharding
from sharding_corruptions import CORRUPTIONS
from step_simulation import StepSimulator, declared_facts, split_facts

from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.step_plan.check import InvalidStepPlanError, prove_step_plan
from motet.parallel.step_plan.check_context import CONTEXT_RULES
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.parallel.sync_groups import METRIC_REPORTERS
from motet.precision.recipe import RECIPES
from parallel.symbolic_execution import RULES_AND_ACTIONS

# The parts of rows and the schedules of keys are no values of a plan: test_attention_in_plan.py plants faults in them.
CONTEXT_RULE_NAMES = {rule.__name__ for rule in CONTEXT_RULES}
SEEDS = [range(2), pytest.param(range(10), marks=pytest.mark.proof)]
assert plan_corruptions.__doc__ and activation_corruptions.__doc__  # Their kinds are in CORRUPTIONS


class Case(NamedTuple):
    """A corruption, and what each rule says about it."""

    layout: str
    kind: str
    names: tuple[str, ...]
    said: dict[str, list[str]]
    is_equal: bool  # The step leaves what the original leaves; compared where at most one rule complains


@cache
def cases(seeds: range) -> list[Case]:
    return [case for layout in PLANS for case in cases_of(layout, seeds)]


def cases_of(layout: str, seeds: range) -> Iterator[Case]:
    plan = make_plan(layout)
    groups = {
        (group.group.sharding.ranks, action.over): action.rank_groups
        for group in plan.groups
        for unit in group.units
        for action in unit.schedule
    }
    simulator = StepSimulator(plan.model_sharding, groups)
    outcome, facts, split = simulator.outcome(plan), declared_facts(plan), split_facts(plan)
    assert outcome is not None
    for kind, corrupt in CORRUPTIONS.items():
        for seed in seeds:
            corrupted = corrupt(layout, plan, Random(f"{layout} {kind} {seed}"))
            if corrupted is not None:
                is_split = corrupted.plan.model_sharding is not plan.model_sharding
                if not is_split:
                    vars(corrupted.plan)["specs"] = plan.specs  # Which takes a while to compute
                with patch.dict(cast(dict[str, Mapping[str, int]], METRIC_REPORTERS), corrupted.reporters):
                    said = complaints(corrupted.plan)
                    is_equal = len(said) < 2 and declared_facts(corrupted.plan) == facts
                is_equal = is_equal and (not is_split or split_facts(corrupted.plan) == split)
                is_equal = is_equal and simulator.outcome(corrupted.plan) == outcome
                yield Case(layout, kind, corrupted.names, said, is_equal)


def complaints(plan: StepPlan) -> dict[str, list[str]]:
    """The sentences of each rule that has any, or its error."""
    said: dict[str, list[str]] = {}
    for name, rule in RULES_AND_ACTIONS.items():
        try:
            said[name] = list(rule(plan))
        except (LookupError, ValueError) as error:  # Another rule, which comes first, must complain
            said[name] = [repr(error)]
    return {name: mistakes for name, mistakes in said.items() if mistakes}


@pytest.mark.parametrize("layout", PLANS)
def test_what_is_right_is_accepted(layout: str) -> None:
    assert complaints(make_plan(layout)) == {}
    prove_step_plan(make_plan(layout))


@pytest.mark.no_cover  # Lines of the rules are counted in tests/parallel/test_rank_classes.py
@pytest.mark.parametrize("seeds", SEEDS)
def test_no_corruption_is_accepted(seeds: range) -> None:
    """A sentence names the tensor or the module, and ranks."""
    rejected, equal = Counter[str](), Counter[str]()
    for layout, kind, names, said, is_equal in cases(seeds):
        assert said or is_equal, f"{layout}: {kind} is accepted"
        if said and not is_equal:
            first = next(iter(said.values()))[0]
            mistakes = [mistake for each in said.values() for mistake in each]
            assert "rank" in first, (kind, first)
            assert any(name in mistake and "rank" in mistake for mistake in mistakes for name in names), (
                kind,
                mistakes,
            )
            rejected[kind] += 1
        equal[kind] += is_equal
    sys.stdout.write("".join(f"{k}: {rejected[k]} rejected, {equal[k]} equal to the original\n" for k in CORRUPTIONS))
    assert len(CORRUPTIONS) >= 40 and set(rejected) == set(CORRUPTIONS) and sum(rejected.values()) >= 300 * len(seeds)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("rule", [rule for rule in RULES_AND_ACTIONS if rule not in CONTEXT_RULE_NAMES])
def test_without_any_one_rule_a_corruption_is_accepted(rule: str, seeds: range) -> None:
    missed = Counter(case.kind for case in cases(seeds) if set(case.said) == {rule} and not case.is_equal)
    sys.stdout.write(f"without {rule}: {dict(missed)}\n")
    assert missed


def test_the_first_mistake_is_raised() -> None:
    plan = make_plan("tp=2 dp=2 zero=1")
    rows = ((range(2),), *plan.rows_by_rank[1:])
    with pytest.raises(
        InvalidStepPlanError, match=r"^ranks \(0, 1\) compute parts of one model, and read different row"
    ):
        prove_step_plan(replace(plan, rows_by_rank=rows))


def test_interleaved_stages_and_context_parallel_ranks_are_accepted() -> None:
    sharding = replace(model_sharding(), stages=(range(1), range(1, 2), range(2, 3)))
    layout = make_layout({"pp": 2, "dp": 2, "cp": 2, "tp": 2}, 1)
    made = make_step_plan(
        inventory(),
        layout,
        RECIPES["fp32"],
        settings=CommunicationSettings(),
        batch_sequences=8,
        model_sharding=sharding,
    )
    assert prove_step_plan(made).ranks == 16
