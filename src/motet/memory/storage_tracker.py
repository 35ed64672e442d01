"""The storages of tensors in a step: which kernel makes each, in which block, and when it is resized and freed.

`StorageTracker` follows them; it has the peak of live bytes, bytes by category and the bytes that a block keeps.
The live bytes of a GPU are those of its allocator. A storage counts from the kernel that makes it until it is freed,
once for all of its views. The tracker does not see memory that no kernel of torch makes and no kernel reads, such as
shared memory of a transport and scratch space inside of kernels, nor tensors that other threads make, such as
compressed reductions. Tensors of the host, which a CPU rank has in the same memory, do not count: kernels make them
inside of `kernels_of_host`, or `mark_storages_of_host` marks them.
"""

import gc
import re
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from motet.core import trace
from motet.core.errors import DEVICE_MEMORY_REMEDIES, DeviceMemoryError, InputError
from motet.core.units import format_bytes
from motet.memory.memory_timeline import Category, MemoryTimeline, StepPhase, StorageLife
from motet.memory.torch_private import storage_and_key, tensors_with_memory, watch_module_calls
from motet.models.torch_private import TorchDispatchMode, is_in_backward
from motet.models.trace.meta_kernels import MetaKernels

# These stand in place of the kernel that made a storage
NO_KERNEL, _BEFORE, _HOST, _MOVED = "made by no kernel", "", "made on the host", "moved to the device"
_FORWARD = re.compile(r"forward|F\d+")
_INNERMOST_PHASES = re.compile(r"forward|backward|update|[FBIW]\d+")
_GATHER_NAMESPACE, _MESSAGE_NAMESPACE = "fsdp", "c10d"
_ADDING_KERNELS = frozenset(["copy_", "add_"])  # Kernels that add gradients to their sums
_SKIPPED = (type, types.ModuleType, types.CodeType, types.FrameType, str, bytes, int, float, bool, type(None))


@dataclass(slots=True)
class TrackedStorage:
    """A storage of one size; another record begins when it is resized."""

    key: int
    ref: weakref.ref[Any]
    size: int
    born: int  # A moment
    maker: Any  # The kernel
    first_tensor: tuple[torch.Size, torch.dtype]
    block: str = ""
    is_recomputed: bool = False
    freed: int | None = None
    category: Category | None = None  # None: it follows from the place where it was made
    is_message: bool = False
    is_foreign: bool = False  # Memory of a transport, from and to which messages are copied

    @property
    def is_counted(self) -> bool:
        """Whether its bytes are among the live ones."""
        return self.maker is not NO_KERNEL and self.maker is not _HOST

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is no memory of the device."""
        return self.is_foreign or self.maker is _HOST


class StorageTracker(TorchDispatchMode):
    """Follows the storages that kernels make in this thread, and those of known tensors."""

    def __init__(
        self,
        known: Iterable[Tensor] = (),
        *,
        on_meta: bool = False,
        on_kernel: Callable[..., None] | None = None,
        limit: int | None = None,
    ) -> None:
        """`on_meta` follows storages on the meta device, and no others. `on_kernel(kernel, args, read=..., result=...)`
        is called after each kernel, before the storages that it made are followed; with it all records are kept.
        A kernel with which more bytes than `limit` are alive raises a `DeviceMemoryError`."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.storages = dict[int, TrackedStorage]()  # Live storages, by key
        self.records = list[TrackedStorage]()  # Records of live and freed storages
        self.resizable = set[int]()  # Storages that FSDP2 frees and allocates again without a kernel
        self.made = Counter[Any]()  # Bytes by kernel
        self.open_blocks = list[str]()
        self.moment, self.is_paused = 0, False
        self._on_meta, self._on_kernel = on_meta, on_kernel
        self._call = MetaKernels().call if on_meta else _call
        self._live = self._peak = self._unchecked_peak = 0
        self._limit = limit
        self.follow(known)

    def __enter__(self) -> "StorageTracker":
        super().__enter__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        _IN_THREAD.trackers.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _IN_THREAD.trackers.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def start(self) -> None:
        self.__enter__()

    def stop(self) -> None:
        self.__exit__(None, None, None)

    def live(self) -> int:
        """The bytes that are alive."""
        return self._live

    def reset_peak(self) -> None:
        """Set the peak to the bytes that are alive."""
        self._peak = self._live

    def peak(self) -> int:
        """The most bytes that were alive since the last reset."""
        return self._peak

    def __torch_dispatch__(self, func: Any, types: Any, *call: Any, **named: Any) -> Any:
        """Call a kernel of torch; `call` is its positional arguments and those by name."""
        args, kwargs = call[0], dict(call[1] or {})
        if self.is_paused:
            return func(*args, **kwargs)
        before, self._unchecked_peak = self._live, 0
        if self.resizable:
            self.notice_resized()
        read = self.follow((*args, *kwargs.values()), NO_KERNEL)
        result = self._call(func, args, kwargs)
        is_gather = func.namespace == _GATHER_NAMESPACE
        if is_gather:
            self.resizable |= {record.key for record in read if not record.is_elsewhere}
        if self._on_kernel is not None:
            self._on_kernel(func, args, read=read, result=result)
        if is_gather:
            self.notice_resized()
        self.follow((result,), _HOST if _IN_THREAD.host_depth else func)
        if self._limit is not None and self._unchecked_peak > self._limit:
            del result  # The error may be caught, and the tensor is not
            raise DeviceMemoryError(self._excess(func, self._unchecked_peak - before))
        return result

    def check_limit(self) -> None:
        """Refuse a limit that the tensors which are known already take more than."""
        if self._limit is not None and self._live > self._limit:
            raise InputError(
                f"{self._named_limit}: the tensors that a rank has between steps take {format_bytes(self._live)} "
                f"({self._live} bytes); shard more (layout.zero, layout.tp), keep the optimizer on the host "
                '(memory.optimizer = "host"), or raise the limit'
            )

    def _excess(self, kernel: Any, size: int) -> str:
        peak, pass_name = self._unchecked_peak, " in backward" * is_in_backward()
        return (
            f"{self._named_limit}: the kernel {_name_of(kernel)}{pass_name} makes {format_bytes(size)}, with which "
            f"{format_bytes(peak)} ({peak} bytes) are alive; {DEVICE_MEMORY_REMEDIES}"
        )

    @property
    def _named_limit(self) -> str:
        return f"memory.device_limit = {self._limit} ({format_bytes(self._limit or 0)})"

    def count(self, tensors: Iterable[Tensor], maker: Any = _MOVED) -> None:
        """Count tensors also if no kernel has made them, such as a batch that is moved to the device."""
        for tensor in tensors:  # One by one: two may have one storage, whose record is replaced
            for record in self.follow([tensor], maker):
                if record.maker is NO_KERNEL and not record.is_foreign:
                    self.moment += 1
                    self.renew(record, self.moment, maker=maker)

    def uncount(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors no longer, which are memory of the host."""
        for record in self.follow(tensors, _HOST):
            if record.maker is not _HOST:
                self._live -= record.size if record.is_counted else 0
                record.maker, record.category = _HOST, None

    def follow(self, values: Iterable[object], maker: Any = _BEFORE) -> list[TrackedStorage]:
        """The records of the tensors in nested values; `maker` is that of storages which are not followed yet."""
        records = list[TrackedStorage]()
        for value in values:
            if type(value) is Tensor:  # Most are
                if value.is_meta == self._on_meta and value.layout == torch.strided:
                    records.append(self._record(value, maker))
            elif isinstance(value, Tensor):
                records += [self._record(part, maker) for part in tensors_with_memory(value, on_meta=self._on_meta)]
            elif isinstance(value, list | tuple):
                records += self.follow(value, maker)
        return records

    def _record(self, tensor: Tensor, maker: Any) -> TrackedStorage:
        storage, key = storage_and_key(tensor)
        known, size = self.storages.get(key), storage.nbytes()
        if known is not None and known.ref() is not None:
            return known if known.size == size or known.is_foreign else self._resize(known, size)
        if maker is _HOST:
            _HOST_STORAGES.add(storage, key)
        elif _HOST_STORAGES.contains(storage, key):
            maker = _HOST
        self.moment += maker is not _HOST
        self.made[maker] += size
        if not size and maker is _BEFORE:
            self.resizable.add(key)  # It is gathered again
        ref, block = weakref.ref(storage, partial(self._forget, key)), self.open_blocks[-1] if self.open_blocks else ""
        first_tensor, is_recomputed = (tensor.shape, tensor.dtype), bool(block) and is_in_backward()
        return self._begin(TrackedStorage(key, ref, size, self.moment, maker, first_tensor, block, is_recomputed))

    def _begin(self, record: TrackedStorage) -> TrackedStorage:
        self.storages[record.key] = record
        if self._on_kernel is not None:
            self.records.append(record)
        if record.is_counted:
            self._live += record.size
            self._peak, self._unchecked_peak = max(self._peak, self._live), max(self._unchecked_peak, self._live)
        return record

    def _end(self, record: TrackedStorage, moment: int) -> None:
        record.freed = moment
        self._live -= record.size if record.is_counted else 0

    def renew(self, record: TrackedStorage, moment: int, **changes: Any) -> TrackedStorage:
        """Begin another record of the same storage."""
        self._end(record, moment)
        return self._begin(replace(record, born=moment, freed=None, **changes))

    def _resize(self, record: TrackedStorage, size: int) -> TrackedStorage:
        self.moment += 1
        self.resizable.add(record.key)
        return self.renew(record, self.moment, size=size)

    def _forget(self, key: int, ref: Any) -> None:
        if key in self.storages and self.storages[key].ref is ref:
            record = self.storages.pop(key)
            self.moment += not record.is_elsewhere
            self._end(record, self.moment)

    def notice_resized(self) -> None:
        """Record storages that were resized without a kernel."""
        for key in [*self.resizable]:
            record = self.storages.get(key)
            storage = None if record is None else record.ref()
            if record is None or storage is None:
                self.resizable.discard(key)
            elif storage.nbytes() != record.size:
                self._resize(record, storage.nbytes())


class _HostStorages:
    """The storages that are memory of the host, while they live."""

    def __init__(self) -> None:
        self._refs = dict[int, weakref.ref[Any]]()

    def add(self, storage: Any, key: int) -> None:
        self._refs[key] = weakref.ref(storage, partial(self._forget, key))

    def contains(self, storage: Any, key: int) -> bool:
        ref = self._refs.get(key)
        return ref is not None and ref() is storage

    def _forget(self, key: int, ref: weakref.ref[Any]) -> None:
        if self._refs.get(key) is ref:
            del self._refs[key]


class _ThreadState(threading.local):
    """The trackers that are active in a thread, and how many `kernels_of_host` are open in it."""

    def __init__(self) -> None:
        self.trackers, self.host_depth = list[StorageTracker](), 0


_HOST_STORAGES, _IN_THREAD = _HostStorages(), _ThreadState()


@contextmanager
def kernels_of_host(*, on_meta: bool = False) -> Iterator[None]:
    """Inside, storages that kernels make in this thread are memory of the host, for each tracker, also for later ones.
    Another tracker marks them where none is active, on the meta device if `on_meta`."""
    with ExitStack() as stack:
        if not _IN_THREAD.trackers:
            stack.enter_context(StorageTracker(on_meta=on_meta))
        _IN_THREAD.host_depth += 1
        try:
            yield
        finally:
            _IN_THREAD.host_depth -= 1


def mark_storages_of_host(tensors: Iterable[Tensor]) -> None:
    """Mark the storages of tensors as memory of the host, for the trackers of this thread and for later ones."""
    marked = [
        part for tensor in tensors for on_meta in (False, True) for part in tensors_with_memory(tensor, on_meta=on_meta)
    ]
    for part in marked:
        _HOST_STORAGES.add(*storage_and_key(part))
    for tracker in _IN_THREAD.trackers:
        tracker.uncount(marked)


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor is marked as memory of the host."""
    return _HOST_STORAGES.contains(*storage_and_key(tensor))


def mark_saved_activations(tensors: Iterable[Tensor]) -> None:
    """Count tensors among the saved activations, for the trackers of this thread, unless they have a category."""
    tensors = [*tensors] if _IN_THREAD.trackers else []
    for tracker in _IN_THREAD.trackers:
        for record in tracker.follow(tensors):
            record.category = record.category or "saved activations"


def count_moved(tensors: Iterable[Tensor]) -> None:
    """Count tensors that are moved to the device from here on; on a CPU rank a move makes no copy. A view of a larger
    storage does not count: a device would get a copy of it."""
    if not _IN_THREAD.trackers:
        return
    moved = [part for tensor in tensors for part in tensors_with_memory(tensor) if _covers_storage(part)]
    for tracker in _IN_THREAD.trackers:
        tracker.count(moved)


def _covers_storage(tensor: Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()


class AllocatorBytes:
    """Live bytes and their peak, from the allocator of a GPU."""

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


LiveBytes = StorageTracker | AllocatorBytes

# --- bytes by category -----------------------------------------------------------------------------


class StepCategories:
    """The storages of a step by category. `blocks` are modules with the names under which their tensors are shown."""

    def __init__(
        self,
        blocks: Mapping[nn.Module, str] | None = None,
        *,
        on_meta: bool = False,
        on_message: Callable[[Any, Sequence[Any]], None] | None = None,
    ) -> None:
        """`on_message` is called with each operator of torch.distributed and its arguments."""
        self._tracker, self._on_message = StorageTracker(on_meta=on_meta, on_kernel=self._on_kernel), on_message
        self._blocks = dict(blocks or {})
        self._additions = list[tuple[TrackedStorage, TrackedStorage]]()  # (sum, tensor added to it) in backward
        self._thread, self._phases, self._forward_start = threading.get_ident(), list[StepPhase](), 0
        self._read_in_forward, self._in_forward, self._has_begun = set[int](), False, False

    # --- calls of the training step ---

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, storages of kernels are tracked, and phases follow the spans of the step."""
        with ExitStack() as stack:
            stack.enter_context(trace.install_sink(_NoSink()))
            stack.enter_context(trace.profiler_ranges(self._phase))
            stack.enter_context(watch_module_calls(self._enter_block, self._exit_block))
            stack.enter_context(self._tracker)
            yield

    def begin_step(self, state: Sequence[tuple[Category, Iterable[Tensor]]]) -> None:
        """Begin a timeline: a live storage belongs to the first category of `state` that has it, or to other state.
        In a later timeline, tensors that no kernel has made since the first do not count, as in a plain tracker."""
        tracker, maker = self._tracker, NO_KERNEL if self._has_begun else _BEFORE
        tracker.notice_resized()
        for record in self._followed():
            record.category, record.is_message, record.is_recomputed = None, False, False
        for category, tensors in state:
            tensors = [*tensors]
            if not self._has_begun:
                tracker.count(tensors, _BEFORE)
            for record in self._follow(tensors, maker):
                if record.size and record.category is None:
                    record.category = category
        self._has_begun = True
        for record in self._followed():
            record.is_foreign = record.maker is NO_KERNEL
        tracker.records = self._followed()
        # Storages that resizing freed are gathered again.
        tracker.resizable |= {record.key for record in tracker.records if not record.size}
        for record in tracker.records:
            default: Category = "gathered or unreduced" if record.key in tracker.resizable else "other state"
            record.category, record.born = record.category or default, 0
        tracker.moment, self._phases, self._additions = 0, [], []

    def assign(self, category: Category, tensors: Iterable[Tensor]) -> None:
        """Assign a category to tensors that have none yet, or are `gathered or unreduced`."""
        for record in self._follow(tensors):
            if record.category in (None, "gathered or unreduced"):
                record.category = category

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is tracked."""
        before, self._tracker.is_paused = self._tracker.is_paused, True
        try:
            yield
        finally:
            self._tracker.is_paused = before

    def end_step(self) -> MemoryTimeline:
        """The timeline since the step began. A tensor that backward added to a gradient is an unreduced gradient."""
        for total, summand in self._additions:
            if total.category in ("gradients", "gathered or unreduced") and summand.category is None:
                summand.category = "gathered or unreduced"
        lives = [_life(each) for each in self._tracker.records if each.is_counted]
        return MemoryTimeline(tuple(lives), tuple(self._phases), self._tracker.moment)

    def live(self, category: Category) -> int:
        """The bytes of a category now."""
        return sum(each.size for each in self._followed() if _category_of(each) == category)

    def _follow(self, tensors: Iterable[Tensor], maker: Any = _BEFORE) -> list[TrackedStorage]:
        return [record for record in self._tracker.follow(tensors, maker) if not record.is_elsewhere]

    def _followed(self) -> list[TrackedStorage]:
        return [record for record in [*self._tracker.storages.values()] if not record.is_elsewhere]

    # --- phases and blocks ---

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        if threading.get_ident() != self._thread or not _INNERMOST_PHASES.fullmatch(name):
            yield
            return
        start, is_forward = self._tracker.moment, bool(_FORWARD.fullmatch(name))
        if is_forward:
            self._read_in_forward.clear()
            self._forward_start, self._in_forward = start, True
        try:
            yield
        finally:
            if is_forward:
                self._end_forward()
            self._phases.append(StepPhase(name, start, self._tracker.moment))

    def _end_forward(self) -> None:
        """Tensors that the forward made, or has read, and that are alive after it, are saved for its backward."""
        self._in_forward, start = False, self._forward_start
        for record in self._followed():
            if record.category is not None or record.born == 0:
                continue
            if record.born > start:
                record.category = "saved activations"
            elif record.key in self._read_in_forward:
                self._tracker.renew(record, start, category="saved activations")  # It may have been a message

    def _enter_block(self, module: nn.Module) -> None:
        if module in self._blocks and threading.get_ident() == self._thread:
            self._tracker.open_blocks.append(self._blocks[module])

    def _exit_block(self, module: nn.Module) -> None:
        if module in self._blocks and self._tracker.open_blocks and threading.get_ident() == self._thread:
            self._tracker.open_blocks.pop()

    # --- kernels ---

    def _on_kernel(self, kernel: Any, args: Sequence[Any], *, read: Sequence[TrackedStorage], result: Any) -> None:
        is_gather, is_collective = kernel.namespace == _GATHER_NAMESPACE, kernel.namespace == _MESSAGE_NAMESPACE
        if self._on_message is not None and is_collective:
            self._on_message(kernel, args)
        is_message = is_collective or any(record.is_foreign for record in read)
        for record in (each for each in read if not each.is_elsewhere):
            if self._in_forward:
                self._read_in_forward.add(record.key)
            if is_gather:
                record.category = record.category or "gathered or unreduced"
            record.is_message |= is_message
        adds = len(read) > 1 and is_in_backward() and _name_of(kernel) in _ADDING_KERNELS
        if adds and not (read[0].is_elsewhere or read[1].is_elsewhere):
            self._additions.append((read[0], read[1]))


def _call(kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return kernel(*args, **kwargs)


def _life(record: TrackedStorage) -> StorageLife:
    """The value for a timeline."""
    return StorageLife(
        _category_of(record), record.size, record.born, record.freed, _name_of(record.maker), record.block
    )


def _category_of(record: TrackedStorage) -> Category:
    if record.category is not None:
        return record.category
    if record.is_recomputed:
        return "recomputed activations"
    return "messages" if record.is_message else "workspace"


def _name_of(kernel: Any) -> str:
    return kernel if isinstance(kernel, str) else str(kernel._schema.name).removeprefix("aten::")


class _NoSink:
    """Spans are opened only where a sink is installed."""

    def on_span(self, *_: Any) -> None:
        """Do nothing."""

    def on_count(self, name: str, value: float) -> None:
        """Do nothing."""


# --- tensors of objects ----------------------------------------------------------------------------


def tensors_reachable_from(*roots: object, without: tuple[type, ...] = (), on_meta: bool = False) -> list[Tensor]:
    """The tensors that objects hold, directly or through others, with their gradients; one for each memory (shared
    memory can have several storages). Objects of the types `without` are left out with all that they hold."""
    tensors, seen, left = dict[int, Tensor](), set[int](), list(roots)
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, (*_SKIPPED, *without)):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            for part in tensors_with_memory(item, on_meta=on_meta):
                storage, key = storage_and_key(part)
                has_memory = storage.nbytes() and not part.is_meta  # FSDP2 frees storages that it gathers again
                tensors.setdefault(storage.data_ptr() if has_memory else key, part)
            left += [item.grad] if item.is_leaf and item.grad is not None else []
        elif isinstance(item, types.FunctionType):
            left += [cell.cell_contents for cell in item.__closure__ or () if cell != types.CellType()]
        else:
            left += gc.get_referents(item)
    return [*tensors.values()]
