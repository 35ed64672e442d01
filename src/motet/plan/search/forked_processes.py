"""Calls a function for the parts of a list, on all cores: in copies of this process, which share what it has read."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST_PROCESSES = 8
_LEAST_PARTS = 8  # Fewer take less time than it takes to start processes

_call: Callable[[int], Any] | None = None  # Of the copies, which are made while it is set


def map_parts(function: Callable[[Sequence[_Item]], _Result], items: Sequence[_Item], size: int) -> Iterator[_Result]:
    """`function(part)` of consecutive parts with `size` items each, in their order."""
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    processes = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, _MOST_PROCESSES)
    if processes == 1 or len(parts) < _LEAST_PARTS:
        yield from map(function, parts)
        return
    global _call
    _call = lambda index: function(parts[index])  # noqa: E731 - copies of this process find it, values included
    try:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
            yield from pool.map(_call_part, range(len(parts)))
    finally:
        _call = None


def _call_part(index: int) -> Any:
    assert _call is not None
    return _call(index)
