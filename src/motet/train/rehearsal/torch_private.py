"""Private names of torch that a rehearsal needs, in one file to check against each new version of torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim import optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

_FLASH_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FSDP_MODULES = (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state)

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


@contextmanager
def fake_process_group(rank: int, world: int) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone, whose collectives leave tensors as they are."""
    devices = [*dist.Backend.backend_capability[dist.Backend.FAKE], "meta"]
    with patch.dict(dist.Backend.backend_capability, {dist.Backend.FAKE: devices}):
        dist.init_process_group(dist.Backend.FAKE, rank=rank, world_size=world, store=FakeStore())
        try:
            assert dist.group.WORLD is not None
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()
            _forget_meshes()


def _forget_meshes() -> None:
    """Clear what torch remembers of operations on DTensors: a mesh in it has the position of the rank before, and is
    equal to that of the next rank."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]  # torch does not annotate it
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
    attention, fused_devices = F.scaled_dot_product_attention, optimizer._get_fused_kernels_supported_devices
    replaced: list[tuple[Any, str, Any]] = [
        *((module, "_get_device_handle", lambda _: torch.cpu) for module in _FSDP_MODULES),
        (_fully_shard, "_get_device_from_mesh", lambda mesh: torch.device(mesh.device_type)),
        (_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None),
        (optimizer, "_get_fused_kernels_supported_devices", lambda: [*fused_devices(), "meta"]),
        (F, "scaled_dot_product_attention", partial(_attention_on_meta, attention)),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replaced:
            stack.enter_context(patch.object(owner, name, replacement))
        yield


def _attention_on_meta(  # noqa: PLR0913  # the signature of what it replaces
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    is_fused = query.is_meta and dropout_p == 0 and query.ndim == 4 and query.shape[-1] == value.shape[-1]
    if not is_fused or (attn_mask is not None and attn_mask.requires_grad):
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    output: Tensor = _FLASH_ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output
