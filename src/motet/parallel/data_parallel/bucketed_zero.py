"""Stages 0 to 2 of ZeRO on flat buckets: gradients are reduced over the ranks, and updated parameters gathered.

With shards, a rank gets the sum of its shard, updates it, and gathers the other shards; a shard group is one replica.
Without shards every rank is a replica, and gradients are all-reduced.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from motet.collectives.execute.api import broadcast
from motet.collectives.execute.work_queue import WorkHandle
from motet.core import trace
from motet.core.errors import check_input
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    resolve_codecs,
    uses_gradient_gather,
)
from motet.parallel.data_parallel.communication.communicator import DataParallelCommunicator
from motet.parallel.data_parallel.communication.powersgd_matrices import bucket_reduction_specs
from motet.parallel.data_parallel.communication.shard_replica_mesh import ShardReplicaMesh
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.flat_parameters import FlatParameters, GradientBuffer
from motet.parallel.data_parallel.forward_prefetch import ModuleParameterWaiter
from motet.parallel.data_parallel.zero import ZERO_STAGES, BucketsAndFSDPUnits, make_buckets
from motet.precision.recipe import PrecisionRecipe


class BucketedDataParallel:
    """Stages 0 to 2. Every rank communicates the buckets in the same order, whatever the order of its backward."""

    def __init__(
        self,
        parameters: Mapping[str, tuple[int, nn.Parameter]],
        recipe: PrecisionRecipe,
        mesh: ShardReplicaMesh,
        *,
        sharding: DataParallelSharding,
        settings: CommunicationSettings,
    ) -> None:
        """Put parameters, name -> (optimizer group, parameter), on flat tensors that are sharded as the layout says."""
        named = {name: parameter for name, (_, parameter) in parameters.items()}
        shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        sizes = {name: (optimizer_group, p.numel()) for name, (optimizer_group, p) in parameters.items()}
        buckets, group = make_buckets(sizes, sharding, recipe, settings=settings), mesh.shard_group
        self.mesh, self._buckets, rank = mesh, buckets, group.rank
        self.comm_units = BucketsAndFSDPUnits(buckets, shapes=shapes)
        # Gathers shards of the sums instead of parameters; then every rank updates everything, as the sums arrive.
        self.updates_on_arrival = uses_gradient_gather(settings, sharding)
        self.keeps_full_gradients = (
            not ZERO_STAGES[sharding.zero].gradients and sharding.reproducible_batch_size is None
        )
        self._gradients = GradientBuffer(
            buckets, rank, getattr(torch, recipe.reduce), device=group.device, keeps_all=self.keeps_full_gradients
        )
        self._gradients.on_bucket_ready = self._on_bucket_ready
        self.flat_parameters = FlatParameters(
            named,
            buckets,
            [bucket.flat_slice if self.updates_on_arrival else bucket.shard_slice(rank) for bucket in buckets],
            recipe=recipe,
            gradients=self._gradients,
            separate_masters=resolve_codecs(settings, sharding).parameters is not None,
        )
        self.optimizer_groups = [each.optimizer_group for each in self.flat_parameters.optimizer_slices]
        self.local_shards = self.flat_parameters.local_shards
        self.local_masters = [each.master for each in self.flat_parameters.optimizer_slices]  # This rank updates them
        specs = partial(bucket_reduction_specs, buckets, shapes=shapes, dtype=recipe.reduce)
        shard_specs = [specs(shard) for shard in range(group.world if settings.compress_gradients else 0)]
        self.communicator = DataParallelCommunicator(
            mesh, sharding, settings, specs=specs(None), shard_specs=shard_specs
        )
        self._bucket_ids: dict[Tensor, int] = {named[m.name]: i for i, each in enumerate(buckets) for m in each.members}
        # Fetches updates that other processes do, such as servers.
        self.fetch_updates: Callable[[], None] = lambda: None
        # (bucket, output for this rank's shard, work) of the reduce-scatter in flight.
        self._pending_scatter: tuple[int, Tensor, WorkHandle | None] | None = None
        self._pending_all_reduces: list[WorkHandle] = []
        self._ready_buckets: set[int] = set()
        self._next_bucket = 0
        self._is_first_microbatch = self._is_last_microbatch = self._reduces_this_microbatch = True
        self._usage_tracker: ModuleParameterWaiter | None = None
        self._gather_order: tuple[int, ...] = ()  # Order of gathers that overlap forward, once it is known
        self._pending_gathers: dict[int, WorkHandle] = {}
        self._pending_update: Callable[[Sequence[int]], None] | None = None  # Runs when gathered gradients arrive

    def enable_forward_prefetch(self, module: nn.Module) -> None:
        """After the first forward, let each module wait only for the buckets that it uses."""
        self._usage_tracker = ModuleParameterWaiter(module, self._bucket_ids, self._wait_for_bucket)

    def begin_step(self) -> None:
        self.flat_parameters.check_storage_unchanged()
        if self._usage_tracker:
            self._usage_tracker.begin_step()
        self.communicator.begin_step()
        self._gradients.begin_step()

    def begin_backward(self, is_first: bool, is_last: bool) -> None:
        """Begin the backward of a micro-batch, which is the first or last of the step."""
        self.wait_for_pending()
        if self._usage_tracker:
            self._usage_tracker.finish_recording()
        self._is_first_microbatch, self._is_last_microbatch, self._next_bucket = is_first, is_last, 0
        self._reduces_this_microbatch = is_last or not self.keeps_full_gradients
        self._ready_buckets.clear()
        self.communicator.begin_backward(is_first)
        self._gradients.begin_backward()

    def end_backward(self) -> None:
        """Reduce the remaining buckets, and wait for all of them."""
        if not self._reduces_this_microbatch:
            return
        with trace.span("communicate"):
            while self._next_bucket < len(self._buckets):
                self._start_reduce()
            self._finish_reduce_scatter()
            for work in self._pending_all_reduces:
                work.wait()
            self._pending_all_reduces.clear()
        self.communicator.end_backward()

    def local_gradients(self) -> Sequence[Tensor]:
        """The gradients of the masters, in the dtype of the sums."""
        return [self._gradients.local_slice(each.flat_slice) for each in self.flat_parameters.optimizer_slices]

    def reduced_gradients(self) -> Sequence[Tensor]:
        """This rank's shards of the sums, each element once over the ranks that count."""
        shards = map(self._gradients.shard, range(len(self._buckets)))
        return [*shards] if self.updates_on_arrival else self.local_gradients()

    def update(self, update_masters: Callable[[Sequence[int]], None]) -> None:
        """Update masters by their indices, and let every rank compute with the result."""
        self.wait_for_pending()
        if self.updates_on_arrival:
            self._pending_update = update_masters
            self._start_gathers([self._gradients.bucket(bucket_id) for bucket_id in range(len(self._buckets))])
        else:
            update_masters(range(len(self.flat_parameters.optimizer_slices)))
            self.sync_parameters()

    def sync_parameters(self) -> None:
        """Cast this rank's masters, and gather the parameters that other ranks have updated."""
        self.wait_for_pending()
        self.flat_parameters.cast_masters()
        if self.mesh.shard_group.world > 1 and not self.updates_on_arrival:
            self._start_gathers([self.flat_parameters.compute[bucket.flat_slice] for bucket in self._buckets])

    def load_assigned_values(self) -> None:
        """Continue from values that were assigned to parameters, on all ranks alike."""
        check_input(
            not self._pending_gathers,
            'load_assigned_values: with communication.overlap = "forward" some values were still arriving, and may '
            "have replaced what you assigned; call engine.synchronize() before you change any",
        )
        self.flat_parameters.load_assigned_values()

    def wait_for_pending(self) -> None:
        """Wait until parameters and masters have the values of the last update or `sync_parameters`."""
        self.fetch_updates()
        if self._usage_tracker:
            self._usage_tracker.exit_recorder()
        for bucket_id in list(self._pending_gathers):
            self._wait_for_bucket(bucket_id)

    def _start_gathers(self, buckets: Sequence[Tensor]) -> None:
        group = self.mesh.shard_group
        for bucket_id in self._first_use_order() or range(len(buckets)):
            unsharded, owner = buckets[bucket_id], self._buckets[bucket_id].owner
            self._pending_gathers[bucket_id] = (
                self.communicator.all_gather(bucket_id, unsharded, unsharded.view(group.world, -1)[group.rank])
                if owner is None
                else self.communicator.broadcast(unsharded, owner)
            )
        if not self._gather_order:
            self.wait_for_pending()

    def _first_use_order(self) -> tuple[int, ...]:
        # The order in which the first rank's forward uses buckets.
        if not self._gather_order and self._usage_tracker and self._usage_tracker.first_use_order:
            order = torch.tensor(self._usage_tracker.first_use_order, device=self.mesh.shard_group.device)
            broadcast(order, self.mesh.shard_group)
            self._gather_order = tuple(order.tolist())
        return self._gather_order

    def _wait_for_bucket(self, bucket_id: int) -> None:
        work = self._pending_gathers.pop(bucket_id, None)
        if work is None:
            return
        with trace.span("gather"):
            work.wait()
        if self._pending_update is not None:
            slices = self.flat_parameters.optimizer_slices
            slice_ids = [i for i, each in enumerate(slices) if each.bucket_id == bucket_id]
            self._pending_update(slice_ids)
            self.flat_parameters.cast_masters([slices[i] for i in slice_ids])
        if self._gather_order:  # a forward that has used the bucket already gets an error of autograd
            self.flat_parameters.bump_versions(bucket_id)

    @property
    def _accumulates_shards(self) -> bool:
        # Shards of this micro-batch are added to those before it; a summation tree does so itself.
        return not (self.keeps_full_gradients or self._is_first_microbatch or self.communicator.uses_summation_tree)

    def _on_bucket_ready(self, bucket_id: int) -> None:
        self._ready_buckets.add(bucket_id)
        if self._reduces_this_microbatch and self.communicator.settings.overlap != "none":
            while self._next_bucket in self._ready_buckets:
                self._start_reduce()

    def _start_reduce(self) -> None:
        """Start to reduce the next bucket and continue the one before it, complete or not: the same on every rank."""
        bucket_id, self._next_bucket = self._next_bucket, self._next_bucket + 1
        self._gradients.zero_missing(bucket_id)
        unsharded, shard = self._gradients.bucket(bucket_id), self._gradients.shard(bucket_id)
        output, work = torch.empty_like(shard) if self._accumulates_shards else shard, None
        owner = self._buckets[bucket_id].owner
        if owner is not None:
            work = self.communicator.reduce(unsharded, owner)  # the shard is the bucket, or empty
        elif self.mesh.shard_group.world > 1 or self.communicator.uses_summation_tree:
            work = self.communicator.reduce_scatter(bucket_id, output, unsharded)
        elif not self.keeps_full_gradients:
            output.copy_(unsharded)
        self._finish_reduce_scatter()
        self._pending_scatter = bucket_id, output, work
        if work is None:
            self._finish_reduce_scatter()

    def _finish_reduce_scatter(self) -> None:
        """Wait for the shard, add it to those of earlier micro-batches, and all-reduce it over the replicas."""
        if self._pending_scatter is None:
            return
        (bucket_id, output, work), self._pending_scatter = self._pending_scatter, None
        if work is not None:
            work.wait()
        shard = self._gradients.shard(bucket_id)
        if not self.keeps_full_gradients:
            self._gradients.free_bucket(bucket_id)
            if self._accumulates_shards:
                shard.add_(output)
        del output, work  # before the all-reduce allocates
        if self._is_last_microbatch and self.mesh.replica_group.world > 1:
            self._pending_all_reduces.append(self.communicator.all_reduce(bucket_id, shard))
