"""Calls of modules in a forward: hooks that look at them or change them, and a record of them.

Tensors inside of nested containers, by the path that leads to them.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from itertools import count
from typing import Any, Self

from torch import Tensor, nn

from motet.models.torch_private import is_in_backward

Path = tuple[int | str, ...]  # Indices, keys and names of attributes
Arguments = dict[int | str, Any]  # Arguments of a call, by index or name


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
    """The value at a path, or None without one."""
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


class CallObserver:
    """Hooks around each call of some modules, except in recomputation. Subclasses look at calls, or change them."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.running = list[str]()  # Modules whose calls are under way, the innermost last
        self.counts = Counter[str]()  # Calls of each module that have begun

    def enter(self, name: str, arguments: Arguments) -> Arguments:
        """The arguments with which a call goes on."""
        return arguments

    def leave(self, name: str, arguments: Arguments, output: Any) -> Any:
        """The output with which the caller goes on."""
        return output

    @contextmanager
    def hooked(self) -> Iterator[Self]:
        """Inside, calls are observed."""
        with ExitStack() as hooks:
            for name, module in self.modules.items():
                enter, leave = partial(self._enter, name), partial(self._leave, name)
                hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
            yield self

    def _enter(self, name: str, *call: Any) -> Any:
        if is_in_backward():
            return None
        _, args, kwargs = call
        values = self.enter(name, arguments_of(args, kwargs))
        self.running.append(name)
        self.counts[name] += 1
        return tuple(values[i] for i in range(len(args))), {key: values[key] for key in kwargs}

    def _leave(self, name: str, *call: Any) -> Any:
        if is_in_backward():
            return None
        _, args, kwargs, output = call
        output = self.leave(name, arguments_of(args, kwargs), output)
        while self.running.pop() != name:  # A call inside has raised something that this module caught
            pass
        return output


@dataclass
class ModuleCall:
    """One call of a module. Values are copies, since later code may write to tensors; without copies there are none."""

    arguments: Arguments
    argument_values: Arguments
    place: tuple[int, int]  # Positions of its begin and its end among those of all calls
    output: Any = None
    output_values: Any = None

    @property
    def entered(self) -> dict[Path, Tensor]:
        """Copies of all tensors in the arguments."""
        return dict(tensors_by_path(self.argument_values))

    @property
    def left(self) -> dict[Path, Tensor]:
        """Copies of all tensors in the output."""
        return dict(tensors_by_path(self.output_values))


class _CallRecorder(CallObserver):
    def __init__(self, modules: Mapping[str, nn.Module], *, copies: bool) -> None:
        super().__init__(modules)
        self.calls, self._begun, self._places = dict[str, list[ModuleCall]](), list[tuple[str, ModuleCall]](), count()
        self._copied: Callable[[Any], Any] = copy_tensors if copies else lambda _: {}

    def enter(self, name: str, arguments: Arguments) -> Arguments:
        call = ModuleCall(arguments, self._copied(arguments), (next(self._places), -1))
        self.calls.setdefault(name, []).append(call)
        self._begun.append((name, call))
        return arguments

    def leave(self, name: str, arguments: Arguments, output: Any) -> Any:
        begun, call = self._begun.pop()
        while begun != name:  # It has raised something
            begun, call = self._begun.pop()
        call.output, call.output_values, call.place = output, self._copied(output), (call.place[0], next(self._places))
        return output


@contextmanager
def record_calls(modules: Mapping[str, nn.Module], *, copies: bool = True) -> Iterator[dict[str, list[ModuleCall]]]:
    """Inside, the calls of modules are recorded by name, in the order in which they begin."""
    recorder = _CallRecorder(modules, copies=copies)
    with recorder.hooked():
        yield recorder.calls
