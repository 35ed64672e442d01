"""Which modules use which parameters, so that a module can wait for what it is about to use.

It is found out by watching one forward. A parameter counts as used by the innermost module that is at work when any
function of torch is given it, whoever owns it; and by the modules that own it, whether they were called or not. What is
used while no module is at work, as by a loss function, counts for the module that was called last before. What was not
seen to be used, or was before any module was called, is waited for when a step begins.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.hooks import RemovableHandle


class Uses:
    """`numbers`: what each parameter is a part of. `needed` is told, before a module begins, of what it will use."""

    def __init__(self, module: nn.Module, numbers: Mapping[Tensor, int], needed: Callable[[int], None]) -> None:
        self._module = module
        self._needed = needed
        self._numbers = {id(parameter): number for parameter, number in numbers.items()}
        self._watch: _Watch | None = None
        self._first: tuple[int, ...] = ()
        """What a step waits for when it begins."""
        self.order: tuple[int, ...] = ()
        """All numbers, by the first use; what was not used comes first. Empty until a forward was watched."""

    def begin(self) -> None:
        """Of a step. Watch what comes, if nothing was watched yet."""
        if self._watch is None:
            self._watch = _Watch(self._module, self._numbers)
        self.leave()
        for number in self._first:
            self._needed(number)

    def leave(self) -> None:
        """What watched, if it has seen a forward and is not in the middle of something."""
        if self._watch is not None and self.order:
            self._watch.leave()

    def end(self) -> None:
        """Of the forward that is watched. From now on modules wait."""
        watch = self._watch
        if watch is None or self.order:
            return
        watch.remove()
        users: dict[nn.Module, dict[int, None]] = {}
        for user in self._module.modules():
            own = (self._numbers.get(id(p)) for p in user.parameters(recurse=False))
            users[user] = dict.fromkeys(number for number in own if number is not None)
        early: dict[int, None] = {}
        for user_or_none, number in watch.found:
            (early if user_or_none is None else users[user_or_none])[number] = None
        unseen = {number for parameter, number in self._numbers.items() if parameter not in watch.seen}
        self._first = (*sorted(unseen), *(number for number in early if number not in unseen))
        self.order = tuple(dict.fromkeys((*self._first, *(number for _, number in watch.found))))
        for user, used in users.items():
            if used or user is self._module:
                user.register_forward_pre_hook(self._before(tuple(used)))

    def _before(self, used: tuple[int, ...]) -> Callable[..., None]:
        def before(module: nn.Module, args: object) -> None:
            for number in chain(self._first, used):
                self._needed(number)

        return before


_NO_USE = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad")
    ),
    *(Tensor.size, Tensor.numel, Tensor.dim, Tensor.data_ptr, Tensor.is_floating_point, Tensor.is_complex),
}
"""They see no values."""


class _Watch(TorchFunctionMode):
    """Sees the arguments of all functions of torch that are called."""

    def __init__(self, module: nn.Module, numbers: Mapping[int, int]) -> None:
        super().__init__()
        self._numbers = numbers
        self._at_work: list[nn.Module] = []
        self._last: nn.Module | None = None
        """That was called while no other was at work."""
        self.found: dict[tuple[nn.Module | None, int], None] = {}
        self.seen: set[int] = set()
        self._handles: list[RemovableHandle] = []
        for inner in module.modules():
            self._handles.append(inner.register_forward_pre_hook(self._begun))
            self._handles.append(inner.register_forward_hook(self._done, always_call=True))
        self._entered = ExitStack()
        self._entered.enter_context(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._handles and func not in _NO_USE:
            for tensor in _tensors((*args, *kwargs.values())):
                number = self._numbers.get(id(tensor))
                if number is not None:
                    self.found[self._at_work[-1] if self._at_work else self._last, number] = None
                    self.seen.add(id(tensor))
        return func(*args, **kwargs)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.leave()

    def leave(self) -> None:
        """As soon as nothing that was entered later is in the way: modes are a stack."""
        if not self._handles and _get_current_function_mode() is self:
            self._entered.close()

    def _begun(self, module: nn.Module, args: object) -> None:
        if not self._at_work:
            self._last = module
        self._at_work.append(module)

    def _done(self, module: nn.Module, args: object, output: object) -> None:
        self._at_work.pop()


def _tensors(nested: Iterable[Any]) -> Iterator[Tensor]:
    for item in nested:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)
