"""The collectives as ranks call them: operators, dtypes, roots, sub-groups, several at once, and in place."""

import functools
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from environment import needs_torch_2_13
from motet.collectives import build
from motet.collectives.execute import api
from motet.collectives.execute.api import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from motet.collectives.execute.reduce_ops import REDUCE_OP_NAMES
from motet.core.errors import InputError
from motet.core.trace import install_sink
from motet.parallel.process.process_group import CpuBackend, RankGroup
from on_ranks import Counter, group_of
from ranks import Ranks

HOW = [
    {},
    {"algorithm": "ring"},
    {"algorithm": "halving-doubling", "check": False},
    {"algorithm": build("all-reduce", "double-tree", 4, pieces=3), "async_op": True},
]


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small whole numbers, so that sums are exact in every dtype."""
    return torch.randint(1, 4, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def every_call(group: RankGroup) -> None:
    rank, world = group.rank, group.world
    everyone = torch.stack([numbers(r, 5, 3) for r in range(world)])
    for how in HOW:
        tensor = numbers(rank, 5, 3)
        all_reduce(tensor, group, **how).wait()
        assert torch.equal(tensor, everyone.sum(0)), how
    for how in ({}, {"algorithm": "tree"}, {"algorithm": "ring", "async_op": True}):
        for root in range(world):
            tensor = numbers(rank, 5, 3)
            broadcast(tensor, group, root, **how).wait()
            assert torch.equal(tensor, everyone[root])
            tensor = numbers(rank, 5, 3)
            api.reduce(tensor, group, root, **how).wait()
            if rank == root or how:  # what is left elsewhere is up to the backend
                assert torch.equal(tensor, everyone.sum(0) if rank == root else everyone[rank])
    for algorithm in (None, "ring", "bruck", "recursive-halving"):
        output = torch.empty(2, 3)
        reduce_scatter(output, numbers(rank, 2 * world, 3, dtype=torch.float32), group, algorithm=algorithm)
        wanted = torch.stack([numbers(r, 2 * world, 3) for r in range(world)]).sum(0)
        assert torch.equal(output.double(), wanted[2 * rank : 2 * rank + 2])
        if algorithm != "recursive-halving":
            gathered = torch.empty(5 * world, 3, dtype=torch.float64)
            all_gather(gathered, everyone[rank], group, algorithm=algorithm)
            assert torch.equal(gathered, everyone.view(-1, 3))
            all_gather(gathered, gathered[5 * rank : 5 * rank + 5], group, algorithm=algorithm or "direct")
            assert torch.equal(gathered, everyone.view(-1, 3))


def parts_of_all_ranks(group: RankGroup) -> None:
    rank, world = group.rank, group.world
    for algorithm in (None, "pairwise", "bruck"):
        parts = torch.arange(2 * world) + 100 * rank
        output = torch.empty_like(parts)
        all_to_all(output, parts, group, algorithm=algorithm)
        assert output.tolist() == [100 * r + 2 * rank + i for r in range(world) for i in range(2)]
    sizes = [[(3 * i + 5 * j) % 4 for j in range(world)] for i in range(world)]
    for algorithm in (None, "pairwise", "bruck", "hierarchical"):
        parts = torch.arange(sum(sizes[rank]), dtype=torch.bfloat16) + 32 * rank
        output = torch.empty(sum(row[rank] for row in sizes), dtype=torch.bfloat16)
        all_to_all(output, parts, group, sizes, algorithm=algorithm)
        starts = [list(accumulate(row, initial=0)) for row in sizes]
        bounds = [(32 * r + starts[r][rank], 32 * r + starts[r][rank + 1]) for r in range(world)]
        assert output.tolist() == [i for first, stop in bounds for i in range(first, stop)]


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
OTHERS = (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)
NUMERIC = {"sum": torch.sum, "avg": torch.mean, "min": torch.amin, "max": torch.amax, "product": torch.prod}
BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


def every_dtype(group: RankGroup, algorithm: str | None) -> list[tuple[str, str]]:
    refused = []
    everyone = torch.stack([numbers(r, 7) for r in range(group.world)])
    for dtype in (*FLOATS, *INTEGERS, *OTHERS):
        tensor = everyone[group.rank].to(dtype)
        gathered = torch.empty(7 * group.world, dtype=dtype)
        all_gather(gathered, tensor, group, algorithm=algorithm)
        assert torch.equal(gathered.view(torch.uint8), everyone.view(-1).to(dtype).view(torch.uint8)), dtype
        for op in REDUCE_OP_NAMES:
            tensor = everyone[group.rank].to(dtype, copy=True)
            try:
                all_reduce(tensor, group, algorithm=algorithm, op=op)
            except (InputError, ValueError) as error:  # ours, and torch's before it asks a backend
                refused.append((str(dtype).removeprefix("torch."), str(error)))
                continue
            whole = everyone.to(torch.bool).double() if dtype == torch.bool else everyone
            wanted = NUMERIC[op](whole, 0) if op in NUMERIC else functools.reduce(BITWISE[op], whole.long())
            if dtype in INTEGERS:
                wanted = wanted.trunc()
            torch.testing.assert_close(tensor.to(torch.complex128), wanted.to(dtype).to(torch.complex128))
    return refused


@pytest.mark.parametrize(("backend", "algorithm", "complex_operators"), [("gloo", "ring", 5), ("motet", None, 6)])
def test_every_dtype_and_operator(
    ranks: Ranks, backend: CpuBackend, algorithm: str | None, complex_operators: int
) -> None:
    refused = ranks.on(backend).run(3, every_dtype, algorithm)
    assert refused[0] == refused[1] == refused[2]
    names = [name for name, _ in refused[0]]
    bits = dict.fromkeys(("float64", "float32", "bfloat16", "float16"), 3)
    others = {"bool": 1, "complex64": complex_operators, "float8_e4m3fn": 8, "float8_e5m2": 8}
    assert {name: names.count(name) for name in names} == bits | others
    assert ("bool", "avg of bool: use max for any, or min for all; or convert it to an integer") in refused[0]


def low_precision(group: RankGroup) -> tuple[list[float], list[float]]:
    """256 + 1 + 1: bfloat16 has no 257, but 258."""
    tensors = [torch.tensor([256.0 if group.rank == 0 else 1.0], dtype=torch.bfloat16) for _ in range(2)]
    for tensor, algorithm in zip(tensors, ("naive", "flat"), strict=True):
        all_reduce(tensor, group, algorithm=algorithm)
    return tensors[0].tolist(), tensors[1].tolist()


def test_sums_of_a_step_are_rounded_once_calls_keep_their_order_and_bytes_are_counted(ranks: Ranks) -> None:
    assert ranks.run(3, low_precision) == [([258.0], [256.0])] * 3 and ranks.run(2, in_order) == [[2**6]] * 2
    # 24 bytes in two halves there and back, and a half of an all-gather; the size of what a backend does itself.
    assert ranks.run(2, counted)[0] == {
        "all_reduce_bytes": 48, "all_gather_bytes": 24, "sent_bytes": 36, "messages": 3, "check_bytes": 24
    }  # fmt: skip


def groups_at_once(group: RankGroup) -> None:
    groups = [(ranks, dist.new_group(ranks, sort_ranks=False)) for ranks in [[1, 3], [3, 0, 2], [2, 1, 0, 3]]]
    works, tensors = [], []
    for ranks, made in groups:
        for algorithm in ("ring", "tree", "bidirectional-ring"):
            if group.rank in ranks:
                tensor = torch.full([1000], 10.0**group.rank, dtype=torch.float64)
                works.append(all_reduce(tensor, made, algorithm=algorithm, async_op=True))
                tensors.append((tensor, sum(10.0**r for r in ranks)))
    for work in works:
        work.wait()
        assert work.is_completed()
    assert all(torch.equal(tensor, torch.full_like(tensor, total)) for tensor, total in tensors)
    for ranks, made in groups:
        if group.rank in ranks:
            tensor = torch.tensor([group.rank])
            broadcast(tensor, made, root=1, algorithm="tree")
            assert tensor.item() == ranks[1]
            gathered = torch.empty(len(ranks), dtype=torch.int64)
            all_gather(gathered, torch.tensor([group.rank]), made, algorithm="bruck")
            assert gathered.tolist() == ranks


def in_order(group: RankGroup) -> list[int]:
    """Asynchronous and synchronous ones keep their order, though some are done by a thread."""
    tensor = torch.ones(50_000, dtype=torch.int64)
    works = [all_reduce(tensor, group, algorithm="ring", async_op=True) for _ in range(5)]
    all_reduce(tensor, group, algorithm="tree")
    assert all(work.is_completed() for work in works)
    for work in works:
        work.wait()
    leaf = torch.ones(3, requires_grad=True)
    all_reduce(leaf, group, algorithm="ring")
    assert leaf.tolist() == [2.0] * 3
    return tensor.unique().tolist()


def counted(group: RankGroup) -> dict[str, float]:
    counter = Counter()
    with install_sink(counter):
        all_reduce(torch.zeros(6), group, algorithm="ring")
        all_reduce(torch.zeros(6), group)
        all_gather(torch.zeros(6), torch.zeros(3), group, algorithm="ring", check=False)
    return counter.counts


def test_a_rank_alone() -> None:
    alone = SimpleNamespace(world=1, process_group=None)
    output = torch.zeros(2, 3)
    all_gather(output, torch.ones(6), alone).wait()
    assert output.unique().tolist() == [1.0]
    reduce_scatter(output, torch.full([6], 2.0), alone, algorithm="ring", async_op=True).wait()
    assert output.unique().tolist() == [2.0]
    for work in (all_reduce(output, alone), broadcast(output, alone)):
        work.wait()
        assert work.is_completed()
    assert output.unique().tolist() == [2.0] and api.sum_scalars([1.5, 2.0], alone, torch.device("cpu")) == [1.5, 2.0]


def ours_is_the_backends(group: RankGroup) -> None:
    for op in ("sum", "min", "max", "product"):  # Gloo has no average
        ours, theirs = (torch.randn(1001, generator=torch.Generator().manual_seed(group.rank)) for _ in range(2))
        all_reduce(ours, group, algorithm="ring", op=op)
        all_reduce(theirs, group_of(group), op=op)
        assert torch.equal(ours, theirs)


CHECKS = [(4, every_call), (4, parts_of_all_ranks), (2, ours_is_the_backends)]
_IN_ORDER = needs_torch_2_13("groups have their ranks in ascending order")
CHECKS += [pytest.param(4, groups_at_once, marks=_IN_ORDER)]


@pytest.mark.parametrize(("world", "check"), CHECKS)
def test_calls(ranks: Ranks, world: int, check: Callable[[RankGroup], None]) -> None:
    ranks.run(world, check)
