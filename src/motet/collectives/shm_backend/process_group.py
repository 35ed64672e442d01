"""The process group `motet`: the methods that torch calls, under their names in torch 2.11 and in later versions.

All methods that torch calls by a private name are in this file.

The torch.distributed backend `motet-shared`: ranks that share one device, for checks of layouts on a single card.

Importing this registers it. NCCL refuses two ranks on one device. Here every collective and message copies its tensors
to the CPU, goes through the backend `motet` there, and copies the results back when it is waited for.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from motet.collectives.execute.work_queue import AsyncWork
from motet.collectives.program import CollectiveError
from motet.collectives.shm_backend.group_operations import GroupOperations
from motet.collectives.shm_backend.torch_operators import (
    answer_operators,
    call_through_dispatcher,
    is_seen_by_dispatcher,
    tensors_of,
)
from motet.collectives.torch_private import AllgatherOptions, AllToAllOptions

_UNSET_TIMEOUT_MS = -1
_UNSET_TIMEOUT = timedelta(milliseconds=_UNSET_TIMEOUT_MS)

if TYPE_CHECKING:

    class _TypedProcessGroupBase:
        """The members used here. Torch's stubs describe the overloads of the C++ methods, which ours do not have."""

        def __init__(self, rank: int, size: int) -> None: ...
else:
    _TypedProcessGroupBase = dist.ProcessGroup


class MotetProcessGroup(_TypedProcessGroupBase):
    """A group of CPU ranks. After a failure every further collective fails."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        answer_operators(MotetProcessGroup)
        self._operations = GroupOperations(store, rank, size, timeout=timeout)
        self._name = self._description = ""
        self.is_on_one_host = len({*self._operations.connections.hosts}) == 1

    def getBackendName(self) -> str:  # noqa: N802
        return "motet"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def shutdown(self) -> None:
        self._operations.shutdown()

    def abort(self) -> None:
        self._operations.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        self._operations.connections.set_timeout(timeout.total_seconds())

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> "MotetProcessGroup":
        if device.type not in {each.type for each in self._device_types}:
            raise CollectiveError(f"group {self._name!r} of the backend {self.getBackendName()} supports no {device}")
        return self

    supports_splitting = supports_coalescing = supports_shrinking = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        return self._operations.sequence_number

    def _set_sequence_number_for_group(self) -> None:
        self._operations.sequence_number = 0

    # Collectives and messages, in every form in which torch's groups take them: with an object of options, or with its
    # values (an operation, a root, a timeout) one by one.

    def allreduce(self, tensors: Tensor | list[Tensor], *values: Any, **named: Any) -> AsyncWork:
        options = _options(dist.AllreduceOptions(), values, named)
        return self._call("allreduce_", _as_list(tensors), options.reduceOp, None, *_when(options))

    def allreduce_coalesced(self, tensors: list[Tensor], *values: Any, **named: Any) -> AsyncWork:
        options = _options(dist.AllreduceCoalescedOptions(), values, named)
        return self._call("allreduce_coalesced_", tensors, options.reduceOp, *_when(options))

    def reduce(self, tensors: Tensor | list[Tensor], *values: Any, **named: Any) -> AsyncWork:
        options = _options(dist.ReduceOptions(), values, named)
        roots = options.rootRank, options.rootTensor
        return self._call("reduce_", _as_list(tensors), options.reduceOp, *roots, *_when(options))

    def broadcast(self, tensors: Tensor | list[Tensor], *values: Any, **named: Any) -> AsyncWork:
        options = _options(dist.BroadcastOptions(), values, named)
        return self._call("broadcast_", _as_list(tensors), options.rootRank, options.rootTensor, *_when(options))

    def allgather(self, outputs: list[Any], inputs: Tensor | list[Tensor], *values: Any, **named: Any) -> AsyncWork:
        outputs = [outputs] if isinstance(inputs, Tensor) else outputs
        return self._call("allgather_", outputs, _as_list(inputs), *_when(_options(AllgatherOptions(), values, named)))

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> AsyncWork:
        """Gather several tensors; `outputs` has one list for each rank, not for each tensor."""
        return self._call("allgather_coalesced_", outputs, inputs, *_when(opts)[:1])

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> AsyncWork:
        return self._call("allgather_into_tensor_coalesced_", outputs, inputs, *_when(opts)[:1])

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> AsyncWork:
        return self._call("_allgather_base_", output, input, *_when(opts))

    all_gather_single = _allgather_base

    def gather(self, outputs: list[Any], inputs: Tensor | list[Tensor], *values: Any, **named: Any) -> AsyncWork:
        options = _options(dist.GatherOptions(), values, named)
        if isinstance(inputs, Tensor):
            outputs = [outputs] if len(outputs) else []
        return self._call("gather_", outputs, _as_list(inputs), options.rootRank, *_when(options))

    def scatter(self, outputs: Tensor | list[Tensor], inputs: list[Any], *values: Any, **named: Any) -> AsyncWork:
        options = _options(dist.ScatterOptions(), values, named)
        if isinstance(outputs, Tensor):
            inputs = [inputs] if len(inputs) else []
        return self._call("scatter_", _as_list(outputs), inputs, options.rootRank, *_when(options))

    def reduce_scatter(
        self, outputs: Tensor | list[Tensor], inputs: list[Any], *values: Any, **named: Any
    ) -> AsyncWork:
        options = _options(dist.ReduceScatterOptions(), values, named)
        inputs = [inputs] if isinstance(outputs, Tensor) else inputs
        return self._call("reduce_scatter_", _as_list(outputs), inputs, options.reduceOp, *_when(options))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], *values: Any, **named: Any
    ) -> AsyncWork:
        options = _options(dist.ReduceScatterOptions(), values, named)
        return self._call("reduce_scatter_tensor_coalesced_", outputs, inputs, options.reduceOp, *_when(options))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, *values: Any, **named: Any) -> AsyncWork:
        options = _options(dist.ReduceScatterOptions(), values, named)
        return self._call("_reduce_scatter_base_", output, input, options.reduceOp, *_when(options))

    reduce_scatter_single = _reduce_scatter_base

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> AsyncWork:
        return self._call("alltoall_", outputs, inputs, *_when(opts))

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any, *values: Any, **named: Any
    ) -> AsyncWork:
        sizes = [int(size) for size in output_sizes], [int(size) for size in input_sizes]
        return self._call("alltoall_base_", output, input, *sizes, *_when(_options(AllToAllOptions(), values, named)))

    all_to_all_single = alltoall_base

    def barrier(self, *values: Any, **named: Any) -> AsyncWork:
        options = _options(dist.BarrierOptions(), values, named)
        return self._call("barrier", torch.empty(0, dtype=torch.uint8), [], *_when(options))

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> AsyncWork:
        return self._call("send", tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> AsyncWork:
        return self._call("recv_", tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> AsyncWork:
        return self._call("recv_any_source_", tensors, tag)

    def _call(self, operator: str, *arguments: Any) -> AsyncWork:
        """Run an operator of c10d, whose arguments are in its order without the group.

        Torch's dispatcher is called only for its listeners, since it takes longer than a small collective.
        """
        if is_seen_by_dispatcher(arguments):
            return call_through_dispatcher(self, operator, arguments)
        return self.perform(operator, *arguments)

    def perform(self, operator: str, *arguments: Any) -> AsyncWork:
        return self._operations.perform(operator, *arguments)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._operations.monitored_barrier(timeout, wait_all_ranks)


def _as_list(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _options(options: Any, values: Sequence[Any], named: dict[str, Any]) -> Any:
    """Options with these values, each of another type: an operation, a root or a timeout."""
    for value in (*values, *named.values()):
        if isinstance(value, type(options)):
            return value
        if isinstance(value, timedelta):
            options.timeout = value
        elif isinstance(value, int):
            options.rootRank = value
        elif value is not None:
            options.reduceOp = value
    return options


def _when(options: Any) -> tuple[bool, int]:
    """Whether the caller waits later, and the milliseconds that the collective may take."""
    if options is None:
        return True, _UNSET_TIMEOUT_MS
    timeout = options.timeout
    return options.asyncOp, _UNSET_TIMEOUT_MS if timeout == _UNSET_TIMEOUT else timeout // timedelta(milliseconds=1)


SHARED_DEVICE_BACKEND = "motet-shared"


class SharedDeviceProcessGroup(MotetProcessGroup):
    """A group of ranks that compute on one device and communicate through the CPU."""

    def getBackendName(self) -> str:  # noqa: N802
        return SHARED_DEVICE_BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def perform(self, operator: str, *arguments: Any) -> AsyncWork:
        """Run the operator over copies on the CPU. Its first argument holds the tensors that receive the results."""
        on_host = [_host_copy(argument) for argument in arguments]
        work = super().perform(operator, *on_host)
        if operator == "send":
            return work

        def finish(handle: AsyncWork, seconds: float | None) -> None:
            work.wait(timedelta(seconds=seconds or 0))
            for result, copy in zip(tensors_of(arguments[0]), tensors_of(on_host[0]), strict=True):
                result.data.copy_(copy)
            handle.complete()

        return AsyncWork(finish, [arguments[0]])


def _host_copy(value: Any) -> Any:
    """A copy on the CPU of a tensor or of nested lists of tensors; anything else is unchanged."""
    if isinstance(value, list | tuple):
        return [_host_copy(each) for each in value]
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


if SHARED_DEVICE_BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(SHARED_DEVICE_BACKEND, SharedDeviceProcessGroup, devices=["cpu", "cuda"])
