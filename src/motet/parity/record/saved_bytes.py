"""Bytes that blocks keep between forward and backward, of tensors that their forward made.

A block with full recomputation keeps only its output and the tensors in its arguments, such as a mask that the first
block makes. With selective recomputation it keeps the results of its matrix products, too. Copies of the buffers that
it may change are added to both.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from motet.collectives.execute.work_queue import WorkHandle
from motet.core.units import dtype_name
from motet.memory.kept_products import KEPT_OPERATORS
from motet.memory.storage_tracker import StorageTracker, TrackedStorage, tensors_reachable_from
from motet.memory.torch_private import tensors_with_memory
from motet.models.kept_results import is_result_pending
from motet.models.torch_private import intercept_calls, is_in_backward, storage_key
from motet.models.user_module import find_blocks
from motet.parallel.data_parallel.zero import CommUnitAction
from motet.parity.record.engine_hooks import patched_method
from motet.parity.record.tensor_recorder import RecordedTensor, TensorRecorder
from motet.train.engine import TrainingEngine


class SavedBytes(NamedTuple):
    """The bytes that one call of a block keeps for backward."""

    block: str
    microbatch: int
    policy: str
    kept: int
    allowed: int
    largest: str  # The largest tensor that it keeps, with the kernel that made it
    is_recomputed: bool  # Backward computes the block again

    def __str__(self) -> str:
        products = f", and {self.allowed} bytes of matrix products" if self.policy == "selective" else ""
        how = "" if self.is_recomputed else "; backward does not compute it again"
        return (
            f"micro-batch {self.microbatch} keeps {self.kept} bytes of the results of {self.block} until backward, but "
            f"{self.policy} recomputation keeps only its input and output{products}; the largest tensor is "
            f"{self.largest}{how}"
        )


def record_saved_bytes(engine: TrainingEngine, step: Callable[[TensorRecorder], None]) -> list[RecordedTensor]:
    """A record for each call of a block that keeps more than its policy, in a step that records nothing else.

    A step must have been done before: tensors that a module keeps for good count only when they are made.
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
    """Records nothing, so that only the tensors of training live."""

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
        """Measure each call of these blocks, around the recomputation."""
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
        made = _MadeByBlock()
        with made.tracker:
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


class _MadeByBlock:
    """The storages that a call of a block makes, and the bytes that selective recomputation keeps."""

    def __init__(self) -> None:
        self.tracker, self.product_bytes = StorageTracker(on_kernel=self._on_kernel), 0
        self._result_begin: int | None = None  # When a product and the operations on its result began

    def _on_kernel(self, kernel: Any, args: Any, *, read: Any, result: Any) -> None:
        if is_result_pending():
            self._result_begin = self.tracker.moment if self._result_begin is None else self._result_begin
            return
        self.count_result()
        self.product_bytes += result.nbytes if kernel in KEPT_OPERATORS else 0

    def count_result(self) -> None:
        """Count the bytes that are left of a product and of the operations on its result."""
        if self._result_begin is not None:
            self.product_bytes += sum(size for each, size in self._living() if each.born > self._result_begin)
        self._result_begin = None

    def alive(self, without: set[int]) -> list[tuple[int, str]]:
        """Bytes and description of each storage that lives."""
        return [(size, _description(each)) for each, size in self._living() if size and each.key not in without]

    def _living(self) -> Iterator[tuple[TrackedStorage, int]]:
        for record in [*self.tracker.storages.values()]:
            if record.is_counted and (storage := record.ref()) is not None:
                yield record, storage.nbytes()


def _description(record: TrackedStorage) -> str:
    shape, dtype = record.first_tensor
    return f"{list(shape)} of {dtype_name(dtype)}, which {record.maker} makes"
