"""Reductions and gathers of a step: by the algorithms of the settings, or by a codec."""

from collections.abc import Callable, Sequence
from functools import partial
from weakref import finalize
from zlib import crc32

import torch
from torch import Tensor

from motet.collectives.compression import compressed_collectives
from motet.collectives.compression.byte_messages import codec_numerics, decode, encode
from motet.collectives.compression.codec_base import BlockwiseCodec, Codec
from motet.collectives.compression.compressed_collectives import DenseAllReduce
from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.collectives.execute import api
from motet.collectives.execute.api import CollectiveOptions
from motet.collectives.execute.work_queue import WorkHandle, WorkQueue, run_on_stream
from motet.collectives.program import Program
from motet.core.seeds import derive_seed
from motet.parallel.data_parallel.communication.communication_settings import (
    CollectiveAlgorithmSelector,
    CommunicationCodecs,
    CommunicationSettings,
    GroupName,
    resolve_codecs,
)
from motet.parallel.data_parallel.communication.powersgd_matrices import MatrixView, StepReductionSpecs
from motet.parallel.data_parallel.communication.shard_replica_mesh import ShardReplicaMesh
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.process.process_group import RankGroup
from motet.parallel.reproducible.tree_reduce import ReproducibleTreeReducer, WorkWithFinish


class DataParallelCommunicator:
    """Reductions and gathers of one model. Every rank must start them in the same order."""

    def __init__(
        self,
        mesh: ShardReplicaMesh,
        sharding: DataParallelSharding,
        settings: CommunicationSettings,
        *,
        specs: StepReductionSpecs,
        shard_specs: Sequence[StepReductionSpecs],
    ) -> None:
        """`specs`: buffers reduced over the shard group; `shard_specs`: over replicas, for each shard."""
        self.mesh, self.settings, self._owners = mesh, settings, sharding.bucket_owners
        self._algorithms = CollectiveAlgorithmSelector(settings, sharding)
        codecs, device, rank = resolve_codecs(settings, sharding), mesh.shard_group.device, mesh.shard_group.rank
        self._shard_reducer, self._replica_reducer = (
            CompressedGradientReducer(codec, group, each, shard=shard, error_feedback=feedback) if codec else None
            for codec, group, each, shard, feedback in (
                (codecs.shard_gradients, mesh.shard_group, [specs], 0, codecs.has_shard_error_feedback),
                (codecs.replica_gradients, mesh.replica_group, shard_specs, rank, codecs.has_replica_error_feedback),
            )
        )
        self._parameter_codec = codecs.parameters
        self._tree_reducer = ReproducibleTreeReducer(mesh, sharding) if sharding.reproducible_batch_size else None
        # Gradients of each micro-batch are reduced separately then, also in a shard group of one rank.
        self.uses_summation_tree = self._tree_reducer is not None
        self._steps_begun = torch.zeros((), dtype=torch.int64)  # Since the start of the run
        self._microbatch, self._local_steps = 0, 0  # Steps begun by this process
        # Compressed reductions run on a separate thread, or on a separate stream on CUDA, in parallel with backward.
        self._stream = torch.cuda.Stream(device) if codecs != CommunicationCodecs() and device.type == "cuda" else None
        self._work_queue = WorkQueue()
        finalize(self, self._work_queue.close)

    def begin_step(self) -> None:
        self._steps_begun += 1
        self._local_steps += 1

    def begin_backward(self, is_first: bool) -> None:
        self._microbatch = 0 if is_first else self._microbatch + 1
        if self._tree_reducer:
            self._tree_reducer.begin_backward(self._microbatch)

    def end_backward(self) -> None:
        """Called after all gradients of the micro-batch were reduced."""
        if self._tree_reducer:
            self._tree_reducer.end_backward()

    def reduce_scatter(self, bucket_id: int, shard: Tensor, unsharded: Tensor, *, is_async: bool = True) -> WorkHandle:
        """Reduce over the shard group. `unsharded` may be overwritten."""
        mesh, reducer = self.mesh, self._shard_reducer
        if self._tree_reducer:
            return self._tree_reducer.reduce_scatter(bucket_id, shard, unsharded)
        if reducer is None or self._is_warming_up:
            options = self._call_options("reduce-scatter", "shards", unsharded, is_async=is_async)
            return api.reduce_scatter(shard, unsharded, mesh.shard_group, **options)
        task = partial(reducer.reduce_scatter, bucket_id, shard, unsharded, dense_all_reduce=self._dense_all_reduce)
        intra, inter = mesh.secondary_shard_group, mesh.secondary_replica_group
        if intra and inter and isinstance(reducer.codec, BlockwiseCodec):
            task = partial(_two_level_reduce_scatter, shard, unsharded, reducer.codec, intra=intra, inter=inter)
        return self._start_async(partial(task, seed=self._seed(bucket_id, "shards", self._microbatch)))

    def reduce(self, bucket: Tensor, owner: int) -> WorkHandle:
        """Reduce to the rank that owns the bucket."""
        assert self._owners
        return api.reduce(bucket, self.mesh.shard_group, owner, **self._options(self._owners.reduce_algorithm))

    def broadcast(self, bucket: Tensor, owner: int) -> WorkHandle:
        """Broadcast from the rank that owns the bucket."""
        assert self._owners
        return api.broadcast(bucket, self.mesh.shard_group, owner, **self._options(self._owners.broadcast_algorithm))

    def all_reduce(self, bucket_id: int, shard: Tensor, *, is_async: bool = True) -> WorkHandle:
        """Reduce over the replica group."""
        if self._tree_reducer:
            return self._tree_reducer.all_reduce(bucket_id, shard)
        reducer, group = self._replica_reducer, self.mesh.replica_group
        if reducer is None or self._is_warming_up:
            return api.all_reduce(
                shard, group, **self._call_options("all-reduce", "replicas", shard, is_async=is_async)
            )
        seed, dense_all_reduce = self._seed(bucket_id, "replicas", self._microbatch), self._dense_all_reduce
        return self._start_async(partial(reducer.all_reduce, bucket_id, shard, seed, dense_all_reduce=dense_all_reduce))

    def all_gather(
        self, bucket_id: int, output: Tensor, shard: Tensor, *, from_secondary: bool = False, is_async: bool = True
    ) -> WorkHandle:
        """Gather from the shard group, or from the secondary one, whose shards went through the codec before.

        With a codec all ranks get the same bits, this rank's shard included.
        """
        group = self.mesh.secondary_shard_group if from_secondary else self.mesh.shard_group
        name: GroupName = "near" if from_secondary else "shards"
        codec = self._parameter_codec
        assert group is not None
        if from_secondary or codec is None or not shard.is_floating_point():
            return api.all_gather(
                output, shard, group, **self._call_options("all-gather", name, output, is_async=is_async)
            )
        with codec_numerics():
            message = encode(codec, shard, self._seed(bucket_id, "gather", group.rank))
            messages = message.new_empty(group.world, message.numel())
        options = self._call_options("all-gather", "shards", messages, is_async=is_async)

        def decode_shards() -> None:
            with codec_numerics():
                for part, received in zip(output.view(len(messages), -1), messages, strict=True):
                    part.copy_(decode(codec, received, part.shape, part.dtype))

        return WorkWithFinish(api.all_gather(messages, message, group, **options), decode_shards)

    def compression_state(self) -> dict[str, LocalShard | Tensor]:
        """State that only the same layout can continue with, one row for each rank; views, to be read and written."""
        reducers = {"shards": self._shard_reducer, "replicas": self._replica_reducer}
        shards, replicas = self.mesh.shard_group, self.mesh.replica_group
        world, rank = shards.world * replicas.world, replicas.rank * shards.world + shards.rank
        state: dict[str, LocalShard | Tensor] = {}
        for group_name, reducer in reducers.items():
            for name, row in (reducer.state() if reducer else {}).items():
                state[f"{group_name}-{name}"] = LocalShard(torch.Size([world, row.numel()]), rank * row.numel(), row)
        return {"steps": self._steps_begun, **state} if state or self._parameter_codec or any(reducers.values()) else {}

    @property
    def _is_warming_up(self) -> bool:
        return int(self._steps_begun) <= self.settings.compress_after

    def _seed(self, *words: int | str) -> int:
        return derive_seed(int(self._steps_begun), *words)

    def _dense_all_reduce(self, tensor: Tensor, ranks: api.RankGroupLike) -> None:
        group_name: GroupName = "replicas" if ranks is self.mesh.replica_group else "shards"
        api.all_reduce(tensor, ranks, **self._call_options("all-reduce", group_name, tensor, is_async=False))

    def _call_options(
        self, collective: str, group_name: GroupName, tensor: Tensor, *, is_async: bool
    ) -> CollectiveOptions:
        return self._options(self._algorithms.program(collective, group_name, tensor.nbytes), is_async)

    def _options(self, algorithm: str | Program | None, is_async: bool = True) -> CollectiveOptions:
        # Ranks check that they make the same calls in the first step; every later step is like it.
        return {"async_op": is_async, "algorithm": algorithm, "check": self._local_steps <= 1}

    def _start_async(self, task: Callable[[], None]) -> WorkHandle:
        def run() -> None:
            with codec_numerics():
                task()

        return self._work_queue.submit(run) if self._stream is None else run_on_stream(run, self._stream)


def _two_level_reduce_scatter(
    shard: Tensor, unsharded: Tensor, codec: BlockwiseCodec, *, intra: RankGroup, inter: RankGroup, seed: int
) -> None:
    """Reduce inside the host first, so that each host sends one message to another where each rank sent one before."""
    by_rank = unsharded.view(inter.world, intra.world, -1).transpose(0, 1)
    sums, _ = compressed_collectives.reduce_scatter(by_rank, codec, intra, derive_seed(seed, "near"))
    shard.copy_(compressed_collectives.reduce_scatter(sums, codec, inter, derive_seed(seed, "far"))[0])


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
        self, codec: Codec, group: RankGroup, specs: Sequence[StepReductionSpecs], *, shard: int, error_feedback: bool
    ) -> None:
        """The buffers are those of `specs[shard]`; the specs of all shards decide the size of the state."""
        self.codec, self.group, self._specs = codec, group, specs[shard].buffers
        text = repr((str(codec), group.world, specs))
        for word, stored in _STORED_WORDS.items():
            text = text.replace(word, stored)
        self._digest, dtype = crc32(text.encode()), specs[shard].dtype
        sizes = [spec.numel if error_feedback else 0 for spec in self._specs]
        error_dtype = torch.promote_types(getattr(torch, dtype), torch.float32)
        self.errors = torch.zeros(sum(sizes), dtype=error_dtype, device=group.device)
        self._errors = self.errors.split(sizes)
        self._segments: list[list[slice | MatrixView]] = [[] for _ in self._specs]
        basis_shapes: list[list[list[tuple[int, int]]]] = [[] for _ in specs]
        if isinstance(codec, PowerSGDCodec):
            self._segments = [spec.split_for_powersgd(codec, dtype) for spec in self._specs]
            basis_shapes = [_basis_shapes(codec, shard_specs) for shard_specs in specs]
        max_numel = max(sum(rows * columns for bases in each for rows, columns in bases) for each in basis_shapes)
        with codec_numerics():
            self.bases = torch.zeros(max_numel, dtype=torch.float32, device=group.device)
        numels = [rows * columns for bases in basis_shapes[shard] for rows, columns in bases]
        views = iter(self.bases[: sum(numels)].split(numels))
        self._bases = [[next(views).view(shape) for shape in bases] for bases in basis_shapes[shard]]

    def all_reduce(self, bucket_id: int, tensor: Tensor, seed: int, *, dense_all_reduce: DenseAllReduce) -> None:
        """Sum in place; all ranks get the same bits."""
        compensated, rounding = self._add_error(bucket_id, tensor)
        if isinstance(self.codec, PowerSGDCodec):
            total, error = self._reduce_low_rank(self.codec, bucket_id, compensated, seed=seed, dense=dense_all_reduce)
        else:
            reduced = compressed_collectives.all_reduce(
                compensated, self.codec, self.group, seed, dense_all_reduce=dense_all_reduce
            )
            total, error = reduced.total, reduced.error
            self._zero_padding(bucket_id, error)
            self._zero_padding(bucket_id, total)
        self._store_error(bucket_id, error + rounding, total)
        tensor.copy_(total)

    def reduce_scatter(
        self, bucket_id: int, shard: Tensor, unsharded: Tensor, *, seed: int, dense_all_reduce: DenseAllReduce
    ) -> None:
        """Sum into `shard`; `unsharded` may be overwritten, since only blockwise codecs reduce shards separately."""
        if isinstance(self.codec, BlockwiseCodec):
            compensated, rounding = self._add_error(bucket_id, unsharded)
            total, error = compressed_collectives.reduce_scatter(compensated, self.codec, self.group, seed)
            self._zero_padding(bucket_id, error)
            self._zero_padding(bucket_id, total, start=self.group.rank * len(total))
            self._store_error(bucket_id, error + rounding, total)
            shard.copy_(total)
            return
        self.all_reduce(bucket_id, unsharded, seed, dense_all_reduce=dense_all_reduce)
        shard.copy_(unsharded.view(self.group.world, -1)[self.group.rank])

    def state(self) -> dict[str, Tensor]:
        """State of the next reductions; its names are those of these specs and this number of ranks alone."""
        kinds = {"errors": self.errors, "bases": self.bases}
        return {f"{kind}-{self._digest:08x}": tensor for kind, tensor in kinds.items() if tensor.numel()}

    def _reduce_low_rank(
        self, codec: PowerSGDCodec, bucket_id: int, compensated: Tensor, *, seed: int, dense: DenseAllReduce
    ) -> tuple[Tensor, Tensor]:
        segments, bases = self._segments[bucket_id], self._bases[bucket_id]
        tensors = [compensated[s.start : s.stop].view(s[1:] if isinstance(s, MatrixView) else -1) for s in segments]
        results = compressed_collectives.all_reduce_powersgd(tensors, codec, self.group, seed, bases, dense)
        for basis, reduced in zip(bases, results, strict=True):
            if reduced.basis is not None:
                basis.copy_(reduced.basis)
        return torch.cat([r.total.reshape(-1) for r in results]), torch.cat([r.error.reshape(-1) for r in results])

    def _add_error(self, bucket_id: int, tensor: Tensor) -> tuple[Tensor, Tensor | float]:
        """(the tensor with the error of the step before, in its dtype; what the rounding to this dtype loses)."""
        assert tensor.numel() == self._specs[bucket_id].numel
        if not self.errors.numel():
            return tensor, 0.0
        exact = tensor + self._errors[bucket_id]
        rounded = exact.to(tensor.dtype)
        return rounded, 0.0 if rounded is exact else exact.sub_(rounded)

    def _zero_padding(self, bucket_id: int, tensor: Tensor, *, start: int = 0) -> None:
        """Keep padding zero: a block may decode it to a sign or a non-finite number."""
        for first, stop in self._specs[bucket_id].padding if isinstance(self.codec, BlockwiseCodec) else ():
            tensor[max(first - start, 0) : max(stop - start, 0)] = 0

    def _store_error(self, bucket_id: int, error: Tensor, total: Tensor) -> None:
        """Keep the error before if the sum is not finite, since no rank applies such a sum."""
        if self.errors.numel():
            is_finite = total.isfinite().all() & error.isfinite().all()
            self._errors[bucket_id].copy_(torch.where(is_finite, error, self._errors[bucket_id]))


def _basis_shapes(codec: PowerSGDCodec, specs: StepReductionSpecs) -> list[list[tuple[int, int]]]:
    return [
        [(s.columns, min(codec.rank, s.rows, s.columns)) if isinstance(s, MatrixView) else (0, 0) for s in segments]
        for segments in (spec.split_for_powersgd(codec, specs.dtype) for spec in specs.buffers)
    ]
