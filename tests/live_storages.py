"""Bytes of the tensors that a computation makes or has, counted by what is alive."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

StorageRefs = dict[int, weakref.ref[torch.UntypedStorage]]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


class LiveStorages(TorchDispatchMode):
    """The storages of known tensors, and those that kernels made while it was active."""

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._made: StorageRefs = {}
        self._others: StorageRefs = {}  # Read by kernels and made by none, such as shared memory of a transport
        self.peak = 0
        self._counts_peak = bool(known)
        for tensor in known:
            self._keep(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not self._is_alive(self._made, storage := _storage(leaf)):
                self._others[storage._cdata] = weakref.ref(storage)
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if [self._keep(tensor) for tensor in tensors].count(True) and self._counts_peak:
            self.peak = max(self.peak, self.bytes())
        return result

    def _keep(self, tensor: Tensor) -> bool:
        storage = _storage(tensor)
        if self._is_alive(self._made, storage) or self._is_alive(self._others, storage):
            return False
        self._made[storage._cdata] = weakref.ref(storage)  # An address may be used again
        return True

    @staticmethod
    def _is_alive(storages: StorageRefs, storage: torch.UntypedStorage) -> bool:
        ref = storages.get(storage._cdata)
        return ref is not None and ref() is not None

    def bytes(self) -> int:
        return sum(storage.nbytes() for ref in self._made.values() if (storage := ref()) is not None)


def live_bytes_after(compute: Callable[[], Any]) -> int:
    with LiveStorages() as storages:
        result = compute()
    count = storages.bytes()
    del result
    return count


def kept_bytes_after(module: nn.Module, compute: Callable[[], Any]) -> int:
    """Bytes of the distinct storages that autograd keeps for backward and that are no parameters of a module."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # held, so that its address is not given away
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    return sum(storage.nbytes() for storage in kept.values())
