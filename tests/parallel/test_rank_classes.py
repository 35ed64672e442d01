"""The check by classes of ranks has the verdicts of a check of every rank, on all small worlds and for all mistakes."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from random import Random
from typing import cast
from unittest.mock import patch

import activation_corruptions
import plan_corruptions
import pytest
from check_of_every_rank import RULES_OF_EVERY_RANK, specs_of
from sharded_inventory import PLANS, STAGES, PlanCase, Sharding, make_plan, model_sharding
from sharding_corruptions import CORRUPTIONS

from motet.parallel.data_parallel.comm_units import SyncGroupPlan
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.step_plan.check import STEP_PLAN_RULES, InvalidStepPlanError, prove_step_plan
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.sync_groups import METRIC_REPORTERS
from parallel.symbolic_execution import RULES_AND_ACTIONS, prove_plan_and_actions

assert plan_corruptions.__doc__ and activation_corruptions.__doc__  # Their kinds are in CORRUPTIONS

STAGES_OF = {1: (), 2: STAGES, 3: (range(1), range(1, 2), range(2, 3))}


def worlds(most: int) -> Iterator[str]:
    """The names of all worlds of at most so many ranks, as cases of plans."""
    for pp, dp, tp, zero in product(STAGES_OF, range(1, most + 1), (1, 2, 4), range(4)):
        shards = [size for size in range(1, dp + 1) if dp % size == 0] if zero else [1]
        for size in shards if pp * dp * tp <= most else ():
            name = f"pp={pp} dp={dp} tp={tp} zero={zero} shards={size}"
            model = replace(model_sharding() if tp > 1 else ModelSharding(), stages=STAGES_OF[pp])
            PLANS[name] = PlanCase({"pp": pp, "dp": dp, "tp": tp}, Sharding(dp, zero=zero, shards=size), model)
            yield name


@pytest.fixture(autouse=True)
def plans_of_other_tests() -> Iterator[None]:
    """Plans that a test adds are not those of other tests."""
    with patch.dict(PLANS):
        yield


def complains(plan: StepPlan, name: str) -> bool:
    try:
        return any(True for _ in RULES_AND_ACTIONS[name](plan))
    except (LookupError, ValueError):  # Another rule, which comes first, must complain
        return True


def is_refused(plan: StepPlan, name: str) -> bool:
    try:
        return not RULES_OF_EVERY_RANK[name](plan)
    except (LookupError, ValueError):
        return True


def verdicts(plan: StepPlan) -> dict[str, tuple[bool, bool]]:
    """Whether each rule refuses a plan: by classes, and rank by rank."""
    return {name: (complains(plan, name), is_refused(plan, name)) for name in RULES_OF_EVERY_RANK}


NO_RULE = dict.fromkeys(RULES_OF_EVERY_RANK, (False, False))


@pytest.mark.no_cover
@pytest.mark.parametrize("most", [4, pytest.param(16, marks=pytest.mark.proof)])
def test_all_small_worlds_are_right_by_classes_and_rank_by_rank(most: int) -> None:
    count = 0
    for world in worlds(most):
        plan = make_plan(world)
        assert verdicts(plan) == NO_RULE, world
        for tensor in plan.inventory.tensors:
            held, wanted = plan.specs[tensor.name], specs_of(plan, tensor)
            assert dict(held) == wanted and len(held) == len(wanted) and [*held] == sorted(held), (world, tensor.name)
            assert -1 not in held and plan.dims.ranks not in held
        count += 1
    assert count >= {4: 30, 16: 250}[most]


@pytest.mark.parametrize(("most", "share"), [(4, 0.05), pytest.param(12, 0.5, marks=pytest.mark.proof)])
def test_every_corruption_has_the_verdict_of_a_check_of_every_rank(most: int, share: float) -> None:
    refused, random = Counter[str](), Random(7)
    for world in worlds(most):
        plan = make_plan(world)
        for kind, corrupt in CORRUPTIONS.items():
            if random.random() > share:
                continue
            try:
                corrupted = corrupt(world, plan, Random(f"{world} {kind}"))
            except (LookupError, ValueError):  # The world is too small for this kind
                continue
            if corrupted is not None:
                with patch.dict(cast(dict[str, Mapping[str, int]], METRIC_REPORTERS), corrupted.reporters):
                    said, others = verdicts(corrupted.plan), RULES_AND_ACTIONS.keys() - RULES_OF_EVERY_RANK
                    # Where a tensor is in two groups, say, rules about ranks may look at one of them.
                    is_refused_before = any(complains(corrupted.plan, name) for name in others)
                for by_class, by_rank in said.values():
                    assert by_class == by_rank or (is_refused_before and by_rank), (world, kind, said)
                refused += Counter(name for name, (by_class, _) in said.items() if by_class)
    assert set(refused) == set(RULES_OF_EVERY_RANK)


def test_a_tensor_among_others_with_the_same_shards_is_held_to_its_own_sum() -> None:
    """A norm of the stream and a norm of each head are whole on all ranks; only the second is partial over tp."""
    plan = make_plan("tp=2 dp=2 zero=1")
    names = {
        "blocks.1.norm.weight": "blocks.1.attn.q_norm.weight",
        "blocks.1.attn.q_norm.weight": "blocks.1.norm.weight",
    }
    groups = []
    for each in plan.groups:
        listed = tuple(names.get(name, name) for name in each.group.names)
        copies = {names.get(name, name): ranks for name, ranks in each.group.copy_groups.items()}
        groups.append(replace(each, group=replace(each.group, names=listed, copy_groups=copies)))
    mistakes = [*STEP_PLAN_RULES["sums_are_complete"](replace(plan, groups=tuple(groups)))]
    assert all(any(name in mistake for mistake in mistakes) for name in names)


def with_rank(groups: tuple[tuple[int, ...], ...], rank: int, other: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(other if each == rank else each for each in ranks)) for ranks in groups)


def mistakes_of_one_rank(plan: StepPlan, group: SyncGroupPlan, rank: int) -> Iterator[StepPlan]:
    """Plans in which one rank alone adds, copies, communicates, updates or reads something else."""

    def planned(changed: SyncGroupPlan) -> StepPlan:
        return replace(plan, groups=tuple(changed if each is group else each for each in plan.groups))

    other = (rank + 1) % plan.dims.ranks
    yield planned(replace(group, group=replace(group.group, sum_groups=with_rank(group.group.sum_groups, rank, other))))
    copies = {name: with_rank(each, rank, other) for name, each in group.group.copy_groups.items()}
    yield planned(replace(group, group=replace(group.group, copy_groups=copies)))
    position = group.position(rank)
    assert position is not None
    for i, action in enumerate(group.units[0].schedule):
        if any(position in ranks for ranks in action.rank_groups):
            fewer = tuple(tuple(p for p in ranks if p != position) for ranks in action.rank_groups)
            schedule = list(group.units[0].schedule)
            schedule[i] = replace(action, rank_groups=tuple(filter(None, fewer)))
            yield planned(replace(group, units=tuple(replace(u, schedule=tuple(schedule)) for u in group.units)))
    if (shard := group.units[0].updated_shard(position)) is not None:
        spans = list(group.units[0].spans)
        ranges = list(spans[0].shard_ranges)
        ranges[shard] = ranges[shard][0], ranges[shard][1] + 1
        spans[0] = spans[0]._replace(shard_ranges=tuple(ranges))
        yield planned(replace(group, units=(replace(group.units[0], spans=tuple(spans)), *group.units[1:])))
    rows = list(plan.rows_by_rank)
    rows[rank] = (range(rows[rank][0].start, rows[rank][0].stop + 1), *rows[rank][1:])
    yield replace(plan, rows_by_rank=tuple(rows))


@pytest.mark.parametrize(
    "sizes", [{"pp": 1, "dp": 8, "tp": 1}, {"pp": 2, "dp": 3, "tp": 2}], ids=lambda sizes: str(sizes)
)
@pytest.mark.parametrize("zero", range(4))
def test_a_mistake_of_any_one_rank_is_found(sizes: dict[str, int], zero: int) -> None:
    dp = sizes["dp"]
    model = replace(model_sharding() if sizes["tp"] > 1 else ModelSharding(), stages=STAGES_OF[sizes["pp"]])
    PLANS["one rank"] = PlanCase(sizes, Sharding(dp, zero=zero, shards=dp if zero else 1), model)
    plan, count = make_plan("one rank"), 0
    for rank in range(plan.dims.ranks):
        group = next(each for each in plan.groups if each.position(rank) is not None)
        for mistaken in mistakes_of_one_rank(plan, group, rank):
            with pytest.raises(InvalidStepPlanError):
                prove_plan_and_actions(mistaken)
            count += 1
    assert count >= 5 * plan.dims.ranks


@pytest.mark.parametrize(
    ("sizes", "zero", "shards"),
    [
        pytest.param({"dp": 16384}, 1, 128, marks=pytest.mark.proof),
        pytest.param({"dp": 16384}, 3, 4096, marks=pytest.mark.proof),
        ({"pp": 2, "dp": 2048, "tp": 4}, 2, 2048),
    ],
)
def test_16384_ranks_are_checked_by_their_classes(sizes: dict[str, int], zero: int, shards: int) -> None:
    """It takes no longer than for some ranks, and a mistake of one rank is found."""
    model = replace(model_sharding() if "tp" in sizes else ModelSharding(), stages=STAGES_OF[sizes.get("pp", 1)])
    PLANS["many"] = PlanCase(sizes, Sharding(sizes["dp"], zero=zero, shards=shards), model)
    plan = make_plan("many")
    assert prove_step_plan(plan).ranks == 16384
    interior = plan.dims.ranks // 2 + 5
    rows = list(plan.rows_by_rank)
    rows[interior] = (range(1), *rows[interior][1:])
    with pytest.raises(InvalidStepPlanError, match="row"):
        prove_step_plan(replace(plan, rows_by_rank=tuple(rows)))


@pytest.mark.parametrize("sizes", [(("pp", 3), ("dp", 2), ("cp", 2), ("tp", 2)), (("dp", 5),), (("pp", 1), ("tp", 4))])
def test_groups_are_ranks_that_differ_in_some_dimensions(sizes: tuple[tuple[str, int], ...]) -> None:
    dims = ParallelDims(sizes)
    for count in range(1 << len(sizes)):
        names = [name for bit, (name, _) in enumerate(sizes) if count >> bit & 1]
        groups: dict[object, list[int]] = {}
        for rank in range(dims.ranks):
            fixed = tuple(index for name, index in dims.coordinates(rank).items() if name not in names)
            groups.setdefault(fixed, []).append(rank)
        assert dims.groups(*names) == tuple(map(tuple, groups.values()))
        assert all(dims.group_of(rank, *names) == ranks for ranks in dims.groups(*names) for rank in ranks)
