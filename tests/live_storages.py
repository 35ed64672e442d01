"""Bytes of the tensors that a computation makes or has, counted by what is alive."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """The storages of known tensors, and those that kernels made while it was active."""

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0
        self._counts_peak = bool(known)
        for tensor in known:
            self._keep(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if [self._keep(tensor) for tensor in tensors].count(True) and self._counts_peak:
            self.peak = max(self.peak, self.bytes())
        return result

    def _keep(self, tensor: Tensor) -> bool:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        before = self._made.get(storage._cdata)
        if before is not None and before() is not None:
            return False
        self._made[storage._cdata] = weakref.ref(storage)  # An address may be used again
        return True

    def bytes(self) -> int:
        return sum(storage.nbytes() for ref in self._made.values() if (storage := ref()) is not None)


def live_bytes_after(compute: Callable[[], Any]) -> int:
    with LiveStorages() as storages:
        result = compute()
    count = storages.bytes()
    del result
    return count
