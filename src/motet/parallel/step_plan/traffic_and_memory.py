"""Bytes that a rank sends in a step, plain or compressed, and its memory, without tensors.

The traffic is that of communicator.py. The memory is the model state that a rank keeps, and the peak of what comes and
goes beyond that: gradients before their reduction, and what stage 3 gathers, without activations. At stage 3 the peak
is that of FSDP2 on CPU ranks. FSDP2 prefetches one block in backward. In forward it frees the gathered buffer of a unit
after the gather of the next unit, and in backward the sent buffer of a unit at the next reduction.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod
from typing import NamedTuple

from motet.collectives.compression.codec_base import BlockwiseCodec, Codec
from motet.collectives.compression.codec_registry import all_reduce_traffic
from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.collectives.execute.rank_plan import elements_sent
from motet.collectives.execute.slot_plan import HostOfRank, backend_sent_bytes
from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.data_parallel.buckets import Bucket
from motet.parallel.data_parallel.communication.communication_settings import (
    CollectiveAlgorithmSelector,
    CommunicationCodecs,
    CommunicationSettings,
    GroupName,
    resolve_codecs,
    uses_gradient_gather,
)
from motet.parallel.data_parallel.communication.powersgd_matrices import (
    MatrixView,
    ReductionBufferSpec,
    Shape,
    bucket_reduction_specs,
    row_shard_reduction_specs,
)
from motet.parallel.data_parallel.data_sharding import (
    DataParallelSharding,
    partial_sums_sent_by_rank,
    partial_sums_sent_by_replica,
)
from motet.parallel.data_parallel.zero import ZERO_STAGES, BucketsAndFSDPUnits, padded_shard_numel, shard_numel
from motet.precision.recipe import PrecisionRecipe


@dataclass(frozen=True)
class StepTrafficBytes:
    """Bytes that one rank sends in one step, without the few bytes of agreements."""

    reduce_scatter: int
    all_reduce: int
    all_gather: int

    @property
    def total(self) -> int:
        return self.reduce_scatter + self.all_reduce + self.all_gather


class _CommUnitTraffic(NamedTuple):
    unsharded: ReductionBufferSpec  # Gradients
    sharded: ReductionBufferSpec
    codecs: CommunicationCodecs
    gathered_numel: int  # With padding
    gather_count: int = 1
    secondary_gather_count: int = 0


def sent_bytes_per_step(
    units: BucketsAndFSDPUnits,
    sharding: DataParallelSharding,
    recipe: PrecisionRecipe,
    *,
    settings: CommunicationSettings,
    rank: int,
    hosts: HostOfRank | None = None,
) -> StepTrafficBytes:
    """Bytes of a rank in a step after the warm-up, with the algorithms and codecs of the settings.

    Where the backend chooses, it is the backend `motet`, on these hosts of the ranks; None is one host for all.
    """
    model = _CollectiveTrafficModel(
        CollectiveAlgorithmSelector(settings, sharding), rank, hosts or (0,) * sharding.ranks
    )
    grad, compute = recipe.reduce, recipe.reduce if uses_gradient_gather(settings, sharding) else recipe.compute
    shards = model.algorithms.group_size("shards")
    traffic = list(_unit_traffic(units, sharding, settings, dtype=grad, shards=shards, shard=rank % shards))
    if sharding.reproducible_batch_size:
        reduce_scatter, all_reduce = (DTYPE_BYTES[grad] * n for n in _tree_reduction_numel(traffic, sharding, rank))
    else:
        reduce_scatter = (sharding.microbatches if ZERO_STAGES[sharding.zero].gradients else 1) * sum(
            model.reduce_scatter_bytes(unit.unsharded, grad, unit.codecs.shard_gradients) for unit in traffic
        )
        all_reduce = sum(model.all_reduce_bytes(u.sharded, grad, u.codecs.replica_gradients) for u in traffic)
    all_gather = sum(
        unit.gather_count * model.all_gather_bytes(unit.gathered_numel, compute, unit.codecs.parameters, group="shards")
        + unit.secondary_gather_count * model.all_gather_bytes(unit.gathered_numel, compute, None, group="near")
        for unit in traffic
    )
    return StepTrafficBytes(reduce_scatter, all_reduce, all_gather)


def _tree_reduction_numel(units: list[_CommUnitTraffic], sharding: DataParallelSharding, rank: int) -> tuple[int, int]:
    """Elements that tree_reduce.py sends: (partial sums within the shard group, sums of the replica)."""
    shards, replicas = sharding.shards, sharding.ranks // sharding.shards
    rank_sums = sum(map(len, partial_sums_sent_by_rank(sharding, rank)))
    replica_sums = len(partial_sums_sent_by_replica(sharding, rank // shards))
    return (
        rank_sums * sum(unit.unsharded.numel // shards * (shards - 1) for unit in units),
        (replica_sums + 1) * sum(ceil(unit.sharded.numel / replicas) * (replicas - 1) for unit in units),
    )


def _unit_traffic(
    units: BucketsAndFSDPUnits,
    sharding: DataParallelSharding,
    settings: CommunicationSettings,
    *,
    dtype: str,
    shards: int,
    shard: int,
) -> Iterator[_CommUnitTraffic]:
    codecs = resolve_codecs(settings, sharding)
    bucket_codecs = CommunicationCodecs() if sharding.zero == 3 else codecs
    buckets = [bucket_reduction_specs(units.buckets, i, units.shapes, dtype=dtype).buffers for i in (None, shard)]
    for unsharded, sharded in zip(*buckets, strict=True):
        yield _CommUnitTraffic(unsharded, sharded, bucket_codecs, unsharded.numel)
    unit_specs, shard_specs = row_shard_reduction_specs([unit.trainable for unit in units.units], shards, dtype)
    for unit, unsharded, sharded in zip(units.units, unit_specs.buffers, shard_specs.buffers, strict=True):
        yield _CommUnitTraffic(unsharded, sharded, codecs, unit.gathered_numel(shards), *unit.gather_counts(sharding))


@dataclass(frozen=True)
class _CollectiveTrafficModel:
    algorithms: CollectiveAlgorithmSelector
    rank: int
    hosts: HostOfRank

    def reduce_scatter_bytes(self, buffer: ReductionBufferSpec, dtype: str, codec: Codec | None) -> int:
        shards = self.algorithms.group_size("shards")
        if codec is None or shards == 1:
            return self._bytes_sent("reduce-scatter", "shards", buffer.numel, dtype=dtype)
        if not isinstance(codec, BlockwiseCodec):
            return self._compressed_sum_bytes(buffer, dtype, codec, group="shards")
        shard_numel, intra_size = buffer.numel // shards, self.algorithms.group_size("near")
        inter_bytes = codec.wire_bytes([shard_numel], dtype)
        if intra_size == 1:  # there are no secondary shards
            return (shards - 1) * inter_bytes
        inter_size = shards // intra_size
        return (intra_size - 1) * codec.wire_bytes([inter_size * shard_numel], dtype) + (inter_size - 1) * inter_bytes

    def all_reduce_bytes(self, buffer: ReductionBufferSpec, dtype: str, codec: Codec | None) -> int:
        if codec is None or self.algorithms.group_size("replicas") == 1:
            return self._bytes_sent("all-reduce", "replicas", buffer.numel, dtype=dtype)
        return self._compressed_sum_bytes(buffer, dtype, codec, group="replicas")

    def all_gather_bytes(self, numel: int, dtype: str, codec: BlockwiseCodec | None, *, group: GroupName) -> int:
        if codec is None:
            return self._bytes_sent("all-gather", group, numel, dtype=dtype)
        shards = self.algorithms.group_size("shards")
        return self._bytes_sent(
            "all-gather", "shards", shards * codec.wire_bytes([numel // shards], dtype), dtype="uint8"
        )

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
        if self.algorithms.group_size(group) == 1 or count == 0:
            return 0
        width, ranks = DTYPE_BYTES[dtype], self.algorithms.group_of(group, self.rank)
        rank, program = ranks.index(self.rank), self.algorithms.program(collective, group, width * count)
        if program is not None:
            return width * elements_sent(program, rank, count)
        numel = count if collective == "all-reduce" else count // len(ranks)
        return backend_sent_bytes(collective, numel, dtype, rank=rank, hosts=tuple(self.hosts[r] for r in ranks))


@dataclass(frozen=True)
class ModelStateMemory:
    """Bytes that one rank keeps from step to step."""

    parameters: int  # In the compute dtype, with padding; at stage 3 only buckets and frozen parameters
    masters: int  # Zero where the parameters are their own masters
    gradients: int
    moments: int
    compression_errors: int = 0  # Error feedback, without PowerSGD's bases

    @property
    def total(self) -> int:
        return self.parameters + self.masters + self.gradients + self.moments + self.compression_errors


def model_state_memory(
    units: BucketsAndFSDPUnits,
    sharding: DataParallelSharding,
    recipe: PrecisionRecipe,
    *,
    moments_per_parameter: int,
    rank: int,
    settings: CommunicationSettings | None = None,
) -> ModelStateMemory:
    """State of one rank. Frozen parameters count at stage 3 only."""
    codecs = CommunicationCodecs() if settings is None else resolve_codecs(settings, sharding)
    shards, bucket_numel = sharding.shards, sum(bucket.length for bucket in units.buckets)
    master, compute, reduce = (DTYPE_BYTES[dtype] for dtype in (recipe.master, recipe.compute, recipe.reduce))
    bucket_shard = bucket_numel // shards
    row_shard = sum(padded_shard_numel(unit.trainable, shards) for unit in units.units)
    frozen_shard = sum(padded_shard_numel(unit.frozen, shards) for unit in units.units)
    updated_rows = sum(shard_numel(unit.trainable, shards, rank % shards) for unit in units.units)
    is_shared = recipe.master == recipe.compute and (sharding.zero == 3 or codecs.parameters is None)
    keeps_shards = ZERO_STAGES[sharding.zero].gradients or sharding.reproducible_batch_size
    errors = bucket_numel * codecs.has_shard_error_feedback
    errors += (row_shard if sharding.zero == 3 else bucket_shard) * codecs.has_replica_error_feedback
    return ModelStateMemory(
        parameters=(bucket_numel + frozen_shard) * compute,
        masters=(row_shard if is_shared else bucket_shard + row_shard) * master,
        gradients=(bucket_shard if keeps_shards else bucket_numel) * reduce + row_shard * master,
        moments=moments_per_parameter * (bucket_shard + updated_rows) * DTYPE_BYTES[recipe.state],
        compression_errors=errors * max(reduce, DTYPE_BYTES["float32"]),
    )


def peak_transient_bytes(
    units: BucketsAndFSDPUnits,
    sharding: DataParallelSharding,
    recipe: PrecisionRecipe,
    *,
    settings: CommunicationSettings,
) -> int:
    """Peak bytes beyond the model state, uncompressed, without buffers of algorithms; each block is called once.

    Autograd is assumed to hold one gradient at a time; it holds two where a bias's gradient follows the next matrix's.
    """
    if units.units:
        return _peak_of_units(units, sharding, recipe)
    largest_shard = max(bucket.length for bucket in units.buckets) // sharding.shards
    cast = DTYPE_BYTES[recipe.master] * largest_shard * (recipe.reduce != recipe.master)  # For the optimizer
    return max(cast, _peak_of_buckets(units.buckets, sharding, recipe, overlaps=settings.overlap != "none"))


def _peak_of_buckets(
    buckets: Sequence[Bucket], sharding: DataParallelSharding, recipe: PrecisionRecipe, *, overlaps: bool
) -> int:
    """One gradient of autograd; at stage 2 also unsharded buckets: one is filled while another travels."""
    compute, reduce = DTYPE_BYTES[recipe.compute], DTYPE_BYTES[recipe.reduce]
    gradients = [compute * max(member.numel for member in bucket.members) for bucket in buckets]
    if not ZERO_STAGES[sharding.zero].gradients:
        return max(gradients)
    sizes = [reduce * bucket.length for bucket in buckets]
    arriving = [size // sharding.shards if sharding.microbatches > 1 else 0 for size in sizes]
    if not overlaps:
        filling = (sum(sizes[: i + 1]) + gradient for i, gradient in enumerate(gradients))
        return max(*filling, *(sum(sizes[i:]) + sum(arriving[i : i + 2]) for i in range(len(sizes))))
    both = (sizes[i] + sizes[j] + arriving[i] + max(arriving[j], gradients[j]) for i, j in pairwise(range(len(sizes))))
    return max([sizes[0] + max(gradients[0], arriving[0]), *both])


def _peak_of_units(units: BucketsAndFSDPUnits, sharding: DataParallelSharding, recipe: PrecisionRecipe) -> int:
    """Peak over the first, the middle and the last micro-batch.

    A step begins by freeing the gradients of the step before, so its first micro-batch reuses their memory. With
    replicas, sums over micro-batches wait for the last one in addition to the gradients that they contribute to.
    """
    last, has_replicas = sharding.microbatches - 1, sharding.ranks > sharding.shards
    row_shard = sum(padded_shard_numel(unit.trainable, sharding.shards) for unit in units.units)
    total, waiting = DTYPE_BYTES[recipe.master] * row_shard, DTYPE_BYTES[recipe.reduce] * row_shard * has_replicas
    # (gradients kept, copies that wait for the all-reduce over the replicas, copies that each unit adds to those).
    cases = [(0, 0, int(has_replicas and last > 0))]
    cases += [(total, waiting, 0)] if last > 1 else []
    cases += [(total, waiting, -int(has_replicas))] if last else []
    return max(max(_live_bytes(units, sharding, recipe, case=case)) for case in cases) - total


def _live_bytes(
    units: BucketsAndFSDPUnits, sharding: DataParallelSharding, recipe: PrecisionRecipe, *, case: tuple[int, int, int]
) -> Iterator[int]:
    compute, reduce, shards = DTYPE_BYTES[recipe.compute], DTYPE_BYTES[recipe.reduce], sharding.shards
    (accumulated, waiting, growth), reshards = case, sharding.reshard_after_forward
    kept = accumulated + waiting
    *blocks, root = units.units
    *block_sizes, gathered = (compute * unit.gathered_numel(shards) for unit in units.units)
    previous = gathered
    yield 2 * gathered + kept  # the gathered buffer, and the parameters copied out of it
    for size in block_sizes:  # the gathered buffer of the block before is freed after this gather
        yield gathered + previous + 2 * size + kept
        gathered, previous = gathered + (0 if reshards else size), size
    gathered += compute * _numel(root.used_after_blocks)
    sent = prefetched = 0
    for index, unit in enumerate((*reversed(blocks), root)):
        size = compute * unit.gathered_numel(shards)
        if unit.is_block and reshards:
            yield gathered + sent + kept + (prefetched or size) + size
            gathered += size
            prefetched = block_sizes[-2 - index] if index + 1 < len(blocks) else 0
        gradients = compute * _numel(unit.trainable)
        new_gradients = gradients if unit.is_block else gradients - compute * _numel(unit.used_after_blocks)
        yield gathered + prefetched + sent + kept + new_gradients
        gathered += new_gradients - size  # the unit is resharded before its gradients are sent
        sent = reduce * shards * padded_shard_numel(unit.trainable, shards)
        yield gathered + prefetched + sent + kept
        gathered -= gradients
        shard, last_gradient = sent // shards, compute * _numel(unit.trainable[-1:])
        yield gathered + prefetched + sent + kept + (1 + max(growth, 0)) * shard + last_gradient
        master_shard = DTYPE_BYTES[recipe.master] * (shard // reduce)
        cast = master_shard * (recipe.reduce != recipe.master)
        yield gathered + prefetched + sent + kept + (1 + growth) * shard + cast + last_gradient
        kept += (0 if accumulated else master_shard) + growth * shard


def _numel(shapes: Iterable[Shape]) -> int:
    return sum(map(prod, shapes))
