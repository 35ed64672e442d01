"""The values that a module has while splits of it are proven: random, in float64, and those of one shard at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from motet.models.blocks import find_blocks
from motet.parallel.model_sharding import DimensionSplit
from motet.parallel.tensor_parallel.sharded_module import set_attributes
from motet.parallel.tensor_parallel.split_regions import LocalAttribute
from motet.parallel.torch_private import without_recomputation

LARGE_MODEL = 2**28  # Parameters, beyond which one of several blocks that are alike has gradients


@contextmanager
def random_values(module: nn.Module, dtype: torch.dtype = torch.float64, *, recomputes: bool = False) -> Iterator[None]:
    """Inside, parameters have this dtype on the CPU, as buffers have if it is float64, and the module is in train mode.

    Parameters have random values; tied ones stay tied, and blocks that are alike share their memory. Nothing is
    recomputed in backward, which may run when the module has other values again, unless `recomputes` is set.
    """
    modes = {part: part.training for part in module.modules()}
    tensors = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    storage, replaced = dict[object, Tensor](), dict[Any, nn.Parameter]()
    is_large = sum(parameter.numel() for parameter in module.parameters()) > LARGE_MODEL
    for parameter, key in _storage_keys(module).items():
        if parameter.is_floating_point():
            if key not in storage:
                storage[key] = _random_like(parameter, len(storage)).to(dtype)
                replaced[parameter] = nn.Parameter(storage[key])
            else:  # A gradient for each block would need the memory of the whole model
                replaced[parameter] = nn.Parameter(storage[key], requires_grad=not is_large)
    try:
        for part, parameters, buffers in tensors:
            part._parameters.update({name: replaced.get(p, p) for name, p in parameters.items()})
            part._buffers.update({name: b if b is None else _on_cpu(b, dtype) for name, b in buffers.items()})
        module.train()
        with nullcontext() if recomputes else without_recomputation():
            yield
    finally:
        for part, parameters, buffers in tensors:
            part._parameters.update(parameters)
            part._buffers.update(buffers)
            part.training = modes[part]


def _storage_keys(module: nn.Module) -> dict[nn.Parameter, object]:
    """The parameters, each with a key that it has in common with those of the same place in blocks that are alike."""
    keys: dict[nn.Parameter, object] = {parameter: parameter for parameter in module.parameters()}
    for block in find_blocks(module):
        named = dict(block.named_parameters())
        shapes = (type(block), *((name, parameter.shape) for name, parameter in named.items()))
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
    """Add the part of one rank to a tensor in place, and return what the part has as padding."""
    spans, padding = split.local_spans(tensor.shape[split.dim], ranks=ranks, index=index)
    lengths = [stop - start for start, stop in spans]
    rest: Tensor
    *parts, rest = part.split([*lengths, padding], split.dim)
    for (start, stop), values in zip(spans, parts, strict=True):
        tensor.narrow(split.dim, start, stop - start).add_(values)
    return rest


@contextmanager
def local_values(
    module: nn.Module, parameters: dict[str, Tensor], attributes: Sequence[LocalAttribute]
) -> Iterator[None]:
    """Inside, parameters have other values, or are other parameters, and integer attributes are those of one rank."""
    before = list[tuple[Any, str, Any]]()
    swapped = [(*_owner(module, name), values) for name, values in parameters.items()]
    originals = [(owner, key, owner._parameters[key]) for owner, key, _ in swapped]
    try:
        for owner, key, values in swapped:
            parameter = owner._parameters[key]
            trains = parameter is None or parameter.requires_grad
            owner._parameters[key] = (
                values if isinstance(values, nn.Parameter) else nn.Parameter(values, requires_grad=trains)
            )
        for path, name, _ in attributes:
            holder, first = module.get_submodule(path), name.partition(".")[0]
            before.append((holder, first, getattr(holder, first)))
        set_attributes(module, attributes)
        yield
    finally:
        for holder, name, value in reversed(before):
            setattr(holder, name, value)
        for owner, key, parameter in originals:
            owner._parameters[key] = parameter


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path), key


def tensors_in(value: object) -> list[Tensor]:
    """The tensors of floating-point numbers in nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    inner: Sequence[Any] = list(value.values()) if isinstance(value, dict) else ()
    if isinstance(value, tuple | list):
        inner = value
    return list(chain.from_iterable(map(tensors_in, inner)))
