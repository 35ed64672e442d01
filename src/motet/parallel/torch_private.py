"""Private names of torch that parallelism needs, in one file to check against each new version of torch.

FSDP2 and DTensor are imported where they are used: with sympy they take as long to import as the rest of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha1
from math import prod
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch
from weakref import WeakMethod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import checkpoint
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

__all__ = ["tree_leaves", "tree_map_only"]

_FLASH_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# Operator -> the name of the collective, and the position of the argument whose size is that of the message.
_COLLECTIVES = {
    "allreduce_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "send": ("send", 0),
    "recv_": ("receive", 0),
}
_ATTENTION_OPTIONS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def new_named_process_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A process group of these ranks of the world, which its members make among themselves; None for other ranks.

    `torch.distributed.new_group` either asks all ranks of the world for every group, or names a group after the number
    of groups that a rank has made, which differs between stages of a pipeline. Here the name follows from the ranks,
    and from the number of groups that they have made together before. With NCCL communicators that are split from that
    of the world, all ranks call this together: members of disjoint groups, and other ranks with any group.
    """
    c10d, members = dist.distributed_c10d, sorted(ranks)
    world = c10d._get_default_group()
    backend, store = c10d._world.pg_map[world]
    name = f"motet-{sha1(repr(members).encode(), usedforsecurity=False).hexdigest()}-"
    made_before = sum(other.startswith(name) for other in c10d._world.pg_names.values())
    made, _ = c10d._new_process_group_helper(
        len(members),
        members.index(world.rank()) if world.rank() in members else None,
        members,
        backend,
        store,
        cast(Any, f"{name}{made_before}"),
        timeout=c10d._get_default_timeout(c10d.Backend(backend)),
        device_id=world.bound_device_id,
    )
    if not isinstance(made, dist.ProcessGroup):
        return None
    c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(members)}
    return made


def is_innermost_mode(mode: TorchFunctionMode) -> bool:
    """Whether no function mode was entered after this one."""
    return _get_current_function_mode() is mode


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a hook gets the gradient of a tensor before it is accumulated."""
    return bool(tensor._backward_hooks)


def accumulates_into_leaf(node: Node) -> bool:
    """Whether the backward under way accumulates into the leaf of this node, which torch.autograd.grad does not."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # Torch raises it for the leaf whose gradient torch.autograd.grad wants
        return False


def is_transformed() -> bool:
    """Whether a transformation of torch.func, such as vmap, is under way."""
    return torch._C._are_functorch_transforms_active()


def autocasts(x: Tensor) -> bool:
    """Whether torch casts the operands of products on the device of x; the meta device is unknown to autocast."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


@contextmanager
def without_recomputation() -> Iterator[None]:
    """Inside, torch.utils.checkpoint calls functions and keeps their saved tensors, in both of its variants."""

    def call_reentrant(function: Any, _: bool, *args: Any) -> Any:
        return function(*args)

    def call_with_hooks(*_: Any, **__: Any) -> Iterator[None]:
        yield  # The caller calls the function here

    with (
        patch.object(checkpoint.CheckpointFunction, "apply", call_reentrant),
        patch.object(checkpoint, "_checkpoint_without_reentrant_generator", call_with_hooks),
    ):
        yield


def _parameters_of(block: FSDPModule) -> Iterator[tuple[Any, Any]]:
    """(group, parameter) of FSDP2 for each parameter that a block gathers."""
    state: Any = block._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return ((group, parameter) for group in groups if group is not None for parameter in group.fsdp_params)


def allocate_shards(block: FSDPModule, device: torch.device) -> None:
    """Give memory to the shards of parameters that were on the meta device when FSDP2 sharded them."""
    for _, parameter in _parameters_of(block):
        sharded = parameter.sharded_param
        if sharded.is_meta:
            padded = torch.zeros(parameter.padded_sharded_param_size, dtype=sharded.dtype, device=device)
            rows = parameter.to_sharded_dtensor(padded[: parameter.sharded_size[0]])
            parameter._sharded_param_data = padded.view(-1)
            parameter.sharded_param = nn.Parameter(rows, requires_grad=sharded.requires_grad)
            parameter._setattr_on_modules(parameter.sharded_param)


class _FetchedRows:
    """Rows on the host, in the place where FSDP2 has a tensor that it sends to the device by `to`."""

    def __init__(self, fetch: Callable[[], Tensor]) -> None:
        self._fetch = fetch

    def to(self, device: torch.device, *, non_blocking: bool) -> Tensor:
        return self._fetch()


def padded_rows(blocks: Sequence[FSDPModule]) -> dict[nn.Parameter, int]:
    """The elements with padding of the rows of each parameter that FSDP2 has sharded."""
    parameters = (parameter for block in blocks for _, parameter in _parameters_of(block))
    return {each.sharded_param: prod(each.padded_sharded_param_size) for each in parameters}


def keep_rows_on_host(
    block: FSDPModule,
    rows: Mapping[nn.Parameter, Tensor],
    *,
    compute: torch.dtype,
    fetches: Mapping[nn.Parameter, Callable[[], Tensor]],
    receive: WeakMethod[Callable[[Tensor], Tensor]] | None,
    before_assigning: Callable[[], None],
) -> None:
    """Let the parameters of a block, which FSDP2 offloads, have these rows on the host or in files, with padding or
    without, and `fetches` copy them to the device with padding. `receive` copies a gradient to the host, where FSDP2
    itself does not; `before_assigning` is called before rows get values that a module was loaded with."""
    for group, parameter in _parameters_of(block):
        before, held = parameter.sharded_param, rows[parameter.sharded_param]
        local = held[: prod(parameter.sharded_size)].view(parameter.sharded_size)
        if not before.is_meta:
            local.copy_(before.to_local())
        after = nn.Parameter(parameter.to_sharded_dtensor(local), requires_grad=before.requires_grad)
        parameter._sharded_param_data, parameter.sharded_param = _FetchedRows(fetches[before]), after
        parameter._setattr_on_modules(after)
        parameter.reset_sharded_param = partial(
            _take_assigned_rows, parameter, after, local, before_assigning=before_assigning
        )
        if group.mesh_info.shard_mesh_size == 1:
            # A tracker of storages knows empty ones, that gathers of several ranks show to it, from the start.
            parameter.init_all_gather_outputs([prod(parameter.padded_sharded_param_size)], [compute], 1, group.device)
            parameter.free_unsharded_param()
        if receive is not None and after.requires_grad:
            after.register_post_accumulate_grad_hook(partial(_receive_gradient, receive))


def _take_assigned_rows(
    parameter: Any, kept: nn.Parameter, rows: Tensor, *, before_assigning: Callable[[], None]
) -> None:
    """Copy values that a module was loaded with into the rows, in the place of FSDP2, which would keep the others."""
    assigned = getattr(parameter._module_info.module, parameter._module_info.param_name)
    if assigned is not kept:
        before_assigning()
        with torch.no_grad():
            rows.copy_(assigned.to_local())
        parameter._setattr_on_modules(kept)


def _receive_gradient(receive: WeakMethod[Callable[[Tensor], Tensor]], parameter: Any) -> None:
    """A hook of a tensor, which Python's collector of cycles does not see: it must not keep its owner."""
    if (alive := receive()) is not None:
        parameter.grad._local_tensor = alive(parameter.grad._local_tensor)


def first_unreduced_parameter(block: FSDPModule) -> str | None:
    """A parameter that has a gradient which FSDP2 did not reduce, since it came after the block's backward."""
    for _, parameter in _parameters_of(block):
        unsharded = getattr(parameter, "_unsharded_param", None)  # None before the first gather
        if unsharded is not None and unsharded.grad is not None:
            return str(parameter._param_fqn).removeprefix("module.")
    return None


def reduce_left_gradients(root: FSDPModule) -> None:
    """Let FSDP2 reduce gradients that came after the last backward, as it does at the end of a backward."""
    state: Any = root._get_fsdp_state()
    state._root_post_backward_final_callback()


def reshard_to_secondary(block: FSDPModule, mesh: DeviceMesh) -> None:
    """Let FSDP2 reshard a block, after its forward, over the second dimension of a mesh only."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group, parameter in _parameters_of(block):
        group.post_forward_mesh_info = parameter.post_forward_mesh_info = info
        parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))


# --- rehearsals on the meta device ------------------------------------------------------------------


@contextmanager
def fake_process_group(rank: int, world: int) -> Iterator[None]:
    """Inside, torch has a process group of this process alone, whose collectives leave tensors unchanged."""
    devices = [*dist.Backend.backend_capability[dist.Backend.FAKE], "meta"]
    with patch.dict(dist.Backend.backend_capability, {dist.Backend.FAKE: devices}):
        dist.init_process_group(dist.Backend.FAKE, rank=rank, world_size=world, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
            _forget_meshes()


def _forget_meshes() -> None:
    """Clear torch's caches of operations on DTensors: a mesh in them has the position of the rank before, and is equal
    to that of the next rank."""
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def message_of_call(operator: Any, args: Sequence[Any]) -> tuple[str, tuple[int, ...], int]:
    """(Collective, ranks of its group, bytes) of a call of an operator of torch.distributed."""
    name = str(operator._schema.name).removeprefix("c10d::")
    collective, position = _COLLECTIVES.get(name, (name, 0))
    tensors = args[position] if isinstance(args[position], (list, tuple)) else [args[position]]
    group = next(each for each in args if isinstance(each, torch.ScriptObject) and _is_group(each))
    ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
    return collective, tuple(ranks), sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def _is_group(script_object: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(script_object._type())


@contextmanager
def kernels_of_cpu_on_meta() -> Iterator[None]:
    """Inside, tensors on the meta device go through the kernels that torch has for a CPU: fused attention, fused
    optimizers, and FSDP2 without streams. By itself torch takes others there, which keep and make other tensors."""
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_init,
        _fsdp_param_group,
        _fsdp_state,
        _fully_shard,
    )

    fsdp_modules = (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state)
    attention, fused_devices = F.scaled_dot_product_attention, _get_fused_kernels_supported_devices
    replaced: list[tuple[Any, str, Any]] = [
        *((module, "_get_device_handle", lambda _: torch.cpu) for module in fsdp_modules),
        (_fsdp_init, "_move_states_to_device", lambda *_: None),  # Buffers may have values, which stay on the host
        (_fully_shard, "_get_device_from_mesh", lambda mesh: torch.device(mesh.device_type)),
        (_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None),
        (_fsdp_param_group.FSDPParamGroup, "_validate_cpu_offload_params", lambda _: None),
        (_fsdp_param_group, "foreach_reduce", partial(_reduce_on_meta, _fsdp_collectives.foreach_reduce)),
        (optimizer, "_get_fused_kernels_supported_devices", lambda: [*fused_devices(), "meta"]),
        (F, "scaled_dot_product_attention", partial(_attention_on_meta, attention)),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replaced:
            stack.enter_context(patch.object(owner, name, replacement))
        yield


def _reduce_on_meta(reduce: Callable[..., Any], parameters: Sequence[Any], *args: Any) -> Any:
    """Reduce gradients of FSDP2 without the move of offloaded ones to the CPU, which a tensor without values cannot."""
    offloaded = [parameter for parameter in parameters if parameter.offload_to_cpu]
    try:
        for parameter in offloaded:
            parameter.offload_to_cpu = False
        return reduce(parameters, *args)
    finally:
        for parameter in offloaded:
            parameter.offload_to_cpu = True


def _attention_on_meta(attention: Callable[..., Tensor], *args: Any, **named: Any) -> Tensor:
    """Call torch's attention, `(query, key, value, ...)`, by the kernel of a CPU where it would."""
    query, key, value, *rest = args
    options = {**_ATTENTION_OPTIONS, **dict(zip(_ATTENTION_OPTIONS, rest, strict=False)), **named}
    mask, dropout, causal = options["attn_mask"], options["dropout_p"], options["is_causal"]
    is_fused = query.is_meta and dropout == 0 and query.ndim == 4 and query.shape[-1] == value.shape[-1]
    if not is_fused or (mask is not None and mask.requires_grad):
        return attention(query, key, value, **options)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    output: Tensor = _FLASH_ATTENTION(query, key, value, dropout, causal, attn_mask=mask, scale=options["scale"])[0]
    return output
