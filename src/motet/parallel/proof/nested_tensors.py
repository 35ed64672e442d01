"""Tensors inside of nested containers, by the path that leads to them."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from torch import Tensor

Path = tuple[int | str, ...]  # Of indices, keys and names of attributes
Arguments = dict[int | str, Any]  # Of a call, by index or name


def arguments_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments of a call in one mapping."""
    arguments: Arguments = {}
    arguments.update(enumerate(args))
    arguments.update(kwargs)
    return arguments


def items_of(value: Any) -> dict[int | str, Any]:
    """The items of a container by index, key or attribute; none for anything else."""
    if value is None or isinstance(value, Tensor):  # Most values, and the tests below take longer
        return {}
    if isinstance(value, Mapping):
        return {key: inner for key, inner in value.items() if isinstance(key, int | str)}
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return {name: getattr(value, name) for name in _field_names(value.__class__) if hasattr(value, name)}


@cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    """The fields of a dataclass; none of another type."""
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else ()


def tensors_by_path(value: object, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in a value, in order."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, inner in items_of(value).items():
        if isinstance(inner, Tensor):  # Most are, and a generator for each takes longer
            yield (*path, key), inner
        elif inner is not None:
            yield from tensors_by_path(inner, (*path, key))


def tensors_in(value: object) -> list[Tensor]:
    """The tensors of floating-point numbers in a value, in order."""
    return [tensor for _, tensor in tensors_by_path(value) if tensor.is_floating_point()]


def value_at(value: object, path: Path) -> Any:
    """The value at a path, or None if nothing is."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else items_of(value).get(key)
    return value


def with_values(value: Any, changed: Mapping[Path, object], path: Path = ()) -> Any:
    """The same value with something else at some paths; containers on the way to them are copied."""
    if path in changed:
        return changed[path]
    items = items_of(value)
    after = {key: with_values(inner, changed, (*path, key)) for key, inner in items.items()}
    return value if all(after[key] is inner for key, inner in items.items()) else rebuild(value, after)


def rebuild(value: Any, items: Mapping[int | str, object]) -> Any:
    """A container like `value` with other items."""
    if isinstance(value, tuple):
        return value._make(items.values()) if hasattr(value, "_make") else type(value)(items.values())
    after = copy.copy(value)
    for key, inner in items.items():
        if isinstance(value, Mapping | list):
            after[key] = inner
        else:  # A frozen dataclass, too
            object.__setattr__(after, str(key), inner)
    return after


def copy_tensors(value: Any) -> Any:
    """The same value with detached copies of its tensors."""
    return with_values(value, {path: tensor.detach().clone() for path, tensor in tensors_by_path(value)})


def output_items(output: Any) -> dict[int | str, Any]:
    """The outputs of a module by index: several outputs in a tuple or list, or one."""
    return dict(enumerate(output if isinstance(output, tuple | list) else (output,)))


def with_output_items(output: Any, items: Mapping[int | str, object]) -> Any:
    """The same output with other items."""
    return rebuild(output, items) if isinstance(output, tuple | list) else items[0]
