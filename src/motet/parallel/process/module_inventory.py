"""The inventory of a module before any rank shards it, and the buffers that a checkpoint holds."""

from collections.abc import Mapping

from torch import Tensor, nn

from motet.models.user_module import find_blocks
from motet.parallel.model_sharding import ModelInventory, TensorInfo, TensorKind


def inventory_of_module(module: nn.Module, optimizer_groups: Mapping[str, int]) -> ModelInventory:
    """The parameters and persistent buffers of a module; `optimizer_groups` names the trained ones. A module names its
    buffers of the kind `load` in `load_buffers`."""
    block_ids: dict[Tensor, int] = {
        tensor: i for i, block in enumerate(find_blocks(module)) for tensor in (*block.parameters(), *block.buffers())
    }
    loads = set(load_buffers(module).values())
    names: dict[Tensor, list[str]] = {}
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *persistent_buffers(module).items()):
        names.setdefault(tensor, []).append(name)

    def describe(tensor: Tensor, name: str, *aliases: str) -> TensorInfo:
        is_parameter, dtype = isinstance(tensor, nn.Parameter), str(tensor.dtype).removeprefix("torch.")
        kind: TensorKind = "trained" if tensor.requires_grad else "frozen"
        if not is_parameter:
            kind = "load" if tensor in loads else "statistics"
        group = optimizer_groups.get(name, 0)
        return TensorInfo(name, tuple(tensor.shape), dtype, kind, group, aliases, block_ids.get(tensor))

    return ModelInventory(tuple(describe(tensor, *names_of_tensor) for tensor, names_of_tensor in names.items()))


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the state of a module, such as running statistics."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, inner in module.named_modules()
        for name, buffer in inner._buffers.items()  # a state_dict has them too, but costs more than a step may
        if buffer is not None and name not in inner._non_persistent_buffers_set
    }


def mark_load_buffer(owner: nn.Module, name: str) -> None:
    """Let a buffer of a module have the kind `load`: ranks change it together after a step, and no forward does."""
    vars(owner)["load_buffers"] = tuple(dict.fromkeys((*getattr(owner, "load_buffers", ()), name)))


def load_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of the kind `load`: the loads of experts, and the corrections that follow from them."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, inner in module.named_modules()
        for name in getattr(inner, "load_buffers", ())
        if (buffer := inner._buffers.get(name)) is not None
    }
