"""The blocks of a model, by its structure alone: what is gathered, computed with and freed as one piece."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The outermost items of its lists of modules, where nothing outside of an item has a parameter of it.

    Lists inside of items stay whole: they may be experts, of which ranks call different ones.
    """
    paths = Counter(inner for _, inner in module.named_modules(remove_duplicate=False))
    uses = Counter(p for _, p in module.named_parameters(remove_duplicate=False))

    def is_alone(block: nn.Module) -> bool:
        own = Counter(p for _, p in block.named_parameters(remove_duplicate=False))
        return all(uses[p] == paths[block] * count for p, count in own.items())

    return [block for block in dict.fromkeys(_items(module)) if is_alone(block)]


def _items(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, _LISTS) and _is_block(child, in_list=isinstance(module, nn.ModuleList)):
            yield child
        else:
            yield from _items(child)


def _is_block(child: nn.Module, in_list: bool) -> bool:
    """Something with parameters that is called. A single layer in a sequence is too little of one."""
    called = type(child).forward is not nn.Module.forward
    large = in_list or any(True for _ in child.children())
    return called and large and not isinstance(child, _LISTS) and any(True for _ in child.parameters())
