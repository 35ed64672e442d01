"""The two variants of benchmarks/update_everywhere.py: each rank updates all parameters, or its shard."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from parts.rounds import interleave, mean_over_ranks
from torch import Tensor, nn

from motet.collectives.execute.api import all_gather, all_reduce, reduce_scatter
from motet.parallel.process.process_group import RankGroup

GRADIENT, LEARNING_RATE = 1e-3, 1e-3
LARGEST_DIFFERENCE = 1e-6
ALIGN_ELEMENTS = 32
PARTS = ("sum", "update", "gather")


@dataclass
class Times:
    """Seconds in each round, as the mean over the ranks, by part and of `all`."""

    everywhere: dict[str, list[float]]
    sharded: dict[str, list[float]]

    def whole(self) -> tuple[list[float], list[float]]:
        """Times of all parts: everywhere, and sharded."""
        return self.everywhere["all"], self.sharded["all"]

    def after_the_sum(self) -> tuple[list[float], list[float]]:
        """Times of the parts that backward cannot hide: everywhere, and sharded."""
        pairs = zip(self.sharded["update"], self.sharded["gather"], strict=True)
        return self.everywhere["update"], [update + gather for update, gather in pairs]


class OptimizerVariant:
    """Parameters, gradients and an optimizer, cut into buckets; all of them, or a share of each bucket, is updated."""

    def __init__(self, numel: int, recipe: str, bucket: int, shards: int, group: RankGroup) -> None:
        self._group, self._shards = group, shards
        unit = group.world * ALIGN_ELEMENTS
        numel, bucket = -(-numel // unit) * unit, -(-bucket // unit) * unit
        self.compute = torch.zeros(numel, dtype=torch.bfloat16 if recipe == "bf16" else torch.float32)
        self._gradients = torch.zeros(numel)
        self._wholes = list(self.compute.split(bucket))
        self._sums = list(self._gradients.split(bucket))
        self._own = [self._share(whole) for whole in self._wholes]
        masters = [own.float() if recipe == "bf16" else own for own in self._own]
        self._masters = [nn.Parameter(master, requires_grad=False) for master in masters]
        self._optimizer = torch.optim.AdamW(self._masters, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
        for master, summed in zip(self._masters, self._sums, strict=True):
            master.grad = self._share(summed)

    def _share(self, tensor: Tensor) -> Tensor:
        return tensor.view(self._shards, -1)[self._group.rank % self._shards]

    def begin(self) -> None:
        """Make gradients as backward would leave them."""
        self._gradients.fill_(GRADIENT * (1 + self._group.rank))

    def sum(self) -> None:
        works = []
        for summed in self._sums:
            if self._shards == 1:
                works.append(all_reduce(summed, self._group, async_op=True))
            else:
                works.append(reduce_scatter(self._share(summed), summed, self._group, async_op=True))
        for work in works:
            work.wait()

    def update(self) -> None:
        self._optimizer.step()
        if self.compute.dtype == torch.bfloat16:
            for own, master in zip(self._own, self._masters, strict=True):
                own.copy_(master)

    def gather(self) -> None:
        """All-gather the updated shards in place; a no-op where each rank has updated everything."""
        if self._shards > 1:
            own = zip(self._wholes, self._own, strict=True)
            works = [all_gather(whole, share, self._group, async_op=True) for whole, share in own]
            for work in works:
                work.wait()


def take_turns(numel: int, recipe: str, rounds: int, bucket: int) -> Times:
    """Times of both ways; the first round warms up. Raises where the two ways come to different parameters."""
    group = RankGroup(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))
    ways = {
        name: OptimizerVariant(numel, recipe, bucket, n, group)
        for name, n in (("everywhere", 1), ("sharded", group.world))
    }
    results = interleave({name: partial(one_round, way, group) for name, way in ways.items()}, rounds + 1)
    times = Times(**{name: {part: [r[part] for r in rs[1:]] for part in rs[0]} for name, rs in results.items()})
    least, most = (w.compute.float() for w in ways.values())
    difference = float((least - most).abs().max())
    if not difference <= LARGEST_DIFFERENCE or not float(least.abs().max()) > 0:
        raise SystemExit(f"the two ways came to different parameters: up to {difference:g} apart")
    return times


def one_round(way: OptimizerVariant, group: RankGroup) -> dict[str, float]:
    """Time a complete step, then another one part by part."""
    seconds = {}
    way.begin()
    seconds["all"] = timed(lambda: [getattr(way, part)() for part in PARTS])
    way.begin()
    for part in PARTS:
        seconds[part] = timed(getattr(way, part))
    return dict(zip(seconds, mean_over_ranks(list(seconds.values())), strict=True))


def timed(work: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
