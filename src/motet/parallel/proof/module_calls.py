"""Calls of modules in a forward: hooks that look at them or change them, and a record of them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Self

from torch import Tensor, nn

from motet.models.torch_private import is_in_backward
from motet.parallel.proof.nested_tensors import Arguments, Path, arguments_of, copy_tensors, tensors_by_path


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
    place: tuple[int, int]  # Of its begin and its end among those of all calls
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
