"""The bytes of live tensors, and their peak: on a GPU its allocator counts, elsewhere kernels are watched.

A storage counts from the kernel that makes it until it is freed, once for all of its views. Memory that no kernel of
torch makes, such as scratch space inside of one, is not seen on a processor.
"""

import gc
import types
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from motet.memory.torch_private import TorchDispatchMode, storage_key, tensors_with_memory, tree_leaves

_SKIPPED = (type, types.ModuleType, types.CodeType, types.FrameType, str, bytes, int, float, bool, type(None))


class LiveBytes(Protocol):
    """A meter of live bytes."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def live(self) -> int:
        """The bytes that are alive."""

    def reset_peak(self) -> None:
        """Let the peak be what is alive."""

    def peak(self) -> int:
        """The most bytes that were alive since the last reset."""


class AllocatorBytes:
    """The count of a GPU's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Nothing to do: the allocator always counts."""

    def stop(self) -> None:
        """Nothing to do."""

    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class WatchedKernels(TorchDispatchMode):
    """Counts the storages that kernels make in this thread, and those of known tensors."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._storages = dict[int, tuple[weakref.ref[Any], int]]()
        self._foreign = dict[int, weakref.ref[Any]]()
        self._live = self._peak = 0
        self._add_all(known)

    def start(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def live(self) -> int:
        return self._live

    def reset_peak(self) -> None:
        self._peak = self._live

    def peak(self) -> int:
        return self._peak

    def __torch_dispatch__(self, func: Any, types: Any, *call: Any, **named: Any) -> Any:
        """Call a kernel of torch; `call` is its positional arguments and those by name."""
        args, kwargs = call[0], dict(call[1] or {})
        for leaf in tree_leaves((args, kwargs)):
            for tensor in tensors_with_memory(leaf):
                self._notice(tensor)
        result = func(*args, **kwargs)
        self._add_all(tree_leaves(result))
        return result

    def _notice(self, tensor: Tensor) -> None:
        """Leave memory uncounted that a kernel reads and none has made, such as that of a transport."""
        key = storage_key(tensor)
        known = self._storages.get(key)
        if known is None or known[0]() is None:
            self._foreign[key] = weakref.ref(tensor.untyped_storage())

    def _add_all(self, leaves: Iterable[object]) -> None:
        for tensor in (part for leaf in leaves for part in tensors_with_memory(leaf)):
            self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        known, foreign = self._storages.get(key), self._foreign.get(key)
        if foreign is not None and foreign() is not None:
            return
        if known is not None and known[0]() is not None:
            if known[1] == storage.nbytes():
                return
            self._live -= known[1]  # It was resized
        size = storage.nbytes()
        self._storages[key] = weakref.ref(storage, partial(self._forget, key)), size
        self._live += size
        self._peak = max(self._peak, self._live)

    def _forget(self, key: int, ref: Any) -> None:
        if key in self._storages and self._storages[key][0] is ref:
            self._live -= self._storages.pop(key)[1]


def tensors_reachable_from(*roots: object, without: tuple[type, ...] = (), on_meta: bool = False) -> list[Tensor]:
    """The tensors that objects hold, directly or through others, with their gradients; one for each memory, of which
    shared memory can have several storages. Objects of the types `without` are left out with all that they hold."""
    tensors, seen, left = dict[int, Tensor](), set[int](), list(roots)
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, (*_SKIPPED, *without)):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            for part in tensors_with_memory(item, on_meta=on_meta):
                tensors.setdefault(storage_key(part) if part.is_meta else part.untyped_storage().data_ptr(), part)
            left += [item.grad] if item.is_leaf and item.grad is not None else []
        elif isinstance(item, types.FunctionType):
            left += [cell.cell_contents for cell in item.__closure__ or () if cell != types.CellType()]
        else:
            left += gc.get_referents(item)
    return [*tensors.values()]
