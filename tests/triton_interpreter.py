"""Triton's interpreter in a process of its own, because Triton reads TRITON_INTERPRET when it is imported.

`interpreted(function, *arguments)` calls a function of a test module there. The process starts with the first call.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from environment import uncounted

Interpreted = Callable[..., Any]


def _start(environment: dict[str, str], paths: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment, TRITON_INTERPRET="1")
    sys.path[:] = paths


def _call(file: str, name: str, arguments: tuple[Any, ...]) -> Any:
    module = sys.modules.get(Path(file).stem)
    if module is None:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    import torch

    torch.manual_seed(0)
    return getattr(module, name)(*arguments)


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreted]:
    """Calls a function of a test module under Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed: `.[dev]` brings it on Linux with x86-64")
    start = (uncounted(), [*sys.path])
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_start, initargs=start) as pool:

        def call(function: Callable[..., Any], *arguments: Any) -> Any:
            file = function.__code__.co_filename
            return pool.submit(_call, file, function.__name__, arguments).result(timeout=300)

        yield call
