"""Shows modules the width of their input on this rank, where their code computes with it: `B, T, C = x.size()`.

The module gets a view of its input that is as wide as what the rank computes from it, so that a later `y.view(B, T, C)`
is right. The layers in it that read the input get the input itself. Nothing else may read its values.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from motet.parallel.model_sharding import InputWidth
from motet.parallel.tensor_parallel.boundary_hooks import argument_key


@contextmanager
def local_input_widths(module: nn.Module, widths: Sequence[InputWidth]) -> Iterator[None]:
    """Inside, inner modules see the widths of one rank."""
    with ExitStack() as stack:
        for remove in show_input_widths(module, widths):
            stack.callback(remove)
        yield


def show_input_widths(module: nn.Module, widths: Sequence[InputWidth]) -> list[Callable[[], None]]:
    """Let inner modules see the widths of one rank, after other hooks have changed inputs. Returns what ends it."""
    return [remove for width in widths for remove in _ShownInput(module, width).removers]


class _ShownInput:
    """The hooks of one module, and of the layers that read its input."""

    def __init__(self, module: nn.Module, width: InputWidth) -> None:
        self._width = width
        self._input: Tensor | None = None
        self._shown: Tensor | None = None
        holder = module.get_submodule(width.module)
        readers = [module.get_submodule(name) for name in width.readers]
        handles = [
            holder.register_forward_pre_hook(self._show, with_kwargs=True),
            holder.register_forward_hook(self._forget, always_call=True),
            *(reader.register_forward_pre_hook(self._give, with_kwargs=True, prepend=True) for reader in readers),
        ]
        self.removers = [handle.remove for handle in handles]

    def _show(self, holder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = argument_key(self._width.argument, holder, args, kwargs=kwargs)
        x: Tensor = args[key] if isinstance(key, int) else kwargs[key]
        self._input, self._shown = x, x.narrow(-1, 0, x.shape[-1] // self._width.ranks)
        if isinstance(key, int):
            return (*args[:key], self._shown, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: self._shown}

    def _give(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(self._original, args)), {key: self._original(value) for key, value in kwargs.items()}

    def _original(self, value: Any) -> Any:
        return value if value is None or value is not self._shown else self._input

    def _forget(self, *_: object) -> None:
        self._input = self._shown = None
