"""torch's operators c10d::* for groups that are written in Python.

Torch sends a collective through an operator of its dispatcher, where tensor subclasses, dispatch modes and the profiler
see it. The operator's kernels know only backends that are written in C++. So each operator gets one kernel more, under
a key (BackendSelect) that comes after those listeners and before torch's kernels, which still serve all other groups.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from motet.collectives.execute.work_queue import AsyncWork, CompletedWork
from motet.collectives.torch_private import (
    KEYS_AFTER_BACKEND_SELECT,
    has_dispatch_modes,
    is_profiling,
    without_dispatch,
)
from motet.core.errors import InputError

# Each operator -> the place of the group among its arguments, and the arguments that it gives back before the work.
OPERATORS = {
    **dict.fromkeys(("allreduce_", "broadcast_"), (1, 1)),
    **dict.fromkeys(("allreduce_coalesced_", "reduce_", "barrier", "send", "recv_", "recv_any_source_"), (1, 0)),
    **dict.fromkeys(("allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_"), (2, 1)),
    **dict.fromkeys(("scatter_", "alltoall_"), (2, 1)),
    **dict.fromkeys(("allgather_coalesced_", "allgather_into_tensor_coalesced_", "gather_", "alltoall_base_"), (2, 0)),
    "reduce_scatter_tensor_coalesced_": (2, 0),
}
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


@dataclass
class _Call:
    """A call through the dispatcher: its operation, which a kernel in Python cannot read, and the works it starts."""

    reduce_op: Any
    works: list[AsyncWork] = field(default_factory=list)


class _Calls(threading.local):
    """The calls of this thread; the innermost is the last."""

    def __init__(self) -> None:
        self.open: list[_Call] = []
        self.boxed: list[Any] | None = None  # Takes the operation of a call that is made for this alone


_calls = _Calls()


def is_seen_by_dispatcher(arguments: Sequence[Any]) -> bool:
    """Whether a mode, the profiler or a class of tensors handles operators of these arguments."""
    if has_dispatch_modes() or is_profiling():
        return True
    return not all(map(_is_plain, arguments[:2]))  # Tensors stand first


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is list or kind is tuple:
        return all(map(_is_plain, value))
    return not isinstance(value, Tensor) or (kind in _PLAIN_TYPES and not value.is_meta)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in nested lists."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    if isinstance(value, list | tuple):
        for each in value:
            tensors += tensors_of(each)
    return tensors


def call_through_dispatcher(group: Any, operator: str, arguments: Sequence[Any]) -> AsyncWork:
    """Call torch's operator; the work ends when everything has ended that it started, for example inner tensors."""
    place, _ = OPERATORS[operator]
    call = _Call(next((each for each in arguments if _is_reduce_op(each)), None))
    boxed = [_boxed_reduce_op(each) if _is_reduce_op(each) else each for each in arguments]
    _calls.open.append(call)
    try:
        getattr(torch.ops.c10d, operator).default(*boxed[:place], group.boxed(), *boxed[place:])
    finally:
        _calls.open.pop()
    outputs = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
    return call.works[0] if len(call.works) == 1 else AsyncWork(partial(_wait_for_all, call.works), outputs)


def _is_reduce_op(value: Any) -> bool:
    return isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType)


def _boxed_reduce_op(op: Any) -> Any:
    """The operation as operators take it. Only torch's C++ makes one, for which a group without ranks is enough."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    boxing: Any = dist.ProcessGroup
    boxing, _calls.boxed = boxing(0, 1), []
    try:
        with without_dispatch():
            boxing.allreduce([torch.empty(0)], options)
        return _calls.boxed[0]
    finally:
        _calls.boxed = None


def _wait_for_all(works: list[AsyncWork], handle: AsyncWork, seconds: float | None) -> None:
    for work in works:
        if not work.finished:
            work.progress(work, seconds)
    handle.complete(next((work.error for work in works if work.error is not None), None))


@cache
def answer_operators(group_class: Any) -> None:
    """Register the kernels for groups of this class, once in a process, when it makes its first one."""
    for operator in OPERATORS:
        _library().impl(operator, partial(_answer, group_class, operator), "BackendSelect", with_keyset=True)


@cache
def _library() -> torch.library.Library:
    return torch.library.Library("c10d", "IMPL")  # It takes its kernels back when it is freed


def _answer(group_class: Any, operator: str, keys: Any, *arguments: Any) -> Any:
    place, results = OPERATORS[operator]
    boxed = _ended().boxed()
    if _calls.boxed is not None:
        _calls.boxed.append(arguments[place + 1])
        return arguments[0], boxed
    group: Any = dist.ProcessGroup.unbox(arguments[place])
    if not isinstance(group, group_class) or any(each.is_meta for each in tensors_of(arguments)):
        return getattr(torch.ops.c10d, operator).default.redispatch(keys & KEYS_AFTER_BACKEND_SELECT, *arguments)
    call = _calls.open[-1] if _calls.open else _Call(None)
    rest = [call.reduce_op if _is_boxed_reduce_op(each) else each for each in arguments]
    if call.reduce_op is None and any(_is_boxed_reduce_op(each) for each in arguments):
        raise InputError(f"c10d::{operator} was called for a group of motet directly: call the method of the group")
    work = group.perform(operator, *rest[:place], *rest[place + 1 :])
    call.works.append(work)
    if not _calls.open:
        work.wait()  # Torch's C++ would hold the work, but not its Python object
    return (arguments[0], boxed) if results else boxed


def _is_boxed_reduce_op(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and str(value._type()).endswith(".ReduceOp")


@cache
def _ended() -> CompletedWork:
    return CompletedWork()
