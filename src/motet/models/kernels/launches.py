"""How kernels in Triton start, and what the starts read and write."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor


class KernelLaunch(NamedTuple):
    """A start of a kernel."""

    kernel: str
    nbytes: int  # The size of its tensors, each of which it reads or writes once


_recorded: list[KernelLaunch] | None = None
_only_records = False


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel on a grid of programs."""
    if _recorded is not None:
        nbytes = sum(tensor.nbytes for tensor in arguments if isinstance(tensor, Tensor))
        _recorded.append(KernelLaunch(kernel.fn.__name__, nbytes))
    if not _only_records:
        kernel[grid](*arguments, **constants)


@contextmanager
def recorded_launches(*, only_record: bool = False) -> Iterator[list[KernelLaunch]]:
    """The launches of all threads while the context is open; with `only_record` no kernel runs."""
    global _recorded, _only_records
    before, launches = (_recorded, _only_records), list[KernelLaunch]()
    _recorded, _only_records = launches, only_record
    try:
        yield launches
    finally:
        _recorded, _only_records = before
