"""Patches for measurements and tests: which implementation runs, and what the launches of kernels read and write."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch


@contextmanager
def kernels_forced(forced: str | Mapping[str, str]) -> Iterator[None]:
    """Run this implementation of every kernel, or of each that is named, in all threads."""
    from motet.models.kernels import choice

    matching_rows = choice._matching_rows

    def rows(kernel: choice.KernelName, *place: str, name: str) -> Any:
        implementation = forced if isinstance(forced, str) else forced.get(kernel)
        return matching_rows(kernel, *place, name=name) if implementation is None else [(0, implementation)]

    with patch.object(choice, "_matching_rows", rows):
        yield


class KernelLaunch(NamedTuple):
    """A start of a kernel."""

    kernel: str
    nbytes: int  # The size of its tensors, each of which it reads or writes once


@contextmanager
def recorded_launches(*, only_record: bool = False) -> Iterator[list[KernelLaunch]]:
    """The launches of all threads while the context is open; with `only_record` no kernel runs."""
    import torch

    launches = list[KernelLaunch]()

    def record(start: Callable[..., Any], kernel: Any, grid: Any, arguments: Any, constants: Any) -> None:
        nbytes = sum(each.nbytes for each in arguments if isinstance(each, torch.Tensor))
        launches.append(KernelLaunch(kernel.fn.__name__, nbytes))
        if not only_record:
            start(kernel, grid)(*arguments, **constants)

    with launches_replaced(record):
        yield launches


@contextmanager
def launches_replaced(launch: Callable[..., object]) -> Iterator[None]:
    """Call `launch(start, kernel, grid, arguments, constants)` for `kernel[grid](*arguments, **constants)`, where
    `start(kernel, grid)` is what Triton calls."""
    from triton.runtime.jit import KernelInterface

    start = KernelInterface.__getitem__

    def replaced(kernel: Any, grid: Any) -> Callable[..., object]:
        return lambda *arguments, **constants: launch(start, kernel, grid, arguments, constants)

    with patch.object(KernelInterface, "__getitem__", replaced):
        yield
