"""Compressed reductions of gradients with error feedback (arXiv:1901.09847)."""

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from motet.collectives.compression import compressed_collectives
from motet.collectives.compression.byte_messages import codec_numerics
from motet.collectives.compression.codec_base import BlockwiseCodec, Codec
from motet.collectives.compression.compressed_collectives import DenseAllReduce
from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.parallel.data_parallel.communication.powersgd_matrices import MatrixView, StepReductionSpecs
from motet.parallel.process.process_group import RankGroup

# Checkpoints name this state by a digest of its specs, spelled with the names of the first version of the format.
_STORED_WORDS = {
    "StepReductionSpecs(buffers=": "Sums(each=",
    "ReductionBufferSpec(": "Sum(",
    "MatrixView(": "Matrix(",
    "padding=": "gaps=",
}


class CompressedGradientReducer:
    """Reductions over a group by a codec, with the error of each buffer and PowerSGD's bases."""

    def __init__(
        self,
        codec: Codec,
        group: RankGroup,
        specs: Sequence[StepReductionSpecs],
        *,
        shard: int,
        uses_error_feedback: bool,
    ) -> None:
        """The buffers are those of `specs[shard]`; the specs of all shards decide the size of the state."""
        self.codec = codec
        self.group = group
        self._specs = specs[shard].buffers
        text = repr((str(codec), group.world, specs))
        for word, stored in _STORED_WORDS.items():
            text = text.replace(word, stored)
        self._digest = crc32(text.encode())
        dtype = specs[shard].dtype
        sizes = [spec.numel if uses_error_feedback else 0 for spec in self._specs]
        self.errors = torch.zeros(sum(sizes), dtype=getattr(torch, dtype), device=group.device)
        self._errors = self.errors.split(sizes)
        self._segments: list[list[slice | MatrixView]] = [[] for _ in self._specs]
        self._bases: list[list[Tensor]] = []
        basis_shapes: list[list[list[tuple[int, int]]]] = [[] for _ in specs]
        if isinstance(codec, PowerSGDCodec):
            self._segments = [spec.split_for_powersgd(codec, dtype) for spec in self._specs]
            basis_shapes = [_basis_shapes(codec, shard_specs) for shard_specs in specs]
        max_numel = max(sum(rows * columns for bases in each for rows, columns in bases) for each in basis_shapes)
        with codec_numerics():
            self.bases = torch.zeros(max_numel, dtype=torch.float32, device=group.device)
        offset = 0
        for bases in basis_shapes[shard]:
            self._bases.append([])
            for rows, columns in bases:
                self._bases[-1].append(self.bases[offset : offset + rows * columns].view(rows, columns))
                offset += rows * columns

    def all_reduce(self, bucket_id: int, tensor: Tensor, seed: int, *, dense_all_reduce: DenseAllReduce) -> None:
        """Sum in place; all ranks get the same bits."""
        compensated = self._add_error(bucket_id, tensor)
        if isinstance(self.codec, PowerSGDCodec):
            total, error = self._all_reduce_low_rank(
                self.codec, bucket_id, compensated, seed=seed, dense_all_reduce=dense_all_reduce
            )
        else:
            reduced = compressed_collectives.all_reduce(
                compensated, self.codec, self.group, seed, dense_all_reduce=dense_all_reduce
            )
            total, error = reduced.total, reduced.error
            self._zero_padding(bucket_id, error)
            self._zero_padding(bucket_id, total)
        self._store_error(bucket_id, error, total)
        tensor.copy_(total)

    def reduce_scatter(
        self, bucket_id: int, shard: Tensor, unsharded: Tensor, *, seed: int, dense_all_reduce: DenseAllReduce
    ) -> None:
        """Sum into `shard`; `unsharded` may be overwritten, since only blockwise codecs reduce shards separately."""
        if isinstance(self.codec, BlockwiseCodec):
            compensated = self._add_error(bucket_id, unsharded)
            total, error = compressed_collectives.reduce_scatter(compensated, self.codec, self.group, seed)
            self._zero_padding(bucket_id, error)
            self._zero_padding(bucket_id, total, start=self.group.rank * len(total))
            self._store_error(bucket_id, error, total)
            shard.copy_(total)
            return
        self.all_reduce(bucket_id, unsharded, seed, dense_all_reduce=dense_all_reduce)
        shard.copy_(unsharded.view(self.group.world, -1)[self.group.rank])

    def state(self) -> dict[str, Tensor]:
        """State of the next reductions; its names are those of these specs and this number of ranks alone."""
        kinds = {"errors": self.errors, "bases": self.bases}
        return {f"{kind}-{self._digest:08x}": tensor for kind, tensor in kinds.items() if tensor.numel()}

    def _all_reduce_low_rank(
        self, codec: PowerSGDCodec, bucket_id: int, compensated: Tensor, *, seed: int, dense_all_reduce: DenseAllReduce
    ) -> tuple[Tensor, Tensor]:
        segments, bases = self._segments[bucket_id], self._bases[bucket_id]
        tensors = [compensated[s.start : s.stop].view(s[1:] if isinstance(s, MatrixView) else -1) for s in segments]
        results = compressed_collectives.all_reduce_powersgd(tensors, codec, self.group, seed, bases, dense_all_reduce)
        for basis, reduced in zip(bases, results, strict=True):
            if reduced.basis is not None:
                basis.copy_(reduced.basis)
        total = torch.cat([reduced.total.reshape(-1) for reduced in results])
        return total, torch.cat([reduced.error.reshape(-1) for reduced in results])

    def _add_error(self, bucket_id: int, tensor: Tensor) -> Tensor:
        assert tensor.numel() == self._specs[bucket_id].numel
        return tensor + self._errors[bucket_id] if self.errors.numel() else tensor

    def _zero_padding(self, bucket_id: int, tensor: Tensor, *, start: int = 0) -> None:
        """Keep padding zero: a block may decode it to a sign or a non-finite number."""
        for first, stop in self._specs[bucket_id].padding if isinstance(self.codec, BlockwiseCodec) else ():
            tensor[max(first - start, 0) : max(stop - start, 0)] = 0

    def _store_error(self, bucket_id: int, error: Tensor, total: Tensor) -> None:
        """Keep the error before if the sum is not finite, since no rank applies such a sum."""
        if self.errors.numel():
            is_finite = total.isfinite().all() & error.isfinite().all()
            self._errors[bucket_id].copy_(torch.where(is_finite, error, self._errors[bucket_id]))


def make_compressed_reducer(
    codec: Codec | None, group: RankGroup, specs: Sequence[StepReductionSpecs], *, shard: int, uses_error_feedback: bool
) -> CompressedGradientReducer | None:
    """A reducer, or None without a codec."""
    if codec is None:
        return None
    return CompressedGradientReducer(codec, group, specs, shard=shard, uses_error_feedback=uses_error_feedback)


def _basis_shapes(codec: PowerSGDCodec, specs: StepReductionSpecs) -> list[list[tuple[int, int]]]:
    """Shapes of the bases by buffer and segment; a segment that is no matrix has 0 x 0."""
    return [
        [(s.columns, min(codec.rank, s.rows, s.columns)) if isinstance(s, MatrixView) else (0, 0) for s in segments]
        for segments in (spec.split_for_powersgd(codec, specs.dtype) for spec in specs.buffers)
    ]
