"""The bytes of the tensors that there are, and the most there ever were, of those made while it is watching."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_RESIZE = torch.UntypedStorage.resize_


class Storages(TorchDispatchMode):
    """Every storage that an operation makes or resizes counts until nobody holds it any more; and what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def __enter__(self) -> "Storages":
        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resized: torch.UntypedStorage = _RESIZE(storage, size)
            self.count(storage)
            return resized

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]  # FSDP2 frees and allocates so
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = _RESIZE  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if all(given.alias_info is None for given in func._schema.returns):  # not in place, and no view
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self.count(tensor.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            weakref.finalize(storage, self._forget, key)
        self.now += size - self._known.get(key, 0)
        self._known[key] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key)
