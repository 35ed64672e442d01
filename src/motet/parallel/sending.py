"""Bytes that one rank sends in one sum or gather, plain or compressed: what carry.py does, without tensors."""

from dataclasses import dataclass

from motet.collectives.compress import SCALE_BYTES, Blockwise, Codec, PowerSGD, all_reduce_traffic
from motet.collectives.library import program
from motet.collectives.lower import elements_sent
from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.communication import CommunicationSettings
from motet.parallel.matrices import Matrix, Sum


@dataclass(frozen=True)
class Sender:
    """One rank of those that share a copy, and of its replicas."""

    settings: CommunicationSettings
    shards: int
    replicas: int
    secondary: int | None
    rank: int

    def scattered(self, one: Sum, dtype: str, codec: Codec | None = None) -> int:
        """Over the ranks that share a copy."""
        shards, width = self.shards, DTYPE_BYTES[dtype]
        if codec is None or shards == 1:
            return width * _elements(
                "reduce-scatter", self.settings.reduce_scatter, shards, self.rank % shards, one.numel
            )
        if not isinstance(codec, Blockwise):
            return self._coded(one, dtype, codec, shards, self.rank % shards)
        part, near = one.numel // shards, self.secondary
        if near is None:
            return (shards - 1) * codec.wire_bytes([part], dtype)
        far = shards // near
        return (near - 1) * codec.wire_bytes([far * part], dtype) + (far - 1) * codec.wire_bytes([part], dtype)

    def summed(self, one: Sum, dtype: str, codec: Codec | None = None) -> int:
        """Over the replicas."""
        replicas, me = self.replicas, self.rank // self.shards
        if codec is None or replicas == 1:
            return DTYPE_BYTES[dtype] * self._all_reduced(one.numel, replicas, me)
        return self._coded(one, dtype, codec, replicas, me)

    def gathered(self, whole: int, dtype: str, codec: Blockwise | None = None) -> int:
        """From the ranks that share a copy, so many elements."""
        shards = self.shards
        width, count = (
            (DTYPE_BYTES[dtype], whole) if codec is None else (1, shards * codec.wire_bytes([whole // shards], dtype))
        )
        return width * _elements("all-gather", self.settings.all_gather, shards, self.rank % shards, count)

    def gathered_near(self, whole: int, dtype: str) -> int:
        """From the neighbours that share a second copy."""
        near = self.secondary or 1
        return DTYPE_BYTES[dtype] * _elements("all-gather", self.settings.all_gather, near, self.rank % near, whole)

    def _coded(self, one: Sum, dtype: str, codec: Codec, ranks: int, me: int) -> int:
        """A compressed all-reduce. Where ranks add as they go, what they add travels as the settings say."""
        width = DTYPE_BYTES[dtype]
        if isinstance(codec, PowerSGD):
            matrices = [part for part in one.cut(codec, dtype) if isinstance(part, Matrix)]
            ranked = [(m.rows, m.columns, min(codec.rank, m.rows, m.columns)) for m in matrices]
            left, right = (sum(size[side] * size[2] for size in ranked) for side in (0, 1))
            rest = one.numel - sum(rows * columns for rows, columns, _ in ranked)
            factors = sum(self._all_reduced(count, ranks, me) for count in (left, right))
            return SCALE_BYTES * factors + width * self._all_reduced(rest, ranks, me)
        sent = all_reduce_traffic(codec, [one.numel], dtype, ranks)
        added = sent.pop("all_reduce_bytes", 0) // width
        return sum(sent.values()) + width * self._all_reduced(added, ranks, me)

    def _all_reduced(self, count: int, ranks: int, me: int) -> int:
        return _elements("all-reduce", self.settings.all_reduce, ranks, me, count)


def _elements(collective: str, algorithm: str, ranks: int, me: int, count: int) -> int:
    return 0 if ranks == 1 or count == 0 else elements_sent(program(collective, algorithm, ranks), me, count)
