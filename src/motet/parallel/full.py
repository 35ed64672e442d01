"""Stage 3 of data parallelism, on torch's FSDP2: a rank keeps some rows of each parameter, master and gradient.

The parameters of a block are gathered when it is called, and again for its backward; what belongs to no block is held
from the first forward to the end of backward. What has no rows, a single number, or is small, stays
whole and is spread flat.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.tensor import DTensor

from motet.core.errors import InputError
from motet.parallel.carry import Carry
from motet.parallel.communication import CommunicationSettings
from motet.parallel.data import FlatSpread, spread_flat
from motet.parallel.layout import Layout
from motet.parallel.matrices import sums_of_rows
from motet.parallel.mesh import Mesh
from motet.parallel.placement import Portions, Unit, is_whole, part_of_rows
from motet.parallel.spread import Piece
from motet.parallel.wrap import blocks_of
from motet.precision.recipe import Recipe


def spread_full(
    module: nn.Module,
    parameters: Mapping[str, tuple[int, nn.Parameter]],
    recipe: Recipe,
    mesh: Mesh,
    layout: Layout,
    settings: CommunicationSettings,
) -> "FullSpread":
    """Shard a module, whose trainable `parameters` are name -> (optimizer group, parameter)."""
    assert mesh.shards.process_group is not None
    whole = {p for p in module.parameters() if is_whole(tuple(p.shape), layout) or not p.is_floating_point()}
    of_rows = {parameter for _, parameter in parameters.values()} - whole
    for name, inner in module.named_modules():
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.sparse and inner.weight in of_rows:
            raise InputError(
                f"{type(inner).__name__} {name!r} has sparse gradients, which layout.zero = 3 cannot cut into rows; "
                "make it without sparse=True, or use layout.zero = 2"
            )
    flat = {name: given for name, given in parameters.items() if given[1] in whole}
    root = _Root(module)
    ways: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(mesh.shards.process_group, mesh.shards.device.type),
        "mp_policy": MixedPrecisionPolicy(
            getattr(torch, recipe.compute), getattr(torch, recipe.reduce), cast_forward_inputs=False
        ),
        "ignored_params": whole,
    }
    found = blocks_of(module)
    described = describe(module, found, whole)
    blocks = [fully_shard(b, reshard_after_forward=layout.regather, **ways) for b in found]
    units = [*blocks, fully_shard(root, reshard_after_forward=False, **ways)]
    if layout.secondary:
        _keep_second_copies(blocks, mesh)
    of_units, part = sums_of_rows([unit.trainable for unit in described], layout.shards, recipe.reduce)
    carry = Carry(mesh, layout, settings, of_units, [part] * layout.shards)
    sums = [_communicate(unit, number, carry) for number, unit in enumerate(units)]
    named = dict(module.named_parameters())  # other objects than those that were given
    sharded = {name: (group, named[name]) for name, (group, _) in parameters.items() if name not in flat}
    plain = settings.model_copy(update={"compress_gradients": None, "compress_parameters": None})
    rest = spread_flat(flat, recipe, mesh, layout, plain) if flat else None
    spread = FullSpread(root, units, described, sharded, carry, sums, rest)
    module.forward = spread.calling(module.forward)
    return spread


def describe(module: nn.Module, blocks: Sequence[nn.Module], whole: Collection[nn.Parameter]) -> tuple[Unit, ...]:
    """The units of a module before it is sharded; each parameter is in the first that has it."""
    seen = set(whole)
    found = []
    named = [p for _, p in module.named_parameters(remove_duplicate=False)]
    inside = {p for block in blocks for p in block.parameters()}
    last = max((place for place, p in enumerate(named) if p in inside), default=-1)
    after = set(named[last + 1 :]) - inside
    for unit in (*blocks, module):
        new = [p for p in unit.parameters() if p not in seen]
        seen.update(new)
        trainable, frozen = ([tuple(p.shape) for p in new if p.requires_grad == which] for which in (True, False))
        late = tuple(tuple(p.shape) for p in new if unit is module and p.requires_grad and p in after)
        found.append(Unit(tuple(trainable), tuple(frozen), unit is not module, late))
    return tuple(found)


def kept(parameter: Tensor, values: Tensor | None = None) -> Piece:
    """What this rank keeps of a parameter, sharded or not; or of `values` that belong to it."""
    if not isinstance(parameter, DTensor):
        return Piece(parameter.shape, 0, parameter.detach() if values is None else values)
    shape, mesh = parameter.shape, parameter.device_mesh
    place = mesh.get_coordinate()  # never by its group, which may be one of these ranks that has ended: see _local
    assert place is not None
    first, _ = part_of_rows(shape[0], mesh.size(), place[0])
    return Piece(shape, first * prod(shape[1:]), _local(parameter) if values is None else values)


@dataclass
class FullSpread:
    """A sharded module. Outside of its forward, and of what else `calling` gives, it has shards only."""

    root: "_Root"
    units: Sequence[FSDPModule]
    """What is gathered as one: the blocks, and the root with what is in none."""
    described: tuple[Unit, ...]
    """The same as values."""
    sharded: Mapping[str, tuple[int, nn.Parameter]]
    """Name -> (optimizer group, parameter)."""
    carry: Carry
    sums: Sequence["_ReplicaSum"]
    rest: FlatSpread | None
    """Of what stays whole."""

    def calling(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """The same function of the module, which may use its parameters outside of a forward."""

        @wraps(compute)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.root.computing:
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
            if not torch.is_grad_enabled():  # no backward will free them
                for unit in self.units:
                    unit.reshard()
            return result

        return call

    @property
    def portions(self) -> Portions:
        return Portions(self.rest.weights.buckets if self.rest else (), self.described)

    @property
    def groups(self) -> Sequence[int]:
        return [*(group for group, _ in self.sharded.values()), *(self.rest.groups if self.rest else ())]

    @property
    def masters(self) -> Sequence[Tensor]:
        return [*map(_local, self._parameters), *(self.rest.masters if self.rest else ())]

    @property
    def counts(self) -> bool:
        return self.carry.mesh.counts

    @property
    def arrives_late(self) -> bool:
        return False

    def begin_step(self) -> None:
        self.carry.begin_step()
        for parameter in self._parameters:
            parameter.grad = None
        if self.rest:
            self.rest.begin_step()

    def begin_backward(self, first: bool, last: bool) -> None:
        self.carry.begin_backward(first)
        for replica_sum in self.sums:
            replica_sum.last = last
        if self.rest:
            self.rest.begin_backward(first, last)

    def end_backward(self) -> None:
        assert not any(s.last and s.before is not None for s in self.sums), "a block had no last backward"
        self.carry.end_backward()
        if self.carry.mesh.near:  # a block without a backward still has its second copy, which is out of date now
            for unit in self.units:
                unit.reshard()
        if self.rest:
            self.rest.end_backward()

    def gradients(self) -> Sequence[Tensor]:
        grads = [torch.zeros_like(_local(p)) if p.grad is None else _local(p.grad) for p in self._parameters]
        return [*grads, *(self.rest.gradients() if self.rest else ())]

    def reduced(self) -> Sequence[Tensor]:
        return self.gradients()

    def update(self, optimizer: Callable[[Sequence[int]], None]) -> None:
        optimizer(range(len(self.masters)))
        self.publish()

    def settle(self) -> None:
        """Nothing of it is underway between steps."""

    def adopt(self) -> None:
        """The rows of this rank are masters themselves."""
        if self.rest:
            self.rest.adopt()

    def publish(self) -> None:
        """Blocks gather what the masters are, when they are called."""
        if self.rest:
            self.rest.publish()

    def pieces(self, tensors: Sequence[Tensor]) -> dict[str, Piece]:
        count = len(self.sharded)
        found = {name: kept(p, t) for (name, (_, p)), t in zip(self.sharded.items(), tensors[:count], strict=True)}
        return found | (self.rest.pieces(tensors[count:]) if self.rest else {})

    def carried(self) -> dict[str, Piece | Tensor]:
        return self.carry.state()

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.sharded.values()]


class _Root(nn.Module):
    """Makes one forward of whatever is computed with a module: FSDP2 gathers, reduces and frees around forwards."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.computing = False

    def forward(self, compute: Callable[[], Any]) -> Any:
        self.computing = True
        try:
            return compute()
        finally:
            self.computing = False


def _local(tensor: Tensor) -> Tensor:
    """The rows of this rank one after another, as a view.

    No operation is done on the DTensor: torch keeps what it has found out for meshes of these ranks, with their groups,
    beyond the end of a group.
    """
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.to_local()
    return local.detach().view(-1)


# --- communication ---------------------------------------------------------------------------------


def _communicate(unit: FSDPModule, number: int, carry: Carry) -> "_ReplicaSum":
    """Sums instead of means, carried as all others are."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_custom_all_gather(_AllGather(carry, number))  # type: ignore[arg-type]  # its base is private
    unit.set_custom_reduce_scatter(_ReduceScatter(carry, number))  # type: ignore[arg-type]
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        # Since torch 2.13. Before it, a parameter must be used on all ranks and in all micro-batches or in none.
        unit.set_reduce_scatter_unused_params(True, recurse=False)
    replica_sum = _ReplicaSum(carry, number)
    if carry.mesh.replicas.world > 1:
        unit.set_all_reduce_hook(replica_sum)
    return replica_sum


def _keep_second_copies(blocks: Sequence[FSDPModule], mesh: Mesh) -> None:
    """What an integer `reshard_after_forward` of FSDP2 does.

    Given the integer, FSDP2 would make process groups for every block, and wrong ones where ranks are several replicas.
    """
    near, far, shards = (group.process_group for group in (mesh.near, mesh.far, mesh.shards) if group)
    assert near is not None and far is not None and shards is not None
    ranks = torch.tensor(dist.get_process_group_ranks(shards)).view(far.size(), near.size())
    both = DeviceMesh.from_group([far, near], mesh.shards.device.type, mesh=ranks, mesh_dim_names=("far", "near"))
    info = HSDPMeshInfo(both, shard_mesh_dim=1, replicate_mesh_dim=0)
    for block in blocks:
        state: Any = block._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in groups:
            group.post_forward_mesh_info = info
            for parameter in group.fsdp_params:
                parameter.post_forward_mesh_info = info
                whole = torch.empty(parameter._orig_size, device="meta")
                parameter._init_sharded_post_forward_param_metadata(whole)


@dataclass(frozen=True)
class _Carried:
    """A collective of FSDP2, which overlaps them by streams: the current one has waited when a call returns."""

    carry: Carry
    unit: int

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Carried):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        near = dist.get_world_size(group) < self.carry.mesh.shards.world
        self.carry.all_gather(self.unit, output_tensor, input_tensor, near).wait()


class _ReduceScatter(_Carried):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, op
        if self.carry.by_tree:  # FSDP2 adds micro-batches up; the sum of all of them comes with the last
            output_tensor.zero_()
        self.carry.reduce_scatter(self.unit, output_tensor, input_tensor).wait()


@dataclass
class _ReplicaSum:
    """Called with a unit's shard of the gradients of a backward: sums it over the replicas, once a step."""

    carry: Carry
    unit: int
    last: bool = True
    """The micro-batch is the last of the step."""
    before: Tensor | None = None
    """The sum over those before it."""

    def __call__(self, shard: Tensor) -> None:
        if not self.last:
            self.before = shard.clone() if self.before is None else self.before.add_(shard)
            shard.zero_()
            return
        if self.before is not None:
            shard.add_(self.before)
            self.before = None
        self.carry.all_reduce(self.unit, shard).wait()
