"""Bytes that a rank sends in a step, plain or compressed: those of each action of its plan."""

from dataclasses import dataclass
from math import ceil

from motet.collectives.algorithms import build
from motet.collectives.compression.codec_base import BlockwiseCodec, Codec
from motet.collectives.compression.codec_registry import all_reduce_traffic
from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.collectives.execute.rank_plan import elements_sent
from motet.collectives.execute.slot_plan import HostOfRank, backend_sent_bytes
from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan
from motet.parallel.data_parallel.communication.communication_settings import (
    CollectiveAlgorithmSelector,
    CommunicationSettings,
    GroupName,
)
from motet.parallel.data_parallel.communication.powersgd_matrices import MatrixView, ReductionBufferSpec
from motet.parallel.data_parallel.data_sharding import partial_sums_sent_by_rank, partial_sums_sent_by_replica
from motet.parallel.data_parallel.unit_schedule import CommUnitAction
from motet.parallel.step_plan.plan import StepPlan
from motet.precision.recipe import PrecisionRecipe


@dataclass(frozen=True)
class StepTrafficBytes:
    """Bytes that one rank sends in one step, without the few bytes of agreements."""

    reduce_scatter: int  # Or a reduction to the owners of buckets
    all_reduce: int
    all_gather: int  # Or a broadcast from the owners

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
class ActionTraffic:
    """The traffic of one rank of a sync group."""

    plan: SyncGroupPlan
    recipe: PrecisionRecipe
    algorithms: CollectiveAlgorithmSelector
    rank: int  # Within the sum group
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
