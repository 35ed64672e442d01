"""Faults of the backend, each with a message of one sentence; monitored barriers, sparse sums and factors."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from environment import needs_torch_2_13, torch_is_older_than
from motet.collectives.shm_backend import CollectiveError, PeerLostError
from motet.parallel.process.launch_environment import RankEnvironment
from motet_groups import motet_group
from ranks import RankFailureError, Ranks
from refusals import refused

OPERATIONS: dict[str, Callable[[int], Any]] = {
    "all-reduce": lambda n: dist.all_reduce(torch.ones(n)),
    "all-reduce ": lambda n: dist.all_reduce(torch.ones(n), async_op=True).wait(),
    "all-gather": lambda n: dist.all_gather([torch.empty(n) for _ in range(dist.get_world_size())], torch.ones(n)),
    "receives": lambda n: dist.recv(torch.empty(n), src=dist.get_world_size() - 1),
}


def until_the_last_is_killed(place: RankEnvironment, name: str, count: int, each: int, notes: str) -> None:
    place, operation = replace(place, local_world=each), OPERATIONS[name]
    # The last thing in the group is a barrier.
    with pytest.raises(PeerLostError), motet_group(place):
        if name != "receives":
            operation(count)
        if place.rank == place.world - 1:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            while True:
                operation(count) if name != "receives" else time.sleep(0.001)
        killed_by = time.monotonic() + 0.05
        with pytest.raises(PeerLostError) as raised:
            while True:
                operation(count)
        delay_s = time.monotonic() - killed_by
        Path(notes, str(place.rank)).write_text(f"{delay_s:.3f}\n{raised.value}")


KILLED = [
    *((2, "all-reduce", 10, 2), (3, "all-reduce ", 3_000_000, 3), (3, "all-gather", 1000, 3)),
    *((2, "receives", 10, 2), (2, "all-reduce", 3_000_000, 1), (2, "receives", 10, 1)),
]


@pytest.mark.parametrize(("world", "killed", "count", "each"), KILLED)
def test_a_killed_peer_is_named(ranks: Ranks, tmp_path: Path, world: int, killed: str, count: int, each: int) -> None:
    with pytest.raises(RankFailureError, match=f"rank {world - 1} failed: the process ended with code -9"):
        ranks.run_places(world, until_the_last_is_killed, killed, count, each, str(tmp_path))
    for rank in range(world - 1):
        delay_s, _, sentence = (tmp_path / str(rank)).read_text().partition("\n")
        assert float(delay_s) < 5, "the timeout is 20 s"
        assert f"rank {rank}" in sentence and killed.strip() in sentence
        # The first to notice names the dead rank; a third may first hear that the first has given up.
        assert f"rank {world - 1}" in sentence


def all_killed(place: RankEnvironment) -> None:
    with motet_group(place):
        for _ in range(3):
            dist.all_reduce(torch.ones(1_000_000))
        Path(place.rendezvous.removeprefix("file://")).with_name(f"ready-{place.rank}").touch()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_stays_when_all_are_killed(ranks: Ranks) -> None:
    before = sorted(path.name for path in Path("/dev/shm").iterdir())
    with pytest.raises(RankFailureError, match="the process ended with code -9"):
        ranks.run_places(3, all_killed)
    assert sorted(path.name for path in Path("/dev/shm").iterdir()) == before


def differing(place: RankEnvironment, case: str, each: int) -> str:
    place = replace(place, local_world=each)
    rank, world = place.rank, place.world
    ones = torch.ones(4, 2)
    root = 0 if rank else 1
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: dist.all_reduce(torch.ones(4, 2) if rank else torch.ones(2, 4)),
        "size": lambda: dist.all_reduce(torch.ones(4 if rank else 3_000_000)),
        "dtype": lambda: dist.all_reduce(ones if rank else ones.double()),
        "reduction": lambda: dist.all_reduce(ones, op=dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX),
        "kind": lambda: dist.all_reduce(ones) if rank else dist.all_gather([ones.clone() for _ in range(world)], ones),
        "root": lambda: dist.broadcast(ones, src=root),
        "order": lambda: (dist.barrier(), dist.all_reduce(ones)) if rank else (dist.all_reduce(ones), dist.barrier()),
    }
    with pytest.raises(CollectiveError) as raised, motet_group(place):
        calls[case]()
    return str(raised.value)


CALLED = {
    "shape": ["all-reduce (sum) of float32 [2, 4]", "all-reduce (sum) of float32 [4, 2]"],
    "size": ["all-reduce (sum) of float32 [3000000]", "all-reduce (sum) of float32 [4]"],
    "dtype": ["all-reduce (sum) of float64 [4, 2]", "all-reduce (sum) of float32 [4, 2]"],
    "reduction": ["all-reduce (max) of float32 [4, 2]", "all-reduce (sum) of float32 [4, 2]"],
    "kind": ["all-gather of float32 [4, 2]", "all-reduce (sum) of float32 [4, 2]"],
    "root": ["broadcast of float32 [4, 2] from rank 1", "broadcast of float32 [4, 2] from rank 0"],
    "order": ["all-reduce (sum) of float32 [4, 2]", "barrier"],
}


@pytest.mark.parametrize(("case", "called"), CALLED.items())
@pytest.mark.parametrize(("world", "each"), [(2, 2), (3, 3), (2, 1)])
def test_calls_that_differ_are_told_apart(ranks: Ranks, case: str, called: list[str], world: int, each: int) -> None:
    if case == "root" and each == 1:
        return  # two ranks that both only listen hear nothing from another host, and time out
    sentences = ranks.run_places(world, differing, case, each)
    first = next(sentence for sentence in sentences if "differs" in sentence)
    for sentence in sentences:
        assert any(words in sentence for words in ("differs", "has given up", "left the group", "is lost")), sentence
    assert f"rank 0 called {called[0]}" in first and f"called {called[1]}" in first


def one_waits(place: RankEnvironment) -> str:
    with motet_group(place, timeout_s=0.4):
        dist.all_reduce(torch.ones(2))
        dist.barrier()
        if place.rank == 1:
            time.sleep(1.2)
            return ""
        with pytest.raises(CollectiveError) as raised:
            dist.all_reduce(torch.ones(3))
        with pytest.raises(CollectiveError) as again:
            dist.all_reduce(torch.ones(3))
        raise RuntimeError(f"{raised.value} | {again.value}")


def test_a_timeout_uneven_sizes_and_the_first_who_is_missing_are_named(ranks: Ranks) -> None:
    with pytest.raises(RankFailureError) as raised:
        ranks.run_places(2, one_waits)
    assert (
        "rank 0 in all-reduce (sum) of float32 [3]: rank 1 did not take part within the timeout of 0.4 s; "
        "it has finished its collective number 2, barrier, this is number 3 | "
        "this group has failed before: rank 0 in all-reduce (sum) of float32 [3]: rank 1 did not take part"
    ) in str(raised.value)
    for rank, sentence in enumerate(ranks.run_places(3, uneven)):
        assert sentence == f"rank {rank} in all-to-all: rank 1 has 2 elements for rank 2, which expects 1000000000000"
    message = ranks.run_places(3, first_missing)[0]
    assert "Rank 1 failed to pass monitoredBarrier" in message and "2" not in message.partition("failed")[0]


def one_receives(place: RankEnvironment) -> None:
    with motet_group(place):
        if place.rank == 0:
            work = dist.irecv(torch.empty(3), src=1, tag=5)
            late = r"rank 0: receiving float32 \[3\] from rank 1 with tag 5 did not end within 0.2 s"
            with pytest.raises(CollectiveError, match=late):
                work.wait(timedelta(seconds=0.2))
        dist.barrier()
        if place.rank == 1:
            dist.send(torch.ones(3), 0, tag=5)
            dist.send(torch.ones(2, dtype=torch.int64), 0)
        if place.rank == 0:
            work.wait()
            unfit = r"rank 0 receives float32 \[3\] \(12 bytes\) from rank 1 with tag 0, which sent int64 \[2\] \(16 "
            with pytest.raises(CollectiveError, match=unfit + r"bytes\)"):
                dist.recv(torch.empty(3), src=1)


def uneven(place: RankEnvironment) -> str:
    with pytest.raises(CollectiveError) as raised, motet_group(place):
        if place.rank == 2:  # it announces what would be many segments for all, without memory for it
            large = torch.empty(1).expand(10**12)
            dist.all_to_all([torch.empty(2), large, torch.empty(2)], [torch.ones(2)] * 3)
        dist.all_to_all_single(torch.empty(6), torch.ones(6), [2, 2, 2], [2, 2, 2])
    return str(raised.value)


def refused_calls(place: RankEnvironment) -> None:
    ones = torch.ones(4)
    with motet_group(place):
        refused("avg of bool: use max for any", dist.all_reduce, ones.bool(), op=dist.ReduceOp.AVG)
        refused("only integers have bits to combine", dist.all_reduce, ones, op=dist.ReduceOp.BXOR)
        refused("it can be moved but not reduced", dist.all_reduce, ones.to(torch.float8_e4m3fn))
        refused("give 2 such tensors, or one with as many elements", dist.all_gather, [torch.empty(3)] * 2, ones)
        refused("with the sum 4", dist.all_to_all_single, ones.clone(), ones, [1, 1], [2, 2])
        dist.all_reduce(ones)
        assert ones.tolist() == [2.0] * 4


def barriers(place: RankEnvironment, absent: list[int]) -> str:
    with motet_group(place) as group:
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
    with motet_group(place) as group:
        message, start = "", time.monotonic()
        if place.rank == 0:
            with pytest.raises(PeerLostError) as raised:
                group.monitored_barrier(timedelta(0))
            message = str(raised.value)
        assert time.monotonic() - start < 10
        dist.barrier()
        return message


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
            dist.all_reduce(found, async_op=True).wait()
            assert found.is_coalesced()
            torch.testing.assert_close(found.detach().to_dense(), expected, rtol=1e-12, atol=1e-13)
        refused("can only be added up", dist.all_reduce, own_part(place.rank), op=dist.ReduceOp.MAX)


def sparse_tensors_of_unlike_shapes(place: RankEnvironment) -> None:
    with pytest.raises(CollectiveError, match="all-reduce of sparse tensors"), motet_group(place):
        dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (3 + place.rank,), check_invariants=True))


def factors(place: RankEnvironment, kind: str) -> None:
    world = place.world
    each = [torch.arange(6 * world, dtype=torch.float64) + rank for rank in range(world)]
    whole = sum(each[rank] / (rank + 1) for rank in range(world))
    factor = torch.tensor([1 / (place.rank + 1)], dtype=torch.float64) if kind == "tensor" else 1 / (place.rank + 1)
    kind = dist.ReduceOp.PREMUL_SUM
    op = dist._make_nccl_premul_sum(factor) if torch_is_older_than(13) else kind(factor)
    reduce_scatter = dist.reduce_scatter_tensor if torch_is_older_than(13) else dist.reduce_scatter_single
    with motet_group(place):
        given, part = each[place.rank].clone(), torch.empty(6, dtype=torch.float64)
        reduce_scatter(part, given, op=op)
        torch.testing.assert_close(part, whole.chunk(world)[place.rank], rtol=1e-12, atol=0)
        dist.reduce(given, dst=0, op=op)
        if place.rank == 0:
            torch.testing.assert_close(given, whole, rtol=1e-12, atol=0)
        given = each[place.rank].clone()
        dist.all_reduce(given, op=op)
        torch.testing.assert_close(given, whole, rtol=1e-12, atol=0)
        refused("int64", dist.all_reduce, torch.ones(2, dtype=torch.int64), op=op)


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
        assert sharded.weight.grad.full_tensor().unique().tolist() == [2 * sum(range(1, place.world + 1)) / 8]


_SPARSE = needs_torch_2_13("sparse tensors warn of checks that were asked for")
CHECKS = [
    *(
        *(pytest.param(world, sparse_sums, marks=_SPARSE) for world in (1, 2, 3)),
        pytest.param(2, sparse_tensors_of_unlike_shapes, marks=_SPARSE),
        (3, divided),
    ),
    *((2, one_receives), (2, refused_calls)),
]


@pytest.mark.parametrize(("world", "check"), CHECKS)
def test_sparse_tensors_a_divisor_of_gradients_and_refusals(
    ranks: Ranks, world: int, check: Callable[..., None]
) -> None:
    ranks.run_places(world, check)
