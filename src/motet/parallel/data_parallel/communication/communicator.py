"""Reductions and gathers of a step: by the algorithms of the settings, or by a codec."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from weakref import finalize
from zlib import crc32

import torch
from torch import Tensor

from motet.collectives.compression import compressed_collectives
from motet.collectives.compression.codecs import BlockwiseCodec, Codec, PowerSGDCodec
from motet.collectives.compression.compressed_collectives import DenseAllReduce, codec_numerics, decode, encode
from motet.collectives.execute import api
from motet.collectives.execute.api import CollectiveOptions
from motet.collectives.execute.work_queue import WorkHandle, WorkQueue, run_on_stream
from motet.collectives.program import Program
from motet.core.seeds import derive_seed
from motet.parallel.data_parallel.comm_units import SyncGroupPlan
from motet.parallel.data_parallel.communication.communication_settings import (
    CollectiveAlgorithmSelector,
    CommunicationSettings,
    GroupName,
)
from motet.parallel.data_parallel.communication.powersgd_matrices import MatrixView, StepReductionSpecs
from motet.parallel.data_parallel.communication.shard_replica_mesh import ShardReplicaMesh
from motet.parallel.data_parallel.zero import CommUnitAction
from motet.parallel.process.process_group import RankGroup
from motet.parallel.reproducible.tree_reduce import ReproducibleTreeReducer, WorkWithFinish


class DataParallelCommunicator:
    """Reductions and gathers of one model. Every rank must start them in the same order."""

    def __init__(
        self, mesh: ShardReplicaMesh, plan: SyncGroupPlan, settings: CommunicationSettings, *, dtype: str
    ) -> None:
        """Gradients are reduced in `dtype`."""
        sharding, units, device = plan.group.sharding, plan.units, mesh.shard_group.device
        self.mesh, self._settings, self._units = mesh, settings, units
        self._owners = sharding.bucket_owners
        self._algorithms = CollectiveAlgorithmSelector(settings, sharding)
        actions = [action for unit in units for action in unit.schedule]
        self._keeps_compression_state = any(action.codec for action in actions)
        every_shard = range(mesh.shard_group.world)
        self._shard_reducer = _compressed_reducer(plan, "shards", mesh.shard_group, dtype=dtype, shards=[None], index=0)
        self._replica_reducer = _compressed_reducer(
            plan, "replicas", mesh.replica_group, dtype=dtype, shards=every_shard, index=mesh.shard_group.rank
        )
        uses_tree = any(action.kind.startswith("tree_") for action in actions)
        self._tree_reducer = ReproducibleTreeReducer(mesh, sharding) if uses_tree else None
        self._steps_begun = torch.zeros((), dtype=torch.int64)  # Steps since the start of the run
        self._microbatch, self._local_steps = 0, 0  # Steps begun by this process
        # Compressed reductions run on a separate thread, or on a separate stream on CUDA, in parallel with backward.
        uses_stream = self._keeps_compression_state and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if uses_stream else None
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

    def execute(
        self,
        action: CommUnitAction,
        unit_id: int,
        output: Tensor,
        *,
        source: Tensor | None = None,
        is_async: bool = True,
    ) -> WorkHandle:
        """Start the collective of an action on a unit. A `source` may be overwritten.

        Scatters reduce the source into the output, gathers gather it; else the output is the source, too.
        """
        shards, owner = self.mesh.shard_group, self._units[unit_id].owner
        match action.kind:
            case "reduce_scatter" | "two_level_reduce_scatter":
                assert source is not None
                return self._reduce_scatter(action, unit_id, output, unsharded=source, is_async=is_async)
            case "tree_reduce_scatter":
                assert self._tree_reducer and source is not None
                return self._tree_reducer.reduce_scatter(unit_id, output, source)
            case "all_reduce":
                return self._all_reduce(action, unit_id, output, is_async=is_async)
            case "tree_all_reduce":
                assert self._tree_reducer
                return self._tree_reducer.all_reduce(unit_id, output)
            case "all_gather":
                source = output.view(shards.world, -1)[shards.rank] if source is None else source
                return self._all_gather(action, unit_id, output, shard=source, is_async=is_async)
            case "reduce":  # the output is the owner's source, or empty
                assert source is not None and self._owners and owner is not None
                return api.reduce(source, shards, owner, **self._options(self._owners.reduce_algorithm))
            case "broadcast":
                assert self._owners and owner is not None
                return api.broadcast(output, shards, owner, **self._options(self._owners.broadcast_algorithm))
        raise AssertionError(action.kind)

    def _reduce_scatter(
        self, action: CommUnitAction, unit_id: int, shard: Tensor, *, unsharded: Tensor, is_async: bool
    ) -> WorkHandle:
        mesh, reducer = self.mesh, self._shard_reducer
        if reducer is None or self._is_warming_up:
            options = self._call_options("reduce-scatter", "shards", unsharded, is_async=is_async)
            return api.reduce_scatter(shard, unsharded, mesh.shard_group, **options)
        task = partial(reducer.reduce_scatter, unit_id, shard, unsharded, dense_all_reduce=self._dense_all_reduce)
        if action.kind == "two_level_reduce_scatter":
            intra, inter = mesh.secondary_shard_group, mesh.secondary_replica_group
            assert intra and inter and isinstance(reducer.codec, BlockwiseCodec)
            task = partial(_two_level_reduce_scatter, shard, unsharded, reducer.codec, intra=intra, inter=inter)
        return self._start_async(partial(task, seed=self._seed(unit_id, "shards", self._microbatch)))

    def _all_reduce(self, action: CommUnitAction, unit_id: int, tensor: Tensor, *, is_async: bool) -> WorkHandle:
        reducer, group = self._replica_reducer, self.mesh.replica_group
        if reducer is None or self._is_warming_up:
            return api.all_reduce(
                tensor, group, **self._call_options("all-reduce", "replicas", tensor, is_async=is_async)
            )
        seed, dense_all_reduce = self._seed(unit_id, "replicas", self._microbatch), self._dense_all_reduce
        return self._start_async(partial(reducer.all_reduce, unit_id, tensor, seed, dense_all_reduce=dense_all_reduce))

    def _all_gather(
        self, action: CommUnitAction, unit_id: int, output: Tensor, *, shard: Tensor, is_async: bool
    ) -> WorkHandle:
        """Gather shards; with a codec all ranks get the same bits, this rank's shard included."""
        group = self.mesh.secondary_shard_group if action.over == "near" else self.mesh.shard_group
        codec = action.codec
        assert group is not None and action.over is not None
        if codec is None or not shard.is_floating_point():
            options = self._call_options("all-gather", action.over, output, is_async=is_async)
            return api.all_gather(output, shard, group, **options)
        with codec_numerics():
            message = encode(codec, shard, self._seed(unit_id, "gather", group.rank))
            messages = message.new_empty(group.world, message.numel())
        options = self._call_options("all-gather", "shards", messages, is_async=is_async)

        def decode_shards() -> None:
            with codec_numerics():
                for part, received in zip(output.view(len(messages), -1), messages, strict=True):
                    part.copy_(decode(codec, received, part.shape, part.dtype))

        return WorkWithFinish(api.all_gather(messages, message, group, **options), decode_shards)

    def compression_state(self) -> dict[str, Tensor]:
        """State of this rank that only the same layout can continue with; views, to be read and written."""
        reducers = {"shards": self._shard_reducer, "replicas": self._replica_reducer}
        named = ((group_name, reducer.state()) for group_name, reducer in reducers.items() if reducer)
        state = {f"{group_name}-{name}": tensor for group_name, each in named for name, tensor in each.items()}
        return {"steps": self._steps_begun, **state} if state or self._keeps_compression_state else {}

    @property
    def _is_warming_up(self) -> bool:
        return int(self._steps_begun) <= self._settings.compress_after

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


def _compressed_reducer(
    plan: SyncGroupPlan, over: GroupName, group: RankGroup, *, dtype: str, shards: Iterable[int | None], index: int
) -> "CompressedGradientReducer | None":
    """The reducer of the sums over a group, if the plan compresses them; the buffer is that of the shard at `index`."""
    sums = (a for unit in plan.units for a in unit.schedule if a.over == over and a.tensor == "gradients")
    action = next((action for action in sums if action.codec), None)
    if action is None or action.codec is None:
        return None
    specs = [StepReductionSpecs(tuple(unit.reduction_spec(i) for unit in plan.units), dtype) for i in shards]
    return CompressedGradientReducer(action.codec, group, specs, shard=index, error_feedback=action.keeps_error)


def _two_level_reduce_scatter(
    shard: Tensor, unsharded: Tensor, codec: BlockwiseCodec, *, intra: RankGroup, inter: RankGroup, seed: int
) -> None:
    """Reduce inside the host first, so that a host sends another host one message instead of one per rank."""
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
        """State of the next reductions; its names are specific to these specs and this number of ranks."""
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
        """(the tensor with the error of the step before, in its dtype; the loss of the rounding to this dtype)."""
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
