"""The values that a module has while splits of it are proven: random, in float64, and those of one shard at a time."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from motet.models.user_module import find_blocks
from motet.parallel.model_sharding import DimensionSplit
from motet.parallel.tensor_parallel.sharded_module import set_attributes
from motet.parallel.tensor_parallel.split_regions import LocalAttribute
from motet.parallel.torch_private import without_recomputation
from motet.precision.float64_mode import use_float64

Replacement = tuple[MutableMapping[str, Any], Mapping[str, Any]]  # A dictionary, and its other values
LARGE_MODEL = 2**28  # Parameters, beyond which one of several blocks that are alike has gradients


@contextmanager
def random_values(
    module: nn.Module, dtype: torch.dtype = torch.float64, *, recomputes: bool = False, keeps_frozen: bool = False
) -> Iterator[None]:
    """Inside, parameters have this dtype on the CPU, as buffers have if it is float64, and the module is in train mode.

    Parameters have random values; tied ones stay tied, and blocks that are alike share their memory. Frozen ones are
    trained, too, unless `keeps_frozen` is set. Nothing is recomputed in backward, which may run when the module has
    other values again, unless `recomputes` is set.
    """
    storage, replaced = dict[object, Tensor](), dict[Any, nn.Parameter]()
    is_large = sum(parameter.numel() for parameter in module.parameters()) > LARGE_MODEL
    for parameter, key in _storage_keys(module).items():
        if parameter.is_floating_point():
            # A gradient for each block would need the memory of the whole model
            is_trained = (parameter.requires_grad or not keeps_frozen) and not (is_large and key in storage)
            if key not in storage:
                storage[key] = _random_like(parameter, len(storage)).to(dtype)
            replaced[parameter] = nn.Parameter(storage[key], requires_grad=is_trained)
    modes, changed = {part: part.training for part in module.modules()}, list[Replacement]()
    for part in modes:
        changed.append((part._parameters, {name: replaced.get(p, p) for name, p in part._parameters.items()}))
        buffers = {name: b if b is None else _on_cpu(b, dtype) for name, b in part._buffers.items()}
        changed.append((part._buffers, buffers))
    with (
        use_float64() if dtype == torch.float64 else nullcontext(),
        torch.random.fork_rng(devices=[]),
        replaced_items(changed),
        nullcontext() if recomputes else without_recomputation(),
    ):
        module.train()
        try:
            yield
        finally:
            for part, is_training in modes.items():
                part.training = is_training


@contextmanager
def replaced_items(changed: Sequence[Replacement]) -> Iterator[None]:
    """Inside, dictionaries have other values at some of their keys."""
    before = [(items, {key: items[key] for key in new}) for items, new in changed]
    for items, new in changed:
        items.update(new)
    try:
        yield
    finally:
        for items, old in before:
            items.update(old)


def _storage_keys(module: nn.Module) -> dict[nn.Parameter, object]:
    """The parameters, each with a key that it has in common with those of the same place in blocks that are alike."""
    keys: dict[nn.Parameter, object] = {parameter: parameter for parameter in module.parameters()}
    for block in find_blocks(module):
        named = dict(block.named_parameters())
        shapes = (type(block), *((name, p.shape, p.requires_grad) for name, p in named.items()))
        keys.update({parameter: (shapes, name) for name, parameter in named.items()})
    return keys


def _random_like(parameter: Tensor, seed: int) -> Tensor:
    """Values of a size at which no softmax is saturated in a deep model."""
    noise = torch.randn(parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if parameter.dim() < 2:
        return 0.6 + 0.3 * noise
    return noise * (1.5 / sqrt(max(parameter.shape[-1], parameter.shape[-2])))


def _on_cpu(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    values = torch.zeros(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer.detach().cpu().clone()
    return values.to(dtype) if buffer.is_floating_point() and dtype == torch.float64 else values


def local_part(tensor: Tensor, split: DimensionSplit, *, ranks: int, index: int) -> Tensor:
    """The part of a tensor that one rank holds, with its padding."""
    spans, padding = split.local_spans(tensor.shape[split.dim], ranks=ranks, index=index)
    parts = [tensor.narrow(split.dim, start, stop - start) for start, stop in spans]
    if padding:
        shape = list(tensor.shape)
        shape[split.dim] = padding
        parts.append(tensor.new_zeros(shape))
    return torch.cat(parts, split.dim)


def add_to_part(tensor: Tensor, part: Tensor, split: DimensionSplit, *, ranks: int, index: int) -> Tensor:
    """Add the part of one rank to a tensor in place, and return the padding of the part."""
    spans, padding = split.local_spans(tensor.shape[split.dim], ranks=ranks, index=index)
    lengths = [stop - start for start, stop in spans]
    rest: Tensor
    *parts, rest = part.split([*lengths, padding], split.dim)
    for (start, stop), values in zip(spans, parts, strict=True):
        tensor.narrow(split.dim, start, stop - start).add_(values)
    return rest


@contextmanager
def local_values(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], attributes: Sequence[LocalAttribute] = ()
) -> Iterator[None]:
    """Inside, a module has other parameters of these names, and integer attributes are those of one rank."""
    changed, before = list[Replacement](), list[tuple[nn.Module, str, Any]]()
    for name, parameter in parameters.items():
        path, _, key = name.rpartition(".")
        changed.append((module.get_submodule(path)._parameters, {key: parameter}))
    for path, name, _ in attributes:
        holder, first = module.get_submodule(path), name.partition(".")[0]
        before.append((holder, first, getattr(holder, first)))
    with replaced_items(changed):
        try:
            set_attributes(module, attributes)  # Raises for a frozen object, after it has set others
            yield
        finally:
            for holder, name, value in reversed(before):
                setattr(holder, name, value)


def local_parameters(
    module: nn.Module, splits: Mapping[str, DimensionSplit], *, ranks: int, index: int
) -> dict[str, nn.Parameter]:
    """The parts that one rank holds of the tensors with these first names, under all of their names."""
    named = list(module.named_parameters(remove_duplicate=False))
    first_names, local = {parameter: name for name, parameter in reversed(named)}, dict[str, nn.Parameter]()
    parts = dict[object, Tensor]()  # Tensors of blocks that are alike share their memory, and so do their parts
    for name, parameter in named:
        first = first_names[parameter]
        if first in local:
            local[name] = local[first]
        elif split := splits.get(first):
            key = parameter.data_ptr(), split
            if key not in parts:
                parts[key] = local_part(parameter.detach(), split, ranks=ranks, index=index)
            local[name] = nn.Parameter(parts[key], requires_grad=parameter.requires_grad)
    return local
