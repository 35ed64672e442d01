"""Garbage collection in commands that import much, run briefly, and end."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 50_000  # In place of 700, between two searches


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Inside, Python seldom searches for objects that refer to each other alone. What modules define is never
    garbage, and the search through it takes a tenth of the time of a short command."""
    usual = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
