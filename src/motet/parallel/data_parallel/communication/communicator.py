"""How sums and gathers over ranks travel: as they are, by the algorithms of the settings, or by a codec.

What a codec loses of a sum is added to what the same bucket gives the next time: error feedback (arXiv:1901.09847).
"""

from collections.abc import Callable, Sequence
from functools import partial
from weakref import finalize
from zlib import crc32

import torch
from torch import Tensor

from motet.collectives.compression import compressed_collectives
from motet.collectives.compression.byte_messages import codec_numerics, decode, encode
from motet.collectives.compression.codec_base import BlockwiseCodec, Codec
from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.collectives.execute import api
from motet.collectives.execute.api import CollectiveOptions
from motet.collectives.execute.work_queue import Task, WorkHandle, WorkQueue, run_on_stream
from motet.core.seeds import derive_seed
from motet.parallel.data_parallel.communication.algorithm_choice import CollectiveAlgorithmSelector, GroupName
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationCodecs,
    CommunicationSettings,
    resolve_codecs,
)
from motet.parallel.data_parallel.communication.powersgd_matrices import MatrixView, StepReductionSpecs
from motet.parallel.data_parallel.communication.shard_replica_mesh import ShardReplicaMesh
from motet.parallel.data_parallel.sharded_parameters import LocalShard
from motet.parallel.layout import Layout
from motet.parallel.process.process_group import RankGroup
from motet.parallel.reproducible.tree_reduce import ReproducibleTreeReducer


class CompressedGradientReducer:
    """Sums over some ranks by a codec: for each of them its error, and PowerSGD's bases."""

    def __init__(
        self,
        codec: Codec,
        group: RankGroup,
        specs: Sequence[StepReductionSpecs],
        shard: int,
        uses_error_feedback: bool,
    ) -> None:
        """`sums`: of each shard; those of `shard` are done here."""
        self.codec = codec
        self.group = group
        self._specs = specs[shard].buffers
        # Of what the state is of, the same on all ranks.
        self._digest = crc32(repr((str(codec), group.world, specs)).encode())
        dtype = getattr(torch, specs[shard].dtype)
        sizes = [s.numel if uses_error_feedback else 0 for s in self._specs]
        self.errors = torch.zeros(sum(sizes), dtype=dtype, device=group.device)
        self._errors = self.errors.split(sizes)
        shapes = [_basis_shapes(codec, one) for one in specs]
        max_numel = max(sum(rows * columns for bases in of_shard for rows, columns in bases) for of_shard in shapes)
        with codec_numerics():
            self.bases = torch.zeros(max_numel, dtype=torch.float32, device=group.device)
        offset = 0
        self._bases: list[list[Tensor]] = []
        for bases in shapes[shard]:
            self._bases.append([])
            for rows, columns in bases:
                self._bases[-1].append(self.bases[offset : offset + rows * columns].view(rows, columns))
                offset += rows * columns
        self._segments = [
            s.split_for_powersgd(codec, specs[shard].dtype) if isinstance(codec, PowerSGDCodec) else []
            for s in self._specs
        ]

    def all_reduce(
        self, bucket_id: int, tensor: Tensor, seed: int, dense_all_reduce: compressed_collectives.DenseAllReduce
    ) -> None:
        """In place; all ranks get the same bits."""
        compensated = self._add_error(bucket_id, tensor)
        if isinstance(self.codec, PowerSGDCodec):
            total, error = self._all_reduce_low_rank(bucket_id, compensated, seed, dense_all_reduce)
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
        self,
        bucket_id: int,
        shard: Tensor,
        unsharded: Tensor,
        seed: int,
        dense_all_reduce: compressed_collectives.DenseAllReduce,
    ) -> None:
        """`whole` may be overwritten: only blockwise codecs sum shards apart from each other."""
        if isinstance(self.codec, BlockwiseCodec):
            compensated = self._add_error(bucket_id, unsharded)
            total, error = compressed_collectives.reduce_scatter(compensated, self.codec, self.group, seed)
            self._zero_padding(bucket_id, error)
            self._zero_padding(bucket_id, total, self.group.rank * len(total))
            self._store_error(bucket_id, error, total)
            shard.copy_(total)
            return
        self.all_reduce(bucket_id, unsharded, seed, dense_all_reduce)
        shard.copy_(unsharded.view(self.group.world, -1)[self.group.rank])

    def state(self) -> dict[str, Tensor]:
        """What the next sums go by. Of these ranks and sums only, which the names tell."""
        kinds = {"errors": self.errors, "bases": self.bases}
        return {f"{kind}-{self._digest:08x}": tensor for kind, tensor in kinds.items() if tensor.numel()}

    def _all_reduce_low_rank(
        self, bucket_id: int, compensated: Tensor, seed: int, dense_all_reduce: compressed_collectives.DenseAllReduce
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(self.codec, PowerSGDCodec)
        segments, bases = self._segments[bucket_id], self._bases[bucket_id]
        tensors = [compensated[p.start : p.stop].view(p[1:] if isinstance(p, MatrixView) else -1) for p in segments]
        results = compressed_collectives.all_reduce_powersgd(
            tensors, self.codec, self.group, seed, bases, dense_all_reduce
        )
        for basis, reduced in zip(bases, results, strict=True):
            if reduced.basis is not None:
                basis.copy_(reduced.basis)
        total, error = (
            torch.cat([t.reshape(-1) for t in ts]) for ts in zip(*((r.total, r.error) for r in results), strict=True)
        )
        return total, error

    def _add_error(self, bucket_id: int, tensor: Tensor) -> Tensor:
        assert tensor.numel() == self._specs[bucket_id].numel
        return tensor + self._errors[bucket_id] if self.errors.numel() else tensor

    def _zero_padding(self, bucket_id: int, tensor: Tensor, start: int = 0) -> None:
        """What belongs to no parameter stays zero: a block may bring a number that is not finite there, or a sign."""
        for first, last in self._specs[bucket_id].padding if isinstance(self.codec, BlockwiseCodec) else ():
            tensor[max(first - start, 0) : max(last - start, 0)] = 0

    def _store_error(self, bucket_id: int, error: Tensor, total: Tensor) -> None:
        """A sum that is not finite is one that nobody applies."""
        if self.errors.numel():
            finite = total.isfinite().all() & error.isfinite().all()
            self._errors[bucket_id].copy_(torch.where(finite, error, self._errors[bucket_id]))


class DataParallelCommunicator:
    """The sums and gathers of a model. Every rank must start them in one order.

    Compressed sums are done on a thread of their own, or on a stream of their own on CUDA, beside backward.
    """

    def __init__(
        self,
        mesh: ShardReplicaMesh,
        layout: Layout,
        settings: CommunicationSettings,
        shard_specs: StepReductionSpecs,
        replica_specs: Sequence[StepReductionSpecs],
    ) -> None:
        """`over_replicas`: those of each shard."""
        self.mesh = mesh
        self.settings = settings
        self._bucket_owners = layout.bucket_owners
        self._algorithms = CollectiveAlgorithmSelector(settings, layout)
        codecs = resolve_codecs(settings, layout)
        shard, shard_feedback, replica_feedback = (
            mesh.shard_group.rank,
            codecs.has_shard_error_feedback,
            codecs.has_replica_error_feedback,
        )
        self._shard_reducer = (
            CompressedGradientReducer(codecs.shard_gradients, mesh.shard_group, [shard_specs], 0, shard_feedback)
            if codecs.shard_gradients
            else None
        )
        self._replica_reducer = (
            CompressedGradientReducer(
                codecs.replica_gradients, mesh.replica_group, replica_specs, shard, replica_feedback
            )
            if codecs.replica_gradients
            else None
        )
        self._parameter_codec = codecs.parameters
        self._tree_reducer = ReproducibleTreeReducer(mesh, layout) if layout.reproducible_batch_size else None
        self._steps_begun = torch.zeros((), dtype=torch.int64)  # Begun since the first of the run
        self._microbatch = 0  # The micro-batch
        # That all ranks do the same is checked until the second step begins; every other is like the first.
        self._checks_calls = True
        self._has_begun = False
        device = mesh.shard_group.device
        self._stream = torch.cuda.Stream(device) if codecs != CommunicationCodecs() and device.type == "cuda" else None
        self._work_queue = WorkQueue()
        finalize(self, self._work_queue.close)

    def begin_step(self) -> None:
        self._steps_begun += 1
        self._checks_calls = not self._has_begun
        self._has_begun = True

    def begin_backward(self, is_first: bool) -> None:
        self._microbatch = 0 if is_first else self._microbatch + 1
        if self._tree_reducer:
            self._tree_reducer.begin_backward(self._microbatch)

    def end_backward(self) -> None:
        """All of its gradients have been given."""
        if self._tree_reducer:
            self._tree_reducer.end_backward()

    @property
    def uses_summation_tree(self) -> bool:
        """Every backward gives its gradients for itself, also where no rank shares a copy."""
        return self._tree_reducer is not None

    def reduce_scatter(self, bucket_id: int, shard: Tensor, unsharded: Tensor) -> WorkHandle:
        """Over the ranks that share a copy. `whole` is free to be overwritten."""
        if self._tree_reducer:
            return self._tree_reducer.reduce_scatter(bucket_id, shard, unsharded)
        if self._shard_reducer is None or self._is_warming_up:
            options = self._call_options("reduce-scatter", "shards", unsharded)
            return api.reduce_scatter(shard, unsharded, self.mesh.shard_group, **options)
        seed = self._seed(bucket_id, "shards", self._microbatch)
        if (
            self.mesh.secondary_shard_group
            and self.mesh.secondary_replica_group
            and isinstance(self._shard_reducer.codec, BlockwiseCodec)
        ):
            levels = self.mesh.secondary_shard_group, self.mesh.secondary_replica_group
            return self._start_async(
                partial(_two_level_reduce_scatter, shard, unsharded, self._shard_reducer.codec, levels, seed)
            )
        return self._start_async(
            partial(self._shard_reducer.reduce_scatter, bucket_id, shard, unsharded, seed, self._dense_all_reduce)
        )

    def reduce(self, bucket: Tensor, owner: int) -> WorkHandle:
        """To the one rank that keeps the bucket."""
        assert self._bucket_owners
        options: CollectiveOptions = {
            "async_op": True,
            "algorithm": self._bucket_owners.reduce_algorithm,
            "check": self._checks_calls,
        }
        return api.reduce(bucket, self.mesh.shard_group, owner, **options)

    def broadcast(self, bucket: Tensor, owner: int) -> WorkHandle:
        """From it."""
        assert self._bucket_owners
        options: CollectiveOptions = {
            "async_op": True,
            "algorithm": self._bucket_owners.broadcast_algorithm,
            "check": self._checks_calls,
        }
        return api.broadcast(bucket, self.mesh.shard_group, owner, **options)

    def all_reduce(self, bucket_id: int, shard: Tensor) -> WorkHandle:
        """Over the replicas."""
        if self._tree_reducer:
            return self._tree_reducer.all_reduce(bucket_id, shard)
        if self._replica_reducer is None or self._is_warming_up:
            return api.all_reduce(shard, self.mesh.replica_group, **self._call_options("all-reduce", "replicas", shard))
        seed = self._seed(bucket_id, "replicas", self._microbatch)
        return self._start_async(
            partial(self._replica_reducer.all_reduce, bucket_id, shard, seed, self._dense_all_reduce)
        )

    def all_gather(
        self, bucket_id: int, unsharded: Tensor, local_shard: Tensor, from_secondary: bool = False
    ) -> WorkHandle:
        """Over the ranks that share a copy. A codec leaves all of them with the same bits, its own shard included.

        `near`: over the neighbours that share a second copy, which went through the codec when it was made.
        """
        if from_secondary:
            assert self.mesh.secondary_shard_group is not None
            return api.all_gather(
                unsharded,
                local_shard,
                self.mesh.secondary_shard_group,
                **self._call_options("all-gather", "near", unsharded),
            )
        if self._parameter_codec is None or not local_shard.is_floating_point():
            return api.all_gather(
                unsharded, local_shard, self.mesh.shard_group, **self._call_options("all-gather", "shards", unsharded)
            )
        seed = self._seed(bucket_id, "gather", self.mesh.shard_group.rank)
        with codec_numerics():
            message = encode(self._parameter_codec, local_shard, seed)
            messages = message.new_empty(self.mesh.shard_group.world, message.numel())
        options = self._call_options("all-gather", "shards", messages)
        work = api.all_gather(messages, message, self.mesh.shard_group, **options)
        return _PendingCompressedGather(work, messages, unsharded, self._parameter_codec)

    def compression_state(self) -> dict[str, LocalShard | Tensor]:
        """What only ranks and buckets like these can go on with: a row for each rank. Read and written as views."""
        reducers = {"shards": self._shard_reducer, "replicas": self._replica_reducer}
        world = self.mesh.shard_group.world * self.mesh.replica_group.world
        rank = self.mesh.replica_group.rank * self.mesh.shard_group.world + self.mesh.shard_group.rank
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
        options = self._call_options("all-reduce", group_name, tensor)
        api.all_reduce(tensor, ranks, **(options | {"async_op": False}))

    def _call_options(self, collective: str, group_name: GroupName, tensor: Tensor) -> CollectiveOptions:
        return {
            "async_op": True,
            "algorithm": self._algorithms.program(collective, group_name, tensor.nbytes),
            "check": self._checks_calls,
        }

    def _start_async(self, task: Callable[[], None]) -> WorkHandle:
        task = partial(_run_with_codec_numerics, task)
        if self._stream is None:
            return self._work_queue.submit(task)
        return run_on_stream(task, self._stream)


class _PendingCompressedGather:
    """Messages of parameters. The caller has sent them and decodes them, so that it may send other things before."""

    def __init__(self, work: WorkHandle, messages: Tensor, unsharded: Tensor, codec: BlockwiseCodec) -> None:
        self._work = work
        self._messages: Tensor | None = messages
        self._unsharded = unsharded
        self._codec = codec

    def wait(self) -> None:
        self._work.wait()
        if self._messages is None:
            return
        with codec_numerics():
            for shard, message in zip(self._unsharded.view(len(self._messages), -1), self._messages, strict=True):
                shard.copy_(decode(self._codec, message, shard.shape, shard.dtype))
        self._messages = None

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _two_level_reduce_scatter(
    shard: Tensor, unsharded: Tensor, codec: BlockwiseCodec, levels: tuple[RankGroup, RankGroup], seed: int
) -> None:
    """Among neighbours first, so that between hosts there is one message of a host where there was one of each rank."""
    intra, inter = levels
    by_rank = unsharded.view(inter.world, intra.world, -1).transpose(0, 1)
    sums, _ = compressed_collectives.reduce_scatter(by_rank, codec, intra, derive_seed(seed, "near"))
    shard.copy_(compressed_collectives.reduce_scatter(sums, codec, inter, derive_seed(seed, "far"))[0])


def _run_with_codec_numerics(task: Task) -> None:
    with codec_numerics():
        task()


def _basis_shapes(codec: Codec, specs: StepReductionSpecs) -> list[list[tuple[int, int]]]:
    """Shapes of PowerSGD's bases, for each part of each sum; none is 0 x 0."""
    if not isinstance(codec, PowerSGDCodec):
        return []
    return [
        [(p.columns, min(codec.rank, p.rows, p.columns)) if isinstance(p, MatrixView) else (0, 0) for p in parts]
        for parts in (one.split_for_powersgd(codec, specs.dtype) for one in specs.buffers)
    ]
