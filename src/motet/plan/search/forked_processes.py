"""Calls a function for parts of a list in forked worker processes, one for each core.

A process with several threads, or with torch, does not fork: a worker has none of the other threads, and waits forever
for a lock that one of them held. It calls the function itself.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST_WORKERS = 8
_PART = 50  # Items that a worker takes from the list each time
_LEAST_PARTS = 8  # Fewer take less time than it takes to start processes

_call: Callable[[int], Any] | None = None  # What workers call; they are forked while it is set


def map_parts(function: Callable[[Sequence[_Item]], list[_Result]], items: Sequence[_Item]) -> Iterator[_Result]:
    """The results of `function(part)` of consecutive parts, in their order."""
    parts = [items[start : start + _PART] for start in range(0, len(items), _PART)]
    workers = min(_worker_count(), _MOST_WORKERS)
    if workers == 1 or len(parts) < _LEAST_PARTS:
        yield from chain.from_iterable(map(function, parts))
        return
    # The prediction of one layout does not wait for these imports.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    global _call
    _call = lambda index: function(parts[index])  # noqa: E731 - workers inherit it, which need not be pickled
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
            yield from chain.from_iterable(pool.map(_call_part, range(len(parts))))
    finally:
        _call = None


def _worker_count() -> int:
    """The cores of this process; one where it must not fork."""
    can_fork = threading.active_count() == 1 and "torch" not in sys.modules
    return len(os.sched_getaffinity(0)) if can_fork and hasattr(os, "sched_getaffinity") else 1


def _call_part(index: int) -> Any:
    assert _call is not None
    return _call(index)
