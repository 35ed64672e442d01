"""The tensors that blocks save for backward, in the memory of the host from forward to backward.

When a block begins, the tensors that the block before it has saved are copied to the host; when it ends, they leave the
device. When the backward of a block begins, the tensors of the block before it are fetched. So the device has those of
two blocks at most. A storage is copied once for all saved views of it. On a GPU copies go on another stream, in the
order of the calls; on a CPU rank, whose device is simulated, they are made at that moment.

Autograd does not compare the versions of tensors that it saves by hooks, so it is done here.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from motet.core.errors import InputError
from motet.core.units import dtype_name
from motet.memory.policy_choice import MIN_SENT_BYTES
from motet.memory.storage_tracker import is_on_host, mark_saved_activations
from motet.memory.tiers.host_link import HAS_ARRIVED, link_of
from motet.memory.torch_private import (
    detach_with_version,
    own_buffers,
    storage_and_key,
    tensors_with_memory,
    version,
)
from motet.models.torch_private import own_parameters, storage_key


class _SavedStorage:
    """A storage of saved tensors: on the device, on the host, or on both."""

    def __init__(self, tensor: Tensor, owner: "OffloadedActivations") -> None:
        storage, self.key = storage_and_key(tensor)
        self.ref, self.version, self._owner = weakref.ref(storage), version(tensor), owner
        self.calls = set[int]()  # Calls of blocks for which it stays on the device
        self.host: Tensor | None = None
        self.device: Tensor | None = _bytes_of(tensor)
        self._arrival = HAS_ARRIVED  # That of a copy which may be under way

    def is_same(self, tensor: Tensor) -> bool:
        """Whether it is the storage of a tensor, and was not changed since."""
        return self.ref() is storage_and_key(tensor)[0] and self.version == version(tensor)

    def hold(self, tensor: Tensor) -> None:
        """Keep the storage of this tensor on the device."""
        if self.device is None:
            self.device = _bytes_of(tensor)

    def send(self) -> None:
        """Begin to copy it to the host, unless it was done before."""
        if self.host is None and self.device is not None:
            mark_saved_activations([self.device])
            (self.host,), self._arrival = self._owner.link.to_host([self.device], may_be_freed=False)
            self._owner.count_on_host(self.host.nbytes)

    def leave(self) -> None:
        """Free it on the device; kernels after this one may overwrite it."""
        self.settle()
        self.device = None

    def fetch(self) -> None:
        """Begin to copy it to the device, unless it is there."""
        if self.device is None and self.host is not None:
            self.device, self._arrival = self._owner.link.fetch(self.host)
            mark_saved_activations([self.device])

    def settle(self) -> None:
        """Let the next kernel wait for the copy that goes on."""
        arrival, self._arrival = self._arrival, HAS_ARRIVED
        arrival.let_device_wait()

    def __del__(self) -> None:
        """Memory to which a copy goes on is not given to other tensors."""
        self.settle()
        self._owner.count_on_host(0 if self.host is None else -self.host.nbytes)


def _bytes_of(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class SavedTensor:
    """A tensor that a call of a block has saved; without a storage, the tensor itself is kept."""

    def __init__(self, call: "BlockCall", tensor: Tensor, storage: _SavedStorage | None) -> None:
        self.storage, self._call, self._version = storage, call, version(tensor)
        self._tensor: Tensor | None = detach_with_version(tensor)
        self._is_changed = False
        self._dtype, self._layout = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def unpack(self) -> Tensor:
        """The tensor, for backward."""
        self._call.begin_backward()
        self.compare_versions()
        if self._is_changed:
            raise InputError(
                f"memory.activations = 'host': the block {self._call.name} saves a tensor of shape "
                f"{list(self._layout[1])} and dtype {dtype_name(self._dtype)} for backward, and the model changes this "
                "tensor in place afterwards; change a copy of it"
            )
        if self._tensor is None and self.storage is not None:
            self.storage.fetch()
        tensor = self.on_device
        assert tensor is not None
        return tensor

    @property
    def on_device(self) -> Tensor | None:
        """The tensor, or a view of the copy that came back; None while only the host has it."""
        if self._tensor is not None or self.storage is None or self.storage.device is None:
            return self._tensor
        self.storage.settle()
        with torch.no_grad():
            view = torch.empty(0, dtype=self._dtype, device=self.storage.device.device)
            return view.set_(self.storage.device.untyped_storage(), *self._layout)

    def compare_versions(self) -> None:
        """Note whether the tensor was changed since it was saved."""
        self._is_changed |= self._tensor is not None and version(self._tensor) != self._version

    def leave(self) -> None:
        """Give the tensor up, of which the host has a copy."""
        if self.storage is not None:
            self.compare_versions()
            self._tensor = None


class BlockCall:
    """The tensors that one call of a block saves. It lives as long as one of them, which autograd frees one by one."""

    def __init__(self, owner: "OffloadedActivations", *, index: int, name: str, previous: "BlockCall | None") -> None:
        """`previous` is the call of a block before it in the same forward."""
        self.index, self.name, self._owner = index, name, owner
        self._previous = None if previous is None else weakref.ref(previous)
        self._tensors = weakref.WeakSet[SavedTensor]()
        self._storages = weakref.WeakValueDictionary[int, _SavedStorage]()
        self._parameters: set[int] | None = None
        self.arguments = list[weakref.ref[Any]]()  # Storages of tensors that are arguments

    def has_argument(self, tensor: Tensor) -> bool:
        """Whether a tensor shares the storage of an argument."""
        return any(ref() is storage_and_key(part)[0] for part in self._owner.parts(tensor) for ref in self.arguments)

    @property
    def previous(self) -> "BlockCall | None":
        return None if self._previous is None else self._previous()

    def pack(self, tensor: Tensor) -> SavedTensor:
        """The value that autograd keeps in place of a tensor."""
        if self._parameters is None:  # Stage 3 has gathered the parameters of the block now
            self._parameters = self._owner.keys_of_parameters(self.index)
        storage = None
        if self._owner.may_leave(tensor) and (key := storage_key(tensor)) not in self._parameters:
            storage = self._storages[key] = self._owner.storage_of(tensor, key)
            storage.calls.add(id(self))
        saved = SavedTensor(self, tensor, storage)
        self._tensors.add(saved)
        return saved

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of these tensors, which others hold anyway, on the device."""
        keys = {storage_key(part) for tensor in tensors for part in self._owner.parts(tensor)}
        keys.intersection_update(self._storages.keys())
        for saved in [*self._tensors] if keys else ():
            if saved.storage is not None and saved.storage.key in keys:
                saved.storage = None

    def send(self) -> None:
        """Begin to copy all of it to the host."""
        for storage in [*self._storages.values()]:
            storage.send()

    def leave(self) -> None:
        """Free all of it on the device that no other call keeps there."""
        self.send()
        for saved in [*self._tensors]:
            saved.leave()
        for storage in [*self._storages.values()]:
            storage.calls.discard(id(self))
            if not storage.calls:
                storage.leave()

    def fetch(self) -> None:
        """Begin to copy all of it to the device, in the order in which backward reads it."""
        for storage in reversed([*self._storages.values()]):
            storage.calls.add(id(self))
            storage.fetch()

    def begin_backward(self) -> None:
        """Called before backward reads a tensor."""
        self._owner.begin_backward(self)


class OffloadedActivations:
    """The saved tensors of the blocks of a module, of which two blocks' worth is on the device. `starts` are the blocks
    with which stages of a pipeline begin."""

    def __init__(
        self, module: nn.Module, blocks: Sequence[nn.Module], device: torch.device, *, starts: Collection[int] = ()
    ) -> None:
        names = {part: name for name, part in module.named_modules()}
        self._blocks, self._names, self._starts = blocks, [names[block] for block in blocks], starts
        in_blocks = {part for block in blocks for part in block.modules()}
        self._outside = [part for part in module.modules() if part not in in_blocks]
        self.link = link_of(device)
        self.host_bytes = self.peak_host_bytes = 0  # Bytes of copies on the host
        self._latest: weakref.ref[BlockCall] | None = None
        self._in_backward: weakref.ref[BlockCall] | None = None
        self._on_device = weakref.WeakSet[BlockCall]()
        self._storages_of_forward = weakref.WeakValueDictionary[int, _SavedStorage]()

    @contextmanager
    def saving(self, index: int, arguments: object) -> Iterator[BlockCall]:
        """Around a call of a block with these arguments, in any containers."""
        latest = None if self._latest is None else self._latest()
        is_first = latest is None or self._in_backward is not None or index in self._starts or index < latest.index
        if is_first:
            self._storages_of_forward.clear()
        self._in_backward = None
        previous, inputs = None if is_first else latest, [*_inputs_in(arguments)]
        call = BlockCall(self, index=index, name=self._names[index], previous=previous)
        call.arguments = [weakref.ref(storage_and_key(part)[0]) for tensor in inputs for part in self.parts(tensor)]
        shared = [] if previous is None else [part for part in inputs if previous.has_argument(part)]
        if previous is not None:
            previous.keep(shared)
        del latest, previous
        for other in [*self._on_device]:
            other.send()
        self._on_device.add(call)
        with saved_tensors_hooks(call.pack, SavedTensor.unpack):
            yield call
        call.keep([*shared, *_held_by_others(arguments)])
        self._leave_but(call)
        self._latest = weakref.ref(call)

    def begin_backward(self, call: BlockCall) -> None:
        """Fetch the tensors of a call and of the one before it; those of others leave the device."""
        if self._in_backward is not None and self._in_backward() is call:
            return
        self._in_backward, previous = weakref.ref(call), call.previous
        needed = [call] if previous is None else [call, previous]
        self._leave_but(*needed)
        for each in needed:
            each.fetch()
            self._on_device.add(each)

    def _leave_but(self, *calls: BlockCall) -> None:
        for other in [*self._on_device]:
            if other not in calls:
                other.leave()
                self._on_device.discard(other)

    def count_on_host(self, change: int) -> None:
        """Count bytes of copies that the host gets, or that it frees."""
        self.host_bytes += change
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def keys_of_parameters(self, index: int) -> set[int]:
        """The storages of the parameters and buffers of a block, and of those outside of blocks."""
        tensors: list[Tensor | None] = [*self._blocks[index].parameters(), *self._blocks[index].buffers()]
        for part in self._outside:
            tensors += [*own_parameters(part).values(), *own_buffers(part).values()]
        return {storage_key(part) for tensor in tensors for part in self.parts(tensor)}

    def parts(self, tensor: Tensor | None) -> Iterator[Tensor]:
        """The tensors with memory that a wrapper holds, or the tensor."""
        return tensors_with_memory(tensor, on_meta=self.link.device.type == "meta")

    def may_leave(self, tensor: Tensor) -> bool:
        """Whether it is a tensor of the device that is large enough."""
        parts = [*self.parts(tensor)]
        return (
            len(parts) == 1
            and parts[0] is tensor  # No wrapper
            and tensor.device.type == self.link.device.type
            and tensor.untyped_storage().nbytes() >= MIN_SENT_BYTES
            and not (tensor.is_conj() or tensor.is_neg() or is_on_host(tensor))
        )

    def storage_of(self, tensor: Tensor, key: int) -> _SavedStorage:
        """The storage of a tensor, which another block of this forward may have saved too."""
        storage = self._storages_of_forward.get(key)
        if storage is None or not storage.is_same(tensor):
            storage = self._storages_of_forward[key] = _SavedStorage(tensor, self)
        storage.hold(tensor)
        return storage


def _inputs_in(arguments: object) -> Iterator[Tensor]:
    """The tensors of nested arguments that something with a gradient has made."""
    if isinstance(arguments, Tensor):
        if arguments.requires_grad and not arguments.is_leaf:
            yield arguments
    elif isinstance(arguments, list | tuple | dict):
        for each in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from _inputs_in(each)


def _held_by_others(arguments: object, depth: int = 4, *, is_shared: bool = False) -> Iterator[Tensor]:
    """The arguments of a block that others hold until backward, in nested containers: leaves of autograd, tensors
    without a gradient, and tensors in objects such as a mask."""
    if isinstance(arguments, Tensor):
        if is_shared or arguments.is_leaf or not arguments.requires_grad:
            yield arguments
    elif depth and isinstance(arguments, list | tuple | set | dict):
        for each in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from _held_by_others(each, depth - 1, is_shared=is_shared)
    elif depth and hasattr(arguments, "__dict__") and not isinstance(arguments, nn.Module | type):
        yield from _held_by_others(vars(arguments), depth - 1, is_shared=True)
