"""Private names of torch that parallelism needs, in one file to check against each new version of torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["tree_leaves", "tree_map_only"]


def is_innermost_mode(mode: TorchFunctionMode) -> bool:
    """Whether no function mode was entered after this one."""
    return _get_current_function_mode() is mode


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether something is called with the gradient of a tensor before it is accumulated."""
    return bool(tensor._backward_hooks)


def accumulates_into_leaf(node: Node) -> bool:
    """Whether the backward under way accumulates into the leaf of this node, which torch.autograd.grad does not."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # What torch raises for the leaf of which torch.autograd.grad wants the gradient
        return False


def is_transformed() -> bool:
    """Whether a transformation of torch.func, such as vmap, is under way."""
    return torch._C._are_functorch_transforms_active()


def autocasts(x: Tensor) -> bool:
    """Whether torch casts the operands of products on the device of x; the meta device is unknown to autocast."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


@contextmanager
def without_recomputation() -> Iterator[None]:
    """Inside, torch.utils.checkpoint calls functions and keeps what they save for backward, in both of its variants."""

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
    """(group, parameter) of FSDP2 for what a block gathers."""
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
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group, parameter in _parameters_of(block):
        group.post_forward_mesh_info = parameter.post_forward_mesh_info = info
        parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))
