"""Bytes of the tensors that a computation leaves behind, counted by what is alive."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """The storages that kernels made while it was active."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                before = self._made.get(storage._cdata)
                if before is None or before() is None:  # An address is used again
                    self._made[storage._cdata] = weakref.ref(storage)
        return result

    def bytes(self) -> int:
        return sum(storage.nbytes() for ref in self._made.values() if (storage := ref()) is not None)


def live_bytes_after(compute: Callable[[], Any]) -> int:
    with LiveStorages() as storages:
        result = compute()
    count = storages.bytes()
    del result
    return count
