"""The torch.distributed backend `motet-shared`: ranks that share one device, for checks of layouts on a single card.

Importing this registers it. NCCL refuses two ranks on one device. Here every collective and message copies its tensors
to the CPU, goes through the backend `motet` there, and copies the results back when it is waited for.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from motet.collectives.execute.work_queue import AsyncWork
from motet.collectives.shm_backend.process_group import MotetProcessGroup

SHARED_DEVICE_BACKEND = "motet-shared"
_WITH_RESULTS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "allgather_into_tensor_coalesced"),
    *("all_gather_single_coalesced", "allgather_coalesced", "_allgather_base", "all_gather_single", "gather"),
    *("scatter", "reduce_scatter", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_single", "alltoall", "alltoall_base", "all_to_all_single"),
    *("recv", "recv_anysource"),
)


class SharedDeviceProcessGroup(MotetProcessGroup):
    """A group of ranks that compute on one device and communicate through the CPU."""

    def getBackendName(self) -> str:  # noqa: N802
        return SHARED_DEVICE_BACKEND

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> AsyncWork:
        return super().send([_host_copy(tensor) for tensor in tensors], dst, tag)


def _through_host(call: Callable[..., AsyncWork]) -> Callable[..., AsyncWork]:
    """The same call over copies on the CPU. Its first argument holds the tensors that receive the results."""

    def staged_call(group: SharedDeviceProcessGroup, results: Any, *rest: Any) -> AsyncWork:
        on_host = _host_copy(results)
        work = call(group, on_host, *map(_host_copy, rest))

        def finish(handle: AsyncWork, seconds: float | None) -> None:
            work.wait(timedelta(seconds=seconds or 0))
            for result, copy in zip(_tensors_of(results), _tensors_of(on_host), strict=True):
                result.detach().copy_(copy)
            handle.complete()

        return AsyncWork(finish, [results])

    return staged_call


def _host_copy(value: Any) -> Any:
    """A copy on the CPU of a tensor or of nested lists of tensors; anything else is unchanged."""
    if isinstance(value, list | tuple):
        return [_host_copy(each) for each in value]
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_of(each)


for _name in _WITH_RESULTS:
    setattr(SharedDeviceProcessGroup, _name, _through_host(getattr(MotetProcessGroup, _name)))

if SHARED_DEVICE_BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(SHARED_DEVICE_BACKEND, SharedDeviceProcessGroup, devices=["cpu", "cuda"])
