"""Calls of torch's c10d API, each with the result that it must have, for ranks of any backend.

Each case is a function of a rank and the number of ranks. It asserts for itself what must come out, so that no backend
is the measure of another one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

Case = Callable[[int, int], None]


@dataclass(frozen=True)
class ListedCase:
    """A case with its place on the page; `gloo_note` stands for an outcome of Gloo that differs between runs."""

    title: str
    part: str
    run: Case
    gloo_note: str = ""


CASES: dict[str, ListedCase] = {}


def case(part: str, title: str, gloo_note: str = "") -> Callable[[Case], Case]:
    def add(run: Case) -> Case:
        CASES[run.__name__] = ListedCase(title, part, run, gloo_note)
        return run

    return add


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


def is_close(value: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(expected, dtype=torch.as_tensor(value).dtype))


def total(world: int) -> int:
    """The sum of 1 to the number of ranks."""
    return world * (world + 1) // 2


_COLLECTIVES, _OBJECTS = "collectives of torch.distributed", "objects and messages"
_METHODS, _GROUPS = "methods of the group", "groups"


@case(_COLLECTIVES, "all-reduce with every operation")
def all_reduce_operations(rank: int, world: int) -> None:
    expected = {
        ReduceOp.SUM: total(world),
        ReduceOp.AVG: total(world) / world,
        ReduceOp.MAX: world,
        ReduceOp.MIN: 1,
        ReduceOp.PRODUCT: int(np.prod(np.arange(1, world + 1))),
    }
    for op, value in expected.items():
        tensor = ones(3) * (rank + 1)
        dist.all_reduce(tensor, op)
        is_close(tensor, [value] * 3)
    bits = torch.tensor([1 << rank, 3])
    dist.all_reduce(bits, ReduceOp.BOR)
    assert bits.tolist() == [(1 << world) - 1, 3]


@case(_COLLECTIVES, "`PREMUL_SUM`, which FSDP takes for a custom divisor")
def premultiplied_sum(rank: int, world: int) -> None:
    tensor = ones(2)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    is_close(tensor, [world / 2] * 2)


@case(_COLLECTIVES, "sum of booleans")
def sum_of_booleans(rank: int, world: int) -> None:
    tensor = torch.tensor([True, rank == 0, False])
    dist.all_reduce(tensor)
    assert tensor.tolist() == [True, True, False]


@case(_COLLECTIVES, "broadcast, reduce, scatter, gather")
def rooted(rank: int, world: int) -> None:
    tensor = ones(2) * rank
    dist.broadcast(tensor, world - 1)
    is_close(tensor, [world - 1.0] * 2)
    tensor = ones(2) * (rank + 1)
    dist.reduce(tensor, 0)
    assert rank or tensor.tolist() == [total(world)] * 2
    out = torch.empty(2)
    dist.scatter(out, [ones(2) * each for each in range(world)] if rank == 0 else None, 0)
    is_close(out, [float(rank)] * 2)
    gathered = [torch.empty(2) for _ in range(world)] if rank == 0 else None
    dist.gather(out, gathered, 0)
    assert gathered is None or [each[0].item() for each in gathered] == list(range(world))


@case(_COLLECTIVES, "all-gather and reduce-scatter, of tensors and of lists")
def gathers_and_scatters(rank: int, world: int) -> None:
    out = torch.empty(2 * world)
    dist.all_gather_into_tensor(out, ones(2) * rank)
    is_close(out, torch.arange(world).repeat_interleave(2))
    outs = [torch.empty(2) for _ in range(world)]
    dist.all_gather(outs, ones(2) * rank)
    is_close(torch.cat(outs), out)
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * world))
    is_close(part, torch.arange(2.0 * world).view(world, 2)[rank] * world)
    dist.reduce_scatter(part, list(torch.arange(2.0 * world).view(world, 2)))
    is_close(part, torch.arange(2.0 * world).view(world, 2)[rank] * world)


@case(_COLLECTIVES, "reduce-scatter of a list of uneven tensors")
def uneven_reduce_scatter(rank: int, world: int) -> None:
    out = torch.empty(3 + 2 * rank)
    dist.reduce_scatter(out, [ones(3 + 2 * each) * (rank + 1 + each) for each in range(world)])
    is_close(out, [float(total(world) + rank * world)] * (3 + 2 * rank))


@case(_COLLECTIVES, "all-gather into a list of uneven tensors")
def uneven_all_gather(rank: int, world: int) -> None:
    outs = [torch.empty(3 + each) for each in range(world)]
    dist.all_gather(outs, ones(3 + rank) * rank)
    for each, out in enumerate(outs):
        is_close(out, [float(each)] * (3 + each))


@case(_COLLECTIVES, "all-to-all, even and with split sizes")
def all_to_all(rank: int, world: int) -> None:
    out = torch.empty(world)
    dist.all_to_all_single(out, torch.arange(float(world)) + 10 * rank)
    is_close(out, [10.0 * each + rank for each in range(world)])
    sizes = [[1 + (source + target) % 2 for target in range(world)] for source in range(world)]
    received = [row[rank] for row in sizes]
    out = torch.empty(sum(received))
    dist.all_to_all_single(out, ones(sum(sizes[rank])) * rank, received, sizes[rank])
    is_close(out, torch.arange(float(world)).repeat_interleave(torch.tensor(received)))
    outs = [torch.empty(1) for _ in range(world)]
    dist.all_to_all(outs, [ones(1) * rank for _ in range(world)])
    is_close(torch.cat(outs), torch.arange(float(world)))


@case(_COLLECTIVES, "split sizes as NumPy arrays")
def numpy_split_sizes(rank: int, world: int) -> None:
    sizes = np.arange(1, world + 1)
    out = torch.empty((rank + 1) * world)
    dist.all_to_all_single(out, ones(total(world)) * rank, np.full(world, rank + 1), sizes)
    is_close(out, torch.arange(float(world)).repeat_interleave(rank + 1))


@case(_COLLECTIVES, "coalesced calls")
def coalesced(rank: int, world: int) -> None:
    first, second, gathered = ones(2), ones(3), torch.empty(2 * world)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(first)
        dist.all_reduce(second)
    manager.wait()
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(gathered, first)
        dist.all_gather_into_tensor(gathered, first)
    is_close(torch.cat([first, second, gathered]), [float(world)] * (5 + 2 * world))


@case(_COLLECTIVES, "tensors that are not contiguous")
def strided_tensors(rank: int, world: int) -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    dist.all_reduce(tensor)
    is_close(tensor, torch.arange(6.0).view(2, 3).t() * world)


@case(_OBJECTS, "objects: all-gather, broadcast, scatter, gather")
def objects(rank: int, world: int) -> None:
    everything: list[Any] = [None] * world
    dist.all_gather_object(everything, {"rank": rank})
    assert everything == [{"rank": each} for each in range(world)]
    one = [{"from": rank}]
    dist.broadcast_object_list(one, 0)
    assert one == [{"from": 0}]
    dist.scatter_object_list(one, list(range(world)) if rank == 0 else [None] * world, 0)
    assert one == [rank]
    gathered: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    assert gathered in (None, list(range(world)))


@case(_OBJECTS, "send and receive, with tags, in batches and from any rank")
def messages(rank: int, world: int) -> None:
    following, before = (rank + 1) % world, (rank - 1) % world
    out = torch.empty(2)
    operations = [dist.P2POp(dist.isend, ones(2) * rank, following), dist.P2POp(dist.irecv, out, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    is_close(out, [float(before)] * 2)
    work = dist.isend(ones(1) * rank, following, tag=7)
    assert dist.recv(out[:1], None if world == 2 else before, tag=7) == before
    work.wait()


@case(_METHODS, "`allreduce`, `broadcast`, `reduce` without options")
def methods_in_place(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD
    for arguments, expected in {
        (): total(world),
        (ReduceOp.MAX,): world,
        (ReduceOp.MIN, timedelta(seconds=9)): 1,
    }.items():
        for wrap in (lambda t: t, lambda t: [t]):
            tensor = ones(2) * (rank + 1)
            group.allreduce(wrap(tensor), *arguments).wait()
            is_close(tensor, [float(expected)] * 2)
    tensor = ones(2) * rank
    group.broadcast(tensor, root=1).wait()
    is_close(tensor, [1.0] * 2)
    group.reduce(tensor, 0, op=ReduceOp.SUM).wait()
    assert rank or tensor.tolist() == [world] * 2


@case(_METHODS, "`allgather`, `gather`, `scatter`, `reduce_scatter`, `alltoall_base`, `barrier` without options")
def methods_with_outputs(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD
    outs, mine = [torch.empty(2) for _ in range(world)], ones(2) * rank
    group.allgather(outs, mine).wait()
    is_close(torch.cat(outs)[::2], torch.arange(float(world)))
    group.allgather([outs], [mine]).wait()
    group.gather(outs if rank == 0 else [], mine, 0).wait()
    out = torch.empty(2)
    group.scatter(out, outs if rank == 0 else [], 0).wait()
    is_close(out, [float(rank)] * 2)
    group.reduce_scatter(out, outs, ReduceOp.MAX).wait()
    is_close(out, [float(rank)] * 2)
    flat = torch.empty(world)
    group.alltoall_base(flat, ones(world) * rank, [1] * world, [1] * world, timedelta(seconds=9)).wait()
    is_close(flat, torch.arange(float(world)))
    group.barrier().wait()
    group.barrier(timeout=timedelta(seconds=9)).wait()


@case(_METHODS, "sequence numbers count collectives")
def sequence_numbers(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    dist.all_reduce(ones(1))
    dist.all_reduce(ones(1), async_op=True).wait()
    assert group._get_sequence_number_for_group() == before + 2


@case(_METHODS, "device types and the backend of a device")
def devices(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD
    assert torch.device("cpu") in group._device_types
    assert group._get_backend(torch.device("cpu")).size() == world


@case(_METHODS, "`get_future` has the list of tensors; callbacks follow")
def futures(rank: int, world: int) -> None:
    for dtype in (torch.float32, torch.float16):
        tensor = torch.ones(2, dtype=dtype)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        assert future.then(lambda done: done.value()[0].sum().item()).wait() == 2 * world
        assert future.wait()[0].data_ptr() == tensor.data_ptr()


@case(_METHODS, "`torch.distributed.monitored_barrier`")
def monitored_barrier(rank: int, world: int) -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=9))


@case(_GROUPS, "new groups, also of a part of the ranks; subgroups by size")
def groups(rank: int, world: int) -> None:
    pair = dist.new_group([0, 1])
    tensor = ones(1)
    if rank < 2:
        dist.all_reduce(tensor, group=pair)
    assert tensor.item() == (2 if rank < 2 else 1)
    mine, everyone = dist.new_subgroups(1)
    assert dist.get_world_size(mine) == 1 and len(everyone) == world


@case(_GROUPS, "aborting all groups")
def aborted(rank: int, world: int) -> None:
    dist.barrier()
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()
