"""The inventory of a module before any rank shards it, and the blocks that it is made of."""

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from motet.parallel.model_inventory import ModelInventory, TensorInfo, TensorKind


def inventory_of_module(module: nn.Module, optimizer_groups: Mapping[str, int]) -> ModelInventory:
    """The parameters and persistent buffers of a module; `optimizer_groups` names what is trained."""
    block_ids: dict[Tensor, int] = {
        tensor: i for i, block in enumerate(find_blocks(module)) for tensor in (*block.parameters(), *block.buffers())
    }
    names: dict[Tensor, list[str]] = {}
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *persistent_buffers(module).items()):
        names.setdefault(tensor, []).append(name)

    def describe(tensor: Tensor, name: str, *aliases: str) -> TensorInfo:
        is_parameter, dtype = isinstance(tensor, nn.Parameter), str(tensor.dtype).removeprefix("torch.")
        kind: TensorKind = "statistics" if not is_parameter else "trained" if tensor.requires_grad else "frozen"
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
