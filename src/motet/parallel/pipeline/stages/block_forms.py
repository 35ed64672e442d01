"""The forms of what blocks return and of tensors between them, from calls of blocks in several forwards.

A block that is skipped or passed by returns something of the form of its output.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import reduce
from importlib import import_module
from itertools import product
from math import prod
from typing import Any

from torch import Tensor

from motet.core.errors import check_input
from motet.parallel.model_sharding import BlockOutput
from motet.parallel.proof.nested_tensors import (
    Arguments,
    Path,
    items_of,
    tensors_by_path,
    value_at,
)

PLAIN_CONTAINERS: dict[type, str] = {tuple: "tuple", list: "list", dict: "dict"}


def describe_sizes(shapes: Sequence[Sequence[int]], sizes: Sequence[Mapping[str, int]]) -> tuple[int | str, ...]:
    """The dims of a tensor whose shapes in several micro-batches are known, by the sizes of those.

    | dims | text |
    |---|---|
    | the same in all micro-batches | the number |
    | one size, or a product of two | `tokens`, `rows * tokens` |
    | a multiple of those, or more by a constant | `2 * tokens`, `tokens + 1` |
    """
    names = list(sizes[0])
    words = [(name,) for name in names] + [pair for pair in product(names, names) if pair[0] < pair[1]]
    return tuple(_describe_size(lengths, words, sizes) for lengths in zip(*shapes, strict=True))


def _describe_size(
    lengths: Sequence[int], words: Sequence[tuple[str, ...]], sizes: Sequence[Mapping[str, int]]
) -> int | str:
    if len(set(lengths)) == 1:
        return lengths[0]
    fits = []
    for word in words:
        counts = [prod(each[name] for name in word) for each in sizes]
        if counts[0] != counts[1]:
            times, rest = divmod(lengths[1] - lengths[0], counts[1] - counts[0])
            plus = lengths[0] - times * counts[0]
            if not rest and all(times * count + plus == n for count, n in zip(counts, lengths, strict=True)):
                text = " * ".join([str(times)] * (times != 1) + [*word]) + f" + {plus}" * (plus != 0)
                fits.append((plus != 0, times != 1, len(word), text))
    check_input(
        fits,
        f"layout.pp: a tensor between two blocks has {', '.join(map(str, lengths))} elements along a dimension in "
        f"micro-batches of {'; '.join(map(str, sizes))}, which follows from none of these sizes; leave layout.pp out",
    )
    return min(fits)[-1]


def describe_output(outputs: Sequence[Any], arguments: Sequence[Arguments]) -> BlockOutput:
    """The form of what a block returns in several forwards, in which it had these arguments."""
    first, items = outputs[0], items_of(outputs[0])
    if isinstance(first, Tensor):
        return _describe_tensor(outputs, arguments)
    if items or type(first) in PLAIN_CONTAINERS:
        of_each = [items_of(output) for output in outputs]
        described = ((key, describe_output([inner[key] for inner in of_each], arguments)) for key in items)
        name = f"{type(first).__module__}:{type(first).__qualname__}"
        return BlockOutput(container=PLAIN_CONTAINERS.get(type(first), name), items=tuple(described))
    if isinstance(first, bool | int | float | str):
        return BlockOutput(value=first)
    same = ((key,) for key, value in arguments[0].items() if value is first and value is not None)
    return BlockOutput(argument=next(same, ()))


def _describe_tensor(outputs: Sequence[Tensor], arguments: Sequence[Arguments]) -> BlockOutput:
    shapes, dtype = [output.shape for output in outputs], outputs[0].dtype
    by_path = {path: [value_at(each, path) for each in arguments] for path, _ in tensors_by_path(arguments[0])}
    like = {path: tensors for path, tensors in by_path.items() if tensors[0].dtype == dtype}
    same = (path for path, tensors in like.items() if [tensor.shape for tensor in tensors] == shapes)
    if path := next(same, None):
        return BlockOutput(argument=path)
    sources: dict[tuple[int, ...], Path] = {}
    for path, tensors in by_path.items():
        for dim, lengths in enumerate(zip(*(tensor.shape for tensor in tensors), strict=True)):
            sources.setdefault(lengths, (*path, dim))
    dims = (n[0] if len(set(n)) == 1 else sources.get(n, 1) for n in zip(*shapes, strict=True))
    other_dtype = "" if like else str(dtype).removeprefix("torch.")
    return BlockOutput(next(iter(like or by_path), ()), tuple(dims), other_dtype)


def output_of_form(form: BlockOutput, arguments: Arguments, make: Callable[[BlockOutput, Any], Any]) -> Any:
    """A block's output of this form; `make` returns what stands in place of an argument."""
    if form.container:
        return _make_container(form.container, {k: output_of_form(item, arguments, make) for k, item in form.items})
    return make(form, value_at(arguments, form.argument)) if form.argument else form.value


def _make_container(name: str, items: Mapping[int | str, object]) -> Any:
    """A container of these items; `name` is that of a built-in type, or `package.module:Class`."""
    if ":" not in name:
        return dict(items) if name == "dict" else {"tuple": tuple, "list": list}[name](items.values())
    module, _, path = name.partition(":")
    kind: Any = reduce(getattr, path.split("."), import_module(module))
    if issubclass(kind, tuple):
        return kind(*items.values())
    if issubclass(kind, Mapping) and not is_dataclass(kind):
        return kind(items)
    return kind(**{str(key): value for key, value in items.items()})
