"""Calls a function for parts of a list, on all cores: in copies of this process, which share what it has read.

A process with several threads, or with torch, computes everything itself: a copy has none of the other threads, and
waits forever for a lock that one of them holds.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST_PROCESSES = 8
_PART = 50  # Items for one process, before it takes the next ones
_LEAST_PARTS = 8  # Fewer take less time than it takes to start processes

_call: Callable[[int], Any] | None = None  # Of the copies, which are made while it is set


def map_parts(function: Callable[[Sequence[_Item]], list[_Result]], items: Sequence[_Item]) -> Iterator[_Result]:
    """The results of `function(part)` of consecutive parts, in their order."""
    parts = [items[start : start + _PART] for start in range(0, len(items), _PART)]
    processes = min(_cores_of_copies(), _MOST_PROCESSES)
    if processes == 1 or len(parts) < _LEAST_PARTS:
        yield from chain.from_iterable(map(function, parts))
        return
    global _call
    _call = lambda index: function(parts[index])  # noqa: E731 - copies of this process find it, values included
    try:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
            yield from chain.from_iterable(pool.map(_call_part, range(len(parts))))
    finally:
        _call = None


def _cores_of_copies() -> int:
    """The cores that copies of this process may use; one if it cannot be copied."""
    is_alone = threading.active_count() == 1 and "torch" not in sys.modules
    return len(os.sched_getaffinity(0)) if is_alone and hasattr(os, "sched_getaffinity") else 1


def _call_part(index: int) -> Any:
    assert _call is not None
    return _call(index)
