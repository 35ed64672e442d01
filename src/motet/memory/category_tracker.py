"""The live bytes of a step by category: kernels are watched, and a storage counts once for all of its views.

Not seen: memory that no kernel of torch makes and no kernel reads, such as shared memory of a transport and scratch
space inside of kernels, and what other threads make, such as compressed reductions.
"""

import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from motet.core import trace
from motet.memory.memory_timeline import Category, MemoryTimeline, StepPhase, StorageLife
from motet.memory.torch_private import (
    TorchDispatchMode,
    storage_key,
    tensors_with_memory,
    tree_leaves,
    watch_module_calls,
)
from motet.models.torch_private import is_in_backward

_FORWARD = re.compile(r"forward|F\d+")
_INNERMOST_PHASES = re.compile(r"forward|backward|update|[FBIW]\d+")
_GATHER_NAMESPACE, _MESSAGE_NAMESPACE = "fsdp", "c10d"
_UNKNOWN = "made by no kernel"
_ADDING_KERNELS = frozenset(["copy_", "add_"])  # By which gradients reach their sums


@dataclass
class _TrackedStorage:
    """A storage of one size; another record begins when it is resized."""

    ref: weakref.ref[Any]
    size: int
    born: int
    operator: str = ""
    block: str = ""
    category: Category | None = None  # None: it follows from where it was made
    is_message: bool = False
    is_recomputed: bool = False
    freed: int | None = None

    def life(self) -> StorageLife:
        """The value for a timeline."""
        if self.category is not None:
            category = self.category
        elif self.is_recomputed:
            category = "recomputed activations"
        else:
            category = "messages" if self.is_message else "workspace"
        return StorageLife(category, self.size, self.born, self.freed, self.operator, self.block)


class CategoryTracker(TorchDispatchMode):
    """Watches the storages of this thread. `blocks` are modules with the names under which their tensors are shown."""

    def __init__(
        self,
        blocks: Mapping[nn.Module, str] | None = None,
        *,
        on_meta: bool = False,
        on_message: Callable[[Any, Sequence[Any]], None] | None = None,
    ) -> None:
        """`on_meta` watches storages on the meta device, and no others. `on_message` is called with each operator of
        torch.distributed and its arguments."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._tensors_of = partial(tensors_with_memory, on_meta=on_meta)
        self._on_message = on_message
        self._blocks, self._open_blocks = dict(blocks or {}), list[str]()
        self._live, self._records = dict[int, _TrackedStorage](), list[_TrackedStorage]()
        self._foreign = dict[int, weakref.ref[Any]]()  # Memory that is not followed
        self._resizable = set[int]()  # Storages that FSDP2 frees and allocates again without a kernel
        self._additions = list[tuple[_TrackedStorage, _TrackedStorage]]()  # (sum, what is added to it) in backward
        self._thread, self._moment = threading.get_ident(), 0
        self._phases, self._forward_start = list[StepPhase](), 0
        self._read_in_forward = set[int]()
        self._in_forward = self._is_paused = False

    # --- what the caller says --------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, storages of kernels are tracked, and phases follow the spans of the step."""
        with ExitStack() as stack:
            stack.enter_context(trace.install_sink(_NoSink()))
            stack.enter_context(trace.profiler_ranges(self._phase))
            stack.enter_context(watch_module_calls(self._enter_block, self._exit_block))
            stack.enter_context(self)
            yield

    def begin_step(self, state: Sequence[tuple[Category, Iterable[Tensor]]]) -> None:
        """Begin a timeline: what is alive belongs to the first category of `state` that has it, or to other state."""
        self._notice_resized()
        for record in self._live.values():
            record.category, record.is_message, record.is_recomputed = None, False, False
        for category, tensors in state:
            for of_tensor in self._track_all(tensors, ""):
                if of_tensor.size and of_tensor.category is None:
                    of_tensor.category = category
        for key in [key for key, each in self._live.items() if each.operator == _UNKNOWN and each.category is None]:
            self._foreign[key] = self._live.pop(key).ref  # Memory of a transport, say
        # What was freed by resizing is gathered again.
        self._resizable |= {key for key, record in self._live.items() if not record.size}
        for key, record in self._live.items():
            of_rest: Category = "gathered or unreduced" if key in self._resizable else "other state"
            record.category, record.born = record.category or of_rest, 0
        self._records = [*self._live.values()]
        self._moment, self._phases, self._additions = 0, [], []

    def assign(self, category: Category, tensors: Iterable[Tensor]) -> None:
        """Say what tensors are, in addition to what they may have been said to be before the step."""
        for record in self._track_all(tensors, ""):
            if record.category in (None, "gathered or unreduced"):
                record.category = category

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is tracked."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def end_step(self) -> MemoryTimeline:
        """The timeline since the step began. What backward has added to a gradient is an unreduced gradient."""
        for total, summand in self._additions:
            if total.category in ("gradients", "gathered or unreduced") and summand.category is None:
                summand.category = "gathered or unreduced"
        followed = (each for each in self._records if each.category is not None or each.operator != _UNKNOWN)
        return MemoryTimeline(tuple(each.life() for each in followed), tuple(self._phases), self._moment)

    def live(self, category: Category) -> int:
        """The bytes of a category now."""
        return sum(each.size for each in self._live.values() if each.life().category == category)

    # --- phases and blocks -----------------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        if threading.get_ident() != self._thread or not _INNERMOST_PHASES.fullmatch(name):
            yield
            return
        start, is_forward = self._moment, bool(_FORWARD.fullmatch(name))
        if is_forward:
            self._read_in_forward.clear()
            self._forward_start, self._in_forward = start, True
        try:
            yield
        finally:
            if is_forward:
                self._end_forward()
            self._phases.append(StepPhase(name, start, self._moment))

    def _end_forward(self) -> None:
        """Tensors that the forward made, or has read, and that are alive after it, are saved for its backward."""
        self._in_forward = False
        for key, record in [*self._live.items()]:
            if record.category is not None or record.born == 0:
                continue
            if record.born > self._forward_start:
                record.category = "saved activations"
            elif key in self._read_in_forward:
                record.freed = self._forward_start  # Until now it was a message, say
                self._add_record(key, replace(record, category="saved activations", freed=None), self._forward_start)

    def _enter_block(self, module: nn.Module) -> None:
        if module in self._blocks and threading.get_ident() == self._thread:
            self._open_blocks.append(self._blocks[module])

    def _exit_block(self, module: nn.Module) -> None:
        if module in self._blocks and self._open_blocks and threading.get_ident() == self._thread:
            self._open_blocks.pop()

    # --- storages --------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, *call: Any, **named: Any) -> Any:
        """Call a kernel of torch; `call` is its positional arguments and those by name."""
        args, kwargs = call[0], dict(call[1] or {})
        if self._is_paused:
            return func(*args, **kwargs)
        self._notice_resized()
        read = [part for leaf in tree_leaves((args, kwargs)) for part in self._tensors_of(leaf)]
        if self._on_message is not None and func.namespace == _MESSAGE_NAMESPACE:
            self._on_message(func, args)
        is_message = func.namespace == _MESSAGE_NAMESPACE or any(map(self._is_foreign, read))
        for tensor in read:
            self._see_input(tensor, func.namespace, is_message=is_message)
        result = func(*args, **kwargs)
        if func.namespace == _GATHER_NAMESPACE:
            self._notice_resized()
        name = str(func._schema.name).removeprefix("aten::")
        if name in _ADDING_KERNELS and len(read) > 1 and is_in_backward():
            total, summand = (self._live.get(storage_key(tensor)) for tensor in read[:2])
            if total is not None and summand is not None:
                self._additions.append((total, summand))
        self._track_all(tree_leaves(result), name)
        return result

    def _see_input(self, tensor: Tensor, namespace: str, *, is_message: bool) -> None:
        record, key = self._track(tensor, _UNKNOWN), storage_key(tensor)
        if record is None:
            return
        if self._in_forward:
            self._read_in_forward.add(key)
        if namespace == _GATHER_NAMESPACE:
            self._resizable.add(key)
            record.category = record.category or "gathered or unreduced"
        record.is_message |= is_message

    def _track_all(self, leaves: Iterable[object], operator: str) -> list[_TrackedStorage]:
        parts = (part for leaf in leaves for part in self._tensors_of(leaf))
        return [record for part in parts if (record := self._track(part, operator)) is not None]

    def _track(self, tensor: Tensor, operator: str) -> _TrackedStorage | None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        known, size = self._live.get(key), storage.nbytes()
        if self._is_foreign(tensor):
            return None
        if known is not None and known.ref() is not None:
            return known if known.size == size else self._resize(key, known, size)
        self._moment += 1
        block = self._open_blocks[-1] if self._open_blocks else ""
        ref = weakref.ref(storage, partial(self._forget, key))
        record = _TrackedStorage(ref, size, self._moment, operator, block)
        record.is_recomputed = bool(block) and is_in_backward()
        return self._add_record(key, record, self._moment)

    def _is_foreign(self, tensor: Tensor) -> bool:
        """Whether it is memory of a transport, from and to which messages are copied."""
        ref = self._foreign.get(storage_key(tensor))
        return ref is not None and ref() is not None

    def _resize(self, key: int, record: _TrackedStorage, size: int) -> _TrackedStorage:
        self._moment += 1
        self._resizable.add(key)
        again = self._add_record(key, replace(record, size=size), self._moment)
        record.freed = self._moment
        return again

    def _add_record(self, key: int, record: _TrackedStorage, born: int) -> _TrackedStorage:
        record.born = born
        self._live[key] = record
        self._records.append(record)
        return record

    def _notice_resized(self) -> None:
        for key in [*self._resizable]:
            record = self._live.get(key)
            storage = None if record is None else record.ref()
            if record is None or storage is None:
                self._resizable.discard(key)
            elif storage.nbytes() != record.size:
                self._resize(key, record, storage.nbytes())

    def _forget(self, key: int, ref: Any) -> None:
        if key in self._live and self._live[key].ref is ref:
            self._moment += 1
            self._live.pop(key).freed = self._moment


class _NoSink:
    """Spans are opened only where a sink is installed."""

    def on_span(self, *_: Any) -> None:
        """Do nothing."""

    def on_count(self, name: str, value: float) -> None:
        """Do nothing."""
