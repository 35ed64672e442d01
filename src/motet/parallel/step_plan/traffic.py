"""Bytes that a rank sends in a step, plain or compressed: those of each action of its plan.

The collectives with which tensor-parallel ranks communicate activations in a step, and the bytes that a rank sends.

They are read from the boundary comms of a `ModelSharding`, which the hooks of a run execute, and from the loss.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate, takewhile
from math import ceil
from typing import Literal, NamedTuple

from motet.cluster.cluster import Cluster
from motet.collectives.algorithms import build
from motet.collectives.compression.codecs import BlockwiseCodec, Codec, PowerSGDCodec, all_reduce_traffic
from motet.collectives.cost.alpha_beta import RankGroups, estimate_cost
from motet.collectives.execute.rank_plan import elements_sent
from motet.collectives.execute.slot_plan import HostOfRank, backend_sent_bytes, select_program
from motet.core.units import DTYPE_BYTES
from motet.memory.tiers.file_layout import FileLayout
from motet.models.spec.layer_specs import BlockPolicy, MicroBatchShape
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan
from motet.parallel.data_parallel.communication.communication_settings import (
    CollectiveAlgorithmSelector,
    CommunicationSettings,
    GroupName,
)
from motet.parallel.data_parallel.communication.powersgd_matrices import MatrixView, ReductionBufferSpec
from motet.parallel.data_parallel.data_sharding import partial_sums_sent_by_rank, partial_sums_sent_by_replica
from motet.parallel.data_parallel.zero import CommUnitAction, FSDPUnit, padded_shard_numel
from motet.parallel.model_sharding import LOSS, BoundaryComm, BoundaryOperation, ModelInventory
from motet.parallel.rank_placement import stages_of_rank
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.step_plan.rows_on_disk import read_bytes
from motet.precision.recipe import PrecisionRecipe


@dataclass(frozen=True)
class StepTrafficBytes:
    """Bytes that one rank sends in one step, without the few bytes of agreements."""

    reduce_scatter: int  # Also reductions to the owners of buckets
    all_reduce: int
    all_gather: int  # Also broadcasts from the owners

    @property
    def total(self) -> int:
        return self.reduce_scatter + self.all_reduce + self.all_gather


def sent_bytes_per_step(
    plan: StepPlan,
    recipe: PrecisionRecipe,
    *,
    settings: CommunicationSettings,
    rank: int,
    hosts: HostOfRank | None = None,
) -> StepTrafficBytes:
    """Bytes of a rank in a step after the warm-up, with the algorithms and codecs of the settings.

    Where the backend chooses, it is the backend `motet`, on these hosts of the ranks; None is one host for all.
    """
    scattered = reduced = gathered = 0
    for group in plan.groups:
        ranks = group.group.sum_group_of(rank)
        if not ranks:
            continue
        group_hosts = tuple((hosts or (0,) * plan.dims.ranks)[other] for other in ranks)
        algorithms = CollectiveAlgorithmSelector(settings, group.group.sharding)
        traffic = ActionTraffic(group, recipe, algorithms, ranks.index(rank), group_hosts)
        for unit, action in ((each, action) for each in group.units for action in each.schedule):
            sent = traffic.sent_bytes_per_step(unit, action)
            scattered += sent * action.is_scatter
            reduced += sent * action.kind.endswith("all_reduce")
            gathered += sent * action.is_gather
    return StepTrafficBytes(scattered, reduced, gathered)


@dataclass(frozen=True)
class HostLinkBytes:
    """Bytes between the device of one rank, its host and the disk of its host in one step."""

    to_host: int
    to_device: int
    fetched: int = 0  # The part of `to_device` that a step sends also if it updates nothing: rows before gathers
    kept: int = 0  # Sums that lie on the host when it updates masters, which may have added several
    read: int = 0  # Rows that are read from files before gathers, with the padding of files


def host_link_bytes(plan: StepPlan, recipe: PrecisionRecipe, *, rank: int) -> HostLinkBytes:
    """Sums of gradients that travel down, and values of parameters that travel up. Rows of stage 3 have the dtype of
    the masters, to which FSDP2 casts their sums; rows on the host travel with their padding, and frozen ones too."""
    down = up = fetched = kept = read = 0
    for group in plan.groups:
        if (position := group.position(rank)) is None:
            continue
        each = host_link_bytes_per_element(recipe, is_in_rows=group.group.unit_kind == "rows")
        for unit in group.units:
            numel = unit.updated_numel(position)
            for action in unit.schedule:
                times = action.times(plan.microbatches)
                if action.kind == "to_host":
                    down, kept = down + times * each.to_host * numel, kept + each.to_host * numel
                elif action.kind == "to_device" and action.moment == "step":
                    up += each.to_device * numel
                elif action.kind == "to_device":
                    fetched += times * _row_bytes(unit, recipe)
                    read += times * read_bytes(plan, group, unit, recipe=recipe, rank=rank)
    return HostLinkBytes(down, up + fetched, fetched, kept, read)


def _row_bytes(unit: CommUnit, recipe: PrecisionRecipe) -> int:
    """The rows of a rank in a unit of stage 3, with padding."""
    assert isinstance(unit.contents, FSDPUnit)
    trained, frozen = (padded_shard_numel(s, unit.shards) for s in (unit.contents.trainable, unit.contents.frozen))
    return DTYPE_BYTES[recipe.master] * trained + DTYPE_BYTES[recipe.compute] * frozen


def host_link_bytes_per_element(recipe: PrecisionRecipe, *, is_in_rows: bool) -> HostLinkBytes:
    """The bytes of one element that a rank updates."""
    dtypes = (recipe.master, recipe.master) if is_in_rows else (recipe.reduce, recipe.compute)
    return HostLinkBytes(*(DTYPE_BYTES[dtype] for dtype in dtypes))


class DelayedBytes(NamedTuple):
    """Bytes on the host of a rank whose updates are delayed by a step."""

    pending_gradients: int
    new_values: int  # They travel to the device when the step has ended


def delayed_update_bytes(plan: StepPlan, recipe: PrecisionRecipe, *, rank: int) -> DelayedBytes:
    """The bytes of a rank, in addition to the sums of the current step."""
    total = DelayedBytes(0, 0)
    for group in plan.groups:
        if (position := group.position(rank)) is not None:
            each = delayed_bytes_per_element(recipe, is_in_rows=group.group.unit_kind == "rows")
            numel = sum(unit.updated_numel(position) for unit in group.units)
            total = DelayedBytes(*(before + numel * more for before, more in zip(total, each, strict=True)))
    return total


def delayed_bytes_per_element(recipe: PrecisionRecipe, *, is_in_rows: bool) -> DelayedBytes:
    """The bytes of one element that a rank updates."""
    values = host_link_bytes_per_element(recipe, is_in_rows=is_in_rows).to_device
    return DelayedBytes(DTYPE_BYTES[recipe.master], values)


def state_files(
    plan: StepPlan, recipe: PrecisionRecipe, *, moment_kinds: Sequence[str], rank: int
) -> tuple[FileLayout, ...]:
    """The files of the states of a rank, one layout for each sync group; a step reads and writes each of them once."""
    layouts = list[FileLayout]()
    for group in plan.groups:
        if (position := group.position(rank)) is not None:
            lengths = [length for unit in group.units for length in unit.slice_lengths(position)]
            layouts.append(state_file_layout(recipe, moment_kinds, lengths))
    return tuple(layouts)


def state_file_layout(recipe: PrecisionRecipe, moment_kinds: Sequence[str], lengths: Sequence[int]) -> FileLayout:
    """The files of slices with these numbers of elements."""
    return FileLayout(dict.fromkeys(("master", *moment_kinds), DTYPE_BYTES[recipe.master]), tuple(lengths or [0]))


@dataclass(frozen=True)
class ActionTraffic:
    """The traffic of one rank of a sync group."""

    plan: SyncGroupPlan
    recipe: PrecisionRecipe
    algorithms: CollectiveAlgorithmSelector
    rank: int  # Position within the sum group
    hosts: HostOfRank

    def sent_bytes_per_step(self, unit: CommUnit, action: CommUnitAction) -> int:
        """Bytes of all occurrences of an action in a step."""
        sharding = self.plan.group.sharding
        replicas, width = sharding.ranks // sharding.shards, DTYPE_BYTES[self.recipe.reduce]
        match action.kind:
            case "tree_reduce_scatter":
                sums = sum(map(len, partial_sums_sent_by_rank(sharding, self.rank)))
                return width * sums * (unit.reduction_spec(None).numel // unit.shards * (unit.shards - 1))
            case "tree_all_reduce":
                sums = len(partial_sums_sent_by_replica(sharding, self.rank // sharding.shards)) + 1
                return width * sums * ceil(self._shard_spec(unit).numel / replicas) * (replicas - 1)
        return action.times(sharding.microbatches) * self._sent_bytes(unit, action)

    def _sent_bytes(self, unit: CommUnit, action: CommUnitAction) -> int:
        dtype = self.recipe.reduce if action.tensor == "gradients" else self.recipe.compute
        sharding, codec = self.plan.group.sharding, action.codec
        match action.kind:
            case "reduce_scatter" | "two_level_reduce_scatter":
                return self._reduce_scatter_bytes(unit.reduction_spec(None), dtype, action)
            case "all_reduce" if codec:
                return self._compressed_sum_bytes(self._shard_spec(unit), dtype, codec, group="replicas")
            case "all_reduce":
                return self._bytes_sent("all-reduce", "replicas", self._shard_spec(unit).numel, dtype=dtype)
            case "all_gather" if isinstance(codec, BlockwiseCodec):
                message = codec.wire_bytes([unit.gathered_numel // unit.shards], dtype)
                return self._bytes_sent("all-gather", "shards", unit.shards * message, dtype="uint8")
            case "all_gather" if action.over:
                return self._bytes_sent("all-gather", action.over, unit.gathered_numel, dtype=dtype)
            case ("reduce" | "broadcast") as collective if sharding.bucket_owners:
                name, owner = getattr(sharding.bucket_owners, f"{collective}_algorithm"), unit.owner
                program = build(collective, name, sharding.ranks, root=owner)
                return DTYPE_BYTES[dtype] * elements_sent(program, self.rank, unit.gathered_numel)
        return 0

    def _shard_spec(self, unit: CommUnit) -> ReductionBufferSpec:
        return unit.reduction_spec(self.rank % unit.shards)

    def _reduce_scatter_bytes(self, buffer: ReductionBufferSpec, dtype: str, action: CommUnitAction) -> int:
        shards, codec = action.group_size, action.codec
        if codec is None:
            return self._bytes_sent("reduce-scatter", "shards", buffer.numel, dtype=dtype)
        if not isinstance(codec, BlockwiseCodec):
            return self._compressed_sum_bytes(buffer, dtype, codec, group="shards")
        shard_numel = buffer.numel // shards
        inter_bytes = codec.wire_bytes([shard_numel], dtype)
        if not action.intra_groups:
            return (shards - 1) * inter_bytes
        intra_size, inter_size = len(action.intra_groups[0]), len(action.inter_groups[0])
        return (intra_size - 1) * codec.wire_bytes([inter_size * shard_numel], dtype) + (inter_size - 1) * inter_bytes

    def _compressed_sum_bytes(self, buffer: ReductionBufferSpec, dtype: str, codec: Codec, *, group: GroupName) -> int:
        if isinstance(codec, PowerSGDCodec):
            matrices = [m for m in buffer.split_for_powersgd(codec, dtype) if isinstance(m, MatrixView)]
            factors = [sum(m[side] * min(codec.rank, m.rows, m.columns) for m in matrices) for side in (1, 2)]
            sent = sum(self._bytes_sent("all-reduce", group, n, dtype="float32") for n in factors)
            dense_numel = buffer.numel - sum(m.rows * m.columns for m in matrices)
        else:
            traffic = all_reduce_traffic(codec, [buffer.numel], dtype, self.algorithms.group_size(group))
            dense_numel = traffic.pop("all_reduce_bytes", 0) // DTYPE_BYTES[dtype]
            sent = sum(traffic.values())
        return sent + self._bytes_sent("all-reduce", group, dense_numel, dtype=dtype)

    def _bytes_sent(self, collective: str, group: GroupName, count: int, *, dtype: str) -> int:
        """Bytes that the rank sends; `count` elements are in the unsharded buffer."""
        if count == 0:
            return 0
        width, ranks = DTYPE_BYTES[dtype], self.algorithms.group_of(group, self.rank)
        rank, program = ranks.index(self.rank), self.algorithms.program(collective, group, width * count)
        if program is not None:
            return width * elements_sent(program, rank, count)
        numel = count if collective == "all-reduce" else count // len(ranks)
        return backend_sent_bytes(collective, numel, dtype, rank=rank, hosts=tuple(self.hosts[r] for r in ranks))


ActivationCollectiveName = Literal["all-reduce", "all-gather", "reduce-scatter"]
_COLLECTIVES: Mapping[BoundaryOperation, ActivationCollectiveName] = {
    "sum": "all-reduce",
    "gather": "all-gather",
    "replicate": "all-gather",
    "scatter": "reduce-scatter",
}  # Each rank does its part of other operations alone


@dataclass(frozen=True)
class ActivationCollective:
    """A collective of a micro-batch."""

    collective: ActivationCollectiveName
    module: str
    moment: Literal["forward", "backward"]
    over: str
    numel: int  # Elements of the activation on all ranks together
    dtype: str


def activation_collectives(
    plan: StepPlan,
    shape: MicroBatchShape,
    recipe: PrecisionRecipe,
    *,
    rank: int | None = None,
    policies: Sequence[BlockPolicy] = (),
) -> tuple[ActivationCollective, ...]:
    """The collectives of a micro-batch of complete rows, forward before backward; only those of a rank, if it is given.
    Of ranks that share rows they are those of the first. A backward repeats collectives of the forward of blocks that
    it computes again, by the `policies` of blocks; by default it computes none again."""
    shape = plan.part_on_rank(shape, rank or 0)
    trained = {name for tensor in plan.inventory.trained for name in (tensor.name, *tensor.aliases)}
    comms = plan.model_sharding.boundary_comms if rank is None else _comms_on_rank(plan, rank)
    repeats = partial(_repeats_forward, policies=policies, blocks=_numbers_of_blocks(plan.inventory))
    made = [
        each
        for comm in comms
        for each in _collectives_of_comm(comm, trained, shape=shape, dtype=recipe.compute, repeats=repeats(comm))
    ]
    on_several_ranks = (each for each in made if plan.dims.size(each.over) > 1)
    return tuple(sorted(on_several_ranks, key=lambda each: each.moment == "backward"))


def _repeats_forward(comm: BoundaryComm, policies: Sequence[BlockPolicy], blocks: Mapping[str, int]) -> bool:
    """Whether backward communicates again as the forward did, inside of a block. Selective recomputation keeps the
    results of products, after communication."""
    around = (blocks[name] for name in accumulate(comm.module.split(".")[:-1], "{}.{}".format) if name in blocks)
    block = next(around, len(policies))
    policy = policies[block] if block < len(policies) else "none"
    return policy == "full" or (policy == "selective" and comm.side == "input")


def _numbers_of_blocks(inventory: ModelInventory) -> dict[str, int]:
    """The names of blocks, which the names of all their modules begin with."""
    modules: dict[int, list[list[str]]] = {}
    for tensor in inventory.tensors:
        if tensor.block is not None:
            modules.setdefault(tensor.block, []).append(tensor.name.split(".")[:-1])
    levels = {
        block: takewhile(lambda names: len(set(names)) == 1, zip(*each, strict=False))
        for block, each in modules.items()
    }
    return {".".join(names[0] for names in each): block for block, each in levels.items()}


def _comms_on_rank(plan: StepPlan, rank: int) -> Iterator[BoundaryComm]:
    """The communication of modules that one of the stages of a rank calls."""
    sharding, stages = plan.model_sharding, stages_of_rank(plan, rank)
    heads = {each.module for each in sharding.boundary_comms if each.argument == LOSS}
    blocks = {name: block for block, name in reversed([*enumerate(sharding.block_names)])}

    def is_called(module: str) -> bool:
        if not stages or module in heads:
            return not stages or len(sharding.stages) - 1 in stages
        around = [blocks[name] for name in accumulate(module.split("."), "{}.{}".format) if name in blocks]
        if around:
            return any(min(around) in sharding.stages[stage] for stage in stages)
        inside = [tensor.name for tensor in plan.inventory.tensors if tensor.name.startswith(f"{module}.")]
        return not inside or any(rank in plan.specs[name] for name in inside)

    return (comm for comm in sharding.boundary_comms if is_called(comm.module))


def _collectives_of_comm(
    comm: BoundaryComm, trained: set[str], *, shape: MicroBatchShape, dtype: str, repeats: bool
) -> Iterator[ActivationCollective]:
    if comm.argument == LOSS and dtype != "float64":
        dtype = "float32"
    # Layers keep the part that a rank has of their input, and gather it again for the gradients of their weights.
    weights = {f"{layer}.{name}" for layer in (comm.module, *comm.shared_by) for name in ("weight", "adapter_a")}
    gathers_again = (comm.operation, comm.side) == ("gather", "input") and not trained.isdisjoint(weights)
    for size in comm.sizes:
        make_collective = partial(
            ActivationCollective,
            module=comm.module,
            over=comm.over,
            numel=size.width * shape.count(size.per),
            dtype=dtype,
        )
        if forward := _COLLECTIVES.get(comm.operation):
            yield make_collective(forward, moment="forward")
            if repeats:
                yield make_collective(forward, moment="backward")
        if gathers_again:
            yield make_collective("all-gather", moment="backward")
        if (backward := _COLLECTIVES.get(comm.conjugate)) and size.needs_gradient:
            yield make_collective(backward, moment="backward")


def sent_activation_bytes(
    plan: StepPlan,
    shape: MicroBatchShape,
    recipe: PrecisionRecipe,
    *,
    rank: int,
    hosts: HostOfRank | None = None,
    policies: Sequence[BlockPolicy] = (),
) -> StepTrafficBytes:
    """Bytes of a rank in a step with micro-batches of complete rows of this shape, by the backend `motet`; without
    hosts, all ranks share one. Blocks are computed again by their `policies`."""
    sent = {"reduce_scatter": 0, "all_reduce": 0, "all_gather": 0}
    for each in activation_collectives(plan, shape, recipe, rank=rank, policies=policies):
        ranks = plan.dims.group_of(rank, each.over)
        numel = each.numel if each.collective == "all-reduce" else each.numel // len(ranks)
        sent[each.collective.replace("-", "_")] += plan.microbatches * backend_sent_bytes(
            each.collective,
            numel,
            each.dtype,
            rank=ranks.index(rank),
            hosts=tuple((hosts or (0,) * plan.dims.ranks)[other] for other in ranks),
        )
    return StepTrafficBytes(**sent)


def traffic_between_hosts(
    collectives: Iterable[ActivationCollective],
    rank_groups: RankGroups,
    *,
    hosts: HostOfRank,
    cluster: Cluster | None = None,
) -> tuple[int, float]:
    """(Bytes that the ranks of a group that spans hosts send from one to another, seconds of all groups on a cluster).

    The algorithms are those of the backend `motet`. Without a cluster there are no seconds.
    """
    counts = Counter((each.collective, DTYPE_BYTES[each.dtype] * each.numel) for each in collectives)
    ranks = next(ranks for ranks in rank_groups if len({hosts[rank] for rank in ranks}) > 1)
    sent, seconds = Fraction(0), Fraction(0)
    for (collective, size), times in counts.items():
        program = select_program(collective, tuple(hosts[rank] for rank in ranks), is_small=False, root=0)
        crossing = (t for step in program.steps for t in step if hosts[ranks[t.src]] != hosts[ranks[t.dst]])
        sent += times * size * Fraction(sum(map(program.relative_size, crossing)), program.message_size_units)
        seconds += times * Fraction(estimate_cost(program, cluster, rank_groups).seconds(size)) if cluster else 0
    return round(sent), float(seconds)
