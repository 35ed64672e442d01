"""Private names of torch that collectives use, of torch 2.11 and later."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunction, _DisableTorchDispatch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

__all__ = [
    "KEYS_AFTER_BACKEND_SELECT",
    "AllToAllOptions",
    "AllgatherOptions",
    "DisableTorchFunction",
    "completed_future",
    "has_dispatch_modes",
    "is_profiling",
    "without_dispatch",
]

KEYS_AFTER_BACKEND_SELECT = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
without_dispatch = _DisableTorchDispatch


def has_dispatch_modes() -> bool:
    """Whether this thread is in a dispatch mode."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_profiling() -> bool:
    """Whether a profiler listens."""
    return torch._C._autograd._profiler_enabled()


def completed_future(value: Callable[[], Any]) -> Any:
    """A future that has the value already, typed as torch's C++ reads it. `torch.jit.fork` warns and does the same."""
    return torch._C.fork(value)
