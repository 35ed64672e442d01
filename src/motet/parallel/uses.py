"""Which modules use which parameters, so that a module can wait for what it is about to use.

It is found out by watching one forward. A parameter counts as used by the innermost module that is at work when any
function of torch is given it, whoever owns it; and by the modules that own it, whether they were called or not. What no
module was seen to use is waited for before anything is called.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle


class Uses:
    """`numbers`: what each parameter is a part of. `needed` is told, before a module begins, of what it will use."""

    def __init__(self, module: nn.Module, numbers: Mapping[Tensor, int], needed: Callable[[int], None]) -> None:
        self._module = module
        self._needed = needed
        self._numbers = {id(parameter): number for parameter, number in numbers.items()}
        self._watch: _Watch | None = None
        self._unseen: tuple[int, ...] = ()
        self.order: tuple[int, ...] = ()
        """All numbers, by the first use; what was not used comes first. Empty until a forward was watched."""

    def begin(self) -> None:
        """Watch what comes, if nothing was watched yet."""
        if not self.order and self._watch is None:
            self._watch = _Watch(self._module, self._numbers)

    def end(self) -> None:
        """Of the forward that is watched. From now on modules wait."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.remove()
        users: dict[nn.Module, dict[int, None]] = {}
        for user in self._module.modules():
            own = (self._numbers.get(id(p)) for p in user.parameters(recurse=False))
            users[user] = dict.fromkeys(number for number in own if number is not None)
        for user, number in watch.found:
            users[user][number] = None
        seen = dict.fromkeys(number for _, number in watch.found)
        self._unseen = tuple(sorted(set(self._numbers.values()) - seen.keys()))
        self.order = (*self._unseen, *seen)
        for user, used in users.items():
            if used or user is self._module:
                user.register_forward_pre_hook(self._before(tuple(used)))

    def _before(self, used: tuple[int, ...]) -> Callable[..., None]:
        def before(module: nn.Module, args: object) -> None:
            for number in chain(self._unseen, used):
                self._needed(number)

        return before


class _Watch(TorchFunctionMode):
    """Sees the arguments of all functions of torch that are called while a module is at work."""

    def __init__(self, module: nn.Module, numbers: Mapping[int, int]) -> None:
        super().__init__()
        self._numbers = numbers
        self._at_work: list[nn.Module] = []
        self.found: dict[tuple[nn.Module, int], None] = {}
        self._handles: list[RemovableHandle] = []
        for inner in module.modules():
            self._handles.append(inner.register_forward_pre_hook(self._begun))
            self._handles.append(inner.register_forward_hook(self._done, always_call=True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((*args, *kwargs.values())):
            number = self._numbers.get(id(tensor))
            if number is not None:
                self.found[self._at_work[-1], number] = None
        return func(*args, **kwargs)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begun(self, module: nn.Module, args: object) -> None:
        self._at_work.append(module)
        if len(self._at_work) == 1:
            self.__enter__()  # type: ignore[no-untyped-call]

    def _done(self, module: nn.Module, args: object, output: object) -> None:
        self._at_work.pop()
        if not self._at_work:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _tensors(nested: Iterable[Any]) -> Iterator[Tensor]:
    for item in nested:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)
