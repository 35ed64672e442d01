"""The check that a step plan fits its model and its ranks; it needs the plan alone and runs nothing.

Each rule yields a sentence for each mistake, with the tensor and the ranks. Ranks in the same state are checked once,
equal shapes once, and elements as intervals. The actions on a unit follow from settings alone, so no run checks them:
tests execute every row of `ZERO_STAGES` with all settings on multisets of contributors. A failure is a bug of motet, or
of a split that was made by hand.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from math import prod

from motet.collectives.algorithms import build
from motet.collectives.program import Program
from motet.collectives.prove.program_checker import CollectiveProofError, prove_program
from motet.parallel.data_parallel.buckets import ALIGN_ELEMENTS, Bucket, BucketParameter
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan
from motet.parallel.data_parallel.communication.communication_settings import (
    AUTO,
    BACKEND,
    CommunicationSettings,
    resolve_communication_groups,
)
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.unit_schedule import CommUnitAction
from motet.parallel.step_plan.plan import StepPlan, updated_ranges
from motet.parallel.step_plan.sharding_check import SHARDING_RULES


class InvalidStepPlanError(AssertionError):
    """A plan that would not train the model correctly."""


@dataclass(frozen=True)
class StepPlanProof:
    """Facts about a plan that was proven."""

    ranks: int
    copies: int  # In each of which every element is updated once
    parameters: int
    elements: int
    comm_units: int
    rows: int  # Of the global batch, each read once
    microbatches: int


def prove_step_plan(plan: StepPlan) -> StepPlanProof:
    """Check a plan and raise at the first mistake."""
    for mistake in chain.from_iterable(rule(plan) for rule in STEP_PLAN_RULES.values()):
        raise InvalidStepPlanError(mistake)
    updates = (a for g in plan.groups for u in g.units for a in u.schedule if a.kind == "update")
    shapes = [tensor.shape for tensor in plan.inventory.trained]
    return StepPlanProof(
        ranks=plan.dims.ranks,
        copies=len(next(updates).rank_groups),
        parameters=len(shapes),
        elements=sum(map(prod, shapes)),
        comm_units=len(plan.comm_units),
        rows=plan.batch_sequences,
        microbatches=plan.microbatches,
    )


def check_rank_matches_plan(
    plan: StepPlan, rank: int, local_ranges: Mapping[str, tuple[int, int]], *, counted_names: Collection[str]
) -> None:
    """Check that a rank updates the elements that its plan says, (first, stop) by name, and which count in the norm."""
    planned = updated_ranges(plan, rank)
    actual = {name: bounds for name, bounds in local_ranges.items() if bounds[0] < bounds[1]}
    for name in {**planned, **actual}:
        if planned.get(name) != actual.get(name):
            does, should = (_format_elements(*r[name]) if name in r else "nothing" for r in (actual, planned))
            raise InvalidStepPlanError(f"rank {rank} updates {does} of {name}, where its plan says {should}")
    for group in plan.groups:
        planned_names = group.counted_names(rank)
        for name in group.shapes:
            if (name in counted_names) != (name in planned_names):
                does = "does not count" if name in planned_names else "counts"
                raise InvalidStepPlanError(f"rank {rank} {does} {name} in the norm, unlike its plan")


# A ring over this many ranks is proven in a tenth of a second; the time grows with the cube of the ranks.
MAX_PROVEN_RANKS = 64


def prove_collective_programs(sharding: DataParallelSharding, settings: CommunicationSettings) -> tuple[Program, ...]:
    """Prove the algorithms that the settings name, for the number of ranks of each group of the layout."""
    groups, owners = resolve_communication_groups(settings, sharding), sharding.bucket_owners
    calls: set[tuple[str, str, int, int | None]]
    if owners:
        rooted = (("reduce", owners.reduce_algorithm), ("broadcast", owners.broadcast_algorithm))
        calls = {(c, name, sharding.ranks, root) for c, name in rooted for root in range(owners.count)}
    else:
        over_shards = [("reduce-scatter", groups.shard_groups), ("all-gather", groups.shard_groups)]
        others = [("all-reduce", groups.replica_groups), ("all-gather", groups.secondary_shard_groups)]
        calls = {(c, settings.algorithm(c), len(each[0]), None) for c, each in over_shards + others if each}
    built = [
        build(collective, name, ranks, **({} if root is None else {"root": root}))
        for collective, name, ranks, root in sorted(calls, key=str)
        if name not in (AUTO, BACKEND) and 1 < ranks <= MAX_PROVEN_RANKS
    ]
    for program in built:
        try:
            prove_program(program)
        except CollectiveProofError as error:
            raise InvalidStepPlanError(f"element 0 of every parameter: {error}") from None
    return tuple(built)


# --- rules about the units of a sync group ---------------------------------------------------------


def members_fill_units(plan: StepPlan) -> Iterator[str]:
    """Units follow one another in a flat tensor, and in each of them its members, aligned."""
    optimizer_groups = {tensor.name: tensor.optimizer_group for tensor in plan.inventory.tensors}
    for group in plan.groups:
        start = 0
        for unit in group.units:
            spans, offset, contents = list[tuple[int, int]](), start, unit.contents
            align = contents.align if isinstance(contents, Bucket) else 1
            for member in unit.members:
                numel = prod(group.shapes.get(member.name, ()))
                wanted = BucketParameter(member.name, optimizer_groups.get(member.name, -1), offset, numel)
                if member != wanted:
                    yield f"{_title(group, unit)}: {member} is in the place of {wanted}"
                spans.append((offset, numel))
                offset += -(-numel // align) * align
            actual = [(span.start, span.length) for span in unit.spans]
            is_right = unit.kind != "bucket" and group.group.unit_kind != "bucket"
            if isinstance(contents, Bucket):
                spans = [(start, -(-(offset - start) // (unit.shards * align)) * unit.shards * align)]
                is_right = unit.kind == group.group.unit_kind == "bucket" and align % ALIGN_ELEMENTS == 0 < align
                is_right &= (contents.start, contents.length, contents.shards) == (*spans[0], unit.shards)
            if actual != spans or not is_right:
                yield f"{_title(group, unit)}: spans {actual} of a {unit.kind} do not hold its members, but {spans}"
            start = sum(spans[-1]) if spans else start


def shards_are_equal(plan: StepPlan) -> Iterator[str]:
    """Shards have equally many elements or rows and are in order, the last of them shorter; or one owner has all."""
    checked: set[object] = set()
    for group, unit in ((each, unit) for each in plan.groups for unit in each.units):
        for span, member in unit.member_spans():
            rows = span.length if unit.kind == "bucket" else group.shapes[member.name][0]
            if (key := (id(span.shard_ranges), span.length, rows, unit.shards, unit.owner)) in checked:
                continue
            checked.add(key)
            size, shards = -(-rows // unit.shards) * (span.length // max(rows, 1)), range(unit.shards)
            wanted = [(min(shard * size, span.length), min((shard + 1) * size, span.length)) for shard in shards]
            if unit.owner is not None:
                wanted = [(0, span.length * (shard == unit.owner)) for shard in shards]
            for shard, (bounds, right) in enumerate(zip_longest(span.shard_ranges, wanted)):
                if bounds != right:
                    yield f"{_title(group, unit)}: shard {shard} of {member.name} is elements {bounds}, not {right}"
            if unit.owner not in (None, *shards):
                yield f"{_title(group, unit)}: there is no rank {unit.owner} among them, which is to own it"


def units_reduce_alike(plan: StepPlan) -> Iterator[str]:
    """All units of a sync group have the same actions, but for gathers before forward and backward."""
    for group in plan.groups:
        trained = [unit for unit in group.units if unit.members]
        for unit in trained:
            # By identity first: comparing the groups of a thousand ranks takes longer.
            if unit.schedule is not trained[0].schedule and _reductions(unit) != _reductions(trained[0]):
                yield f"{_title(group, unit)}: its actions are not those on {trained[0].members[0].name}"


def codecs_keep_copies(plan: StepPlan) -> Iterator[str]:
    """A codec rounds by what it compresses together, so a unit that is compressed has tensors with the same copies."""
    for group, unit in ((each, unit) for each in plan.groups for unit in each.units):
        members, copies = unit.members, group.group.copy_groups
        if any(action.codec for action in unit.schedule):
            for member in members:
                if copies.get(member.name) != copies.get(members[0].name):
                    yield f"{_title(group, unit)}: compressed with {members[0].name}, copies of {member.name} differ"


def _reductions(unit: CommUnit) -> list[CommUnitAction]:
    return [action for action in unit.schedule if action.moment not in ("forward", "backward")]


def _title(group: SyncGroupPlan, unit: CommUnit) -> str:
    names = ", ".join(member.name for member in unit.members[:4])
    return f"{unit.name} ({names}) of {format_ranks(group.group.sum_groups[0])}"


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 7`, or a list that is cut after eight ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown} and {len(ranks) - 8} more" if len(ranks) > 8 else f"ranks {shown or '(none)'}"


def _format_elements(first: int, stop: int) -> str:
    return f"element {first}" if stop - first < 2 else f"elements {first} to {stop - 1}"


_UNIT_RULES = (
    members_fill_units,
    shards_are_equal,
    units_reduce_alike,
    codecs_keep_copies,
)
STEP_PLAN_RULES: Mapping[str, Callable[[StepPlan], Iterator[str]]] = {
    rule.__name__: rule for rule in (*SHARDING_RULES, *_UNIT_RULES)
}
