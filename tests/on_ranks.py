"""Helpers that the tests of collectives on real ranks share."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from motet.collectives import Program
from motet.collectives.execute.rank_plan import chunk_lengths
from motet.parallel.process.process_group import RankGroup


@dataclass
class Counter:
    counts: dict[str, float] = field(default_factory=dict)

    def on_span(self, action: str, start: float, stop: float, depth: int) -> None:
        pass

    def on_count(self, name: str, value: float) -> None:
        self.counts[name] = self.counts.get(name, 0) + value


def group_of(group: RankGroup) -> dist.ProcessGroup:
    assert group.process_group is not None
    return group.process_group


def contribution(rank: int, chunk: int, length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * rank + chunk), dtype=torch.float64)


def start_of(made: Program, rank: int, numel: int) -> Tensor:
    lengths = chunk_lengths(made, numel)
    return _joined([contribution(rank, chunk, lengths[chunk]) for chunk in sorted(made.initial[rank])])


def end_of(made: Program, rank: int, numel: int) -> Tensor:
    """The output that the Program's postcondition requires on this rank, summed in float64."""
    lengths, ends = chunk_lengths(made, numel), sorted(made.final[rank].items())
    return _joined([_total([contribution(r, chunk, lengths[chunk]) for r in sources]) for chunk, sources in ends])


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([*parts, torch.empty(0, dtype=torch.float64)])
