"""Every operation of the backend against what it must give, computed from all ranks' values, at 2, 3 and 4 ranks."""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from motet.collectives.execute.slot_plan import backend_sent_bytes
from motet.collectives.shm_backend.executor import CollectiveExecutor
from motet.core.trace import install_sink
from motet.core.units import dtype_name
from motet.parallel.process.launch_environment import RankEnvironment
from motet_groups import motet_group
from on_ranks import Counter as SinkCounter
from ranks import Ranks

SIZES = (0, 1, 1000, 700_001)
DTYPES = (torch.float64, torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16)


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of a rank that every other rank can make too."""
    made = torch.randint(-9, 9, (count,), generator=torch.Generator().manual_seed(100 * rank + count))
    return made.abs().to(dtype) if dtype in (torch.uint8, torch.uint16) else made.to(dtype)


def reductions(rank: int, world: int) -> None:
    for count in SIZES:
        everybody = torch.stack([values(rank, count) for rank in range(world)]).double()
        results = [everybody.sum(0), everybody.sum(0) / world, everybody.prod(0), everybody.amin(0), everybody.amax(0)]
        for name, result in zip(("SUM", "AVG", "PRODUCT", "MIN", "MAX"), results, strict=True):
            op = getattr(dist.ReduceOp, name)
            dist.all_reduce(mine := values(rank, count), op=op)
            torch.testing.assert_close(mine, result.float())
            dist.reduce(mine := values(rank, count), dst=1, op=op)
            torch.testing.assert_close(mine, result.float() if rank == 1 else values(rank, count))


def dtypes(rank: int, world: int) -> None:
    for dtype in DTYPES:
        dist.all_reduce(mine := values(rank, 1000, dtype))
        # Arithmetic on uint16 is not torch's own.
        expected = torch.stack([values(rank, 1000, dtype).long() for rank in range(world)]).sum(0).to(dtype)
        assert torch.equal(mine, expected), dtype
    for op, together in ((dist.ReduceOp.BAND, "and"), (dist.ReduceOp.BOR, "or"), (dist.ReduceOp.BXOR, "xor")):
        dist.all_reduce(mine := values(rank, 1000, torch.int32), op=op)
        everybody = [values(other, 1000, torch.int32) for other in range(world)]
        assert torch.equal(mine, reduce(getattr(torch, f"bitwise_{together}"), everybody)), op
    dist.all_reduce(flags := torch.arange(8) % world == rank, op=dist.ReduceOp.MAX)
    assert flags.all()
    dist.all_reduce(numbers := torch.full((3,), complex(rank, 1)))
    assert torch.equal(numbers, torch.full((3,), complex(sum(range(world)), world)))


def low_precision(rank: int, world: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for count in (1000, 400_000):
            generators = [torch.Generator().manual_seed(other) for other in range(world)]
            everybody = [torch.randn(count, generator=generator).to(dtype) for generator in generators]
            dist.all_reduce(mine := everybody[rank].clone())
            once = torch.stack(everybody).float().sum(0).to(dtype)
            # The order of additions in float32 may move a rounding, but not more than that.
            assert (mine != once).float().mean() < 0.01
            torch.testing.assert_close(mine, once, rtol=2**-7, atol=2**-9)


def same_bits(rank: int, world: int) -> None:
    for count in (1000, 400_000):
        dist.all_reduce(mine := torch.randn(count, generator=torch.Generator().manual_seed(rank)))
        theirs = [torch.empty(count) for _ in range(world)]
        dist.all_gather(theirs, mine)
        assert all(torch.equal(mine, other) for other in theirs)


def moves(rank: int, world: int) -> None:
    for count in SIZES:
        for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex64) if count < 10_000 else (torch.float32,):
            everybody = [values(r, count).to(dtype) for r in range(world)]
            outs = [torch.empty(count, dtype=dtype) for _ in range(world)]
            dist.all_gather(outs, everybody[rank])
            assert all(_same(out, x) for out, x in zip(outs, everybody, strict=True))
            long = torch.empty(count * world, dtype=dtype)
            getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(long, everybody[rank])
            assert _same(long, torch.cat(everybody))
            dist.broadcast(sent := everybody[rank].clone(), src=world - 1)
            assert _same(sent, everybody[-1])
            outs = [torch.empty(count, dtype=dtype) for _ in range(world)]
            dist.gather(everybody[rank], outs if rank == 1 else None, dst=1)
            assert rank != 1 or all(_same(out, x) for out, x in zip(outs, everybody, strict=True))
            dist.scatter(dealt := torch.empty(count, dtype=dtype), everybody if rank == 0 else None, src=0)
            assert _same(dealt, everybody[rank])
            swapped = torch.empty(count * world, dtype=dtype)
            dist.all_to_all_single(swapped, torch.cat([values(10 * rank + r, count).to(dtype) for r in range(world)]))
            assert _same(swapped, torch.cat([values(10 * r + rank, count).to(dtype) for r in range(world)]))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else a.numel() == b.numel()


def scattered_sums(rank: int, world: int) -> None:
    for count in SIZES:
        everybody = torch.stack([values(r, count * world) for r in range(world)])
        expected = everybody.sum(0).view(world, count)[rank]
        out, given = torch.empty(count), everybody[rank].clone()
        getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(out, given)
        assert torch.equal(out, expected) and torch.equal(given, everybody[rank])
        dist.reduce_scatter(out, list(given.view(world, count)), op=dist.ReduceOp.AVG)
        torch.testing.assert_close(out, expected / world)


def uneven_swap(rank: int, world: int) -> None:
    sizes = [[(3 * source + target) % 5 for target in range(world)] for source in range(world)]
    given = torch.cat([torch.full((sizes[rank][to], 3), 10.0 * rank + to) for to in range(world)])
    theirs = [sizes[source][rank] for source in range(world)]
    out = torch.empty(sum(theirs), 3)
    dist.all_to_all_single(out, given, theirs, sizes[rank])
    expected = torch.cat([torch.full((sizes[source][rank], 3), 10.0 * source + rank) for source in range(world)])
    assert torch.equal(out, expected)
    outs = [torch.empty(count, 3) for count in theirs]
    dist.all_to_all(outs, list(given.split(sizes[rank])))
    assert torch.equal(torch.cat(outs), expected)


def scattered_memory(rank: int, world: int) -> None:
    dist.all_reduce(mine := torch.arange(12.0).view(3, 4).t())
    assert torch.equal(mine, torch.arange(12.0).view(3, 4).t() * world)
    dist.broadcast(parameter := torch.nn.Parameter(torch.full((4,), float(rank))), src=1)
    assert torch.equal(parameter, torch.ones(4))
    whole = torch.zeros(4, world)
    dist.all_gather(list(whole.unbind(1)), torch.full((4,), float(rank)))
    assert torch.equal(whole, torch.arange(float(world)).expand(4, -1))


def at_once(rank: int, world: int) -> None:
    """Asynchronous ones in a row, several groups, coalesced, objects, and futures."""
    groups = [dist.new_group() for _ in range(2)]
    tensors = [torch.full((50_000,), float(rank + i)) for i in range(12)]
    works = [dist.all_reduce(x, async_op=True, group=groups[i % 2]) for i, x in enumerate(tensors)]
    future = works[-1].get_future()
    dist.all_reduce(last := torch.ones(3), group=groups[0])
    assert torch.equal(future.wait()[0], tensors[-1])
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    assert torch.equal(last, torch.full((3,), float(world)))
    for i, x in enumerate(tensors):
        assert (x == sum(range(world)) + i * world).all()
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in tensors:
            dist.all_reduce(x)
    manager.wait()
    assert (tensors[1] == (sum(range(world)) + world) * world).all()
    given = [torch.full((2,), float(rank)), torch.full((3,), -float(rank))]
    together = [[torch.empty(2), torch.empty(3)] for _ in range(world)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_coalesced(together, given)
    assert [[x[0].item() for x in pair] for pair in together] == [[r, -r] for r in range(world)]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": r} for r in range(world)]
    halves = [dist.new_group([r for r in range(world) if r % 2 == odd]) for odd in (0, 1)]
    dist.all_reduce(mine := torch.ones(1), group=halves[rank % 2])
    assert mine.item() == len([r for r in range(world) if r % 2 == rank % 2])


def called_when_done(rank: int, world: int) -> None:
    def again(future: Any) -> list[Tensor]:
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()

    after = dist.all_reduce(torch.full((4,), float(rank + 1)), async_op=True).get_future().then(again).then(again)
    assert after.wait()[0].tolist() == [float(sum(range(1, world + 1)) * world**2)] * 4


def messages(rank: int, world: int) -> None:
    after, before = (rank + 1) % world, (rank - 1) % world
    for count in (0, 5, 3_000_000):
        out = torch.empty(count)
        sending = dist.isend(values(rank, count), after)  # everybody sends first
        dist.recv(out, before)
        sending.wait()
        assert torch.equal(out, values(before, count))
    first, second = torch.empty(4), torch.empty(4)
    sends = [dist.isend(torch.full((4,), float(tag)), after, tag=tag) for tag in (7, 8)]
    dist.recv(second, before, tag=8)
    dist.recv(first, before, tag=7)
    assert first.tolist() + second.tolist() == [7.0] * 4 + [8.0] * 4
    for send in sends:
        send.wait()
    dist.barrier()
    if rank == 0:
        assert {dist.recv(torch.empty(2)) for _ in range(world - 1)} == set(range(1, world))
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    dist.barrier()  # or a message of the batch could be received as one from any rank
    batch = [dist.P2POp(dist.irecv, first, before), dist.P2POp(dist.isend, torch.full((4,), float(rank)), after)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert first.tolist() == [float(before)] * 4


def a_message_meets_a_collective(rank: int, world: int) -> None:
    """A large send under way does not keep its rank from a collective, though nobody waits for it."""
    if rank == 0:
        sending = dist.isend(values(0, 2_000_000), 1)
        dist.barrier()
        sending.wait()
    else:
        if rank == 1:
            dist.recv(out := torch.empty(2_000_000), 0)
            assert torch.equal(out, values(0, 2_000_000))
        dist.barrier()


def alone(rank: int, world: int) -> None:
    groups = [dist.new_group([rank]) for rank in range(world)]
    mine, out = torch.full((3,), float(rank)), torch.empty(3)
    dist.all_reduce(mine, op=dist.ReduceOp.AVG, group=groups[rank])
    dist.all_gather([out], mine, group=groups[rank])
    dist.barrier(group=groups[rank])
    assert torch.equal(out, torch.full((3,), float(rank)))


OPERATIONS = (
    *(reductions, dtypes, low_precision, same_bits, moves, scattered_sums, uneven_swap, scattered_memory, at_once),
    *(called_when_done, messages, a_message_meets_a_collective, alone),
)


def in_group(place: RankEnvironment, name: str, each: int) -> None:
    with motet_group(replace(place, local_world=each)):
        globals()[name](place.rank, place.world)


@pytest.mark.parametrize(
    ("world", "each"),
    [(2, 2), (3, 3), (2, 1), (4, 2), *(pytest.param(*sizes, marks=pytest.mark.proof) for sizes in ((4, 4), (3, 2)))],
)
@pytest.mark.parametrize("function", OPERATIONS)
def test_operations(ranks: Ranks, function: Any, world: int, each: int) -> None:
    ranks.run_places(world, in_group, function.__name__, each)


def crossings(place: RankEnvironment, each: int) -> list[tuple[list[float], int, int]]:
    """Bytes read from the slots of each rank, bytes counted here, and bytes promised; of each collective."""
    rank, world, reads, rounds = place.rank, place.world, Counter[tuple[int, ...]](), [0]
    hosts = tuple(other // each for other in range(world))
    view, consume = CollectiveExecutor._view, CollectiveExecutor._consume

    def counting_view(self: CollectiveExecutor, prepared: Any, key: tuple[int, int, int, int]) -> Tensor:
        slot = view(self, prepared, key)
        source = ~key[0] if key[0] < 0 else key[0] + hosts[rank] * each
        if rounds[0] > 0 and source != rank:
            reads[rounds[0], source, key[2]] = slot.nbytes
        return slot

    def counting_consume(self: CollectiveExecutor, *step: Any) -> None:
        rounds[0] = 1 + abs(rounds[0])
        consume(self, *step)
        rounds[0] = -rounds[0]

    results = []
    patches = patch.multiple(CollectiveExecutor, _view=counting_view, _consume=counting_consume)
    with motet_group(replace(place, local_world=each)), patches:
        for kind, count, dtype in product(CALLS, SIZES, (torch.float32, torch.bfloat16)):
            part, full = torch.ones(count, dtype=dtype), torch.ones(world, count, dtype=dtype)
            reads.clear()
            with install_sink(counter := SinkCounter()):
                CALLS[kind](part, full)
            counted = int(counter.counts.get("sent_bytes", 0))
            numel = count * world if kind == "all-to-all" else count
            promised = backend_sent_bytes(kind, numel, dtype_name(dtype), rank=rank, hosts=hosts)
            by_source = [sum(n for (_, source, _), n in reads.items() if source == other) for other in range(world)]
            results.append((by_source, counted, promised))
    return results


CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all-reduce": lambda part, full: dist.all_reduce(part),
    "broadcast": lambda part, full: dist.broadcast(part, 0),
    "reduce": lambda part, full: dist.reduce(part, 0),
    "all-gather": lambda part, full: dist.all_gather(list(full), part),
    "reduce-scatter": lambda part, full: dist.reduce_scatter(part, list(full)),
    "all-to-all": lambda part, full: dist.all_to_all_single(full, full.clone()),
}


@pytest.mark.parametrize(("world", "each"), [(3, 3), (4, 4), (4, 2), (3, 1)])
def test_bytes_that_are_counted_are_those_that_other_ranks_read(ranks: Ranks, world: int, each: int) -> None:
    results = ranks.run_places(world, crossings, each)
    for rank_results in zip(*results, strict=True):
        read = [sum(by_source[rank] for by_source, _, _ in rank_results) for rank in range(world)]
        assert [counted for _, counted, _ in rank_results] == [promised for *_, promised in rank_results] == read


def test_an_all_reduce_sends_what_the_textbook_says() -> None:
    """Small tensors are read by all others in one step; a large sum is scattered and gathered, as by a ring."""
    for ranks in (2, 4, 8):
        for numel, fraction in ((1 << 10, ranks - 1), (1 << 20, 2 * (ranks - 1) / ranks)):
            for rank in range(ranks):
                sent = backend_sent_bytes("all-reduce", numel, "float32", rank=rank, hosts=(0,) * ranks)
                assert sent == 4 * numel * fraction
