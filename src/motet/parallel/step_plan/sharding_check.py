"""The check that shards, sync groups, boundary communication, rows and metrics fit together; it needs values alone.

Each rule is a function that yields a sentence for each mistake, with the tensor and the ranks. check.py proves what the
ranks of one sync group do. A mistake is a bug of motet, or of a split that was made by hand.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from math import prod

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.layout import Layout, contributing_rows_of_rank
from motet.parallel.metric_reductions import METRIC_REPORTERS, reports
from motet.parallel.model_inventory import ModelInventory, TensorInfo
from motet.parallel.model_sharding import BOUNDARY_OPERATIONS, ActivationSplit, BoundaryComm, ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.step_plan.check import InvalidStepPlanError
from motet.parallel.sync_groups import SyncGroup, make_sync_groups

# Ranks that agree in these coordinates have one number of the metric together.
METRIC_SHARES = {"loss": ("dp", "cp"), "targets": ("dp", "cp"), "tokens": ("dp",), "rows": ("dp",)}


@dataclass(frozen=True)
class ShardedStep:
    """The parts of each rank in a step: what it holds, adds, reads and reports."""

    inventory: ModelInventory
    model_sharding: ModelSharding
    dims: ParallelDims
    specs: Mapping[str, Mapping[int, ShardSpec]]  # By tensor and rank; a rank that holds nothing is missing
    sync_groups: tuple[SyncGroup, ...]
    rows_by_rank: tuple[tuple[range, ...], ...]
    batch_sequences: int
    reporters: Mapping[str, tuple[int, ...]]  # Ranks that report each metric

    @cached_property
    def alike(self) -> list[tuple[TensorInfo, SyncGroup | None]]:
        """One tensor of each kind that ranks hold and add in the same way, and its group."""
        group_of = {name: group for group in self.sync_groups for name in group.names}
        alike: dict[object, tuple[TensorInfo, SyncGroup | None]] = {}
        for tensor in self.inventory.tensors:
            group, rule = group_of.get(tensor.name), self.model_sharding.rule(tensor.name)
            key = id(self.specs[tensor.name]), id(group), rule, self.model_sharding.stages_of(tensor), tensor.shape
            alike.setdefault(key, (tensor, group))
        return list(alike.values())

    def groups_across(self, *names: str) -> RankGroups:
        """Ranks that agree in some dimensions."""
        return self.dims.groups(*(name for name, _ in self.dims.sizes if name not in names))


def make_sharded_step(
    inventory: ModelInventory, model_sharding: ModelSharding, layout: Layout, *, batch_sequences: int
) -> ShardedStep:
    """Everything that the check looks at."""
    ranks, dims = range(layout.dims.ranks), layout.dims
    return ShardedStep(
        inventory,
        model_sharding,
        dims,
        model_sharding.specs(inventory, dims),
        make_sync_groups(inventory, model_sharding, layout),
        tuple(tuple(contributing_rows_of_rank(layout, rank, batch_sequences)) for rank in ranks),
        batch_sequences,
        {metric: tuple(r for r in ranks if reports(metric, dims.coordinates(r), dims)) for metric in METRIC_REPORTERS},
    )


def check_sharding(step: ShardedStep) -> None:
    """Raise at the first mistake."""
    for mistake in sharding_mistakes(step):
        raise InvalidStepPlanError(mistake)


# --- tensors and ranks -----------------------------------------------------------------------------


def _tiling_mistakes(tensor: TensorInfo, held: list[tuple[int, ShardSpec]]) -> Iterator[str]:
    for (rank, spec), (other, other_spec) in combinations(held, 2):
        if spec.overlaps(other_spec):
            yield f"elements twice, on {rank} and {other}"
    if (numel := sum(spec.numel for _, spec in held)) < prod(tensor.shape):
        yield f"{numel} of {prod(tensor.shape)} elements, on {[rank for rank, _ in held]}"


def shards_are_declared(step: ShardedStep) -> Iterator[str]:
    """Each rank holds the shard that the rule of the tensor and the stages say."""
    for tensor, _ in step.alike:
        for rank in range(step.dims.ranks):
            declared = step.model_sharding.spec(tensor, step.dims.coordinates(rank), step.dims)
            if step.specs[tensor.name].get(rank) != declared:
                yield f"{tensor.name}: rank {rank} holds another shard than its rule and its stages say"


def shards_tile(step: ShardedStep) -> Iterator[str]:
    """The ranks of each data coordinate hold the whole tensor; two ranks hold the same shard or disjoint ones."""
    for tensor, _ in step.alike:
        for ranks in step.groups_across("dp", "cp"):
            shards = {step.specs[tensor.name][rank]: rank for rank in ranks if rank in step.specs[tensor.name]}
            for mistake in _tiling_mistakes(tensor, [(rank, spec) for spec, rank in shards.items()]):
                yield f"{tensor.name}: ranks {ranks} hold {mistake}"


def blocks_have_one_stage(step: ShardedStep) -> Iterator[str]:
    """Each block is in one stage."""
    times = Counter(chain.from_iterable(step.model_sharding.stages))
    for tensor in step.inventory.tensors if times else ():
        if tensor.block is not None and times[tensor.block] != 1:
            ranks = list(step.specs[tensor.name])
            yield f"{tensor.name}: block {tensor.block} is in {times[tensor.block]} stages, of ranks {ranks}"


def tensors_have_one_group(step: ShardedStep) -> Iterator[str]:
    """Each trained tensor is in one sync group, and nothing else is."""
    times = Counter(name for group in step.sync_groups for name in group.names)
    times.subtract(tensor.name for tensor in step.inventory.trained)
    for name, excess in times.items():
        if excess:
            yield f"{name}: ranks {list(step.specs.get(name, {}))} add it in {1 + excess} sync groups"


def sums_are_complete(step: ShardedStep) -> Iterator[str]:
    """A sum group is all ranks that have partial sums of the gradient of one shard, and no others."""
    for tensor, group in step.alike:
        wanted: set[tuple[int, ...]] = set()
        for ranks in step.dims.groups(*step.model_sharding.partial_over(tensor)):
            of_shard: dict[ShardSpec, list[int]] = {}
            for rank in sorted(step.specs[tensor.name].keys() & ranks):
                of_shard.setdefault(step.specs[tensor.name][rank], []).append(rank)
            wanted.update(map(tuple, of_shard.values()))
        added = Counter(group.sum_groups if group else wanted)
        for ranks in wanted - set(added):
            yield f"{tensor.name}: ranks {ranks} have partial sums of the gradient of one shard, and do not add them"
        for ranks in added - Counter(wanted):
            yield f"{tensor.name}: ranks {ranks} add what are not partial sums of the gradient of one shard"


def copies_are_copies(step: ShardedStep) -> Iterator[str]:
    """Each rank that holds a tensor is in one copy group, of one shard and one position of the sum groups."""
    for tensor, group in ((tensor, group) for tensor, group in step.alike if group):
        shards, ranks = step.specs[tensor.name], sorted(chain(*group.copy_groups))
        if ranks != sorted(shards) or group.stages != step.model_sharding.stages_of(tensor):
            yield f"{tensor.name}: ranks {sorted(shards)} hold it; its copies are on {ranks}, of stages {group.stages}"
        if any(len(ranks) != group.sharding.ranks for ranks in group.sum_groups):
            yield f"{tensor.name}: {group.sharding.ranks} ranks shard it, ranks {group.sum_groups} add it"
        positions = {rank: position for ranks in group.sum_groups for position, rank in enumerate(ranks)}
        for copies in group.copy_groups:
            if len({(shards.get(r), positions.get(r)) for r in copies}) > 1 or list(copies) != sorted(copies):
                yield f"{tensor.name}: ranks {copies} are no copies in ascending order"


def elements_count_once(step: ShardedStep) -> Iterator[str]:
    """The first ranks of copy groups, which count in the norm and write, hold each element once at each position."""
    for tensor, group in ((tensor, group) for tensor, group in step.alike if group):
        shards, firsts = step.specs[tensor.name], {copies[0] for copies in group.copy_groups}
        for position in range(group.sharding.ranks):
            ranks = [added[position] for added in group.sum_groups if position < len(added)]
            counted = [(rank, shards[rank]) for rank in ranks if rank in firsts and rank in shards]
            for mistake in _tiling_mistakes(tensor, counted):
                yield f"{tensor.name}: at position {position} of sum groups, ranks count and write {mistake}"


# --- activations -----------------------------------------------------------------------------------


def boundaries_have_conjugates(step: ShardedStep) -> Iterator[str]:
    """Each region that opens closes, activations lie as the next region needs them, and splits lie in a region."""
    comms = step.model_sharding.boundary_comms
    for over in sorted({comm.over for comm in comms if step.dims.size(comm.over) > 1}):
        yield from _region_mistakes([comm for comm in comms if comm.over == over], over)
    for tensor in step.inventory.trained:
        for over in {s.over for s in step.model_sharding.rule(tensor.name).splits if step.dims.size(s.over) > 1}:
            if not any(comm.over == over and _contains(comm.module, tensor.name) for comm in comms):
                yield f"{tensor.name} is split over ranks of {over}, and no communication surrounds it"


def _region_mistakes(comms: list[BoundaryComm], over: str) -> Iterator[str]:
    start: tuple[str, int | None] = ("split", 1) if over == "cp" else ("same", None)  # The batch
    state, before_region, openings = start, start, list[BoundaryComm]()
    for comm in comms:
        before, after, _ = BOUNDARY_OPERATIONS.get((comm.operation, comm.side), ((), "", "copy"))
        is_another_input = openings and comm.side == "input" and comm not in openings
        lies, dim = before_region if is_another_input else state
        if lies not in before or (lies == "split" and dim != comm.dim):
            yield f"{comm.module}: activations are {lies} on ranks of {over} before its {comm.operation}, {comm.side}"
        if comm.side == "output":
            for opening in openings:
                if not _contains(opening.module, comm.module) and _parent(opening) != _parent(comm):
                    yield f"{opening.module}: no sum, scatter or gather ends its region of ranks of {over}"
            openings = []
        elif after not in ("same", "split"):
            before_region, openings = (lies, dim), [*openings, comm]
        state = after, comm.dim if after == "split" else None
    if state != start:
        yield f"{comms[-1].module}: activations stay {state[0]} on ranks of {over} after it"


def _parent(comm: BoundaryComm) -> str:
    return comm.module.rpartition(".")[0]


def _contains(module: str, name: str) -> bool:
    return not module or name.startswith(f"{module}.")


def blocks_keep_activations(step: ShardedStep) -> Iterator[str]:
    """A module whose input and output are both listed is a block: its residual stream lies the same at both ends."""
    splits = {(each.module, each.side): each.splits for each in step.model_sharding.activations}
    for (module, side), lies in splits.items():
        if side == "output" and splits.get((module, "input"), lies) != lies:
            yield f"{module}: ranks split activations by {splits[module, 'input']} before it, and by {lies} after it"


def partial_gradients_are_declared(step: ShardedStep) -> Iterator[str]:
    """A gradient is partial over ranks that share its shard if and only if the activations are split over them."""
    entries = [each for each in step.model_sharding.activations if each.side == "input"]
    for tensor in step.inventory.trained:
        rule, split_by = step.model_sharding.rule(tensor.name), _activation_splits(tensor, entries)
        for over, size in ((over, size) for over, size in step.dims.sizes if size > 1 and over != "pp"):
            splits = [split for split in rule.splits if split.over == over]
            held = [s.local_spans(tensor.shape[s.dim], ranks=size, index=i)[0] for s in splits for i in range(size)]
            held = [spans for spans in held if any(first < stop for first, stop in spans)]
            is_shared = len(set(held)) < len(held)
            is_partial = is_shared or over in ("dp", "cp") or over in split_by
            if (is_shared or not splits) and is_partial != (over in rule.partial_over):
                text = "are partial sums" if is_partial else "are no partial sums"
                yield f"{tensor.name}: gradients of ranks of {over} {text}, and its rule says otherwise"


def _activation_splits(tensor: TensorInfo, entries: list[ActivationSplit]) -> list[str]:
    around = [entry for entry in entries if _contains(entry.module, tensor.name)]
    nearest = max(around, key=lambda entry: len(entry.module), default=ActivationSplit("", "input"))
    return [over for _, over in nearest.splits]


# --- rows and metrics ------------------------------------------------------------------------------


def rows_are_read_once(step: ShardedStep) -> Iterator[str]:
    """The ranks that differ in data parallelism alone read each row of the global batch once."""
    for ranks in step.dims.groups("dp"):
        times = Counter(chain.from_iterable(chain.from_iterable(step.rows_by_rank[rank] for rank in ranks)))
        times.subtract(range(step.batch_sequences))
        for row, excess in times.items():
            if excess:
                yield f"ranks {ranks} read row {row} {1 + excess} times"


def metrics_are_reported_once(step: ShardedStep) -> Iterator[str]:
    """One of the ranks that have a number together reports it."""
    for metric, shares in METRIC_SHARES.items():
        for ranks in step.groups_across(*shares):
            if (times := sum(step.reporters[metric].count(rank) for rank in ranks)) != 1:
                yield f"{metric}: ranks {ranks} report it {times} times"


SHARDING_RULES: tuple[Callable[[ShardedStep], Iterator[str]], ...] = (
    shards_are_declared,
    shards_tile,
    blocks_have_one_stage,
    tensors_have_one_group,
    sums_are_complete,
    copies_are_copies,
    elements_count_once,
    boundaries_have_conjugates,
    blocks_keep_activations,
    partial_gradients_are_declared,
    rows_are_read_once,
    metrics_are_reported_once,
)


def sharding_mistakes(
    step: ShardedStep, rules: Iterable[Callable[[ShardedStep], Iterator[str]]] = SHARDING_RULES
) -> Iterator[str]:
    """A sentence for each mistake."""
    return chain.from_iterable(rule(step) for rule in rules)
