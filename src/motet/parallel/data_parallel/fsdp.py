"""Stage 3 of ZeRO on torch's FSDP2: a rank keeps some rows of each parameter, master and gradient.

The parameters of a block are gathered when it is called, and again for its backward. Parameters outside of blocks stay
gathered from the first forward to the end of backward. Parameters that have no rows, or are small, are in buckets.

Rows may lie on the host, also those of a single rank. FSDP2 then fetches them before it gathers, and sends their sums.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from math import prod
from time import perf_counter_ns
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from motet.core.errors import InputError, check_input
from motet.memory.tiers.device_limit import host_memory
from motet.memory.tiers.optimizer_states import FetchedUnit, HostStates, Target
from motet.models.user_module import find_blocks
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.communication.communicator import DataParallelCommunicator
from motet.parallel.data_parallel.communication.shard_replica_mesh import ShardReplicaMesh
from motet.parallel.data_parallel.flat_parameters import STRAY_GRADIENT, LocalShard, MasterUpdate, no_update
from motet.parallel.data_parallel.hosted_slices import HostedSlices
from motet.parallel.data_parallel.zero import CommUnitAction, shard_rows
from motet.parallel.process.process_group import process_group_of_one
from motet.parallel.torch_private import (
    allocate_shards,
    first_unreduced_parameter,
    keep_rows_on_host,
    padded_rows,
    reduce_left_gradients,
    reshard_to_secondary,
)
from motet.precision.recipe import PrecisionRecipe


def _check_no_sparse_gradients(module: nn.Module, row_sharded: Collection[nn.Parameter]) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.sparse and inner.weight in row_sharded:
            raise InputError(
                f"{type(inner).__name__} {name!r} has sparse gradients, which layout.zero = 3 cannot cut into rows; "
                "make it without sparse=True, or use layout.zero = 2"
            )


def local_shard(parameter: Tensor, values: Tensor | None = None) -> LocalShard:
    """This rank's shard of a parameter, sharded or not, or of `values` that belong to that shard."""
    if not isinstance(parameter, DTensor):
        return LocalShard(parameter.shape, 0, parameter.detach() if values is None else values)
    shape, mesh = parameter.shape, parameter.device_mesh
    coordinate = mesh.get_coordinate()  # not by its group, which may belong to an ended process group
    assert coordinate is not None
    first, _ = shard_rows(shape[0], mesh.size(), coordinate[0])
    return LocalShard(shape, first * prod(shape[1:]), _local_rows(parameter) if values is None else values)


class FSDP2DataParallel:
    """A module sharded at stage 3. Outside of its forward, and of `wrap_as_forward`, it has shards only."""

    updates_on_arrival = False
    needs_even_microbatches = True  # Every rank gathers and reduces in each forward and backward

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
        """Shard the parameters of a plan, and the frozen ones of its units; the others are left to buckets. `states`
        has the masters, if the host updates them. Rows of the device are then copies in the same dtype; rows of the
        host are the masters themselves, or copies of files."""
        group, sharded = mesh.shard_group, {parameters[name] for name in (*plan.shapes, *plan.group.frozen)}
        process_group, place = group.process_group or process_group_of_one(), plan.group.sharding.parameters
        on_host = place != "device"
        ignored = {*module.parameters()} - sharded
        blocks, has_all = find_blocks(module), not plan.group.in_pipeline
        blocks = [block for block in blocks if has_all or not sharded.isdisjoint(block.parameters())]
        _check_no_sparse_gradients(module, {parameters[name] for name in plan.shapes})
        compute, reduce = getattr(torch, recipe.compute), getattr(torch, recipe.reduce)
        shard: Callable[..., FSDPModule] = partial(
            fully_shard,
            mesh=DeviceMesh.from_group(process_group, group.device.type),
            mp_policy=MixedPrecisionPolicy(compute, reduce, cast_forward_inputs=False),
            ignored_params=ignored,
            offload_policy=CPUOffloadPolicy(pin_memory=group.device.type == "cuda") if on_host else OffloadPolicy(),
        )
        root = _FSDPRootModule(module if has_all else _part_of_module(module, {*blocks}, sharded))
        self.mesh, self.root, self.plan = mesh, root, plan
        self._blank = _blank_outside(
            module, {*blocks}, sharded, blank=torch.full((), torch.nan, dtype=compute, device=group.device)
        )
        # The blocks, and the root with the parameters outside of blocks.
        self.fsdp_modules = [
            shard(inner, reshard_after_forward=unit.reshards)
            for inner, unit in zip((*blocks, self.root), plan.units, strict=True)
        ]
        self._hosted, self._host_rows, self._compute = HostedSlices(states) if states else None, on_host, compute
        self._received = dict[int, Tensor]()  # Sums of gradients on the host, by identity
        self._host_masters = self._allocate(dict(module.named_parameters()), group.device)
        if not has_all:
            _prefetch_within_stage(self.fsdp_modules)
        self._install_communication(settings, recipe)
        named = dict(module.named_parameters())  # DTensors by now
        self.sharded_parameters = {name: named[name] for name in plan.shapes}
        self._row_shards = {name: local_shard(p) for name, p in named.items() if isinstance(p, DTensor)}
        self.replaced_parameters = frozenset(plan.shapes)
        group_of = {member.name: member.optimizer_group for unit in plan.units for member in unit.members}
        self.optimizer_groups = [group_of[name] for name in plan.shapes]
        self.update_masters: MasterUpdate = no_update  # The optimizer sets it
        self._updating = dict[int, list[int]]()  # Units that the host updates -> their slices
        self._unit_uses = dict[int, int]()  # Unit -> the time of its first forward
        self._watch_forwards([*blocks, self.root])
        self._accumulates = self._is_deferred = self._is_last = False
        self._reduces_each_microbatch = any(a.moment == "microbatch" for unit in plan.units for a in unit.schedule)
        if has_all:
            module.forward = self.wrap_as_forward(module.forward)

    def _install_communication(self, settings: CommunicationSettings, recipe: PrecisionRecipe) -> None:
        mesh, plan = self.mesh, self.plan
        if mesh.secondary_shard_group:
            _install_secondary_shards(self.fsdp_modules[:-1], mesh)
        self.communicator = DataParallelCommunicator(mesh, plan, settings, dtype=recipe.reduce)
        self.replica_hooks = [
            _install_collectives(fsdp_module, unit_id, unit, communicator=self.communicator)
            for unit_id, (fsdp_module, unit) in enumerate(zip(self.fsdp_modules, plan.units, strict=True))
        ]

    def _watch_forwards(self, modules: Sequence[nn.Module]) -> None:
        """Let a unit wait for an update that overlaps with its forward, before FSDP2 gathers it."""
        if self._hosted is not None and (self._hosted.states.overlaps or self._host_rows):
            for unit_id, module in enumerate(modules):
                module.register_forward_pre_hook(partial(self._before_forward, unit_id), prepend=True)

    def _allocate(self, named: Mapping[str, nn.Parameter], device: torch.device) -> list[Tensor] | None:
        """Allocate the rows, and masters on the host: none where rows on the host are the masters themselves."""
        states = None if self._hosted is None else self._hosted.states
        trained = [named[name] for name in self.plan.shapes]
        lengths = [_local_rows(parameter).numel() for parameter in trained]
        if states is None or not self._host_rows:
            for fsdp_module in self.fsdp_modules:
                allocate_shards(fsdp_module, device)
            if states is None:
                return None
            made = states.allocate(lengths)
            states.set_targets([Target(partial(self._rows_of, name)) for name in self.plan.shapes])
            return made
        padded = padded_rows(self.fsdp_modules)
        allocated, masters = states.allocate_rows(lengths, [padded[parameter] for parameter in trained])
        rows = dict(zip(trained, allocated, strict=True))
        for dtype in dict.fromkeys(parameter.dtype for parameter in padded if parameter not in rows):
            frozen = [p for p in padded if p.dtype == dtype and p not in rows]
            lengths = [_local_rows(parameter).numel() for parameter in frozen]
            made = states.allocate_frozen_rows(lengths, [padded[parameter] for parameter in frozen], dtype)
            rows |= zip(frozen, made, strict=True)
        self._let_host_have(rows, states, receive=None if device.type == "cuda" else WeakMethod(self._receive))
        copies = [Target(partial(self._rows_of, name), is_on_host=True) for name in self.plan.shapes]
        states.set_targets([None] * len(trained) if masters is None else copies)
        return masters

    def _let_host_have(
        self,
        rows: Mapping[nn.Parameter, Tensor],
        states: HostStates,
        *,
        receive: "WeakMethod[Callable[[Tensor], Tensor]] | None",
    ) -> None:
        """Let FSDP2 fetch these rows, and give back sums of gradients."""
        *blocks, root = zip(self.fsdp_modules, self.plan.units, strict=True)
        in_use = [(module, unit.reshards, [*padded_rows([module])]) for module, unit in (root, *blocks)]
        units = [FetchedUnit([rows[p] for p in parameters], again) for _, again, parameters in in_use]
        fetches = states.fetches(units, turns=not self.plan.group.in_pipeline)
        for (module, _, parameters), unit_fetches in zip(in_use, fetches, strict=True):
            keep_rows_on_host(
                module,
                rows,
                compute=self._compute,
                fetches=dict(zip(parameters, unit_fetches, strict=True)),
                receive=receive,
                before_assigning=states.refresh,
            )

    def _receive(self, rows: Tensor) -> Tensor:
        """A copy on the host of reduced gradients, which FSDP2 has not copied where it takes the device for the host.
        Gradients of later micro-batches have been added to it."""
        assert self._hosted is not None
        if id(rows) in self._received:
            self._hosted.states.link.count(to_host=rows.nbytes)
            return rows
        (received,) = self._hosted.states.to_host([rows])
        self._received[id(received)] = received
        return received

    def wrap_as_forward(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, in which parameters of the module may be used outside of its forward."""

        @wraps(compute)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.root.is_computing:
                return compute(*args, **kwargs)
            try:
                result = self.root(partial(compute, *args, **kwargs))
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" not in str(error):
                    raise
                raise InputError(
                    f"{type(self.root.module).__name__} uses parameters of a block outside of its call, where "
                    "layout.zero = 3 does not gather them; use layout.zero = 2"
                ) from error
            if not torch.is_grad_enabled():  # no backward will reshard them
                self._reshard()
            return result

        return call

    def without_parameters(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which does not depend on these parameters. Those outside of blocks are NaN inside, since a
        forward of another stage may use them, and they may not be gathered."""

        @wraps(compute)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = [(part, key, part._parameters[key]) for part, key, _ in self._blank]
            try:
                for part, key, blank in self._blank:
                    part._parameters[key] = blank
                return compute(*args, **kwargs)
            finally:
                for part, key, parameter in before:
                    part._parameters[key] = parameter

        return call

    def _reshard(self) -> None:
        for unit in self.fsdp_modules:
            unit.reshard()

    def _rows_of(self, name: str) -> Tensor:
        return _local_rows(self.sharded_parameters[name])

    @property
    def _rows(self) -> list[Tensor]:
        """The rows that travel when a block is gathered."""
        return [*map(_local_rows, self.sharded_parameters.values())]

    @property
    def local_masters(self) -> Sequence[Tensor]:
        return self._rows if self._host_masters is None else self._host_masters

    def begin_step(self) -> None:
        self.communicator.begin_step()
        for parameter in self.sharded_parameters.values():
            parameter.grad = None
        if self._hosted is not None:
            self._hosted.begin_step()
        self._received.clear()

    def begin_backward(
        self, is_first: bool, is_last: bool, *, accumulates: bool = False, is_deferred: bool = False
    ) -> None:
        """Begin a backward. With `accumulates`, its gradients stay unsharded, and are added to those of the next. A
        deferred backward has only weight gradients, after the backward of their inputs."""
        self.wait_for_pending()
        if self._host_rows and self._hosted is not None:
            self._hosted.states.before_backward(is_last=is_last)
        self._is_deferred, self._is_last = is_deferred, is_last
        accumulates |= not is_last and not self._reduces_each_microbatch
        if accumulates != self._accumulates:
            self._accumulates = accumulates
            for unit in self.fsdp_modules:
                unit.set_requires_gradient_sync(not accumulates, recurse=False)
        if not accumulates:
            self.communicator.begin_backward(is_first)
        for hook in self.replica_hooks:
            hook.is_last_microbatch = is_last

    def start_remaining_reductions(self) -> None:
        """Do nothing: FSDP2 starts all reductions of a backward in it."""

    def end_backward(self) -> None:
        if self._accumulates:
            return
        if self._is_deferred:
            reduce_left_gradients(self.fsdp_modules[-1])
        is_incomplete = any(hook.is_last_microbatch and hook.accumulated is not None for hook in self.replica_hooks)
        assert not is_incomplete, "a block had no last backward"
        self.communicator.end_backward()
        for name in map(first_unreduced_parameter, self.fsdp_modules):
            check_input(name is None, STRAY_GRADIENT.format(name))
        if self._hosted is not None:
            self._send_sums(self._hosted)
        if self.mesh.secondary_shard_group:  # a block without a backward still has stale secondary shards
            self._reshard()

    def _send_sums(self, hosted: HostedSlices) -> None:
        """Let the host have the sums of a step; with rows on the host, it has got them with each reduction."""
        if not self._host_rows:
            if self._is_last:
                hosted.send(range(len(self.optimizer_groups)), self.local_gradients())
            return
        if self.mesh.shard_group.device.type == "cuda":  # FSDP2 has copied them
            reduced = (p.grad for p in self.sharded_parameters.values() if p.grad is not None)
            hosted.states.link.count(to_host=sum(_local_rows(gradient).nbytes for gradient in reduced))
        if self._is_last:
            hosted.sums = dict(enumerate(self.local_gradients()))

    def local_gradients(self) -> Sequence[Tensor]:
        return self.reduced_gradients(self.sharded_parameters)

    def reduced_gradients(self, names: Collection[str]) -> Sequence[Tensor]:
        """This rank's rows of the sums of some parameters."""
        sharded = [parameter for name, parameter in self.sharded_parameters.items() if name in names]
        with host_memory(self.mesh.shard_group.device) if self._host_rows else nullcontext():
            return [torch.zeros_like(_local_rows(p)) if p.grad is None else _local_rows(p.grad) for p in sharded]

    def reduced_shards(self) -> dict[str, LocalShard]:
        """This rank's rows of the sums, by the names of parameters."""
        return self.local_shards(self.local_gradients())

    def update(self) -> None:
        self.wait_for_pending()
        if self._hosted is None:
            self.update_masters(dict(enumerate(self.local_gradients())))
            return
        self.update_masters(self._hosted.sums)
        self._hosted.wait_after_update(len(self.optimizer_groups))
        if self._hosted.states.overlaps and not self._hosted.states.delays:
            self.expect_values()

    def expect_values(self) -> None:
        """Let units wait for the values of their rows, which the host sends or updates."""
        self._updating = self._slices_of_units()

    def _slices_of_units(self) -> dict[int, list[int]]:
        indices = {name: index for index, name in enumerate(self.sharded_parameters)}
        return {i: [indices[member.name] for member in unit.members] for i, unit in enumerate(self.plan.units)}

    @property
    def first_uses(self) -> list[int] | None:
        """A time for each master, in the order in which forwards use their values; None before the first forward."""
        if not self._unit_uses:
            return None
        slices = self._slices_of_units().items()
        times = {index: self._unit_uses.get(unit_id, 0) for unit_id, members in slices for index in members}
        return [times[index] for index in sorted(times)]

    def gather_parameters(self) -> None:
        """Do nothing: a block gathers its parameters when it is called."""

    def _before_forward(self, unit_id: int, module: nn.Module, args: object) -> None:
        """Wait until the host has updated the rows of a unit, which are gathered next."""
        self._unit_uses.setdefault(unit_id, perf_counter_ns())
        if self._host_rows and self._hosted is not None:
            self._hosted.states.before_forward()
        slices = self._updating.pop(unit_id, None)
        if slices is not None:
            assert self._hosted is not None
            self._hosted.wait(slices)

    def wait_for_pending(self) -> None:
        """Wait until the host has updated all rows."""
        for unit_id in [*self._updating]:
            self._before_forward(unit_id, self.root, ())

    def load_assigned_values(self) -> None:
        """Continue from the rows, which are the masters of parameters without masters on the host."""
        if self._hosted is not None:
            self._hosted.states.refresh()
        for master, rows in zip(self._host_masters or (), self._rows, strict=False):
            master.copy_(rows)

    def sync_parameters(self) -> None:
        """Give the device the rows of masters on the host; a block gathers its parameters when it is called."""
        if self._hosted is not None:
            self._hosted.states.refresh()
        for rows, master in zip(self._rows, self._host_masters or (), strict=False):
            rows.copy_(master)

    def unfilled_shards(self) -> Iterable[tuple[str, LocalShard]]:
        """The rows of all parameters, frozen ones included, to be filled with values, and masters on the host."""
        yield from self._row_shards.items()
        if self._host_masters is not None:
            yield from self.local_shards(self._host_masters).items()

    def local_shards(self, tensors: Sequence[Tensor]) -> dict[str, LocalShard]:
        named = zip(self.sharded_parameters.items(), tensors, strict=True)
        return {name: local_shard(parameter, tensor) for (name, parameter), tensor in named}


def _prefetch_within_stage(units: Sequence[FSDPModule]) -> None:
    """Prefetch in a unit's backward the unit before it in the forward; the backward of the first prefetches nothing.

    By itself FSDP2 prefetches in the order of all forwards so far. A stage of a pipeline runs forwards of later
    micro-batches before a backward: the first block would gather the last again without a use.
    """
    for before, unit in zip((units[0], *units), units, strict=False):
        unit.set_modules_to_backward_prefetch([before])  # The first prefetches itself, which is gathered already


class _FSDPRootModule(nn.Module):
    """Runs any function as one forward, since FSDP2 gathers, reduces and reshards around forwards."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: nn.Module = module
        self.is_computing = False

    def forward(self, compute: Callable[[], Any]) -> Any:
        self.is_computing = True
        try:
            return compute()
        finally:
            self.is_computing = False


def _blank_outside(
    module: nn.Module, blocks: set[nn.Module], parameters: set[nn.Parameter], *, blank: Tensor
) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(Module, key, the blank value in its shape, without memory) of each of these parameters outside of blocks."""
    in_blocks = {inner for block in blocks for inner in block.modules()}
    return [
        (part, key, nn.Parameter(blank.expand(p.shape), requires_grad=False))
        for part in module.modules()
        for key, p in part._parameters.items()
        if part not in in_blocks and p in parameters
    ]


def _part_of_module(module: nn.Module, blocks: set[nn.Module], parameters: set[nn.Parameter]) -> nn.Module:
    """A module with these blocks, and with parameters outside of blocks, under the names that they have: stages of a
    pipeline on one rank are separate trees for FSDP2, whose roots own everything below them."""
    part = nn.Module()
    part._parameters = module._parameters  # FSDP2 replaces parameters there
    for name, child in module.named_children():
        if child in blocks:
            part.add_module(name, child)
        elif not blocks.isdisjoint(child.modules()) or not parameters.isdisjoint(child.parameters()):
            part.add_module(name, _part_of_module(child, blocks, parameters))
    return part


def _local_rows(tensor: Tensor) -> Tensor:
    """This rank's rows, flat, without an operation on the DTensor: torch caches results with ended process groups."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():  # else `to_local` is a function of autograd, which takes twice as long
        local: Tensor = tensor.to_local()
    return local.detach().view(-1)


# --- communication ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FSDPCustomCollective:
    """A collective of FSDP2; the current stream has waited for it when a call returns.

    So it runs in the calling thread: handing it to a queue and waiting would cost a change of threads.
    """

    communicator: DataParallelCommunicator
    unit_id: int
    actions: tuple[CommUnitAction, ...]  # Actions of this kind, in the schedule of the unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _FSDPAllGather(_FSDPCustomCollective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        size = dist.get_world_size(group)
        action = next(action for action in self.actions if action.group_size == size)
        self.communicator.execute(action, self.unit_id, output_tensor, source=input_tensor, is_async=False).wait()


class _FSDPReduceScatter(_FSDPCustomCollective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, op
        (action,) = self.actions
        if action.kind == "tree_reduce_scatter":  # FSDP2 adds up micro-batches; only the last one writes the sum
            output_tensor.zero_()
        self.communicator.execute(action, self.unit_id, output_tensor, source=input_tensor, is_async=False).wait()


@dataclass
class _HSDPAllReduceHook:
    """Called with a unit's gradient shard after each backward; reduces it over the replicas once a step."""

    communicator: DataParallelCommunicator
    unit_id: int
    action: CommUnitAction | None  # None without replicas
    is_last_microbatch: bool = True
    accumulated: Tensor | None = None  # Sum over the earlier micro-batches

    def __call__(self, shard: Tensor) -> None:
        if not self.is_last_microbatch:
            self.accumulated = shard.clone() if self.accumulated is None else self.accumulated.add_(shard)
            shard.zero_()
            return
        if self.accumulated is not None:
            shard.add_(self.accumulated)
            self.accumulated = None
        assert self.action is not None
        self.communicator.execute(self.action, self.unit_id, shard, is_async=False).wait()


def _install_collectives(
    fsdp_module: FSDPModule, unit_id: int, unit: CommUnit, *, communicator: DataParallelCommunicator
) -> _HSDPAllReduceHook:
    """Replace FSDP2's collectives by those of the communicator, which sum where FSDP2 averages."""
    if unit.shards > 1:  # FSDP2 would divide on a single rank, by one
        fsdp_module.set_gradient_divide_factor(1.0)
    fsdp_module.set_force_sum_reduction_for_comms(True)
    gathers = tuple(action for action in unit.schedule if action.kind == "all_gather")
    scatters = tuple(action for action in unit.schedule if action.is_scatter)
    # The parameter types are private base classes of torch, of which it calls `allocate` and `__call__` alone.
    all_gather: Any = _FSDPAllGather(communicator, unit_id, gathers)
    reduce_scatter: Any = _FSDPReduceScatter(communicator, unit_id, scatters)
    fsdp_module.set_custom_all_gather(all_gather)
    fsdp_module.set_custom_reduce_scatter(reduce_scatter)
    if hasattr(fsdp_module, "set_reduce_scatter_unused_params"):
        # Since torch 2.13. Before it, a parameter must be used on all ranks and in all micro-batches or in none.
        fsdp_module.set_reduce_scatter_unused_params(True, recurse=False)
    sum_over_replicas = next((action for action in unit.schedule if action.over == "replicas"), None)
    replica_hook = _HSDPAllReduceHook(communicator, unit_id, sum_over_replicas)
    if sum_over_replicas:
        fsdp_module.set_all_reduce_hook(replica_hook)
    return replica_hook


def _install_secondary_shards(blocks: Sequence[FSDPModule], mesh: ShardReplicaMesh) -> None:
    """Do the same as an integer `reshard_after_forward` of FSDP2."""
    # FSDP2 itself would make process groups for every block, and wrong ones where ranks are several replicas.
    groups = (mesh.secondary_shard_group, mesh.secondary_replica_group, mesh.shard_group)
    intra, inter, shards = (group.process_group for group in groups if group)
    assert intra is not None and inter is not None and shards is not None
    ranks = torch.tensor(dist.get_process_group_ranks(shards)).view(inter.size(), intra.size())
    mesh_2d = DeviceMesh.from_group([inter, intra], mesh.shard_group.device.type, ranks, mesh_dim_names=("far", "near"))
    for block in blocks:
        reshard_to_secondary(block, mesh_2d)
