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
from motet.parallel.matrices import Matrix, Sum
from motet.parallel.routes import Over, Routes


@dataclass(frozen=True)
class Sender:
    """One rank of those that share a copy, and of its replicas."""

    routes: Routes
    rank: int

    def scattered(self, one: Sum, dtype: str, codec: CodecOptions | None = None) -> int:
        """Over the ranks that share a copy."""
        shards, width = self.routes.ranks("shards"), DTYPE_BYTES[dtype]
        if codec is None or shards == 1:
            return self._sent("reduce-scatter", "shards", one.numel, width)
        if not isinstance(codec, BlockwiseCodecOptions):
            return self._coded(one, dtype, codec, "shards")
        part, near = one.numel // shards, self.routes.ranks("near")
        if near == 1:  # there is no second copy
            return (shards - 1) * codec.wire_bytes([part], dtype)
        far = shards // near
        return (near - 1) * codec.wire_bytes([far * part], dtype) + (far - 1) * codec.wire_bytes([part], dtype)

    def summed(self, one: Sum, dtype: str, codec: CodecOptions | None = None) -> int:
        """Over the replicas."""
        if codec is None or self.routes.ranks("replicas") == 1:
            return self._sent("all-reduce", "replicas", one.numel, DTYPE_BYTES[dtype])
        return self._coded(one, dtype, codec, "replicas")

    def gathered(self, whole: int, dtype: str, codec: BlockwiseCodecOptions | None = None) -> int:
        """From the ranks that share a copy, so many elements."""
        if codec is None:
            return self._sent("all-gather", "shards", whole, DTYPE_BYTES[dtype])
        shards = self.routes.ranks("shards")
        return self._sent("all-gather", "shards", shards * codec.wire_bytes([whole // shards], dtype), 1)

    def gathered_near(self, whole: int, dtype: str) -> int:
        """From the neighbours that share a second copy."""
        return self._sent("all-gather", "near", whole, DTYPE_BYTES[dtype])

    def _coded(self, one: Sum, dtype: str, codec: CodecOptions, over: Over) -> int:
        """A compressed all-reduce. Where ranks add as they go, what they add travels as the settings say."""
        width = DTYPE_BYTES[dtype]
        if isinstance(codec, PowerSGDCodecOptions):
            matrices = [part for part in one.cut(codec, dtype) if isinstance(part, Matrix)]
            ranked = [(m.rows, m.columns, min(codec.rank, m.rows, m.columns)) for m in matrices]
            left, right = (sum(size[side] * size[2] for size in ranked) for side in (0, 1))
            rest = one.numel - sum(rows * columns for rows, columns, _ in ranked)
            factors = sum(self._sent("all-reduce", over, count, SCALE_BYTES) for count in (left, right))
            return factors + self._sent("all-reduce", over, rest, width)
        sent = all_reduce_traffic(codec, [one.numel], dtype, self.routes.ranks(over))
        added = sent.pop("all_reduce_bytes", 0) // width
        return sum(sent.values()) + self._sent("all-reduce", over, added, width)

    def _sent(self, collective: str, over: Over, count: int, width: int) -> int:
        """Bytes, of a whole of so many elements of this width."""
        if self.routes.ranks(over) == 1 or count == 0:
            return 0
        found = self.routes.program(collective, over, width * count)
        if found is None:
            key = f"communication.{collective.replace('-', '_')}"
            raise InputError(f"{key} = 'backend': how much a backend sends is not known; name an algorithm, or 'auto'")
        return width * elements_sent(found, self.routes.number(over, self.rank), count)
