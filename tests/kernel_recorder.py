"""A stand-in for the capture of CUDA graphs, on a CPU: kernels of a captured function run when it is replayed."""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


def at_address(value: Any) -> Any:
    """The memory of a tensor, which need not stay allocated: a graph keeps addresses, and no tensor."""
    if isinstance(value, list | tuple):
        return type(value)(at_address(each) for each in value)
    if not isinstance(value, Tensor):
        return value
    elements = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    memory = (ctypes.c_char * (elements * value.itemsize)).from_address(value.data_ptr())
    return torch.frombuffer(memory, dtype=value.dtype).as_strided(value.shape, value.stride())


class KernelRecorder:
    """Starts kernels, or keeps them while a function is captured."""

    def __init__(self) -> None:
        self._kept: list[Callable[[], object]] | None = None
        self.captures = self.replays = 0

    def start(self, kernel: Callable[..., object], *arguments: Any, **named: Any) -> None:
        if self._kept is None:
            kernel(*arguments, **named)
        else:
            by_name = {name: at_address(value) for name, value in named.items()}
            self._kept.append(partial(kernel, *map(at_address, arguments), **by_name))

    def launch(self, start: Callable[..., Any], kernel: Any, grid: Any, arguments: Any, constants: Any) -> None:
        """A launch of Triton, as `launches_replaced` hands it over."""
        self.start(start(kernel, grid), *arguments, **constants)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        self._kept = kept = list[Callable[[], object]]()
        try:
            function()
        finally:
            self._kept = None
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            for kernel in kept:
                kernel()

        return replay
