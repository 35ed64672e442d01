"""The proof that a step plan trains every element correctly; it needs the plan alone and runs nothing.

Schedules are executed on multisets of contributors, so that a missing gradient is noticed as well as one that counts
twice. Ranks in the same state are checked once, and elements as intervals: a thousand parameters on a thousand ranks
take some hundredths of a second. A failure is a bug of motet; the message names the element and the rank.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from motet.collectives.algorithms import build
from motet.collectives.program import Program
from motet.collectives.prove.program_checker import CollectiveProofError, prove_program
from motet.parallel.data_parallel.comm_units import CommUnit, ShardedSpan, SyncGroupPlan
from motet.parallel.data_parallel.communication.communication_settings import (
    AUTO,
    BACKEND,
    CommunicationSettings,
    resolve_communication_groups,
)
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.unit_schedule import CommUnitAction
from motet.parallel.step_plan.plan import StepPlan, updated_ranges
from motet.parallel.step_plan.symbolic_execution import (
    ShardCoverageRequirement,
    SymbolicRankStates,
    UnitScheduleError,
    execute_symbolically,
)


class InvalidStepPlanError(AssertionError):
    """A plan that would not train the model correctly."""


def _require(is_right: bool, message: str) -> None:
    if not is_right:
        raise InvalidStepPlanError(message)


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
    _check_rows(plan)
    _check_members(plan)
    _check_outer_groups(plan)
    for group in plan.groups:
        _check_actions(group)
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


def _check_actions(group: SyncGroupPlan) -> None:
    ranks = len(group.group.sum_groups[0])
    executed: dict[int, SymbolicRankStates] = {}
    checked: set[tuple[int, ...]] = set()
    trained = [unit for unit in group.units if unit.members]
    for unit in trained:
        schedule = id(unit.schedule)  # by identity: comparing the groups of a thousand ranks takes longer
        try:
            if schedule not in executed:
                executed[schedule] = execute_symbolically(unit.schedule, ranks, is_bucket=unit.kind == "bucket")
        except UnitScheduleError as error:
            raise InvalidStepPlanError(str(error).format(_describe_shard(group, unit, error.shard))) from None
        for (index, requirement), span in product(
            enumerate(executed[schedule].coverage_requirements.values()), unit.spans
        ):
            key = schedule, index, id(span.shard_ranges), span.length
            if key not in checked:
                _check_coverage(unit, span, requirement)
                checked.add(key)
        is_same = unit.schedule is trained[0].schedule or _reductions(unit) == _reductions(trained[0])
        first, other = (f"{each.name} ({each.members[0].name})" for each in (trained[0], unit))
        _require(is_same, f"{other} has other actions than {first}, which the same ranks hold")


def _reductions(unit: CommUnit) -> list[CommUnitAction]:
    return [action for action in unit.schedule if action.moment not in ("forward", "backward")]


def check_rank_matches_plan(
    plan: StepPlan, rank: int, local_ranges: Mapping[str, tuple[int, int]], *, counted_names: Collection[str]
) -> None:
    """Check that a rank updates the elements that its plan says, (first, stop) by name, and which count in the norm."""
    planned = updated_ranges(plan, rank)
    actual = {name: bounds for name, bounds in local_ranges.items() if bounds[0] < bounds[1]}
    for name in {**planned, **actual}:
        if planned.get(name) != actual.get(name):
            does, should = (_format_range("element", *r[name]) if name in r else "nothing" for r in (actual, planned))
            raise InvalidStepPlanError(f"rank {rank} updates {does} of {name}, where its plan says {should}")
    for group in plan.groups:
        is_planned = group.counts_in_norm(rank)
        for name in group.shapes:
            does = "counts" if name in counted_names else "does not count"
            _require((name in counted_names) == is_planned, f"rank {rank} {does} {name} in the norm, unlike its plan")


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


# --- rows, micro-batches and parameters ------------------------------------------------------------


def _check_rows(plan: StepPlan) -> None:
    for ranks in (range(len(plan.rows_by_rank)),) if plan.outer_groups else plan.dims.groups("dp"):
        _check_rows_of_ranks(plan, ranks)


def _check_rows_of_ranks(plan: StepPlan, ranks: Sequence[int]) -> None:
    rows_read = sorted(
        (rows.start, rows.stop, rank, microbatch)
        for rank in ranks
        for microbatch, rows in enumerate(plan.rows_by_rank[rank])
        if rows
    )
    next_row, previous = 0, ""
    for start, stop, rank, microbatch in rows_read:
        reader = f"rank {rank} in micro-batch {microbatch}"
        missing, twice = _format_range("row", next_row, start), _format_range("row", start, min(next_row, stop))
        _require(start <= next_row, f"nobody reads {missing} of the global batch")
        _require(start >= next_row, f"{previous} and {reader} both read {twice} of the global batch")
        next_row, previous = stop, reader
    count = plan.batch_sequences
    _require(next_row >= count, f"nobody reads {_format_range('row', next_row, count)} of the global batch")
    _require(next_row <= count, f"{previous} reads up to row {next_row - 1} of a global batch of {count} rows")


def _check_members(plan: StepPlan) -> None:
    unit_of: dict[str, str] = {}
    for group in plan.groups:
        next_element, previous = 0, "the unit before it"
        for unit in group.units:
            for span, member in unit.member_spans():
                name, numel = member.name, prod(group.shapes.get(member.name, ()))
                other = unit_of.setdefault(name, unit.name)
                repeated = f"element 0 of {name} is in {other} and again in {unit.name}"
                _require(other == unit.name and name != previous, repeated)
                lost = _format_range("element", min(member.numel, numel), max(member.numel, numel))
                _require(member.numel == numel, f"{lost} of {name}: {unit.name} has {member.numel} of {numel}")
                is_free = member.numel == 0 or member.start >= max(next_element, span.start)
                _require(is_free, f"element 0 of {name} is in {unit.name} where {previous} is")
                end = span.start + span.length
                beyond = _format_range("element", max(0, end - member.start), member.numel)
                _require(member.stop <= end, f"{beyond} of {name}: beyond the end of {unit.name}")
                next_element, previous = max(next_element, member.stop), name
            next_element = max([next_element, *(span.start + span.length for span in unit.spans)])
    for tensor in plan.inventory.trained:
        updated = _format_range("element", 0, prod(tensor.shape))
        _require(tensor.name in unit_of, f"nobody updates {updated} of {tensor.name}")


def _check_outer_groups(plan: StepPlan) -> None:
    for first, rank in ((ranks[0], rank) for ranks in plan.outer_groups for rank in ranks):
        name, is_same = plan.inventory.trained[0].name, (rank - first) % plan.dims.ranks == 0
        _require(is_same, f"element 0 of {name}: the outer step of ranks {first} and {rank} mixes shards")


# --- elements --------------------------------------------------------------------------------------


def _check_coverage(unit: CommUnit, span: ShardedSpan, requirement: ShardCoverageRequirement) -> None:
    ranges: dict[int | None, tuple[int, int]] = {None: (0, span.length), **dict(enumerate(span.shard_ranges))}
    intervals = [(*ranges.get(shard, (0, 0)), rank) for shard, rank in requirement.held_shards]
    next_element, last_rank = 0, -1
    for first, stop, rank in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if first > next_element:
            raise InvalidStepPlanError(requirement.gap.format(_describe_elements(unit, span, next_element, stop=first)))
        if first < next_element:
            twice = requirement.twice.format(_describe_elements(unit, span, first, stop=min(next_element, stop)))
            raise InvalidStepPlanError(f"{twice}: ranks {last_rank} and {rank}")
        next_element, last_rank = stop, rank
    excess, missing = next_element - span.length, _describe_elements(unit, span, next_element, stop=span.length)
    _require(excess >= 0, requirement.gap.format(missing))
    name = unit.name if unit.kind == "bucket" else next(m.name for m in unit.members if m.start == span.start)
    _require(excess <= 0, f"rank {last_rank} has {excess} elements beyond the end of {name}")


def _describe_shard(group: SyncGroupPlan, unit: CommUnit, shard: int | None) -> str:
    """Elements of a shard, of the first unit with this schedule in which it is not empty."""
    if shard is not None:
        for other in group.units:
            for span in other.spans if other.schedule == unit.schedule else ():
                if shard < len(span.shard_ranges) and span.shard_ranges[shard][0] < span.shard_ranges[shard][1]:
                    return _describe_elements(
                        other, span, span.shard_ranges[shard][0], stop=span.shard_ranges[shard][1]
                    )
    return _describe_elements(unit, unit.spans[0], 0, stop=unit.spans[0].length)


def _describe_elements(unit: CommUnit, span: ShardedSpan, first: int, *, stop: int) -> str:
    for member in sorted(unit.members, key=lambda member: member.start):
        start, end = max(member.start, span.start + first), min(member.stop, span.start + stop)
        if start < end:
            return f"{_format_range('element', start - member.start, end - member.start)} of {member.name}"
    return f"{_format_range('element', first, stop)} of {unit.name}, which are padding,"


def _format_range(noun: str, first: int, stop: int) -> str:
    return f"{noun} {first}" if stop - first < 2 else f"{noun}s {first} to {stop - 1}"
