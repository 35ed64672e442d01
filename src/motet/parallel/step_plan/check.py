"""The proof that a layout trains every element as it should, from its plan alone: nothing is run.

Each portion's course is played on multisets of contributors, so that a share that is missing is seen as well as one
that counts twice. Ranks that do the same are looked at once, and elements as intervals: a thousand parameters on a
thousand ranks take some hundredths of a second. What is wrong is a mistake of motet, told by element and rank.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from motet.collectives.algorithms import build
from motet.collectives.program import Program
from motet.collectives.prove.program_checker import UnprovenCollectiveError, prove_program
from motet.parallel.data_parallel.communication.communication_settings import (
    AUTO,
    BACKEND,
    CommunicationSettings,
    resolve_communication_groups,
)
from motet.parallel.layout import Layout
from motet.parallel.step_plan.plan import CommUnit, ShardRanges, StepPlan, updated_ranges
from motet.parallel.step_plan.symbolic_execution import (
    HeldShard,
    ShardCoverageRequirement,
    SymbolicRankStates,
    UnitScheduleError,
    execute_symbolically,
)


class InvalidStepPlanError(AssertionError):
    """A plan that would not train the model that it is given."""


@dataclass(frozen=True)
class StepPlanProof:
    """What is known of a plan that is right."""

    ranks: int
    copies: int  # In each of which every element is updated once
    parameters: int
    elements: int
    comm_units: int
    rows: int  # Of the global batch, each read once
    microbatches: int


def prove_step_plan(plan: StepPlan) -> StepPlanProof:
    """Play a step; raise at the first thing that is wrong."""
    _check_rows(plan)
    _check_gradient_reductions(plan)
    _check_members(plan)
    _check_outer_groups(plan)
    executed: dict[int, SymbolicRankStates] = {}
    seen: set[tuple[int, ...]] = set()
    for unit in plan.comm_units:
        schedule = id(unit.schedule)  # of what the plan holds: to compare the sets of a thousand ranks takes longer
        try:
            if schedule not in executed:
                executed[schedule] = execute_symbolically(unit.schedule, plan.ranks)
        except UnitScheduleError as fault:
            raise InvalidStepPlanError(
                str(fault).format(_describe_shard(_unit_with_shard(plan, unit, fault), fault.shard))
            ) from None
        for index, requirement in enumerate(executed[schedule].coverage_requirements.values()):
            key = schedule, index, id(unit.shard_ranges), unit.length
            if key not in seen:
                _check_coverage(unit, requirement)
                seen.add(key)
    update = next(move for move in plan.comm_units[0].schedule if move.kind == "update")
    elements = sum(map(prod, plan.shapes.values()))
    sizes = plan.ranks, len(update.rank_groups), len(plan.shapes), elements, len(plan.comm_units)
    return StepPlanProof(*sizes, plan.batch_sequences, plan.microbatches)


def check_rank_matches_plan(
    plan: StepPlan, rank: int, local_ranges: Mapping[str, tuple[int, int]], contributes_to_norm: bool
) -> None:
    """That a rank does as its plan says. `kept`: (first, stop) of what it updates; `counts`: in the norm."""
    planned, actual = (
        updated_ranges(plan, rank),
        {name: part for name, part in local_ranges.items() if part[0] < part[1]},
    )
    for name in {**planned, **actual}:
        if planned.get(name) != actual.get(name):
            first, stop = actual.get(name, (0, 0))
            does = _format_range("element", first, stop) if first < stop else "nothing"
            first, stop = planned.get(name, (0, 0))
            should = _format_range("element", first, stop) if first < stop else "nothing"
            raise InvalidStepPlanError(f"rank {rank} updates {does} of {name}, where its plan says {should}")
    norm = next(move for move in plan.comm_units[0].schedule if move.kind == "norm")
    if contributes_to_norm != any(rank in ranks for ranks in norm.rank_groups):
        raise InvalidStepPlanError(
            f"rank {rank} {'counts' if contributes_to_norm else 'does not count'} in the norm, unlike its plan"
        )


# Ranks of a Program that is proven here: a tenth of a second for a ring of so many, which grows as their cube.
MAX_PROVEN_RANKS = 64


def prove_collective_programs(layout: Layout, settings: CommunicationSettings) -> tuple[Program, ...]:
    """Those that are named for the sums and gathers of a layout, proven for the ranks that do them together."""
    groups = resolve_communication_groups(settings, layout)
    wanted: set[tuple[str, str, int, int | None]] = set()
    if layout.bucket_owners:
        for root in range(layout.bucket_owners.count):
            wanted.add(("reduce", layout.bucket_owners.reduce_algorithm, layout.dp, root))
            wanted.add(("broadcast", layout.bucket_owners.broadcast_algorithm, layout.dp, root))
    else:
        gathers = [groups.shard_groups, groups.secondary_shard_groups]
        rank_groups_by_collective = {
            "reduce-scatter": [groups.shard_groups],
            "all-reduce": [groups.replica_groups],
            "all-gather": gathers,
        }
        for collective, all_sets in rank_groups_by_collective.items():
            name = settings.algorithm(collective)
            sizes = {len(sets[0]) for sets in all_sets if sets and name not in (AUTO, BACKEND)}
            wanted |= {(collective, name, ranks, None) for ranks in sizes}
    programs = [
        build(collective, name, ranks, **({} if root is None else {"root": root}))
        for collective, name, ranks, root in sorted(wanted, key=str)
        if 1 < ranks <= MAX_PROVEN_RANKS
    ]
    for candidate in programs:
        try:
            prove_program(candidate)
        except UnprovenCollectiveError as error:
            raise InvalidStepPlanError(f"element 0 of every parameter: {error}") from None
    return tuple(programs)


# --- what is read and sent -------------------------------------------------------------------------


def _check_rows(plan: StepPlan) -> None:
    """Each row of the global batch is read once."""
    rows_read = sorted(
        (part.start, part.stop, rank, number)
        for rank, parts in enumerate(plan.rows_by_rank)
        for number, part in enumerate(parts)
        if part
    )
    next_row, previous_reader = 0, ""
    for start, stop, rank, number in rows_read:
        reader = f"rank {rank} in micro-batch {number}"
        if start > next_row:
            raise InvalidStepPlanError(f"nobody reads {_format_range('row', next_row, start)} of the global batch")
        if start < next_row:
            twice = _format_range("row", start, min(next_row, stop))
            raise InvalidStepPlanError(f"{previous_reader} and {reader} both read {twice} of the global batch")
        next_row, previous_reader = stop, reader
    if next_row < plan.batch_sequences:
        raise InvalidStepPlanError(
            f"nobody reads {_format_range('row', next_row, plan.batch_sequences)} of the global batch"
        )
    if next_row > plan.batch_sequences:
        raise InvalidStepPlanError(
            f"{previous_reader} reads up to row {next_row - 1} of a global batch of {plan.batch_sequences} rows"
        )


def _check_gradient_reductions(plan: StepPlan) -> None:
    """The gradients of each micro-batch travel once."""
    times = Counter(microbatch for sent in plan.reduce_after for microbatch in sent)
    for number in range(plan.microbatches):
        if times[number] != 1:
            problem = f"are summed {times[number]} times" if times[number] else "are in no sum"
            raise InvalidStepPlanError(
                f"element 0 of {next(iter(plan.shapes))}: gradients of micro-batch {number} {problem}"
            )


def _check_members(plan: StepPlan) -> None:
    """Each parameter has one place, which nothing else has."""
    places: dict[str, str] = {}
    ends = {"rows": 0, "bucket": 0}
    for unit in sorted(plan.comm_units, key=lambda portion: portion.start):
        next_element, previous = max(ends[unit.kind], unit.start), "what stands before it"
        for member in sorted(unit.members, key=lambda member: member.start):
            other = places.setdefault(member.name, unit.name)
            if other != unit.name or member.name == previous:
                raise InvalidStepPlanError(f"element 0 of {member.name} stands in {other} and again in {unit.name}")
            full_numel = prod(plan.shapes[member.name])
            if member.numel != full_numel:
                lost = _format_range("element", min(member.numel, full_numel), max(member.numel, full_numel))
                raise InvalidStepPlanError(f"{lost} of {member.name}: {unit.name} has {member.numel} of {full_numel}")
            if member.numel and member.start < next_element:
                raise InvalidStepPlanError(f"element 0 of {member.name} stands in {unit.name} where {previous} does")
            if member.stop > unit.start + unit.length:
                beyond = _format_range("element", max(0, unit.start + unit.length - member.start), member.numel)
                raise InvalidStepPlanError(f"{beyond} of {member.name}: beyond the end of {unit.name}")
            next_element, previous = max(next_element, member.stop), member.name
        ends[unit.kind] = unit.start + unit.length
    for name, shape in plan.shapes.items():
        if name not in places:
            raise InvalidStepPlanError(f"nobody updates {_format_range('element', 0, prod(shape))} of {name}")


def _check_outer_groups(plan: StepPlan) -> None:
    """Replicas that train apart tell each other about the same shards."""
    for ranks in plan.outer_groups:
        other = next((rank for rank in ranks if (rank - ranks[0]) % plan.ranks), None)
        if other is not None:
            name = next(iter(plan.shapes))
            raise InvalidStepPlanError(f"element 0 of {name}: ranks {ranks[0]} and {other} meet, with unlike shards")


# --- elements --------------------------------------------------------------------------------------


def _check_coverage(unit: CommUnit, requirement: ShardCoverageRequirement) -> None:
    """Each element of a portion is of one of these ranks."""
    next_element, last_rank = 0, -1
    for first, stop, rank in sorted(_held_intervals(unit.shard_ranges, unit.length, requirement.held_shards)):
        if first > next_element:
            raise InvalidStepPlanError(requirement.gap_message.format(_describe_elements(unit, next_element, first)))
        if first < next_element:
            twice = requirement.overlap_message.format(_describe_elements(unit, first, min(next_element, stop)))
            raise InvalidStepPlanError(f"{twice}: ranks {last_rank} and {rank}")
        next_element, last_rank = stop, rank
    if next_element < unit.length:
        raise InvalidStepPlanError(requirement.gap_message.format(_describe_elements(unit, next_element, unit.length)))
    if next_element > unit.length:
        raise InvalidStepPlanError(
            f"rank {last_rank} has {next_element - unit.length} elements beyond the end of {unit.name}"
        )


def _held_intervals(
    shard_ranges: ShardRanges, length: int, held_shards: Iterable[HeldShard]
) -> Iterator[tuple[int, int, int]]:
    for shard, rank in held_shards:
        first, stop = (0, length) if shard is None else shard_ranges[shard] if shard < len(shard_ranges) else (0, 0)
        if first < stop:
            yield first, stop, rank


def _unit_with_shard(plan: StepPlan, unit: CommUnit, fault: UnitScheduleError) -> CommUnit:
    """One of this course that has elements in the shard."""
    shard = fault.shard
    alike = (other for other in plan.comm_units if other.schedule == unit.schedule)
    if shard is None:
        return unit
    return next(
        (p for p in alike if shard < len(p.shard_ranges) and p.shard_ranges[shard][0] < p.shard_ranges[shard][1]), unit
    )


def _describe_shard(unit: CommUnit, shard: int | None) -> str:
    is_unsharded = shard is None or shard >= len(unit.shard_ranges)
    return _describe_elements(unit, *((0, unit.length) if is_unsharded or shard is None else unit.shard_ranges[shard]))


def _describe_elements(unit: CommUnit, first: int, stop: int) -> str:
    """Elements of the first parameter that has some there."""
    for member in sorted(unit.members, key=lambda member: member.start):
        start, end = max(member.start, unit.start + first), min(member.stop, unit.start + stop)
        if start < end:
            return f"{_format_range('element', start - member.start, end - member.start)} of {member.name}"
    return f"{_format_range('element', first, stop)} of {unit.name}, which are padding,"


def _format_range(what: str, first: int, stop: int) -> str:
    return f"{what} {first}" if stop - first < 2 else f"{what}s {first} to {stop - 1}"
