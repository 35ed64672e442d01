"""Bytes that one rank sends in one sum or gather, plain or compressed: what carry.py does, without tensors."""

from dataclasses import dataclass

from motet.collectives.compression.codec_options import (
    SCALE_BYTES,
    BlockwiseCodecOptions,
    CodecOptions,
    PowerSGDCodecOptions,
    all_reduce_traffic,
)
from motet.collectives.execute.rank_plan import elements_sent
from motet.core.dtypes import DTYPE_BYTES
from motet.core.errors import InputError
from motet.parallel.data_parallel.communication.algorithm_choice import CollectiveAlgorithmSelector, GroupName
from motet.parallel.data_parallel.communication.powersgd_matrices import MatrixView, ReductionBufferSpec


@dataclass(frozen=True)
class CollectiveTrafficModel:
    """One rank of those that share a copy, and of its replicas."""

    algorithms: CollectiveAlgorithmSelector
    rank: int

    def reduce_scatter_bytes(self, buffer: ReductionBufferSpec, dtype: str, codec: CodecOptions | None = None) -> int:
        """Over the ranks that share a copy."""
        shards, width = self.algorithms.group_size("shards"), DTYPE_BYTES[dtype]
        if codec is None or shards == 1:
            return self._bytes_sent("reduce-scatter", "shards", buffer.numel, width)
        if not isinstance(codec, BlockwiseCodecOptions):
            return self._compressed_all_reduce_bytes(buffer, dtype, codec, "shards")
        shard_numel, intra_size = buffer.numel // shards, self.algorithms.group_size("near")
        if intra_size == 1:  # there is no second copy
            return (shards - 1) * codec.wire_bytes([shard_numel], dtype)
        inter_size = shards // intra_size
        return (intra_size - 1) * codec.wire_bytes([inter_size * shard_numel], dtype) + (
            inter_size - 1
        ) * codec.wire_bytes([shard_numel], dtype)

    def all_reduce_bytes(self, buffer: ReductionBufferSpec, dtype: str, codec: CodecOptions | None = None) -> int:
        """Over the replicas."""
        if codec is None or self.algorithms.group_size("replicas") == 1:
            return self._bytes_sent("all-reduce", "replicas", buffer.numel, DTYPE_BYTES[dtype])
        return self._compressed_all_reduce_bytes(buffer, dtype, codec, "replicas")

    def all_gather_bytes(self, numel: int, dtype: str, codec: BlockwiseCodecOptions | None = None) -> int:
        """From the ranks that share a copy, so many elements."""
        if codec is None:
            return self._bytes_sent("all-gather", "shards", numel, DTYPE_BYTES[dtype])
        shards = self.algorithms.group_size("shards")
        return self._bytes_sent("all-gather", "shards", shards * codec.wire_bytes([numel // shards], dtype), 1)

    def secondary_all_gather_bytes(self, numel: int, dtype: str) -> int:
        """From the neighbours that share a second copy."""
        return self._bytes_sent("all-gather", "near", numel, DTYPE_BYTES[dtype])

    def _compressed_all_reduce_bytes(
        self, buffer: ReductionBufferSpec, dtype: str, codec: CodecOptions, group_name: GroupName
    ) -> int:
        """A compressed all-reduce. Where ranks add as they go, what they add travels as the settings say."""
        width = DTYPE_BYTES[dtype]
        if isinstance(codec, PowerSGDCodecOptions):
            matrices = [part for part in buffer.split_for_powersgd(codec, dtype) if isinstance(part, MatrixView)]
            low_rank_sizes = [(m.rows, m.columns, min(codec.rank, m.rows, m.columns)) for m in matrices]
            left, right = (sum(size[side] * size[2] for size in low_rank_sizes) for side in (0, 1))
            dense_numel = buffer.numel - sum(rows * columns for rows, columns, _ in low_rank_sizes)
            factors = sum(self._bytes_sent("all-reduce", group_name, count, SCALE_BYTES) for count in (left, right))
            return factors + self._bytes_sent("all-reduce", group_name, dense_numel, width)
        sent = all_reduce_traffic(codec, [buffer.numel], dtype, self.algorithms.group_size(group_name))
        dense_count = sent.pop("all_reduce_bytes", 0) // width
        return sum(sent.values()) + self._bytes_sent("all-reduce", group_name, dense_count, width)

    def _bytes_sent(self, collective: str, group_name: GroupName, count: int, width: int) -> int:
        """Bytes, of a whole of so many elements of this width."""
        if self.algorithms.group_size(group_name) == 1 or count == 0:
            return 0
        program = self.algorithms.program(collective, group_name, width * count)
        if program is None:
            key = f"communication.{collective.replace('-', '_')}"
            raise InputError(f"{key} = 'backend': how much a backend sends is not known; name an algorithm, or 'auto'")
        return width * elements_sent(program, self.algorithms.rank_in_group(group_name, self.rank), count)
