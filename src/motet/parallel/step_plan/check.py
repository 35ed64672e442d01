"""The check that a step plan fits its model and its ranks; it needs the plan alone and runs nothing.

Each rule yields a sentence for each mistake, with the tensor and the ranks. Ranks in the same state are checked once,
equal shapes once, and elements as intervals. The actions on a unit follow from settings alone, so no run checks them:
tests execute every row of `ZERO_STAGES` with all settings on multisets of contributors. A failure is a bug of motet, or
of a split that was made by hand.

The rules of a step plan about the ranks that hold, add, read and report each value; they need the plan alone.

Each rule is a function that yields a sentence for each mistake, with the tensor and the ranks. check.py has the rules
about the actions of the ranks of one sync group, and runs all of them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise, zip_longest
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
from motet.parallel.data_parallel.zero import CommUnitAction
from motet.parallel.model_sharding import BOUNDARY_OPERATIONS, BoundaryComm, DimensionSplit, TensorInfo
from motet.parallel.step_plan.check_context import CONTEXT_RULES
from motet.parallel.step_plan.check_transfers import transfer_mistakes
from motet.parallel.step_plan.plan import StepPlan, updated_ranges
from motet.parallel.sync_groups import METRIC_REPORTERS, SyncGroup, reports

# Ranks that agree in these coordinates have one number of the metric together.
METRIC_SHARES = {"loss": ("dp", "cp"), "targets": ("dp", "cp"), "tokens": ("dp",), "rows": ("dp",)}


def _alike(plan: StepPlan) -> list[tuple[TensorInfo, SyncGroup | None]]:
    """One tensor of each kind that ranks hold, add and copy in the same way, and its sync group."""
    group_of = {name: group.group for group in plan.groups for name in group.group.names}
    alike: dict[object, tuple[TensorInfo, SyncGroup | None]] = {}
    for tensor in plan.inventory.tensors:
        group = group_of.get(tensor.name)
        copies = group.copy_groups.get(tensor.name) if group else None
        adds = plan.model_sharding.partial_over(tensor), plan.model_sharding.stages_of(tensor)
        alike.setdefault((plan.specs[tensor.name].pattern, adds, id(group), id(copies)), (tensor, group))
    return list(alike.values())


def _one_of_each_class(plan: StepPlan, inside: Collection[str], decisive: Collection[str]) -> list[tuple[int, ...]]:
    """Ranks that differ in the dimensions `inside` alone: one group for each index in the others that are `decisive`.

    Groups that have the same indices there do the same, whatever their indices in the remaining dimensions.
    """
    firsts = plan.dims.ranks_at_start_but_in([name for name in decisive if name not in inside])
    return [plan.dims.group_of(rank, *inside) for rank in firsts]


def _dims_without(plan: StepPlan, *names: str) -> tuple[str, ...]:
    return tuple(name for name, _ in plan.dims.sizes if name not in names)


def differences(actual: Iterable[object], wanted: Iterable[object]) -> Iterator[tuple[object, int, int]]:
    """Yield each thing that is not listed as often as wanted, with its actual and its wanted number of times."""
    actual_times, wanted_times = Counter(actual), Counter(wanted)
    for thing in {**wanted_times, **actual_times}:
        if actual_times[thing] != wanted_times[thing]:
            yield thing, actual_times[thing], wanted_times[thing]


def group_ranks(keys: Mapping[int, object]) -> list[tuple[int, ...]]:
    """Ranks with the same key, in ascending order."""
    groups: dict[object, list[int]] = {}
    for rank in sorted(keys):
        groups.setdefault(keys[rank], []).append(rank)
    return [tuple(group) for group in groups.values()]


# --- tensors and ranks -----------------------------------------------------------------------------


def shards_tile(plan: StepPlan) -> Iterator[str]:
    """The ranks of each data coordinate hold the whole tensor; two ranks hold the same shard or disjoint ones."""
    for tensor in {id(plan.specs[tensor.name]): tensor for tensor in plan.inventory.tensors}.values():
        specs, numel = plan.specs[tensor.name], prod(tensor.shape)
        for ranks in _one_of_each_class(plan, _dims_without(plan, "dp", "cp"), specs.over):
            shards = {specs[rank]: rank for rank in ranks if rank in specs}
            for (spec, rank), (other_spec, other) in combinations(shards.items(), 2):
                if spec.overlaps(other_spec):
                    yield f"{tensor.name}: ranks {rank} and {other} hold shards that overlap and differ"
            if (held := sum(spec.numel for spec in shards)) < numel:
                yield f"{tensor.name}: ranks {ranks} hold {held} of {numel} elements, on {[*shards.values()]}"


def blocks_have_one_stage(plan: StepPlan) -> Iterator[str]:
    """Each block is in one stage."""
    times = Counter(chain.from_iterable(plan.model_sharding.stages))
    for tensor in plan.inventory.tensors if times else ():
        if tensor.block is not None and times[tensor.block] != 1:
            ranks = list(plan.specs[tensor.name])
            yield f"{tensor.name}: block {tensor.block} is in {times[tensor.block]} stages, of ranks {ranks}"


def tensors_have_one_unit(plan: StepPlan) -> Iterator[str]:
    """Each trained tensor is in one sync group and in one unit of it, and no other tensor is."""
    trained = [tensor.name for tensor in plan.inventory.trained]
    placed = [[member.name for unit in group.units for member in unit.members] for group in plan.groups]
    listed = [group.group.names for group in plan.groups]
    for noun, names in (("sync groups", listed), ("units", placed)):
        for name, times, wanted in differences(chain.from_iterable(names), trained):
            ranks = list(plan.specs.get(str(name), {}))
            yield f"{name}: ranks {ranks} hold it, and it is in {times} {noun}, not in {wanted}"
    for group, names_of_units in zip(plan.groups, placed, strict=True):
        for name in set(group.group.names) ^ set(names_of_units):
            yield f"{name}: ranks {group.group.sum_groups} add it in a unit of another sync group"


def shapes_are_local(plan: StepPlan) -> Iterator[str]:
    """The shape of each tensor in a plan is that of the shards that its ranks hold."""
    held: dict[int, set[tuple[int, ...]]] = {}
    for specs in {id(specs): specs for specs in plan.specs.values()}.values():
        held[id(specs)] = {spec.local_shape for spec in specs.shards.values()}
    for group in plan.groups:
        for name in group.group.names:
            shapes, shape = held.get(id(plan.specs.get(name))), group.shapes.get(name)
            if shapes != {shape}:
                yield f"{name}: ranks {group.group.sum_groups} hold shards of shape {shapes}, and plan with {shape}"


def sums_are_complete(plan: StepPlan) -> Iterator[str]:
    """A sum group is all ranks that have partial sums of the gradient of one shard, and no others."""
    # Dimensions -> each rank -> the first rank that has the same index in all others.
    first_of_others = dict[frozenset[str], dict[int, int]]()
    for tensor, group in ((tensor, group) for tensor, group in _alike(plan) if group):
        classes, partial_over = plan.specs[tensor.name].class_of_rank, {*plan.model_sharding.partial_over(tensor)}
        partial_over -= {"pp"} if group.sharding.reproducible_batch_size else set()  # Stages are added row by row
        if (key := frozenset(partial_over)) not in first_of_others:
            first_of_others[key] = {rank: ranks[0] for ranks in plan.dims.groups(*key) for rank in ranks}
        first = first_of_others[key]
        wanted = group_ranks({rank: (number, first[rank]) for rank, number in classes.items()})
        for ranks, times, right in differences(group.sum_groups, wanted):
            yield f"{tensor.name}: ranks {ranks} are {times} groups that add the gradient of one shard, not {right}"
        stages, sizes = plan.model_sharding.stages_of(tensor), {len(ranks) for ranks in group.sum_groups}
        if (group.stages, sizes) != (stages, {group.sharding.ranks}):
            problem = f"{group.sharding.ranks} ranks of stages {group.stages} shard it"
            yield f"{tensor.name}: {problem}, and ranks {group.sum_groups} of stages {stages} add it"


def copies_are_copies(plan: StepPlan) -> Iterator[str]:
    """A copy group, whose first rank counts and writes, has the ranks with one shard and one position in sum groups."""
    for tensor, group in ((tensor, group) for tensor, group in _alike(plan) if group):
        classes = plan.specs[tensor.name].class_of_rank
        positions = {rank: position for ranks in group.sum_groups for position, rank in enumerate(ranks)}
        wanted = group_ranks({rank: (number, positions.get(rank)) for rank, number in classes.items()})
        for ranks, times, right in differences(group.copy_groups.get(tensor.name, ()), wanted):
            yield f"{tensor.name}: ranks {ranks} are {times} groups of identical copies, not {right}"


def ranks_have_one_group(plan: StepPlan) -> Iterator[str]:
    """The same ranks add all buckets of the same stages as one sync group, and all rows as one."""
    first: dict[object, SyncGroup] = {}
    for group in (each.group for each in plan.groups):
        for place in ((group.unit_kind, group.stages, ranks) for ranks in group.sum_groups):
            if (other := first.setdefault(place, group)) is not group:
                names = ", ".join([*group.names[:1], *other.names[:1]])
                yield f"{names}: ranks {place[-1]} add them in two sync groups, whose order of collectives is open"
                break


# --- activations -----------------------------------------------------------------------------------


def boundaries_have_conjugates(plan: StepPlan) -> Iterator[str]:
    """Each region that opens closes, activations lie as the next region needs them, and splits lie in a region."""
    sharding = plan.model_sharding
    for over in (over for over, size in plan.dims.sizes if size > 1):
        comms = [comm for comm in sharding.boundary_comms if comm.over == over]
        split = [tensor for tensor in plan.inventory.tensors if _splits_over(plan, tensor, over)]
        yield from _region_mistakes(comms, over, {owner for tensor in split for owner in _owners(tensor)})
        layers = {name for comm in comms if _is_border(comm) for name in (comm.module, *comm.shared_by)}
        # A table with an entry at both sides reads no activation, and its output is split.
        layers |= {each.module for each in sharding.activations if each.side == "output"} & {
            each.module for each in sharding.activations if each.side == "input" and not each.splits
        }
        for tensor in split:
            owner, is_passed = _owners(tensor)[0], tensor.name in sharding.head_tensors  # Passed to the head
            if not ((layers and is_passed) or owner in layers or any(_contains(owner, layer) for layer in layers)):
                yield f"{tensor.name} is split over ranks of {over}, and no communication surrounds it"


def _splits_over(plan: StepPlan, tensor: TensorInfo, over: str) -> list[DimensionSplit]:
    return [split for split in plan.model_sharding.rule(tensor.name).splits if split.over == over]


def _owners(tensor: TensorInfo) -> list[str]:
    """The modules that have a tensor."""
    return [name.rpartition(".")[0] for name in (tensor.name, *tensor.aliases)]


def _is_border(comm: BoundaryComm) -> bool:
    """Whether communication opens or closes a region in which ranks compute different parts of the same rows."""
    before, after, _ = BOUNDARY_OPERATIONS.get((comm.operation, comm.side), ((), "", "copy"))
    return bool({*before, after} & {"parallel", "exchanged"})


def _region_mistakes(comms: list[BoundaryComm], over: str, split_layers: set[str]) -> Iterator[str]:
    start: tuple[str, int | None] = ("split", 1) if over == "cp" else ("same", None)  # The batch
    state, before_region, openings = start, start, list[BoundaryComm]()
    lies, dim = start
    sums = {comm.module for comm in comms if (comm.side, comm.operation) == ("output", "sum")}
    for (module, side, argument), times in Counter((c.module, c.side, c.argument) for c in comms).items():
        if times > 1:
            yield f"{module}: ranks of {over} communicate its {side} {argument} {times} times"
    for previous, comm in pairwise([None, *comms]):
        assert comm is not None
        before, after, _ = BOUNDARY_OPERATIONS.get((comm.operation, comm.side), ((), "", "copy"))
        if not _is_of_same_call(previous, comm):
            lies, dim = before_region if openings and comm.side == "input" else state
        # A layer whose rows alone are split takes the features that its rows read.
        reads_features = (comm.operation, comm.side, comm.dim) == ("split", "input", -1) and comm.module in sums
        after = "parallel" if reads_features else after
        # Besides the stream, a region may read tensors that all ranks have, and a split table reads no activation.
        reads_other = comm.operation == "copy" and comm.dim == -1
        opens_itself = comm.side == "output" and not openings and comm.module in split_layers and lies == "same"
        is_right = lies in before and (lies != "split" or comm.dim in _dims_of_tokens(dim))
        if not (is_right or (reads_other and lies == "split") or (opens_itself and "parallel" in before)):
            yield f"{comm.module}: activations are {lies} on ranks of {over} before its {comm.operation}, {comm.side}"
        if comm.side == "output":
            if before_region[0] == "split" and openings and {o.dim for o in openings} - {-1} != {comm.dim}:
                yield f"{openings[0].module}: ranks of {over} gather none or another dimension than they scatter later"
            openings = []
        elif _is_border(comm) or reads_features:
            before_region, openings = (lies, dim), [*openings, comm]
        state = after, (comm.dim or 1) if after == "split" else None
    if state != start:
        yield f"{comms[-1].module}: activations stay {state[0]} on ranks of {over} after it"


def _is_of_same_call(previous: BoundaryComm | None, comm: BoundaryComm) -> bool:
    """Whether communication is the same as the one before it, of another argument or output of the same module."""
    places = [(each.module, each.side, each.operation) for each in (previous, comm) if each is not None]
    return len(places) == 2 and places[0] == places[1]


def _dims_of_tokens(dim: int | None) -> tuple[int | None, ...]:
    """The dimensions along which tokens may lie in a stream that is split along `dim`: first, if rows are flattened."""
    return (dim, 0) if dim == 1 else (dim,)


def _contains(module: str, name: str) -> bool:
    return not module or name.startswith(f"{module}.")


def blocks_keep_activations(plan: StepPlan) -> Iterator[str]:
    """A module whose input and output are both listed is a block: its residual stream lies the same at both ends.

    After a block that gathers it, ranks have all of it. A module inside of a block that reads all of a tensor which is
    split there gets it by communication. A layer that is split itself is not a block.
    """
    sharding = plan.model_sharding
    layers = {o for t in plan.inventory.tensors if sharding.rule(t.name).splits for o in _owners(t)}
    splits = {(each.module, each.side): each.splits for each in sharding.activations if each.module not in layers}
    with_comm = {comm.module for comm in sharding.boundary_comms if comm.side == "input"}
    entries = _splits_on_entry(plan)
    gathered = {(comm.module, comm.side) for comm in sharding.boundary_comms if comm.operation == "gather"}
    for (module, side), lies in splits.items():
        wanted = () if (module, "output") in gathered else splits.get((module, "input"), lies)
        if side == "output" and wanted != lies:
            yield f"{module}: ranks split activations by {wanted} in it, and by {lies} after it"
        if (side, lies) == ("input", ()) and module not in with_comm and (around := _splits_around(entries, module)):
            yield f"{module}: no communication gives its ranks all of the activations that they split by {around}"


def _splits_on_entry(plan: StepPlan) -> dict[str, tuple[DimensionSplit, ...]]:
    """The splits of activations where they enter each listed module."""
    return {each.module: each.splits for each in reversed(plan.model_sharding.activations) if each.side == "input"}


def _splits_around(entries: Mapping[str, tuple[DimensionSplit, ...]], name: str) -> tuple[DimensionSplit, ...]:
    """The splits of activations where they enter the innermost listed module around a module or tensor."""
    while name:
        name = name.rpartition(".")[0]
        if name in entries:
            return entries[name]
    return ()


def partial_gradients_are_declared(plan: StepPlan) -> Iterator[str]:
    """A gradient is partial over ranks that share its shard if and only if the activations are split over them."""
    dims = [(over, size) for over, size in plan.dims.sizes if size > 1 and over != "pp"]
    used_in_parts = {over: _used_in_parts(plan, over) for over, _ in dims}
    for tensor in plan.inventory.trained:
        rule = plan.model_sharding.rule(tensor.name)
        for over, size in dims:
            splits = _splits_over(plan, tensor, over)
            held = [s.local_spans(tensor.shape[s.dim], ranks=size, index=i)[0] for s in splits for i in range(size)]
            held = [spans for spans in held if any(first < stop for first, stop in spans)]
            is_shared = len(set(held)) < len(held)
            is_partial = is_shared or over in ("dp", "cp") or tensor.name in used_in_parts[over]
            if (is_shared or not splits) and is_partial != (over in rule.partial_over):
                text = "are partial sums" if is_partial else "are not partial sums"
                yield f"{tensor.name}: gradients of ranks of {over} {text}, and its rule says otherwise"


def _used_in_parts(plan: StepPlan, over: str) -> set[str]:
    """Trained tensors that each rank, if it has the whole, uses for a part of the activations."""
    borders = [comm for comm in plan.model_sharding.boundary_comms if comm.over == over and _is_border(comm)]
    readers = {module for comm in borders for module in (comm.module, *comm.shared_by)}
    outputs, entries = {comm.module for comm in borders if comm.side == "output"}, _splits_on_entry(plan)

    def is_used_in_parts(tensor: TensorInfo) -> bool:
        owner = _owners(tensor)[0]
        if owner in outputs:
            return len(tensor.shape) > 1  # A vector is added after the sum over ranks, and an adapter before it
        return owner in readers or any(split.over == over for split in _splits_around(entries, tensor.name))

    return {tensor.name for tensor in plan.inventory.trained if is_used_in_parts(tensor)}


# --- rows and metrics ------------------------------------------------------------------------------


def rows_are_read_once(plan: StepPlan) -> Iterator[str]:
    """Ranks that differ in data parallelism alone read each row once; ranks that agree in it read the same."""
    for ranks in plan.dims.groups(*_dims_without(plan, "dp")):
        first = plan.rows_by_rank[ranks[0]]
        if any(rows is not first and rows != first for rows in (plan.rows_by_rank[rank] for rank in ranks)):
            yield f"ranks {ranks} compute parts of one model, and read different rows"
    first_ranks, read = set(plan.dims.groups("dp")[0]), list[tuple[range, int]]()
    for rank, row_ranges in enumerate(plan.rows_by_rank):  # Replica after replica, where there are independent ones
        if len(row_ranges) > plan.microbatches:
            yield f"rank {rank} reads rows for {len(row_ranges)} micro-batches, not {plan.microbatches}"
        if rank % plan.dims.ranks in first_ranks:
            read += [(rows, rank) for rows in row_ranges]
    if not _follow_one_another((rows for rows, _ in read), plan.batch_sequences):
        yield from _rows_not_read_once(plan, read)


def _follow_one_another(ranges: Iterable[range], stop: int) -> bool:
    """Whether ranges have each number below `stop` once."""
    filled = sorted((rows.start, rows.stop) if rows.step == 1 else (-1, -1) for rows in ranges if rows)
    return [0, *(end for _, end in filled)] == [*(start for start, _ in filled), stop]


def _rows_not_read_once(plan: StepPlan, read: Iterable[tuple[range, int]]) -> Iterator[str]:
    readers: dict[int, list[int]] = {row: [] for row in range(plan.batch_sequences)}
    for row, rank in ((row, rank) for rows, rank in read for row in rows):
        readers.setdefault(row, []).append(rank)
    for row, ranks_of_row in readers.items():
        if len(ranks_of_row) != 1 or row >= plan.batch_sequences:
            times = f"{len(ranks_of_row)} times, by ranks {ranks_of_row}"
            yield f"row {row} of the {plan.batch_sequences} rows of the global batch is read {times}"


def metrics_are_reported_once(plan: StepPlan) -> Iterator[str]:
    """One of the ranks that have a number together reports it."""
    for metric, shares in METRIC_SHARES.items():
        for ranks in _one_of_each_class(plan, _dims_without(plan, *shares), METRIC_REPORTERS[metric]):
            reporters = [rank for rank in ranks if reports(metric, plan.dims.coordinates(rank), plan.dims)]
            if len(reporters) != 1:
                yield f"{metric}: of ranks {ranks}, {reporters} report it"


def outer_steps_join_equal_shards(plan: StepPlan) -> Iterator[str]:
    """Ranks of independent replicas that average their masters hold the same shard, one rank in each replica."""
    ranks, size = range(len(plan.rows_by_rank)), plan.dims.ranks
    wanted = group_ranks({rank: rank % size for rank in ranks}) if plan.outer_groups or len(ranks) > size else []
    for joined, times, right in differences(plan.outer_groups, wanted):
        yield f"{plan.inventory.trained[0].name}: ranks {joined} are {times} groups of an outer step, not {right}"


SHARDING_RULES: tuple[Callable[[StepPlan], Iterator[str]], ...] = (
    blocks_have_one_stage,
    shards_tile,
    tensors_have_one_unit,
    shapes_are_local,
    sums_are_complete,
    copies_are_copies,
    ranks_have_one_group,
    boundaries_have_conjugates,
    blocks_keep_activations,
    partial_gradients_are_declared,
    rows_are_read_once,
    metrics_are_reported_once,
    outer_steps_join_equal_shards,
    *CONTEXT_RULES,
)


class InvalidStepPlanError(AssertionError):
    """A plan that would not train the model correctly."""


@dataclass(frozen=True)
class StepPlanProof:
    """Facts about a plan that was proven."""

    ranks: int
    copies: int  # Copies of the model, in each of which every element is updated once
    parameters: int
    elements: int
    comm_units: int
    rows: int  # Rows of the global batch, each read once
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
    """Check the elements that a rank updates, (first, stop) by name, and its counted tensors against its plan."""
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
                yield f"{_title(group, unit)}: its owner, rank {unit.owner}, is not among them"


def units_reduce_alike(plan: StepPlan) -> Iterator[str]:
    """All units of a sync group have the same actions, but for gathers before forward and backward."""
    for group in plan.groups:
        trained = [unit for unit in group.units if unit.members]
        for unit in trained:
            # By identity first: comparing the groups of a thousand ranks takes longer.
            if unit.schedule is not trained[0].schedule and _reductions(unit) != _reductions(trained[0]):
                yield f"{_title(group, unit)}: its actions are not those on {trained[0].members[0].name}"


def codecs_keep_copies(plan: StepPlan) -> Iterator[str]:
    """A codec rounds by the tensors that it compresses together, so those of a compressed unit have the same copies."""
    for group, unit in ((each, unit) for each in plan.groups for unit in each.units):
        members, copies = unit.members, group.group.copy_groups
        if any(action.codec for action in unit.schedule):
            for member in members:
                if copies.get(member.name) != copies.get(members[0].name):
                    yield f"{_title(group, unit)}: compressed with {members[0].name}, copies of {member.name} differ"


def transfers_surround_updates(plan: StepPlan) -> Iterator[str]:
    """Sums travel to a host that updates masters after their last reduction and before the update, and values to the
    device after the update and before ranks gather them. Nothing travels to another host."""
    for group, unit, mistake in transfer_mistakes(plan):
        yield f"{_title(group, unit)}: {mistake}"


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
    transfers_surround_updates,
)
STEP_PLAN_RULES: Mapping[str, Callable[[StepPlan], Iterator[str]]] = {
    rule.__name__: rule for rule in (*SHARDING_RULES, *_UNIT_RULES)
}
