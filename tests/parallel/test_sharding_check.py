"""The check of a sharded step accepts what is right and no mistake of any kind; each of its rules is needed."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from sharded_inventory import LAYOUTS, STAGES, inventory, make_layout, model_sharding, sharded_step
from sharding_corruptions import CORRUPTIONS

from motet.parallel.step_plan.check import InvalidStepPlanError
from motet.parallel.step_plan.sharding_check import (
    SHARDING_RULES,
    ShardedStep,
    check_sharding,
    make_sharded_step,
    sharding_mistakes,
)

SEEDS = range(10)
Complaints = dict[str, list[str]]  # Sentences of each rule


@pytest.fixture(scope="module")
def cases() -> list[tuple[str, str, tuple[str, ...], Complaints]]:
    """All corruptions that do not mean the same as the original: layout, kind, names to expect, what the check says."""
    return list(_cases())


def _cases() -> Iterator[tuple[str, str, tuple[str, ...], Complaints]]:
    for layout in LAYOUTS:
        step = sharded_step(layout)
        for kind, corrupt in CORRUPTIONS.items():
            for seed in SEEDS:
                made = corrupt(layout, step, Random(f"{layout} {kind} {seed}"))
                if made and meaning(made[0]) != meaning(step):
                    said = {rule.__name__: list(sharding_mistakes(made[0], [rule])) for rule in SHARDING_RULES}
                    yield layout, kind, made[1], {rule: mistakes for rule, mistakes in said.items() if mistakes}


def meaning(step: ShardedStep) -> object:
    """All facts about a step in a form that is equal where only the order of groups or names differs.

    Units of rows and of buckets hold the same elements. `partial_over` makes no difference along a dimension of size 1,
    and for shards that no two ranks share.
    """
    sums = Counter()
    for group in step.sync_groups:
        for name in group.names:
            facts = group.sharding, group.stages, frozenset(Counter(group.copy_groups).items())
            sums[name, frozenset(Counter(group.sum_groups).items()), facts] += 1
    sharding = step.model_sharding
    shards = {name: dict(specs) for name, specs in step.specs.items()}
    partial = {}
    for tensor in step.inventory.trained:
        for over, size in step.dims.sizes:
            held = [[shards[tensor.name].get(rank) for rank in ranks] for ranks in step.dims.groups(over)]
            if any(None not in specs and len(set(specs)) < size for specs in held):
                partial[tensor.name, over] = over in sharding.rule(tensor.name).partial_over
    rows = [Counter(row for rows in rank for row in rows) for rank in step.rows_by_rank]
    comms = [comm for comm in sharding.boundary_comms if step.dims.size(comm.over) > 1]
    lies = [comm.dim if comm.operation in ("gather", "scatter", "split", "exchange") else None for comm in comms]
    reporters = {metric: sorted(ranks) for metric, ranks in step.reporters.items()}
    return sums, shards, partial, sharding.stages, rows, comms, lies, sharding.activations, reporters


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_right_is_accepted(layout: str) -> None:
    step = sharded_step(layout)
    assert list(sharding_mistakes(step)) == []
    check_sharding(step)


def test_no_corruption_is_accepted(cases: list[tuple[str, str, tuple[str, ...], Complaints]]) -> None:
    """A sentence names the tensor or the module, and ranks."""
    rejected, applied = Counter[str](), Counter(kind for _, kind, _, _ in cases)
    for layout, kind, names, said in cases:
        assert said, f"{layout}: {kind} is accepted"
        mistakes = [mistake for each in said.values() for mistake in each]
        assert any(name in mistake and "rank" in mistake for mistake in mistakes for name in names), (kind, mistakes)
        rejected[kind] += 1
    sys.stdout.write("".join(f"{kind}: {rejected[kind]} of {applied[kind]} rejected\n" for kind in CORRUPTIONS))
    assert len(CORRUPTIONS) >= 12 and set(rejected) == set(CORRUPTIONS) and sum(rejected.values()) >= 500


@pytest.mark.parametrize("rule", [rule.__name__ for rule in SHARDING_RULES])
def test_without_any_one_rule_a_corruption_is_accepted(
    rule: str, cases: list[tuple[str, str, tuple[str, ...], Complaints]]
) -> None:
    missed = Counter(kind for _, kind, _, said in cases if set(said) == {rule})
    sys.stdout.write(f"without {rule}: {dict(missed)}\n")
    assert missed


def test_the_first_mistake_is_raised() -> None:
    step = sharded_step("tp=2 dp=2")
    rows = ((range(2),), *step.rows_by_rank[1:])
    with pytest.raises(InvalidStepPlanError, match=r"^ranks \(0, 2\) read row 2 0 times$"):
        check_sharding(replace(step, rows_by_rank=rows))


def test_interleaved_stages_and_context_parallel_ranks_are_accepted() -> None:
    sharding = replace(model_sharding(), stages=(range(1), range(1, 2), range(2, 3)))
    layout = make_layout({"pp": 2, "dp": 2, "cp": 2, "tp": 2}, 1)
    check_sharding(make_sharded_step(inventory(), sharding, layout, batch_sequences=8))


def test_a_thousand_ranks_are_checked_by_their_kinds() -> None:
    """Tensors that ranks hold and add in the same way are looked at only one time."""
    layout = make_layout({"pp": 4, "dp": 64, "tp": 4}, 3)
    step = make_sharded_step(inventory(), model_sharding(stages=STAGES), layout, batch_sequences=128)
    check_sharding(step)
    assert len(step.alike) < len(step.inventory.tensors)
