"""Kernels on the meta device, where torch computes sizes of results in Python: up to a millisecond for a kernel.

Blocks and micro-batches repeat the same kernels on the same sizes. A call whose arguments have the sizes, strides and
dtypes of an earlier call makes its results from those of that call.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motet.models.torch_private import storage_key

_SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (Tensor, nn.Parameter)
_UNREPEATABLE_TAGS = (torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded)


class _NotRepeatableError(Exception):
    """A call has an argument that sizes do not describe."""


@dataclass(frozen=True)
class _MetaTensor:
    """A result that has its own storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class _Results:
    """The results of a kernel; no tensors where it returns the argument that it writes to."""

    container: type | None  # None: one tensor
    tensors: tuple[Any, ...] = ()  # `_MetaTensor`, or None


class _KnownCalls:
    """The calls of a kernel by their arguments."""

    def __init__(self, kernel: Any) -> None:
        self.written = _written_argument(kernel)
        self.results = dict[object, _Results | None]()  # None: the kernel is called each time


class MetaKernels:
    """Calls kernels, and repeats results on the meta device by their sizes."""

    def __init__(self) -> None:
        self._calls = dict[Any, _KnownCalls]()

    def call(self, kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a kernel, or make the results that it had for such arguments."""
        if (calls := self._calls.get(kernel)) is None:
            calls = self._calls[kernel] = _KnownCalls(kernel)
        if (written := calls.written) is None:
            return kernel(*args, **kwargs)
        try:
            positional = _description(args)
            key = (positional, _description([*kwargs.items()])) if kwargs else positional
        except _NotRepeatableError:
            return kernel(*args, **kwargs)
        if key not in calls.results:
            result = kernel(*args, **kwargs)
            target, is_resized = _argument(kernel, written, args, kwargs=kwargs), _description(args) != positional
            calls.results[key] = None if is_resized else _results(result, target, [*args, *kwargs.values()])
            return result
        if (results := calls.results[key]) is None:
            return kernel(*args, **kwargs)
        if written:
            return _argument(kernel, written, args, kwargs=kwargs)
        if results.container is None:
            return results.tensors[0].make()
        return results.container([each and each.make() for each in results.tensors])


def _written_argument(kernel: Any) -> str | None:
    """The only argument that a kernel writes to, which is then its result; "" if its results are new tensors; None if
    its calls cannot be repeated by sizes."""
    schema = kernel._schema
    if kernel.namespace != "aten" or any(tag in kernel.tags for tag in _UNREPEATABLE_TAGS) or "set_" in schema.name:
        return None
    aliased = [each for each in schema.arguments if each.alias_info is not None]
    if not aliased:
        return "" if schema.returns and all(each.alias_info is None for each in schema.returns) else None
    is_written = len(aliased) == 1 and aliased[0].alias_info.is_write and len(schema.returns) == 1
    return str(aliased[0].name) if is_written else None


def _argument(kernel: Any, name: str, args: Sequence[Any], *, kwargs: dict[str, Any]) -> Any:
    if not name or name in kwargs:
        return kwargs.get(name)
    names = [each.name for each in kernel._schema.arguments]
    return args[names.index(name)]


def _description(value: Any) -> object:
    """A key that is equal for arguments with which a kernel has results of the same sizes."""
    if type(value) in _PLAIN:
        if not value.is_meta or value.layout != torch.strided:
            raise _NotRepeatableError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, _SIMPLE):
        return type(value), value  # 1, 1.0 and True are equal
    if isinstance(value, list | tuple):
        return tuple([_description(each) for each in value])
    raise _NotRepeatableError


def _results(result: Any, target: Any, arguments: Iterable[Any]) -> _Results | None:
    """The description of results, or None where new tensors would differ from them."""
    if target is not None:
        return _Results(None) if result is target else None
    is_one = isinstance(result, Tensor)
    if not is_one and type(result) not in (list, tuple):
        return None
    tensors: Sequence[Any] = [result] if is_one else result
    described, storages = list[_MetaTensor | None](), set(_storages(arguments))
    for tensor in tensors:
        if tensor is None:
            described.append(None)
            continue
        if type(tensor) not in _PLAIN or not tensor.is_meta or tensor.layout != torch.strided:
            return None
        description = _MetaTensor(tuple(tensor.shape), tensor.stride(), tensor.dtype)
        is_complete = tensor.untyped_storage().nbytes() == description.make().untyped_storage().nbytes()
        if not is_complete or tensor.is_conj() or tensor.is_neg() or storage_key(tensor) in storages:
            return None
        storages.add(storage_key(tensor))
        described.append(description)
    return _Results(None if is_one else type(result), tuple(described)) if described else None


def _storages(values: Iterable[Any]) -> Iterable[int]:
    for value in values:
        if isinstance(value, Tensor):
            yield storage_key(value)
        elif isinstance(value, list | tuple):
            yield from _storages(value)
