"""Data parallelism on flat buckets: gradients are summed over the ranks, and updated parameters given to all.

With shards, each rank gets the sum of its shard, updates it, and gathers what the others have updated; a group of ranks
that shares a copy is then one replica. Without, every rank is a replica of its own: gradients are all-reduced.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from motet.collectives.execute.api import RankGroupLike, broadcast
from motet.collectives.execute.work_queue import WorkHandle
from motet.core import trace
from motet.core.errors import InputError
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    resolve_codecs,
    uses_gradient_gather,
)
from motet.parallel.data_parallel.communication.communicator import DataParallelCommunicator
from motet.parallel.data_parallel.communication.powersgd_matrices import bucket_reduction_specs
from motet.parallel.data_parallel.communication.shard_replica_mesh import ShardReplicaMesh
from motet.parallel.data_parallel.flat_parameters import FlatParameters, GradientBuffer
from motet.parallel.data_parallel.forward_prefetch import ParameterUsageTracker
from motet.parallel.data_parallel.sharded_parameters import LocalShard
from motet.parallel.data_parallel.zero import ZERO_STAGES, BucketsAndFSDPUnits, make_buckets
from motet.parallel.layout import Layout
from motet.precision.recipe import PrecisionRecipe


def build_bucketed_data_parallel(
    parameters: Mapping[str, tuple[int, nn.Parameter]],
    recipe: PrecisionRecipe,
    mesh: ShardReplicaMesh,
    layout: Layout,
    settings: CommunicationSettings,
) -> "BucketedDataParallel":
    """Put parameters on flat tensors, cut as the layout says. `parameters`: name -> (optimizer group, parameter)."""
    gathers_gradients = uses_gradient_gather(settings, layout)
    sizes = {name: (group, parameter.numel()) for name, (group, parameter) in parameters.items()}
    buckets = make_buckets(sizes, layout, recipe, settings)
    keeps_full_gradients = not ZERO_STAGES[layout.zero].gradients and layout.reproducible_batch_size is None
    named = {name: p for name, (_, p) in parameters.items()}
    separate_masters = resolve_codecs(settings, layout).parameters is not None
    device = mesh.shard_group.device
    gradients = GradientBuffer(
        buckets, mesh.shard_group.rank, getattr(torch, recipe.reduce), device, keeps_full_gradients
    )
    updated_slices = [
        slice(b.start, b.stop) if gathers_gradients else b.shard_slice(mesh.shard_group.rank) for b in buckets
    ]
    flat_parameters = FlatParameters(named, buckets, updated_slices, recipe, gradients, separate_masters)
    shapes = {name: tuple(p.shape) for name, p in named.items()}
    shards = range(mesh.shard_group.world if settings.compress_gradients else 0)
    replica_specs = [bucket_reduction_specs(buckets, shard, shapes, recipe.reduce) for shard in shards]
    communicator = DataParallelCommunicator(
        mesh, layout, settings, bucket_reduction_specs(buckets, None, shapes, recipe.reduce), replica_specs
    )
    bucket_ids: dict[Tensor, int] = {
        named[member.name]: number for number, bucket in enumerate(buckets) for member in bucket.members
    }
    return BucketedDataParallel(
        flat_parameters,
        mesh,
        communicator,
        settings.overlap != "none",
        keeps_full_gradients,
        gathers_gradients,
        bucket_ids,
    )


@dataclass
class _PendingBucketReduce:
    """Of one bucket, underway."""

    bucket_id: int
    shard: Tensor  # Where the sum of this rank's shard arrives
    work: WorkHandle | None = None
    is_scattered: bool = False  # The shard is there; what is underway then is its sum over the replicas


@dataclass
class BucketedDataParallel:
    """Stages 0 to 2, and the communication of a step.

    Every rank sends the buckets in one order, whatever its own backward was.
    """

    flat_parameters: FlatParameters
    mesh: ShardReplicaMesh
    communicator: DataParallelCommunicator
    overlaps_backward: bool  # Buckets are sent during backward
    # Whole gradients are summed over the micro-batches, and sent once a step; else shards are, each time.
    keeps_full_gradients: bool
    # Shards of the sums are gathered, not of what is updated; every rank updates all of a bucket when it has it.
    gathers_gradients: bool
    bucket_ids: Mapping[Tensor, int]  # The bucket of each parameter
    fetch_updates: Callable[[], None] = lambda: None  # Brings what others have updated, where it is others that do
    _pending_reduces: list[_PendingBucketReduce] = field(default_factory=list)
    _ready_buckets: set[int] = field(default_factory=set)
    _next_bucket: int = 0
    _is_first_microbatch: bool = True
    _is_last_microbatch: bool = True
    _usage_tracker: ParameterUsageTracker | None = None
    _gather_order: tuple[int, ...] = ()  # In which buckets are gathered beside the next forward, once that is known
    _pending_gathers: dict[int, WorkHandle] = field(default_factory=dict)
    # What is still to be done with gradients that arrive.
    _pending_update: Callable[[Sequence[int]], None] | None = None

    def __post_init__(self) -> None:
        self.flat_parameters.gradients.on_bucket_ready = self._on_bucket_ready

    def enable_forward_prefetch(self, module: nn.Module) -> None:
        """After the first forward modules wait for what they use, while the rest arrives beside them."""
        self._usage_tracker = ParameterUsageTracker(module, self.bucket_ids, self._wait_for_bucket)

    def begin_step(self) -> None:
        self.flat_parameters.check_storage_unchanged()
        if self._usage_tracker:
            self._usage_tracker.begin_step()
        self.communicator.begin_step()
        self.flat_parameters.gradients.begin_step()

    def begin_backward(self, is_first: bool, is_last: bool) -> None:
        """Of a micro-batch, which is the first or last of the step."""
        self.wait_for_pending()
        if self._usage_tracker:
            self._usage_tracker.finish_recording()
        self._is_first_microbatch, self._is_last_microbatch, self._next_bucket = is_first, is_last, 0
        self._ready_buckets.clear()
        self.communicator.begin_backward(is_first)
        self.flat_parameters.gradients.begin_backward()

    def end_backward(self) -> None:
        """Send what is left, and see that all of it has arrived."""
        if not self._reduces_this_microbatch:
            return
        with trace.span("communicate"):
            while self._next_bucket < len(self.flat_parameters.buckets):
                self._start_reduce()
            for pending in self._pending_reduces:
                self._finish_reduce_scatter(pending)
            for pending in self._pending_reduces:
                if pending.work is not None:
                    pending.work.wait()
            self._pending_reduces.clear()
        self.communicator.end_backward()

    @property
    def comm_units(self) -> BucketsAndFSDPUnits:
        shapes = {name: tuple(piece.shape) for name, piece in self.local_shards(self.local_masters).items()}
        return BucketsAndFSDPUnits(self.flat_parameters.buckets, shapes=shapes)

    @property
    def optimizer_groups(self) -> Sequence[int]:
        return [part.optimizer_group for part in self.flat_parameters.optimizer_slices]

    @property
    def local_masters(self) -> Sequence[Tensor]:
        return [part.master for part in self.flat_parameters.optimizer_slices]

    @property
    def contributes_to_norm(self) -> bool:
        return self.mesh.contributes_to_norm

    @property
    def updates_on_arrival(self) -> bool:
        return self.gathers_gradients

    def local_gradients(self) -> Sequence[Tensor]:
        return [
            self.flat_parameters.gradients.local_slice(part.flat_slice)
            for part in self.flat_parameters.optimizer_slices
        ]

    def local_shards(self, tensors: Sequence[Tensor]) -> dict[str, LocalShard]:
        return self.flat_parameters.local_shards(tensors)

    def compression_state(self) -> dict[str, LocalShard | Tensor]:
        return self.communicator.compression_state()

    def reduced_gradients(self) -> Sequence[Tensor]:
        if not self.gathers_gradients:
            return self.local_gradients()
        return [self.flat_parameters.gradients.shard(number) for number in range(len(self.flat_parameters.buckets))]

    def update(self, update_masters: Callable[[Sequence[int]], None]) -> None:
        self.wait_for_pending()
        if not self.gathers_gradients:
            update_masters(range(len(self.flat_parameters.optimizer_slices)))
            self.sync_parameters()
            return
        self._pending_update = update_masters
        self._start_gathers(
            [self.flat_parameters.gradients.bucket(number) for number in range(len(self.flat_parameters.buckets))]
        )

    def sync_parameters(self) -> None:
        """Cast what this rank has updated, and gather what the others have."""
        self.wait_for_pending()
        self.flat_parameters.cast_masters()
        if self.mesh.shard_group.world > 1 and not self.gathers_gradients:
            self._start_gathers([self.flat_parameters.compute[b.start : b.stop] for b in self.flat_parameters.buckets])

    def load_assigned_values(self) -> None:
        if self._pending_gathers:
            raise InputError(
                'adopt: with communication.overlap = "forward" some values were still arriving, and may have replaced '
                "what you assigned; call engine.synchronize() before you change any"
            )
        self.flat_parameters.load_assigned_values()

    def wait_for_pending(self) -> None:
        self.fetch_updates()
        if self._usage_tracker:
            self._usage_tracker.exit_recorder()
        for bucket_id in list(self._pending_gathers):
            self._wait_for_bucket(bucket_id)

    def _start_gathers(self, buckets: Sequence[Tensor]) -> None:
        shards = self.mesh.shard_group
        for bucket_id in self._first_use_order() or range(len(buckets)):
            unsharded, owner = buckets[bucket_id], self.flat_parameters.buckets[bucket_id].owner
            if owner is not None:
                self._pending_gathers[bucket_id] = self.communicator.broadcast(unsharded, owner)
                continue
            local_shard = unsharded.view(shards.world, -1)[shards.rank]
            self._pending_gathers[bucket_id] = self.communicator.all_gather(bucket_id, unsharded, local_shard)
        if not self._gather_order:
            self.wait_for_pending()

    def _first_use_order(self) -> tuple[int, ...]:
        """As the first rank's forward needed them."""
        if not self._gather_order and self._usage_tracker and self._usage_tracker.first_use_order:
            order = torch.tensor(self._usage_tracker.first_use_order, device=self.mesh.shard_group.device)
            broadcast(order, self.mesh.shard_group)
            self._gather_order = tuple(order.tolist())
        return self._gather_order

    def _wait_for_bucket(self, bucket_id: int) -> None:
        """Until a bucket has arrived and is what the model is to compute with."""
        work = self._pending_gathers.pop(bucket_id, None)
        if work is None:
            return
        with trace.span("gather"):
            work.wait()
        if self._pending_update is not None:
            slice_ids = [
                i for i, part in enumerate(self.flat_parameters.optimizer_slices) if part.bucket_id == bucket_id
            ]
            self._pending_update(slice_ids)
            self.flat_parameters.cast_masters([self.flat_parameters.optimizer_slices[i] for i in slice_ids])
        if self._gather_order:  # whoever has used it already is told by autograd
            self.flat_parameters.bump_versions(bucket_id)

    @property
    def _reduces_this_microbatch(self) -> bool:
        return self._is_last_microbatch or not self.keeps_full_gradients

    @property
    def _accumulates_shards(self) -> bool:
        """Those of this micro-batch to those before it; a tree does so by itself."""
        return not (self.keeps_full_gradients or self._is_first_microbatch or self.communicator.uses_summation_tree)

    def _on_bucket_ready(self, bucket_id: int) -> None:
        """Called from backward, when it has all gradients of a bucket."""
        self._ready_buckets.add(bucket_id)
        if self._reduces_this_microbatch and self.overlaps_backward:
            while self._next_bucket in self._ready_buckets:
                self._start_reduce()

    def _start_reduce(self) -> None:
        """Start to sum the next bucket."""
        bucket_id, gradients, shards = self._next_bucket, self.flat_parameters.gradients, self.mesh.shard_group
        self._next_bucket += 1
        gradients.zero_missing(bucket_id)
        unsharded, shard = gradients.bucket(bucket_id), gradients.shard(bucket_id)
        pending = _PendingBucketReduce(bucket_id, torch.empty_like(shard) if self._accumulates_shards else shard)
        self._pending_reduces.append(pending)
        owner = self.flat_parameters.buckets[bucket_id].owner
        if owner is not None:
            pending.work = self.communicator.reduce(unsharded, owner)  # the shard is all of it, or nothing
        elif shards.world > 1 or self.communicator.uses_summation_tree:
            pending.work = self.communicator.reduce_scatter(bucket_id, pending.shard, unsharded)
        elif not self.keeps_full_gradients:
            pending.shard.copy_(unsharded)
        for earlier in self._pending_reduces[
            :-1
        ]:  # never by what happens to be done: the order is the same on every rank
            self._finish_reduce_scatter(earlier)
        if pending.work is None:
            self._finish_reduce_scatter(pending)

    def _finish_reduce_scatter(self, pending: _PendingBucketReduce) -> None:
        """Once the shard is there: add it to those of earlier micro-batches, and sum it over the replicas."""
        if pending.is_scattered:
            return
        if pending.work is not None:
            pending.work.wait()
            pending.work = None
        pending.is_scattered = True
        gradients = self.flat_parameters.gradients
        shard = gradients.shard(pending.bucket_id)
        if not self.keeps_full_gradients:
            gradients.free_bucket(pending.bucket_id)
            if self._accumulates_shards:
                shard.add_(pending.shard)
                pending.shard = shard  # and what came is freed
        if self._is_last_microbatch and self.mesh.replica_group.world > 1:
            pending.work = self.communicator.all_reduce(pending.bucket_id, shard)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the state of a module: running statistics, say, but no tables that it can remake."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, inner in module.named_modules()
        for name, buffer in inner._buffers.items()  # a state_dict would say it too, but costs more than a step may
        if buffer is not None and name not in inner._non_persistent_buffers_set
    }


def broadcast_buffers(module: nn.Module, ranks: RankGroupLike) -> None:
    """Buffers become the first rank's: there is one of each, in every step, evaluation and checkpoint."""
    for buffer in persistent_buffers(module).values():
        if not buffer.is_contiguous():
            buffer.data = buffer.data.contiguous()
        broadcast(buffer.detach(), ranks)


def broadcast_parameters_and_buffers(module: nn.Module, ranks: RankGroupLike) -> None:
    """Everyone starts from the first rank's values, whatever a module was initialised from."""
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
        broadcast(parameter.data, ranks)
    broadcast_buffers(module, ranks)
