"""On the backend `motet`: the barrier that names who is missing, sums of sparse tensors, and factors before a sum."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from motet.collectives.shm_backend import CollectiveError, PeerLostError
from motet.core.errors import InputError
from motet.parallel.process.launch_environment import RankEnvironment
from motet_groups import motet_group
from ranks import Ranks


def barriers(place: RankEnvironment, absent: list[int]) -> str:
    with motet_group(place) as made:
        group: Any = made
        for number in range(3):
            dist.all_reduce(torch.ones(10))
            group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=number % 2 == 0)
        message = ""
        if place.rank not in absent:
            try:
                group.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=place.rank == 0)
            except PeerLostError as error:
                message = str(error)
        dist.all_reduce(torch.ones(10))  # the group goes on
        return message


@pytest.mark.parametrize(("world", "local"), [(3, 3), (4, 2)])
def test_a_monitored_barrier_names_who_does_not_come(ranks: Ranks, world: int, local: int) -> None:
    absent = [world - 2, world - 1]
    messages = ranks.run_places(world, barriers, absent)
    assert f"Ranks {absent[0]}, {absent[1]} failed to pass monitoredBarrier" in messages[0]
    assert [message for rank, message in enumerate(messages) if rank in absent] == ["", ""]
    for rank in range(1, world - 2):
        assert f"rank {rank} came to the barrier, but rank 0 did not answer" in messages[rank]


def first_missing(place: RankEnvironment) -> str:
    with motet_group(place) as made:
        group: Any = made
        message = ""
        start = time.monotonic()
        if place.rank == 0:
            with pytest.raises(PeerLostError) as raised:
                group.monitored_barrier(timedelta(0))
            message = str(raised.value)
        assert time.monotonic() - start < 10
        dist.barrier()
        return message


def test_without_waiting_for_all_it_names_the_first(ranks: Ranks) -> None:
    message = ranks.run_places(3, first_missing)[0]
    assert "Rank 1 failed to pass monitoredBarrier" in message
    assert "2" not in message.partition("failed")[0]


def own_part(rank: int, dense: tuple[int, ...] = ()) -> Tensor:
    """Each rank has another number of places, one of them twice, and shares some with others."""
    generator = torch.Generator().manual_seed(rank)
    places = torch.stack([torch.randint(high, (2 * rank,), generator=generator) for high in (5, 3)])
    places = torch.cat([places, places[:, :1]], 1)
    values = torch.randn(places.shape[1], *dense, dtype=torch.float64, generator=generator)
    return torch.sparse_coo_tensor(places, values, (5, 3, *dense), check_invariants=True)


def sparse_sums(place: RankEnvironment) -> None:
    with motet_group(place):
        for dense in ((), (2,), (2, 3)):
            expected = sum(own_part(rank, dense).to_dense() for rank in range(place.world))
            found = own_part(place.rank, dense).requires_grad_()
            work = dist.all_reduce(found, async_op=True)
            assert work is not None
            work.wait()
            assert found.is_coalesced()
            torch.testing.assert_close(found.detach().to_dense(), expected, rtol=1e-12, atol=1e-13)
        with pytest.raises(InputError, match="can only be added up"):
            dist.all_reduce(own_part(place.rank), op=dist.ReduceOp.MAX)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sparse_tensors_are_added_up(ranks: Ranks, world: int) -> None:
    ranks.run_places(world, sparse_sums)


def unlike_shapes(place: RankEnvironment) -> None:
    with pytest.raises(CollectiveError, match="all-reduce of sparse tensors"), motet_group(place):
        dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (3 + place.rank,), check_invariants=True))


def test_sparse_tensors_of_unlike_shapes_are_refused(ranks: Ranks) -> None:
    ranks.run_places(2, unlike_shapes)


def factors(place: RankEnvironment, kind: str) -> None:
    """Every rank has a factor of its own."""
    world = place.world
    each = [torch.arange(6 * world, dtype=torch.float64) + rank for rank in range(world)]
    whole = sum(each[rank] / (rank + 1) for rank in range(world))
    assert isinstance(whole, Tensor)
    factor = torch.tensor([1 / (place.rank + 1)], dtype=torch.float64) if kind == "tensor" else 1 / (place.rank + 1)
    op = dist.ReduceOp.PREMUL_SUM(factor)
    with motet_group(place):
        given = each[place.rank].clone()
        part = torch.empty(6, dtype=torch.float64)
        dist.reduce_scatter_single(part, given, op=op)
        torch.testing.assert_close(part, whole.chunk(world)[place.rank], rtol=1e-12, atol=0)
        dist.reduce(given, dst=0, op=op)
        if place.rank == 0:
            torch.testing.assert_close(given, whole, rtol=1e-12, atol=0)
        given = each[place.rank].clone()
        dist.all_reduce(given, op=op)
        torch.testing.assert_close(given, whole, rtol=1e-12, atol=0)
        with pytest.raises(InputError, match="int64"):
            dist.all_reduce(torch.ones(2, dtype=torch.int64), op=op)


@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize("world", [1, 3])
def test_contributions_are_multiplied_before_the_sum(ranks: Ranks, world: int, kind: str) -> None:
    ranks.run_places(world, factors, kind)


def divided(place: RankEnvironment) -> None:
    """Small integers, so float32 is exact: FSDP multiplies before the sum in this dtype alone."""
    with motet_group(place):
        sharded: Any = fully_shard(nn.Linear(4, 6, bias=False), mesh=init_device_mesh("cpu", (place.world,)))
        sharded.set_gradient_divide_factor(8.0)
        sharded(torch.full((2, 4), place.rank + 1.0)).sum().backward()
        gradient = sharded.weight.grad
        assert isinstance(gradient, DTensor)
        assert gradient.full_tensor().unique().tolist() == [2 * sum(range(1, place.world + 1)) / 8]


def test_a_divisor_of_gradients_in_fsdp(ranks: Ranks) -> None:
    ranks.run_places(3, divided)
