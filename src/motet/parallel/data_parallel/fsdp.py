"""Stage 3 of ZeRO on torch's FSDP2: a rank keeps some rows of each parameter, master and gradient.

The parameters of a block are gathered when it is called, and again for its backward. Parameters outside of blocks stay
gathered from the first forward to the end of backward. Parameters that have no rows, or are small, are in buckets.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from motet.core.errors import InputError
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.communication.communicator import DataParallelCommunicator
from motet.parallel.data_parallel.communication.powersgd_matrices import row_shard_reduction_specs
from motet.parallel.data_parallel.communication.shard_replica_mesh import ShardReplicaMesh
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.data_parallel.zero import BucketsAndFSDPUnits, FSDPUnit, is_replicated, shard_rows
from motet.parallel.torch_private import reshard_to_secondary
from motet.precision.recipe import PrecisionRecipe


def _check_no_sparse_gradients(module: nn.Module, row_sharded: Collection[nn.Parameter]) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.sparse and inner.weight in row_sharded:
            raise InputError(
                f"{type(inner).__name__} {name!r} has sparse gradients, which layout.zero = 3 cannot cut into rows; "
                "make it without sparse=True, or use layout.zero = 2"
            )


def describe_fsdp_units(
    module: nn.Module, blocks: Sequence[nn.Module], replicated: Collection[nn.Parameter]
) -> tuple[FSDPUnit, ...]:
    """The units of a module before it is sharded; a shared parameter is in the first that has it."""
    assigned = set(replicated)
    parameters = [p for _, p in module.named_parameters(remove_duplicate=False)]
    block_parameters = {p for block in blocks for p in block.parameters()}
    last_in_block = max((i for i, p in enumerate(parameters) if p in block_parameters), default=-1)
    after_blocks = set(parameters[last_in_block + 1 :]) - block_parameters
    units = []
    for unit in (*blocks, module):
        new = [p for p in unit.parameters() if p not in assigned]
        assigned.update(new)
        late = [p for p in new if p.requires_grad and unit is module and p in after_blocks]
        trainable, frozen = ([p for p in new if p.requires_grad == is_trained] for is_trained in (True, False))
        shapes, frozen_shapes, late_shapes = (tuple(tuple(p.shape) for p in each) for each in (trainable, frozen, late))
        units.append(FSDPUnit(shapes, frozen_shapes, unit is not module, late_shapes))
    return tuple(units)


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

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, tuple[int, nn.Parameter]],
        recipe: PrecisionRecipe,
        *,
        mesh: ShardReplicaMesh,
        sharding: DataParallelSharding,
        settings: CommunicationSettings,
    ) -> None:
        """Shard a module, whose trainable `parameters` are name -> (optimizer group, parameter)."""
        group, shapes = mesh.shard_group, {p: tuple(p.shape) for p in module.parameters()}
        assert group.process_group is not None
        replicated = {p for p, s in shapes.items() if is_replicated(s, sharding) or not p.is_floating_point()}
        bucketed = {name: grouped for name, grouped in parameters.items() if grouped[1] in replicated}
        _check_no_sparse_gradients(module, {p for _, p in parameters.values()} - replicated)
        compute, reduce = getattr(torch, recipe.compute), getattr(torch, recipe.reduce)
        shard: Callable[..., FSDPModule] = partial(
            fully_shard,
            mesh=DeviceMesh.from_group(group.process_group, group.device.type),
            mp_policy=MixedPrecisionPolicy(compute, reduce, cast_forward_inputs=False),
            ignored_params=replicated,
        )
        self.mesh, self.root, blocks = mesh, _FSDPRootModule(module), find_blocks(module)
        fsdp_units = describe_fsdp_units(module, blocks, replicated)
        fsdp_blocks = [shard(block, reshard_after_forward=sharding.reshard_after_forward) for block in blocks]
        # The blocks, and the root with the parameters outside of blocks.
        self.fsdp_modules = [*fsdp_blocks, shard(self.root, reshard_after_forward=False)]
        if sharding.secondary_shards:
            _install_secondary_shards(fsdp_blocks, mesh)
        trainable = [unit.trainable for unit in fsdp_units]
        unit_specs, shard_specs = row_shard_reduction_specs(trainable, sharding.shards, recipe.reduce)
        self.communicator = DataParallelCommunicator(
            mesh, sharding, settings, specs=unit_specs, shard_specs=[shard_specs] * sharding.shards
        )
        self.replica_hooks = [_install_collectives(m, i, self.communicator) for i, m in enumerate(self.fsdp_modules)]
        named = dict(module.named_parameters())  # FSDP2 has replaced the parameters by DTensors
        self.sharded_parameters = {name: named[name] for name in parameters if name not in bucketed}
        uncompressed = settings.model_copy(update={"compress_gradients": None, "compress_parameters": None})
        self.unsharded = (  # The parameters that are not cut into rows
            BucketedDataParallel(bucketed, recipe, mesh, sharding=sharding, settings=uncompressed) if bucketed else None
        )
        groups = [parameters[name][0] for name in self.sharded_parameters]
        self.optimizer_groups = [*groups, *(self.unsharded.optimizer_groups if self.unsharded else ())]
        self.comm_units = BucketsAndFSDPUnits(self.unsharded.comm_units.buckets if self.unsharded else (), fsdp_units)
        module.forward = self.wrap_as_forward(module.forward)

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
                    "layout.zero = 3 gathers the parameters of a block when it is called, but "
                    f"{type(self.root.module).__name__} uses some of one in another way; use layout.zero = 2"
                ) from error
            if not torch.is_grad_enabled():  # no backward will reshard them
                self._reshard()
            return result

        return call

    def _reshard(self) -> None:
        for unit in self.fsdp_modules:
            unit.reshard()

    @property
    def local_masters(self) -> Sequence[Tensor]:
        masters = map(_local_rows, self.sharded_parameters.values())
        return [*masters, *(self.unsharded.local_masters if self.unsharded else ())]

    def begin_step(self) -> None:
        self.communicator.begin_step()
        for parameter in self.sharded_parameters.values():
            parameter.grad = None
        if self.unsharded:
            self.unsharded.begin_step()

    def begin_backward(self, is_first: bool, is_last: bool) -> None:
        self.communicator.begin_backward(is_first)
        for hook in self.replica_hooks:
            hook.is_last_microbatch = is_last
        if self.unsharded:
            self.unsharded.begin_backward(is_first, is_last)

    def end_backward(self) -> None:
        is_incomplete = any(hook.is_last_microbatch and hook.accumulated is not None for hook in self.replica_hooks)
        assert not is_incomplete, "a block had no last backward"
        self.communicator.end_backward()
        if self.mesh.secondary_shard_group:  # a block without a backward still has stale secondary shards
            self._reshard()
        if self.unsharded:
            self.unsharded.end_backward()

    def local_gradients(self) -> Sequence[Tensor]:
        sharded = self.sharded_parameters.values()
        grads = [torch.zeros_like(_local_rows(p)) if p.grad is None else _local_rows(p.grad) for p in sharded]
        return [*grads, *(self.unsharded.local_gradients() if self.unsharded else ())]

    reduced_gradients = local_gradients

    def update(self, update_masters: Callable[[Sequence[int]], None]) -> None:
        update_masters(range(len(self.local_masters)))
        self.sync_parameters()

    def wait_for_pending(self) -> None:
        """Do nothing: no communication is in flight between steps."""

    def load_assigned_values(self) -> None:
        """Only buckets have masters of their parameters; a row-sharded parameter is its master."""
        if self.unsharded:
            self.unsharded.load_assigned_values()

    def sync_parameters(self) -> None:
        """Gather buckets; a block gathers its parameters when it is called."""
        if self.unsharded:
            self.unsharded.sync_parameters()

    def local_shards(self, tensors: Sequence[Tensor]) -> dict[str, LocalShard]:
        count = len(self.sharded_parameters)
        named = zip(self.sharded_parameters.items(), tensors[:count], strict=True)
        shards = {name: local_shard(parameter, tensor) for (name, parameter), tensor in named}
        return shards | (self.unsharded.local_shards(tensors[count:]) if self.unsharded else {})


ShardedParameters = BucketedDataParallel | FSDP2DataParallel  # The trainable parameters, as one rank holds them


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


def _local_rows(tensor: Tensor) -> Tensor:
    """This rank's rows, flat, by no operation on the DTensor: torch caches results with ended process groups."""
    assert isinstance(tensor, DTensor)
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

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _FSDPAllGather(_FSDPCustomCollective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        from_secondary = dist.get_world_size(group) < self.communicator.mesh.shard_group.world
        self.communicator.all_gather(
            self.unit_id, output_tensor, input_tensor, from_secondary=from_secondary, is_async=False
        ).wait()


class _FSDPReduceScatter(_FSDPCustomCollective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, op
        if self.communicator.uses_summation_tree:  # FSDP2 adds up micro-batches; only the last one writes the sum
            output_tensor.zero_()
        self.communicator.reduce_scatter(self.unit_id, output_tensor, input_tensor, is_async=False).wait()


@dataclass
class _HSDPAllReduceHook:
    """Called with a unit's gradient shard after each backward; reduces it over the replicas once a step."""

    communicator: DataParallelCommunicator
    unit_id: int
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
        self.communicator.all_reduce(self.unit_id, shard, is_async=False).wait()


def _install_collectives(unit: FSDPModule, unit_id: int, communicator: DataParallelCommunicator) -> _HSDPAllReduceHook:
    """Replace FSDP2's collectives by those of the communicator, which sum where FSDP2 averages."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    # The parameter types are private base classes of torch, of which it calls `allocate` and `__call__` alone.
    all_gather: Any = _FSDPAllGather(communicator, unit_id)
    reduce_scatter: Any = _FSDPReduceScatter(communicator, unit_id)
    unit.set_custom_all_gather(all_gather)
    unit.set_custom_reduce_scatter(reduce_scatter)
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        # Since torch 2.13. Before it, a parameter must be used on all ranks and in all micro-batches or in none.
        unit.set_reduce_scatter_unused_params(True, recurse=False)
    replica_hook = _HSDPAllReduceHook(communicator, unit_id)
    if communicator.mesh.replica_group.world > 1:
        unit.set_all_reduce_hook(replica_hook)
    return replica_hook


def _install_secondary_shards(blocks: Sequence[FSDPModule], mesh: ShardReplicaMesh) -> None:
    """Do what an integer `reshard_after_forward` of FSDP2 does."""
    # FSDP2 itself would make process groups for every block, and wrong ones where ranks are several replicas.
    groups = (mesh.secondary_shard_group, mesh.secondary_replica_group, mesh.shard_group)
    intra, inter, shards = (group.process_group for group in groups if group)
    assert intra is not None and inter is not None and shards is not None
    ranks = torch.tensor(dist.get_process_group_ranks(shards)).view(inter.size(), intra.size())
    mesh_2d = DeviceMesh.from_group([inter, intra], mesh.shard_group.device.type, ranks, mesh_dim_names=("far", "near"))
    for block in blocks:
        reshard_to_secondary(block, mesh_2d)


_LIST_TYPES = (nn.ModuleList, nn.Sequential)


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost items of lists of modules whose parameters nothing else owns."""
    # Lists inside of items are not split: they may be experts, of which ranks call different ones.
    module_counts = Counter(inner for _, inner in module.named_modules(remove_duplicate=False))
    parameter_counts = Counter(p for _, p in module.named_parameters(remove_duplicate=False))

    def owns_its_parameters(block: nn.Module) -> bool:
        block_parameters = Counter(p for _, p in block.named_parameters(remove_duplicate=False))
        return all(parameter_counts[p] == module_counts[block] * count for p, count in block_parameters.items())

    return [block for block in dict.fromkeys(_list_items(module)) if owns_its_parameters(block)]


def _list_items(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, _LIST_TYPES) and _is_block(child, in_list=isinstance(module, nn.ModuleList)):
            yield child
        else:
            yield from _list_items(child)


def _is_block(child: nn.Module, in_list: bool) -> bool:
    """Whether a child has parameters and a forward; a single layer of a Sequential is too small."""
    called, large = type(child).forward is not nn.Module.forward, in_list or any(True for _ in child.children())
    return called and large and not isinstance(child, _LIST_TYPES) and any(True for _ in child.parameters())
