"""The blocks that a model is made of, such as the layers of a transformer."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

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


def named_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by their names."""
    names = {part: name for name, part in module.named_modules()}
    return {names[block]: block for block in find_blocks(module)}


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
