"""Random ways in which ranks may hold a tensor, and what each of them then has, by the definition alone."""

from itertools import pairwise, product
from math import prod
from random import Random
from typing import NamedTuple

import torch

from motet.parallel.shard_spec import ShardSpec

PADDING = -1


class HeldElements(NamedTuple):
    """The part of one rank: elements `start` to `stop` of its shard, in local order."""

    spec: ShardSpec
    start: int
    stop: int


def local_indices(spec: ShardSpec) -> torch.Tensor:
    """The flat index in the whole of each element of a shard: the product of the spans, PADDING where there is none."""
    indices = torch.full(spec.local_shape, PADDING)
    along = [[i for first, stop in spans for i in range(first, stop)] for spans in spec.spans]
    numbers = torch.arange(prod(spec.shape)).view(spec.shape)
    for place in product(*(range(len(each)) for each in along)):
        indices[place] = numbers[tuple(each[i] for each, i in zip(along, place, strict=True))]
    return indices.flatten()


def random_shape(draw: Random) -> tuple[int, ...]:
    return tuple(draw.choice([1, 2, 3, 5, 8]) for _ in range(draw.randrange(4)))


def random_sharding(draw: Random, shape: tuple[int, ...], ranks: int) -> list[HeldElements | None]:
    """One item for each rank. Specs tile the tensor; the ranks of a spec cut it, or hold copies of it, or both."""
    specs = _random_specs(draw, shape, ranks)
    groups: list[list[int]] = [[] for _ in specs]
    for i, rank in enumerate(draw.sample(range(ranks), ranks)):
        groups[i if i < len(specs) else draw.randrange(len(specs))].append(rank)
    held: list[HeldElements | None] = [None] * ranks
    for spec, group in zip(specs, groups, strict=True):
        runs = _random_runs(draw, spec, draw.randint(1, len(group)))
        for i, rank in enumerate(group):
            start, stop = runs[i if i < len(runs) else draw.randrange(len(runs))]
            held[rank] = HeldElements(spec, start, stop) if start < stop else None
    return held


def _random_specs(draw: Random, shape: tuple[int, ...], ranks: int) -> list[ShardSpec]:
    """One split dimension or two, such as experts and their inner width; fused parts are split one by one."""
    along: list[list[tuple[tuple[tuple[int, int], ...], int]]] = [[(((0, length),), 0)] for length in shape]
    for dim in draw.sample(range(len(shape)), draw.randrange(min(2, len(shape)) + 1)):
        pieces = draw.randint(1, min(shape[dim], ranks // prod(map(len, along))))
        joints = sorted(draw.sample(range(1, shape[dim]), min(draw.randrange(3), shape[dim] - 1)))
        fused = list(zip([0, *joints], [*joints, shape[dim]], strict=True))
        cuts = [[a, *sorted(draw.randint(a, b) for _ in range(pieces - 1)), b] for a, b in fused]
        along[dim] = [
            (tuple((edges[i], edges[i + 1]) for edges in cuts), draw.choice([0, 0, 1, 2])) for i in range(pieces)
        ]
    specs = []
    for each in product(*along):
        padding = tuple(zeros for _, zeros in each)
        specs.append(ShardSpec(shape, tuple(spans for spans, _ in each), padding if any(padding) else ()))
    return specs


def _random_runs(draw: Random, spec: ShardSpec, count: int) -> list[tuple[int, int]]:
    """Flat runs as buckets cut them, or rows as FSDP2 does; some may be empty."""
    rows, width = (spec.local_shape or (1,))[0], prod(spec.local_shape[1:])
    if draw.random() < 0.5:
        size = -(-rows // count)
        return [(min(i * size, rows) * width, min((i + 1) * size, rows) * width) for i in range(count)]
    edges = [0, *sorted(draw.randint(0, rows * width) for _ in range(count - 1)), rows * width]
    return list(pairwise(edges))
