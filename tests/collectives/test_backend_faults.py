"""Faults between ranks: killed processes, calls that do not match, timeouts. Each has a message of one sentence."""

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

from motet.collectives.shm_backend import CollectiveError, PeerLostError
from motet.core.errors import InputError
from motet.parallel.process.launch_environment import RankEnvironment
from motet_groups import motet_group
from ranks import RankFailureError, Ranks


def reduce_all(count: int) -> None:
    dist.all_reduce(torch.ones(count))


def reduce_later(count: int) -> None:
    work = dist.all_reduce(torch.ones(count), async_op=True)
    assert work is not None
    work.wait()


def gather_all(count: int) -> None:
    dist.all_gather([torch.empty(count) for _ in range(dist.get_world_size())], torch.ones(count))


def receive(count: int) -> None:
    dist.recv(torch.empty(count), src=dist.get_world_size() - 1)


OPERATIONS = {"all-reduce": reduce_all, "all-reduce ": reduce_later, "all-gather": gather_all, "receives": receive}


def until_the_last_is_killed(place: RankEnvironment, name: str, count: int, each: int, notes: str) -> None:
    place = replace(place, local_world=each)
    operation = OPERATIONS[name]
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


@pytest.mark.parametrize(
    ("world", "killed", "count", "each"),
    [
        (2, "all-reduce", 10, 2),
        (3, "all-reduce ", 3_000_000, 3),
        (3, "all-gather", 1000, 3),
        (2, "receives", 10, 2),
        (2, "all-reduce", 3_000_000, 1),
        (2, "receives", 10, 1),
    ],
)
def test_a_killed_peer_is_named(ranks: Ranks, tmp_path: Path, world: int, killed: str, count: int, each: int) -> None:
    """`each` ranks on every host."""
    with pytest.raises(RankFailureError, match=f"rank {world - 1} failed: the process ended with code -9"):
        ranks.run_places(world, until_the_last_is_killed, killed, count, each, str(tmp_path))
    for rank in range(world - 1):
        delay_s, _, sentence = (tmp_path / str(rank)).read_text().partition("\n")
        assert float(delay_s) < 5, "the timeout is 20 s"
        assert f"rank {rank}" in sentence
        assert killed.strip() in sentence
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


Calls = dict[int, Callable[[], Any]]


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


@pytest.mark.parametrize(
    ("case", "called"),
    [
        ("shape", ["all-reduce (sum) of float32 [2, 4]", "all-reduce (sum) of float32 [4, 2]"]),
        ("size", ["all-reduce (sum) of float32 [3000000]", "all-reduce (sum) of float32 [4]"]),
        ("dtype", ["all-reduce (sum) of float64 [4, 2]", "all-reduce (sum) of float32 [4, 2]"]),
        ("reduction", ["all-reduce (max) of float32 [4, 2]", "all-reduce (sum) of float32 [4, 2]"]),
        ("kind", ["all-gather of float32 [4, 2]", "all-reduce (sum) of float32 [4, 2]"]),
        ("root", ["broadcast of float32 [4, 2] from rank 1", "broadcast of float32 [4, 2] from rank 0"]),
        ("order", ["all-reduce (sum) of float32 [4, 2]", "barrier"]),
    ],
)
@pytest.mark.parametrize(("world", "each"), [(2, 2), (3, 3), (2, 1)])
def test_calls_that_differ_are_told_apart(ranks: Ranks, case: str, called: list[str], world: int, each: int) -> None:
    if case == "root" and each == 1:
        return  # two ranks that both only listen hear nothing from another host, and time out
    sentences = ranks.run_places(world, differing, case, each)
    first = next(sentence for sentence in sentences if "differs" in sentence)
    for sentence in sentences:
        assert (
            "differs" in sentence or "has given up" in sentence or "left the group" in sentence or "is lost" in sentence
        ), sentence
    assert f"rank 0 called {called[0]}" in first
    assert f"called {called[1]}" in first


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


def test_a_timeout_says_whom_it_waits_for(ranks: Ranks) -> None:
    with pytest.raises(RankFailureError) as raised:
        ranks.run_places(2, one_waits)
    assert (
        "rank 0 in all-reduce (sum) of float32 [3]: rank 1 did not take part within the timeout of 0.4 s; "
        "it has finished its collective number 2, barrier, this is number 3 | "
        "this group has failed before: rank 0 in all-reduce (sum) of float32 [3]: rank 1 did not take part"
    ) in str(raised.value)


def one_receives(place: RankEnvironment) -> None:
    with motet_group(place):
        if place.rank == 0:
            work = dist.irecv(torch.empty(3), src=1, tag=5)
            assert work is not None
            with pytest.raises(
                CollectiveError,
                match=r"rank 0: receiving float32 \[3\] from rank 1 with tag 5 did not end within 0.2 s",
            ):
                work.wait(timedelta(seconds=0.2))
        dist.barrier()
        if place.rank == 1:
            dist.send(torch.ones(3), 0, tag=5)
            dist.send(torch.ones(2, dtype=torch.int64), 0)
        if place.rank == 0:
            work.wait()
            with pytest.raises(
                CollectiveError,
                match=r"rank 0 receives float32 \[3\] \(12 bytes\) from rank 1 with tag 0, which sent int64 \[2\] "
                r"\(16 bytes\)",
            ):
                dist.recv(torch.empty(3), src=1)


def test_messages_that_do_not_come_or_do_not_fit(ranks: Ranks) -> None:
    ranks.run_places(2, one_receives)


def uneven(place: RankEnvironment) -> str:
    with pytest.raises(CollectiveError) as raised, motet_group(place):
        dist.all_to_all_single(torch.empty(4), torch.ones(4), ([2, 2] if place.rank else [1, 3]), [2, 2])
    return str(raised.value)


def test_split_sizes_that_do_not_match(ranks: Ranks) -> None:
    assert ranks.run_places(2, uneven)[0] == "rank 0 in all-to-all: rank 0 has 2 elements for it, where it expects 1"


def refused(place: RankEnvironment) -> None:
    ones = torch.ones(4)
    with motet_group(place):
        for call, sentence in (
            (lambda: dist.all_reduce(ones.bool()), "sum of bool: use max for any"),
            (lambda: dist.all_reduce(ones, op=dist.ReduceOp.BXOR), "only integers have bits to combine"),
            (lambda: dist.all_reduce(ones.to(torch.float8_e4m3fn)), "it can be moved but not reduced"),
            (
                lambda: dist.all_gather([torch.empty(3)] * 2, ones),
                "it must be 2 such tensors, or one with as many elements",
            ),
            (lambda: dist.all_to_all_single(ones.clone(), ones, [1, 1], [2, 2]), "with the sum 4"),
        ):
            with pytest.raises(InputError, match=sentence):
                call()
        dist.all_reduce(ones)
        assert ones.tolist() == [2.0] * 4


def test_what_is_refused_before_anything_moves(ranks: Ranks) -> None:
    ranks.run_places(2, refused)
