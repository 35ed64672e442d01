"""Contiguous stages that take equal time, from the costs of the blocks of a model."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, takewhile
from typing import NamedTuple

from motet.core.errors import check_input
from motet.core.units import DTYPE_BYTES
from motet.models.spec.layer_specs import BlockSpec, MicroBatchShape
from motet.models.spec.model_spec import ModelSpec

TOLERANCE = 1e-9  # Relative difference below which costs are equal
BYTES_OF_PARAMETER = 16  # A float32 parameter, its gradient and two moments


class BlockCosts(NamedTuple):
    """Costs of each block. The computation before the first block or after a block is part of that block."""

    times: tuple[float, ...]
    memory: tuple[float, ...] = ()


@lru_cache(maxsize=256)  # The planner asks for the stages of the same model in every layout
def balance_stages(costs: BlockCosts, stages: int) -> tuple[range, ...]:
    """Stages of at least one block whose largest time is the least possible.

    Among several, those with the least largest memory are taken, and among these the one with the most even times. With
    more stages than blocks, the last stages are empty.
    """
    count = len(costs.times)
    if stages > count:
        return tuple(range(min(i, count), min(i + 1, count)) for i in range(stages))
    time, memory = _sums(costs.times), _sums(costs.memory or (0.0,) * count)
    by_time = _best_cut(count, stages, cost=time, join=max)
    most_time = (1 + TOLERANCE) * max(map(time, by_time))
    by_memory = _best_cut(count, stages, cost=memory, join=max, allowed=lambda blocks: time(blocks) <= most_time)
    most_memory = (1 + TOLERANCE) * max(map(memory, by_memory))
    return _best_cut(
        count,
        stages,
        cost=lambda blocks: time(blocks) ** 2,
        join=float.__add__,
        allowed=lambda blocks: time(blocks) <= most_time and memory(blocks) <= most_memory,
    )


def _sums(costs: Sequence[float]) -> Callable[[range], float]:
    totals = list(accumulate(costs, initial=0.0))
    return lambda blocks: totals[blocks.stop] - totals[blocks.start]


def _best_cut(
    count: int,
    stages: int,
    *,
    cost: Callable[[range], float],
    join: Callable[[float, float], float],
    allowed: Callable[[range], bool] = lambda _: True,
) -> tuple[range, ...]:
    """The cut of blocks into stages with the least joint cost; of several the one with the longest last stages.

    A longer stage costs at least as much, and a joint cost is at least that of each stage, so the search ends at stages
    that cost more than the least joint cost.
    """
    best: dict[int, tuple[float, tuple[range, ...]]] = {0: (0.0, ())}  # Cuts of the first blocks, by their number
    for stage in range(stages):
        after: dict[int, tuple[float, tuple[range, ...]]] = {}
        for stop in range(stage + 1, count - (stages - stage - 1) + 1):
            least: tuple[float, int] | None = None
            for start in reversed(range(stage, stop)):
                if start not in best:
                    continue
                blocks = range(start, stop)
                own_cost = float(cost(blocks))
                if not allowed(blocks) or (least is not None and own_cost > least[0]):
                    break
                option = join(best[start][0], own_cost), start
                least = option if least is None else min(least, option)
            if least is not None:
                after[stop] = least[0], (*best[least[1]][1], range(least[1], stop))
        best = after
    return best[count][1]


def costs_of_spec(spec: ModelSpec, shape: MicroBatchShape, dtype: str) -> BlockCosts:
    """The FLOPs of each block of a model for a micro-batch, and the bytes of its parameters and activations."""

    def memory(block: BlockSpec) -> float:
        frozen = (block.parameter_count - block.trained_count) * DTYPE_BYTES[dtype]
        return block.trained_count * BYTES_OF_PARAMETER + frozen + block.saved_bytes(shape, dtype)

    return BlockCosts(_by_block(spec, lambda block: block.training_flops(shape)), _by_block(spec, memory))


def _by_block(spec: ModelSpec, cost: Callable[[BlockSpec], float]) -> tuple[float, ...]:
    blocks, before = list[float](), sum(map(cost, takewhile(lambda block: "{i}" not in block.prefix, spec.blocks)))
    for block in spec.blocks:
        if "{i}" in block.prefix:
            blocks += [float(cost(block))] * block.repeat
        elif blocks:
            blocks[-1] += cost(block)
    return (blocks[0] + before, *blocks[1:]) if blocks else ()


def check_stages(stages: Sequence[range], blocks: int, model: str) -> None:
    """Refuse stages that are not all blocks of a model in their order, at least one each."""
    covered = stages[-1].stop if stages else 0
    check_input(
        len(stages) <= blocks,
        f"layout.pp x layout.chunks = {len(stages)} stages, but {model} has {blocks} block{'s' * (blocks != 1)}, and a "
        f"stage needs one; {f'use {blocks} stages at most' if blocks > 1 else 'leave layout.pp out'}",
    )
    check_input(
        covered == blocks,
        f"layout.stages ends with block {covered - 1}, but {model} has {blocks} blocks; end it with block {blocks - 1}",
    )
    check_input(
        all(stages),
        f"a stage of {[f'{r.start}-{r.stop - 1}' for r in stages]} is empty; give each stage a block",
    )
