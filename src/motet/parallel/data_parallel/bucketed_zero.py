"""Stages 0 to 2 of ZeRO on flat buckets: this engine executes the actions of a plan on each bucket.

Gradients are reduced as backward completes buckets, and updated parameters gathered. Every rank communicates the
buckets in the same order, whatever the order of its backward.

The reductions of one bucket, executed in the order of its schedule.

Records which modules use which parameters, so that a module can wait for exactly the buckets that it needs.

One forward is recorded. A parameter counts as used by the innermost active module when any torch function takes it, and
by each module that owns it. A use outside of all modules, as in a loss function, counts for the module that was called
last. Parameters that were not used, or used before any module was called, are waited for at the beginning of a step.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from motet.collectives.execute.api import broadcast
from motet.collectives.execute.work_queue import WorkHandle
from motet.core import trace
from motet.core.errors import check_input
from motet.memory.tiers.optimizer_states import HostStates
from motet.models.torch_private import InterceptedFunctions
from motet.parallel.data_parallel.buckets import Bucket
from motet.parallel.data_parallel.comm_units import SyncGroupPlan
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.communication.communicator import DataParallelCommunicator
from motet.parallel.data_parallel.communication.shard_replica_mesh import ShardReplicaMesh
from motet.parallel.data_parallel.flat_parameters import (
    FlatParameters,
    GradientBuffer,
    LocalShard,
    MasterUpdate,
    ParameterGradientSum,
    member_overlaps,
    no_update,
)
from motet.parallel.data_parallel.hosted_slices import HostedSlices
from motet.parallel.data_parallel.zero import CommUnitAction, UnitSchedule
from motet.parallel.torch_private import is_innermost_mode
from motet.precision.recipe import PrecisionRecipe


class BucketReduction:
    """The gradients of one bucket from the end of their backward to their sum over all ranks.

    Collectives of a bucket follow one another. Those of each micro-batch reduce its gradients, which are then added to
    those before; those of the last micro-batch reduce the accumulated sum.
    """

    def __init__(
        self, unit_id: int, schedule: UnitSchedule, gradients: GradientBuffer, *, communicator: DataParallelCommunicator
    ) -> None:
        self._unit_id, self._gradients, self._communicator = unit_id, gradients, communicator
        self._each = [action for action in schedule if action.moment == "microbatch"]
        self._last = [action for action in schedule if action.moment == "last_microbatch" and action.over]
        # A summation tree adds up the micro-batches itself.
        self._adds_microbatches = bool(self._each) and not any(a.kind == "tree_reduce_scatter" for a in self._each)
        self._todo: list[CommUnitAction] = []
        self._running: CommUnitAction | None = None
        self._work: WorkHandle | None = None
        self._new_sum: Tensor | None = None  # Sum of this micro-batch, where it is added to those before

    def start(self, is_first: bool, is_last: bool) -> None:
        """Start the first collective of this micro-batch, whose gradients are complete."""
        self._gradients.zero_missing(self._unit_id)
        shard = self._gradients.shard(self._unit_id)
        self._todo = [*self._each, *(self._last if is_last else [])]
        self._new_sum = torch.empty_like(shard) if self._adds_microbatches and not is_first else None
        self._start_next()

    def advance(self) -> None:
        """Wait for the collective in flight, if another one follows or it frees memory, and start the next one."""
        if self._running is not None and (self._todo or self._running.is_scatter):
            self._finish_running()

    def finish(self) -> None:
        """Wait until the gradients are summed."""
        while self._running is not None:
            self._finish_running()

    @property
    def is_summed(self) -> bool:
        """Whether the gradients are summed, or will be when `finish` is called, which then does not wait."""
        return not self._todo and (self._work is None or self._work.is_completed())

    def _finish_running(self) -> None:
        action, work, self._running, self._work = self._running, self._work, None, None
        assert action is not None and work is not None
        work.wait()
        del work  # its buffers, before the next collective allocates
        if action.is_scatter:
            self._gradients.free_bucket(self._unit_id)
        has_more = any(each.moment == "microbatch" for each in self._todo)
        if self._new_sum is not None and not has_more:
            self._gradients.shard(self._unit_id).add_(self._new_sum)
            self._new_sum = None
        self._start_next()

    def _start_next(self) -> None:
        if not self._todo:
            return
        self._running = action = self._todo.pop(0)
        output = self._gradients.shard(self._unit_id) if self._new_sum is None else self._new_sum
        unsharded = self._gradients.bucket(self._unit_id) if action.is_scatter else None
        self._work = self._communicator.execute(action, self._unit_id, output, source=unsharded)


class ModuleParameterWaiter:
    """Calls `wait` before a module begins, for each bucket that the module uses."""

    def __init__(self, module: nn.Module, bucket_ids: Mapping[Tensor, int], wait: Callable[[int], None]) -> None:
        self._module, self._wait_for_bucket = module, wait
        self._bucket_ids = {id(parameter): bucket_id for parameter, bucket_id in bucket_ids.items()}
        self._recorder: _ParameterUsageRecorder | None = None
        self._waited_at_step_start: tuple[int, ...] = ()
        self.first_use_order: tuple[int, ...] = ()  # All buckets, unused ones first; empty until a forward was recorded
        self.first_uses = dict[int, int]()  # Bucket -> a time, in the order of first uses of all recorders

    def begin_step(self) -> None:
        """Begin to record if nothing was recorded yet."""
        if self._recorder is None:
            self._recorder = _ParameterUsageRecorder(self._module, self._bucket_ids)
        self.exit_recorder()
        for bucket_id in self._waited_at_step_start:
            self._wait_for_bucket(bucket_id)

    def exit_recorder(self) -> None:
        """Leave the recording mode once a forward was recorded."""
        if self._recorder is not None and self.first_use_order:
            self._recorder.exit_mode()

    def finish_recording(self) -> None:
        """End the recording of the first forward; from now on modules wait for their buckets."""
        recorder = self._recorder
        if recorder is None or self.first_use_order:
            return
        recorder.remove_hooks()
        users: dict[nn.Module | None, dict[int, None]] = {None: {}}
        for user in self._module.modules():
            owned = map(id, user.parameters(recurse=False))
            users[user] = {self._bucket_ids[key]: None for key in owned if key in self._bucket_ids}
        for (user_or_none, bucket_id), time in recorder.uses.items():
            users[user_or_none][bucket_id] = None
            self.first_uses.setdefault(bucket_id, time)
        unused = {bucket_id for key, bucket_id in self._bucket_ids.items() if key not in recorder.used_parameters}
        self._waited_at_step_start = (*sorted(unused), *(i for i in users.pop(None) if i not in unused))
        self.first_uses |= dict.fromkeys(self._waited_at_step_start, 0)
        self.first_use_order = tuple(dict.fromkeys((*self._waited_at_step_start, *(i for _, i in recorder.uses))))
        for module, bucket_ids in users.items():
            if module is not None and (bucket_ids or module is self._module):
                module.register_forward_pre_hook(partial(self._wait_before_forward, tuple(bucket_ids)))

    def _wait_before_forward(self, bucket_ids: tuple[int, ...], module: nn.Module, args: object) -> None:
        for bucket_id in (*self._waited_at_step_start, *bucket_ids):
            self._wait_for_bucket(bucket_id)


# Functions that read no values.
_METADATA_FUNCTIONS = {
    *(getattr(Tensor, n).__get__ for n in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad")),
    *(Tensor.size, Tensor.numel, Tensor.dim, Tensor.data_ptr, Tensor.is_floating_point, Tensor.is_complex),
}


class _ParameterUsageRecorder:
    def __init__(self, module: nn.Module, bucket_ids: Mapping[int, int]) -> None:
        self._bucket_ids = bucket_ids
        self._active_modules: list[nn.Module] = []
        self._last_module: nn.Module | None = None  # Module called last while no other was active
        self.uses: dict[tuple[nn.Module | None, int], int] = {}  # -> the time of the first
        self.used_parameters: set[int] = set()
        starts = [inner.register_forward_pre_hook(self._on_forward_start) for inner in module.modules()]
        ends = [inner.register_forward_hook(self._on_forward_end, always_call=True) for inner in module.modules()]
        self._handles: list[RemovableHandle] = starts + ends
        self._mode_stack = ExitStack()
        self._mode = self._mode_stack.enter_context(InterceptedFunctions(self._call_function))

    def _call_function(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._handles and function not in _METADATA_FUNCTIONS:
            for tensor in _nested_tensors((*args, *kwargs.values())):
                bucket_id = self._bucket_ids.get(id(tensor))
                if bucket_id is not None:
                    user = self._active_modules[-1] if self._active_modules else self._last_module
                    self.uses.setdefault((user, bucket_id), perf_counter_ns())
                    self.used_parameters.add(id(tensor))
        return function(*args, **kwargs)

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.exit_mode()

    def exit_mode(self) -> None:
        """Exit if no mode was entered later: modes are a stack."""
        if not self._handles and is_innermost_mode(self._mode):
            self._mode_stack.close()

    def _on_forward_start(self, module: nn.Module, args: object) -> None:
        if not self._active_modules:
            self._last_module = module
        self._active_modules.append(module)

    def _on_forward_end(self, module: nn.Module, args: object, output: object) -> None:
        self._active_modules.pop()


def _nested_tensors(nested: Iterable[Any]) -> Iterator[Tensor]:
    for item in nested:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _nested_tensors(item)


class BucketedDataParallel:
    """The parameters of one sync group in buckets."""

    needs_even_microbatches = False
    replaced_parameters: frozenset[str] = frozenset()

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        plan: SyncGroupPlan,
        *,
        recipe: PrecisionRecipe,
        mesh: ShardReplicaMesh,
        settings: CommunicationSettings,
        states: HostStates | None = None,
    ) -> None:
        """Put parameters on flat tensors that are sharded as the plan says. `states` has masters of the host."""
        named, group = {name: parameters[name] for name in plan.shapes}, mesh.shard_group
        self.mesh, self.plan, rank, dtype = mesh, plan, group.rank, getattr(torch, recipe.reduce)
        self._hosted = HostedSlices(states) if states else None
        self._has_alike_copies = len(set(plan.group.copy_groups.values())) == 1
        self._buckets = [unit.contents for unit in plan.units if isinstance(unit.contents, Bucket)]
        schedule = plan.units[0].schedule
        self._step_actions = [action for action in schedule if action.moment == "step"]
        gathers = [each for each in self._step_actions if each.is_gather]
        # Gathers shards of the sums instead of parameters; then every rank updates everything, as the sums arrive.
        self.updates_on_arrival = any(action.tensor == "gradients" for action in gathers)
        self._parameter_gather = next((action for action in gathers if action.tensor == "parameters"), None)
        self._reduces_each_microbatch = any(action.moment == "microbatch" for action in schedule)
        self._starts_early = all(a.overlaps for a in schedule if a.over and a.moment.endswith("microbatch"))
        self._shard_slices = shard_slices = [unit.shard_slice(rank) for unit in plan.units]
        device, keeps_all = group.device, not self._reduces_each_microbatch
        self._gradients = GradientBuffer(self._buckets, shard_slices, dtype, device=device, keeps_all=keeps_all)
        self._gradients.on_bucket_ready = self._on_bucket_ready
        self.flat_parameters = self._flatten(named, recipe)
        if self._hosted is not None:
            self._hosted.set_targets(self.flat_parameters.compute_slices())
        self._slices_of_bucket = self.flat_parameters.slices_of_buckets()
        self.optimizer_groups = [each.optimizer_group for each in self.flat_parameters.optimizer_slices]
        self.local_shards = self.flat_parameters.local_shards
        self.unfilled_shards = self.flat_parameters.unfilled_shards
        self.local_masters = [each.master for each in self.flat_parameters.optimizer_slices]  # This rank updates them
        self.communicator = DataParallelCommunicator(mesh, plan, settings, dtype=recipe.reduce)
        self._reductions = [
            BucketReduction(unit_id, unit.schedule, self._gradients, communicator=self.communicator)
            for unit_id, unit in enumerate(plan.units)
        ]
        self._bucket_ids: dict[Tensor, int] = {
            named[m.name]: i for i, each in enumerate(self._buckets) for m in each.members
        }
        self.update_masters: MasterUpdate = no_update  # The optimizer sets it
        self.update_casts = False  # Whether the optimizer writes masters to the parameters that compute, too
        self._ready_buckets, self._next_bucket = set[int](), 0
        self._is_first_microbatch, self._is_last_microbatch, self._accumulates = True, True, False
        # Lets each module wait only for the buckets that it uses, once a forward was recorded.
        wait = partial(ModuleParameterWaiter, module, self._bucket_ids, self._wait_for_bucket)
        overlaps = any(action.overlaps for action in gathers) or bool(states and states.overlaps)
        self._usage_tracker = wait() if overlaps else None
        self._gather_order: tuple[int, ...] = ()  # Order of gathers that overlap forward, once it is known
        self._pending_gathers = dict[int, WorkHandle]()
        self._updating = dict[int, None]()  # Buckets that the host updates, in their order
        self._next_sent = 0  # The next bucket whose sums travel to the host
        # A tree adds up micro-batches until the backward has ended.
        self._sends_early = not any(action.kind.startswith("tree_") for action in schedule)
        self._actions_on_arrival: Sequence[CommUnitAction] = ()

    def _flatten(self, named: Mapping[str, nn.Parameter], recipe: PrecisionRecipe) -> FlatParameters:
        """Put the parameters on flat tensors; masters lie on the host if that updates them."""
        scatters = any(action.is_scatter for unit in self.plan.units[:1] for action in unit.schedule)
        updates_everything = self.updates_on_arrival or not scatters
        return FlatParameters(
            named,
            self._buckets,
            [b.flat_slice for b in self._buckets] if updates_everything else self._shard_slices,
            recipe=recipe,
            gradients=self._gradients,
            separate_masters=self._parameter_gather is not None and self._parameter_gather.codec is not None,
            allocate_masters=self._hosted.states.allocate if self._hosted else None,
        )

    def begin_step(self) -> None:
        self.flat_parameters.check_storage_unchanged()
        if self._usage_tracker:
            self._usage_tracker.begin_step()
        self.communicator.begin_step()
        self._gradients.begin_step()
        self._next_sent = 0
        if self._hosted is not None:
            self._hosted.begin_step()

    def begin_backward(
        self, is_first: bool, is_last: bool, *, accumulates: bool = False, is_deferred: bool = False
    ) -> None:
        """Begin the backward of a micro-batch, perhaps the first or last that the step reduces. With `accumulates`, its
        gradients are only added to those of the next. A deferred backward has only weight gradients."""
        self.wait_for_pending()
        if self._usage_tracker:
            self._usage_tracker.finish_recording()
        self._is_first_microbatch, self._is_last_microbatch, self._next_bucket = is_first, is_last, 0
        self._ready_buckets.clear()
        self._accumulates = accumulates
        if not accumulates:
            self.communicator.begin_backward(is_first)
        self._gradients.begin_backward()

    def end_backward(self) -> None:
        """Reduce the remaining buckets, and wait for all of them."""
        self.flat_parameters.check_no_stray_gradients()
        if not self._reduces_this_microbatch:
            return
        self.start_remaining_reductions()
        with trace.span("communicate"):
            self._reductions[-1].advance()
            for reduction in self._reductions:
                reduction.finish()
        self.communicator.end_backward()
        self._send_sums()

    def _send_sums(self) -> None:
        """Send the sums of the next buckets to the host, for all that are complete."""
        slices, hosted = self.flat_parameters.optimizer_slices, self._hosted
        if hosted is None or not self._is_last_microbatch:
            return
        while self._next_sent < self._next_bucket and self._reductions[self._next_sent].is_summed:
            self._reductions[self._next_sent].finish()
            indices = self._slices_of_bucket[self._next_sent]
            hosted.send(indices, [self._gradients.local_slice(slices[index].flat_slice) for index in indices])
            self._next_sent += 1

    def start_remaining_reductions(self) -> None:
        """Start to reduce the buckets without a gradient, too: this backward has ended."""
        with trace.span("communicate"):
            while self._reduces_this_microbatch and self._next_bucket < len(self._reductions):
                self._start_reduction()

    @property
    def keeps_gradients(self) -> bool:
        """Whether the gradients stay whole on this rank until the last backward of a step."""
        return not self._reduces_each_microbatch

    @property
    def gradient_sums(self) -> Mapping[Tensor, ParameterGradientSum]:
        """Sums of gradients to which products of matrices can be added, by parameter: they have one dtype."""
        same_dtype = self.flat_parameters.compute.dtype == self._gradients.dtype
        return self.flat_parameters.gradient_sums if same_dtype else {}

    def take_gradients(self) -> list[Tensor]:
        """Remove the gradients that were added up and not reduced, by bucket."""
        taken = []
        for bucket_id in range(len(self._buckets)):
            self._gradients.zero_missing(bucket_id)
            taken.append(self._gradients.bucket(bucket_id).clone())
        self._gradients.begin_step()
        return taken

    def put_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Let these be the gradients of this backward, by bucket."""
        for bucket_id, gradient in enumerate(gradients):
            self._gradients.zero_missing(bucket_id)
            self._gradients.bucket(bucket_id).copy_(gradient)

    def local_gradients(self) -> Sequence[Tensor]:
        """The gradients of the masters, in the dtype of the sums."""
        return [self._gradients.local_slice(each.flat_slice) for each in self.flat_parameters.optimizer_slices]

    def reduced_gradients(self, names: Collection[str]) -> Sequence[Tensor]:
        """This rank's shards of the sums, each element once over the ranks that count. `names` are all parameters with
        the same copies, or several such sets; a tensor never has parameters of two sets."""
        slices = [(each.bucket_id, each.flat_slice) for each in self.flat_parameters.optimizer_slices]
        slices = [*enumerate(self._shard_slices)] if self.updates_on_arrival else slices
        tensors = [self._gradients.local_slice(flat_slice) for _, flat_slice in slices]
        copies = self.plan.group.copy_groups
        if self._has_alike_copies:
            return tensors
        reduced = []
        for (bucket_id, flat_slice), tensor in zip(slices, tensors, strict=True):
            overlaps = member_overlaps(self._buckets[bucket_id], flat_slice)
            for _, run in groupby(overlaps, lambda overlap: copies[overlap[0].name]):
                members, starts, stops = zip(*run, strict=True)
                if members[0].name in names:
                    reduced.append(tensor[starts[0] - flat_slice.start : stops[-1] - flat_slice.start])
        return reduced

    def reduced_shards(self) -> dict[str, LocalShard]:
        """This rank's shards of the sums, by the names of parameters."""
        if not self.updates_on_arrival:
            return self.local_shards(self.local_gradients())
        shards = dict[str, LocalShard]()
        for bucket, flat_slice in zip(self._buckets, self._shard_slices, strict=True):
            tensor = self._gradients.local_slice(flat_slice)
            for member, first, stop in member_overlaps(bucket, flat_slice):
                values = tensor[first - flat_slice.start : stop - flat_slice.start]
                shape = torch.Size(self.plan.shapes[member.name])
                shards[member.name] = LocalShard(shape, first - member.start, values)
        return shards

    def update(self) -> None:
        """Update the masters, and let every rank compute with the result."""
        self.wait_for_pending()
        if self._hosted is not None:
            self.update_masters(self._hosted.sums)
            self._hosted.wait_after_update(len(self.optimizer_groups))
            if not self._hosted.states.delays:
                (self.expect_values if self._hosted.states.overlaps else self.gather_parameters)()
            return
        for index, action in enumerate(self._step_actions):
            if action.kind == "update":
                self.update_masters(dict(enumerate(self.local_gradients())))
                if not self.update_casts:
                    self.flat_parameters.cast_masters()
            elif action.is_gather:
                self._start_gathers(action, self._step_actions[index + 1 :])
                break

    @property
    def first_uses(self) -> list[int] | None:
        """A time for each master, in the order in which forwards use their values; None before the first forward."""
        times = self._usage_tracker.first_uses if self._usage_tracker else {}
        return [times[each.bucket_id] for each in self.flat_parameters.optimizer_slices] if times else None

    def expect_values(self) -> None:
        """Let modules wait for the values of their buckets, which the host sends."""
        self._updating = dict.fromkeys(self._first_use_order() or range(len(self._buckets)))

    def gather_parameters(self) -> None:
        """Gather the parameters that other ranks have updated."""
        if self._parameter_gather is not None:
            self._start_gathers(self._parameter_gather)

    def sync_parameters(self) -> None:
        """Cast this rank's masters, and gather the parameters that other ranks have updated."""
        self.wait_for_pending()
        if self._hosted is not None:
            self._hosted.states.refresh()
        self.flat_parameters.cast_masters()
        self.gather_parameters()

    def wrap_as_forward(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """The function itself: parameters are unsharded between forwards."""
        return compute

    without_parameters = wrap_as_forward

    def load_assigned_values(self) -> None:
        """Continue from values that were assigned to parameters, on all ranks alike."""
        check_input(
            not (self._pending_gathers or self._updating),
            'load_assigned_values: with communication.overlap = "forward" some values were still arriving, and may '
            "have replaced your values; call engine.synchronize() before you change any",
        )
        if self._hosted is not None:
            self._hosted.states.refresh()
        self.flat_parameters.load_assigned_values()

    def wait_for_pending(self) -> None:
        """Wait until parameters and masters have the values of the last update or `sync_parameters`."""
        if self._usage_tracker:
            self._usage_tracker.exit_recorder()
        for bucket_id in [*self._updating, *self._pending_gathers]:
            self._wait_for_bucket(bucket_id)

    def _start_gathers(self, action: CommUnitAction, on_arrival: Sequence[CommUnitAction] = ()) -> None:
        """Gather all buckets; then do the actions `on_arrival` of each."""
        self._actions_on_arrival = on_arrival
        for bucket_id in self._first_use_order() or range(len(self._buckets)):
            bucket = self._buckets[bucket_id]
            gathers_gradients = action.tensor == "gradients"
            unsharded = self._gradients.bucket(bucket_id) if gathers_gradients else self._compute_bucket(bucket)
            self._pending_gathers[bucket_id] = self.communicator.execute(action, bucket_id, unsharded)
        if not self._gather_order:
            self.wait_for_pending()

    def _compute_bucket(self, bucket: Bucket) -> Tensor:
        return self.flat_parameters.compute[bucket.flat_slice]

    def _first_use_order(self) -> tuple[int, ...]:
        # The order in which the first rank's forward uses buckets.
        if not self._gather_order and self._usage_tracker and self._usage_tracker.first_use_order:
            order = torch.tensor(self._usage_tracker.first_use_order, device=self.mesh.shard_group.decision_device)
            broadcast(order, self.mesh.shard_group)
            self._gather_order = tuple(order.tolist())
        return self._gather_order

    def _receive_values(self, bucket_id: int) -> None:
        """Wait until the host has updated a bucket. Where ranks gather it, they do so in one order, and the gather of
        the bucket behind it begins, too."""
        assert self._hosted is not None
        order = [*self._updating]
        arriving = [bucket_id] if self._parameter_gather is None else order[: order.index(bucket_id) + 2]
        for each in arriving:
            self._hosted.wait(self._slices_of_bucket[each])
            del self._updating[each]
            if self._parameter_gather is None:
                self.flat_parameters.bump_versions(each)
            else:
                compute = self._compute_bucket(self._buckets[each])
                self._pending_gathers[each] = self.communicator.execute(self._parameter_gather, each, compute)

    def _wait_for_bucket(self, bucket_id: int) -> None:
        if bucket_id in self._updating:
            self._receive_values(bucket_id)
        work = self._pending_gathers.pop(bucket_id, None)
        if work is None:
            return
        with trace.span("gather"):
            work.wait()
        if any(action.kind == "update" for action in self._actions_on_arrival):
            slices = self.flat_parameters.optimizer_slices
            slice_ids = [i for i, each in enumerate(slices) if each.bucket_id == bucket_id]
            gradients = self.local_gradients()
            self.update_masters({i: gradients[i] for i in slice_ids})
            if not self.update_casts:
                self.flat_parameters.cast_masters([slices[i] for i in slice_ids])
        if self._gather_order:  # a forward that has used the bucket already gets an error of autograd
            self.flat_parameters.bump_versions(bucket_id)

    @property
    def _reduces_this_microbatch(self) -> bool:
        return not self._accumulates and (self._is_last_microbatch or self._reduces_each_microbatch)

    def _on_bucket_ready(self, bucket_id: int) -> None:
        self._ready_buckets.add(bucket_id)
        if self._reduces_this_microbatch and self._starts_early:
            while self._next_bucket in self._ready_buckets:
                self._start_reduction()

    def _start_reduction(self) -> None:
        """Start to reduce the next bucket and continue the one before it, complete or not: the same on every rank."""
        bucket_id, self._next_bucket = self._next_bucket, self._next_bucket + 1
        self._reductions[bucket_id].start(self._is_first_microbatch, self._is_last_microbatch)
        if bucket_id:
            self._reductions[bucket_id - 1].advance()
        if self._sends_early:
            self._send_sums()
