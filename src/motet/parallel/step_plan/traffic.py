"""Bytes that a rank sends in a step, plain or compressed: the traffic of communicator.py, without tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from motet.collectives.compression.codec_base import SCALE_BYTES, BlockwiseCodec, Codec
from motet.collectives.compression.codec_registry import all_reduce_traffic
from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.collectives.execute.rank_plan import elements_sent
from motet.core.dtypes import DTYPE_BYTES
from motet.core.errors import InputError
from motet.parallel.data_parallel.communication.algorithm_choice import CollectiveAlgorithmSelector, GroupName
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationCodecs,
    CommunicationSettings,
    resolve_codecs,
    uses_gradient_gather,
)
from motet.parallel.data_parallel.communication.powersgd_matrices import (
    MatrixView,
    ReductionBufferSpec,
    bucket_reduction_specs,
    row_shard_reduction_specs,
)
from motet.parallel.data_parallel.zero import ZERO_STAGES, BucketsAndFSDPUnits, padded_shard_numel
from motet.parallel.layout import Layout
from motet.parallel.row_assignment import partial_sums_sent_by_rank, partial_sums_sent_by_replica
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
    unsharded_gradients: ReductionBufferSpec
    sharded_gradients: ReductionBufferSpec
    codecs: CommunicationCodecs
    gathered_numel: int  # With padding
    gather_count: int = 1
    secondary_gather_count: int = 0


def sent_bytes_per_step(
    comm_units: BucketsAndFSDPUnits,
    layout: Layout,
    recipe: PrecisionRecipe,
    *,
    settings: CommunicationSettings,
    rank: int,
) -> StepTrafficBytes:
    """Bytes of a rank in a step after the warm-up, with the algorithms and codecs of the settings."""
    gathers_gradients = uses_gradient_gather(settings, layout)
    model = CollectiveTrafficModel(CollectiveAlgorithmSelector(settings, layout), rank)
    grad, compute = recipe.reduce, recipe.reduce if gathers_gradients else recipe.compute
    shards = layout.dp if gathers_gradients else layout.shards
    units = list(_unit_traffic(comm_units, layout, settings, dtype=grad, shards=shards, shard=rank % shards))
    if layout.reproducible_batch_size:
        reduce_scatter, all_reduce = _tree_reduction_numel(units, layout, rank)
        width = DTYPE_BYTES[grad]
        reduce_scatter, all_reduce = width * reduce_scatter, width * all_reduce
    else:
        reductions = layout.microbatches if ZERO_STAGES[layout.zero].gradients else 1
        reduce_scatter = reductions * sum(
            model.reduce_scatter_bytes(unit.unsharded_gradients, grad, unit.codecs.shard_gradients) for unit in units
        )
        all_reduce = sum(
            model.all_reduce_bytes(unit.sharded_gradients, grad, unit.codecs.replica_gradients) for unit in units
        )
    all_gather = sum(
        unit.gather_count * model.all_gather_bytes(unit.gathered_numel, compute, unit.codecs.parameters)
        + unit.secondary_gather_count * model.secondary_all_gather_bytes(unit.gathered_numel, compute)
        for unit in units
    )
    return StepTrafficBytes(reduce_scatter, all_reduce, all_gather)


def _tree_reduction_numel(units: list[_CommUnitTraffic], layout: Layout, rank: int) -> tuple[int, int]:
    """Elements that tree_reduce.py sends: (partial sums within the shard group, sums of the replica)."""
    shards, replicas = layout.shards, layout.dp // layout.shards
    rank_sums = sum(map(len, partial_sums_sent_by_rank(layout, rank)))
    replica_sums = len(partial_sums_sent_by_replica(layout, rank // shards))
    return (
        rank_sums * sum(unit.unsharded_gradients.numel // shards * (shards - 1) for unit in units),
        (replica_sums + 1) * sum(ceil(unit.sharded_gradients.numel / replicas) * (replicas - 1) for unit in units),
    )


def _unit_traffic(
    comm_units: BucketsAndFSDPUnits,
    layout: Layout,
    settings: CommunicationSettings,
    *,
    dtype: str,
    shards: int,
    shard: int,
) -> Iterator[_CommUnitTraffic]:
    codecs = resolve_codecs(settings, layout)
    bucket_codecs = CommunicationCodecs() if layout.zero == 3 else codecs
    unsharded, sharded = (
        bucket_reduction_specs(comm_units.buckets, index, comm_units.shapes, dtype=dtype).buffers
        for index in (None, shard)
    )
    for unsharded_gradients, sharded_gradients in zip(unsharded, sharded, strict=True):
        yield _CommUnitTraffic(unsharded_gradients, sharded_gradients, bucket_codecs, unsharded_gradients.numel)
    unit_specs, shard_specs = row_shard_reduction_specs([unit.trainable for unit in comm_units.units], shards, dtype)
    for unit, unsharded_gradients, sharded_gradients in zip(
        comm_units.units, unit_specs.buffers, shard_specs.buffers, strict=True
    ):
        gathered_numel = shards * padded_shard_numel(unit.trainable + unit.frozen, shards)
        yield _CommUnitTraffic(
            unsharded_gradients, sharded_gradients, codecs, gathered_numel, *unit.gather_counts(layout)
        )


@dataclass(frozen=True)
class CollectiveTrafficModel:
    """Bytes that one rank sends in one collective."""

    algorithms: CollectiveAlgorithmSelector
    rank: int

    def reduce_scatter_bytes(self, buffer: ReductionBufferSpec, dtype: str, codec: Codec | None = None) -> int:
        """Bytes of a reduction over the shard group."""
        shards = self.algorithms.group_size("shards")
        if codec is None or shards == 1:
            return self._bytes_sent("reduce-scatter", "shards", buffer.numel, width=DTYPE_BYTES[dtype])
        if not isinstance(codec, BlockwiseCodec):
            return self._compressed_all_reduce_bytes(buffer, dtype, codec, group_name="shards")
        shard_numel, intra_size = buffer.numel // shards, self.algorithms.group_size("near")
        inter_bytes = codec.wire_bytes([shard_numel], dtype)
        if intra_size == 1:  # there are no secondary shards
            return (shards - 1) * inter_bytes
        inter_size = shards // intra_size
        intra_bytes = codec.wire_bytes([inter_size * shard_numel], dtype)
        return (intra_size - 1) * intra_bytes + (inter_size - 1) * inter_bytes

    def all_reduce_bytes(self, buffer: ReductionBufferSpec, dtype: str, codec: Codec | None = None) -> int:
        """Bytes of a reduction over the replica group."""
        if codec is None or self.algorithms.group_size("replicas") == 1:
            return self._bytes_sent("all-reduce", "replicas", buffer.numel, width=DTYPE_BYTES[dtype])
        return self._compressed_all_reduce_bytes(buffer, dtype, codec, group_name="replicas")

    def all_gather_bytes(self, numel: int, dtype: str, codec: BlockwiseCodec | None = None) -> int:
        """Bytes of a gather of `numel` elements from the shard group."""
        if codec is None:
            return self._bytes_sent("all-gather", "shards", numel, width=DTYPE_BYTES[dtype])
        shards = self.algorithms.group_size("shards")
        return self._bytes_sent("all-gather", "shards", shards * codec.wire_bytes([numel // shards], dtype), width=1)

    def secondary_all_gather_bytes(self, numel: int, dtype: str) -> int:
        """Bytes of a gather of `numel` elements from the secondary shard group."""
        return self._bytes_sent("all-gather", "near", numel, width=DTYPE_BYTES[dtype])

    def _compressed_all_reduce_bytes(
        self, buffer: ReductionBufferSpec, dtype: str, codec: Codec, *, group_name: GroupName
    ) -> int:
        """Bytes of a compressed all-reduce, whose dense part travels by the algorithm of the settings."""
        width = DTYPE_BYTES[dtype]
        if isinstance(codec, PowerSGDCodec):
            matrices = [m for m in buffer.split_for_powersgd(codec, dtype) if isinstance(m, MatrixView)]
            ranks = [min(codec.rank, m.rows, m.columns) for m in matrices]
            left, right = (sum(m[side] * rank for m, rank in zip(matrices, ranks, strict=True)) for side in (1, 2))
            dense_numel = buffer.numel - sum(m.rows * m.columns for m in matrices)
            factors = sum(self._bytes_sent("all-reduce", group_name, n, width=SCALE_BYTES) for n in (left, right))
            return factors + self._bytes_sent("all-reduce", group_name, dense_numel, width=width)
        sent = all_reduce_traffic(codec, [buffer.numel], dtype, self.algorithms.group_size(group_name))
        dense_numel = sent.pop("all_reduce_bytes", 0) // width
        return sum(sent.values()) + self._bytes_sent("all-reduce", group_name, dense_numel, width=width)

    def _bytes_sent(self, collective: str, group_name: GroupName, count: int, *, width: int) -> int:
        if self.algorithms.group_size(group_name) == 1 or count == 0:
            return 0
        program = self.algorithms.program(collective, group_name, width * count)
        if program is None:
            key = f"communication.{collective.replace('-', '_')}"
            raise InputError(f"{key} = 'backend': how much a backend sends is not known; name an algorithm, or 'auto'")
        return width * elements_sent(program, self.algorithms.rank_in_group(group_name, self.rank), count)
