"""Bytes that blocks keep between forward and backward, of tensors that their forward made.

A block with full recomputation keeps only its output and what its arguments hold, such as a mask that the first block
makes. With selective recomputation it keeps the results of its matrix products, too. Copies of the buffers that it may
change are added to both.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from motet.collectives.execute.work_queue import WorkHandle
from motet.core.dtypes import dtype_name
from motet.memory.kept_products import KEPT_OPERATORS, is_result_pending
from motet.memory.live_bytes import tensors_reachable_from
from motet.memory.torch_private import TorchDispatchMode, storage_key, tensors_with_memory, tree_leaves
from motet.models.blocks import find_blocks
from motet.models.torch_private import intercept_calls, is_in_backward
from motet.parallel.data_parallel.unit_schedule import CommUnitAction
from motet.parity.record.engine_hooks import patched_method
from motet.parity.record.tensor_recorder import RecordedTensor, TensorRecorder
from motet.train.engine import TrainingEngine

_Storages = dict[int, tuple[weakref.ref[Any], str]]  # With a description


class SavedBytes(NamedTuple):
    """The bytes that one call of a block keeps for backward."""

    block: str
    microbatch: int
    policy: str
    kept: int
    allowed: int
    largest: str  # Of the tensors that it keeps, with the kernel that made it
    is_recomputed: bool  # Backward computes the block again

    def __str__(self) -> str:
        products = f", and {self.allowed} bytes of matrix products" if self.policy == "selective" else ""
        how = "" if self.is_recomputed else "; backward does not compute it again"
        return (
            f"micro-batch {self.microbatch} keeps {self.kept} bytes of what {self.block} computes until backward, but "
            f"{self.policy} recomputation keeps only its input and output{products}; the largest tensor is "
            f"{self.largest}{how}"
        )


def record_saved_bytes(engine: TrainingEngine, step: Callable[[TensorRecorder], None]) -> list[RecordedTensor]:
    """A record for each call of a block that keeps more than its policy, in a step that records nothing else.

    A step must have been done before: what a module keeps for good counts only when it is made.
    """
    recomputation = engine.recomputation.recomputation
    if recomputation is None:
        return []
    recorder = _NoRecorder()
    measured = _BlockMeter(engine.module, recorder, policy_of=lambda index: recomputation.policies[index])
    with ExitStack() as stack:
        stack.enter_context(measured.watching(find_blocks(engine.module)))
        for each in engine.optimizer.sharded_parameters.engines:
            execute = measured.executing(each.communicator.execute)
            stack.enter_context(patched_method(each.communicator, "execute", execute))
        step(recorder)
    excess = [each for each in measured.calls if each.kept > each.allowed]
    texts = [str(each._replace(is_recomputed=each.block in measured.recomputed)) for each in excess]
    return [
        RecordedTensor("saved bytes", text, torch.tensor(each.kept)) for text, each in zip(texts, excess, strict=True)
    ]


class _NoRecorder(TensorRecorder):
    """Records nothing, so that all that lives is what training keeps."""

    def add(self, *_: Any, **__: Any) -> None:
        """Leave the tensor out."""

    @contextmanager
    def recording_masks(self, randomness: AbstractContextManager[object]) -> Iterator[None]:
        """The masks are drawn and not recorded."""
        with randomness:
            yield


@dataclass
class _BlockMeter:
    module: nn.Module
    recorder: TensorRecorder
    policy_of: Callable[[int], str]
    gathered: set[int] = field(default_factory=set)  # Messages with parameters; FSDP2 holds one until the next
    calls: list[SavedBytes] = field(default_factory=list)
    recomputed: set[str] = field(default_factory=set)

    @contextmanager
    def watching(self, blocks: list[nn.Module]) -> Iterator[None]:
        """Measure each call of these blocks, around what recomputes them."""
        names = {block: name for name, block in self.module.named_modules()}
        ends = [intercept_calls(block, partial(self._call, i, names[block])) for i, block in enumerate(blocks)]
        ends += [b.register_forward_pre_hook(partial(self._on_call, names[b])).remove for b in blocks]
        try:
            yield
        finally:
            for end in reversed(ends):
                end()

    def executing(self, original: Callable[..., WorkHandle]) -> Callable[..., WorkHandle]:
        """The method of a communicator that executes its actions."""

        def execute(action: CommUnitAction, unit_id: int, output: Tensor, **options: Any) -> WorkHandle:
            if action.tensor == "parameters":
                self.gathered |= {storage_key(part) for part in tensors_with_memory(output)}
            return original(action, unit_id, output, **options)

        return execute

    def _on_call(self, name: str, *_: Any) -> None:
        if is_in_backward():
            self.recomputed.add(name)

    def _call(self, index: int, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        policy = self.policy_of(index)
        if policy == "none" or not torch.is_grad_enabled() or is_in_backward():
            return call(*args, **kwargs)
        with _MadeStorages() as made:
            output = call(*args, **kwargs)
        made.count_result()
        block = self.module.get_submodule(name)
        buffers = sum(buffer.nbytes for buffer in block.buffers())
        allowed = buffers + (made.product_bytes if policy == "selective" else 0)
        known = [*self.module.parameters(), *self.module.buffers(), *tensors_reachable_from(output, args, kwargs)]
        keys = {storage_key(part) for tensor in known for part in tensors_with_memory(tensor)} | self.gathered
        kept = made.alive(keys)
        if sum(size for size, _ in kept) > allowed:
            gc.collect()  # Cycles of objects that nothing holds
            kept = made.alive(keys)
        total, largest = sum(size for size, _ in kept), max(kept, default=(0, ""))[1]
        self.calls.append(SavedBytes(name, self.recorder.microbatch, policy, total, allowed, largest, False))
        return output


class _MadeStorages(TorchDispatchMode):
    """The storages that kernels make while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.product_bytes = 0
        self._of_result: _Storages = {}  # Made while a product together with what is done to it is computed
        self._made: _Storages = {}
        self._before: _Storages = {}  # That kernels were given

    def __torch_dispatch__(self, func: Any, types: Any, *call: Any, **named: Any) -> Any:
        """Call a kernel of torch; `call` is its positional arguments and those by name."""
        arguments = [part for leaf in tree_leaves(call) for part in tensors_with_memory(leaf)]
        for tensor in arguments:
            if not self._is_known(tensor, self._made):
                self._before[storage_key(tensor)] = weakref.ref(tensor.untyped_storage()), ""
        result = func(*call[0], **dict(call[1] or {}))
        if not is_result_pending():
            self.count_result()
            self.product_bytes += result.nbytes if func in KEPT_OPERATORS else 0
        for leaf in tree_leaves(result):
            for part in tensors_with_memory(leaf):
                self._add(part, str(func))
        return result

    def count_result(self) -> None:
        """Count what is left of a product together with what was done to it."""
        living = (ref() for ref, _ in self._of_result.values())
        self.product_bytes += sum(storage.nbytes() for storage in living if storage is not None)
        self._of_result = {}

    def alive(self, without: set[int]) -> list[tuple[int, str]]:
        """Bytes and description of each storage that lives."""
        living = ((ref(), text) for key, (ref, text) in self._made.items() if key not in without)
        return [(storage.nbytes(), text) for storage, text in living if storage is not None and storage.nbytes()]

    def _add(self, tensor: Tensor, kernel: str) -> None:
        if not self._is_known(tensor, self._before) and not self._is_known(tensor, self._made):
            text = f"{list(tensor.shape)} of {dtype_name(tensor.dtype)}, which {kernel} makes"
            self._made[storage_key(tensor)] = made = weakref.ref(tensor.untyped_storage()), text
            if is_result_pending():
                self._of_result[storage_key(tensor)] = made

    @staticmethod
    def _is_known(tensor: Tensor, storages: _Storages) -> bool:
        """Whether the storage is there; another one may have had its key before."""
        known = storages.get(storage_key(tensor))
        return known is not None and known[0]() is not None
