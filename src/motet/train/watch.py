"""Watching a run (`monitor.watch_every`): now and then ranks compare what must be the same on them, or must add up.

Each rank also does some of its neighbour's work again: it reads the same rows, and computes the loss of the first
micro-batch, all ranks at once, so that it is possible at every stage. Training goes on as if nothing had been.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from motet.checkpoint.manifest import COMPRESSION_STATE_PREFIX
from motet.cluster.local_device import device_name
from motet.collectives.execute.api import all_gather
from motet.core.batch import Batch
from motet.core.seeds import derive_seed
from motet.core.trace import span
from motet.monitor.events import ReplicaCheckDone
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    resolve_communication_groups,
)
from motet.parallel.data_parallel.sharded_parameters import LocalShard
from motet.parallel.layout import Layout
from motet.parallel.process.process_group import RankGroup
from motet.parallel.row_assignment import contributing_rows_of_rank
from motet.train.compared import MEANS, Broken, Expected, Report, bits_of, broken, odd_ones, rows_digest, wrapped
from motet.train.engine import Engine, Update
from motet.train.step import Done, Model, Samples

CHUNK = 1 << 20
"""Words that are looked at together."""


@dataclass(frozen=True)
class Seen:
    """What a rank reports, as far as it is known before the update."""

    report: Report
    parameters: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Watch:
    """One rank's part in watching."""

    model: Model
    samples: Samples
    engine: Engine
    layout: Layout
    batch_sequences: int
    communication: CommunicationSettings
    every: int
    """Steps."""

    def due(self, number: int) -> bool:
        return (number + 1) % self.every == 0

    def look(self, number: int, done: Done) -> Seen:
        """After backward, when gradients are summed and nothing is updated yet."""
        start_s = time.perf_counter()
        with span("watch"):
            peers = self.engine.peers
            other = self.engine.group.rank - peers.rank + (peers.rank - 1) % peers.world
            again = [self.samples.batch(number, rows) for rows in self._rows(other)]
            parameters = digests(self._whole())
            rows = torch.cat([batch.rows for batch in done.batches]).tolist()
            loss, neighbour_loss = self._losses(number, done, again[0])
            report = Report(
                machine=derive_seed(*self._machine()),
                parameters=derive_seed(*parameters.values()),
                states=0,
                rows=rows_digest(rows),
                row_count=len(rows),
                batches=_read(done.batches),
                neighbour_batches=_read(again),
                targets=bits_of(done.targets),
                neighbour_targets=bits_of(sum(b.weights.sum(dtype=torch.float64).item() for b in again)),
                gradients=derive_seed(
                    *digests(dict(enumerate(self.engine.updater.spread.reduced_gradients()))).values()
                ),
                norm=0,
                squares=bits_of(self.engine.updater.own_squares()),
                loss=loss,
                neighbour_loss=neighbour_loss,
            )
        return Seen(report, parameters, time.perf_counter() - start_s)

    def compare(self, number: int, seen: Seen, update: Update) -> ReplicaCheckDone:
        """After the update."""
        start_s = time.perf_counter()
        with span("watch"):
            peers = self.engine.peers
            states = digests(self._states())
            report = seen.report._replace(states=derive_seed(*states.values()), norm=bits_of(update.grad_norm))
            reports = [Report(*numbers) for numbers in gathered(list(report), peers)]
            found = broken(reports, self._expected(update.count))
            tensors = {"parameters": seen.parameters, "states": states}
            told = [(one, self._first_unlike(one, tensors[one.what]) if one.what in tensors else "") for one in found]
        return ReplicaCheckDone(
            step=number + 1,
            ranks=peers.world,
            same_machines=len({report.machine for report in reports}) == 1,
            violations=tuple(_sentence(one, tensor) for one, tensor in told),
            duration_s=seen.seconds + time.perf_counter() - start_s,
        )

    def _rows(self, rank: int) -> list[range]:
        return contributing_rows_of_rank(self.layout, rank, self.batch_sequences)

    def _machine(self) -> tuple[str, ...]:
        kernels = torch.backends.cpu.get_cpu_capability()
        return device_name(self.engine.group.device), kernels, str(torch.get_num_threads()), torch.__version__

    def _whole(self) -> dict[str, Tensor]:
        """What every rank has all of: parameters that are not cut into rows, and buffers as the step began."""
        named_ones = self.engine.module.named_parameters()
        return {n: p.detach() for n, p in named_ones if not isinstance(p, DTensor)} | self.engine.buffers

    def _states(self) -> dict[str, Tensor]:
        """What this rank keeps of masters and moments."""
        state = self.engine.updater.state()
        found = {name: part for name, part in state.items() if not name.startswith(COMPRESSION_STATE_PREFIX)}
        return {name: part.values if isinstance(part, LocalShard) else part for name, part in found.items()}

    def _expected(self, targets: float) -> Expected:
        apart = self.engine.outer is not None
        layout = replace(self.layout, dp=self.layout.shards) if apart else self.layout
        together = resolve_communication_groups(self.communication, layout)
        first = self.engine.group.rank - self.engine.peers.rank
        rows = [part for rank in range(first, first + layout.dp) for part in self._rows(rank)]
        states = (tuple(range(layout.dp)),) if together.gathers_gradients else together.replica_groups
        read = range(min(part.start for part in rows), max(part.stop for part in rows))
        return Expected(together.replica_groups, states, read, targets, norm_again=not self.engine.reproducible)

    def _losses(self, number: int, done: Done, other: Batch) -> tuple[int, int]:
        """Of this rank's first micro-batch, and of its neighbour's, computed here without gradients.

        The forward of a module may have other bits without gradients. If so, it has on most ranks, and then this rank's
        own is computed without them, too.
        """
        mine, theirs = bits_of(done.first_loss), bits_of(self._loss(number, other))
        pairs = gathered([mine, theirs], self.engine.peers)
        if all(own == pairs[(rank + 1) % len(pairs)][1] for rank, (own, _) in enumerate(pairs)):
            return mine, theirs
        again = bits_of(self._loss(number, done.batches[0]))
        others = sum(other for (other,) in gathered([int(again != mine)], self.engine.peers))
        return (again if 2 * others > len(pairs) else mine), theirs

    def _loss(self, number: int, batch: Batch) -> float:
        """By this rank's model, in no step; what a forward changes is put back."""
        batch = batch.to(self.engine.group.device)
        kept = _unchanged(self.engine.module, batch.tokens.device)
        with kept, torch.no_grad(), self.model.randomness(number, batch.rows):
            return self.model.loss_sum(batch).item()

    def _first_unlike(self, one: Broken, mine: Mapping[str, int]) -> str:
        """The first tensor that differs. Every rank asks, since every rank has seen that some does."""
        reports = gathered(list(mine.values()), self.engine.peers)
        if len({len(numbers) for numbers in reports}) > 1:
            return ""
        # Ranks that keep different shards differ in everything: only those that are compared count.
        ranks = next((r for r in self._expected(0.0).states if set(one.ranks) <= set(r)), range(len(reports)))
        ranks = range(len(reports)) if one.what == "parameters" else ranks
        for place, name in enumerate(mine):
            if odd_ones({rank: reports[rank][place] for rank in ranks}):
                return name
        return ""


def _sentence(one: Broken, tensor: str) -> str:
    where = f", first in {tensor}" if tensor else ""
    return f"{one.text}{where}: {MEANS[one.what]}"


# --- digests ---------------------------------------------------------------------------------------

Key = TypeVar("Key")


def digests(tensors: Mapping[Key, Tensor]) -> dict[Key, int]:
    """Of each tensor, from its bits."""
    found = [_digest(tensor) for tensor in tensors.values()]
    numbers = torch.stack([d.cpu() for d in found]).tolist() if found else []
    return dict(zip(tensors, numbers, strict=True))


def _digest(tensor: Tensor) -> Tensor:
    """A sum of 64-bit words with an odd factor for each place, modulo 2^64: exact, in any order, on any device.

    As the factors are odd, tensors that differ in one word never have the same digest.
    """
    data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    short = -data.numel() % 8
    if short or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(short)])
    words = data.view(torch.int64)
    total, factor = torch.zeros((), dtype=torch.int64, device=tensor.device), 1
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK]
        total = total + (part * _factors(tensor.device)[: len(part)]).sum() * factor
        factor = wrapped(factor * _STEP)
    return total


_STEP = derive_seed("chunk") | 1


@cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed("digest"))
    return torch.randint(-(2**62), 2**62, (CHUNK,), generator=generator).mul_(2).add_(1).to(device)


def _read(batches: Iterable[Batch]) -> int:
    """Digest of what is read; not of the numbers of rows."""
    tensors = {
        f"{place}.{field.name}": value
        for place, batch in enumerate(batches)
        for field in fields(batch)
        if field.name != "rows" and (value := getattr(batch, field.name)) is not None
    }
    return derive_seed(*(word for pair in digests(tensors).items() for word in pair))


def gathered(numbers: list[int], ranks: RankGroup) -> list[list[int]]:
    """The numbers of all ranks."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=ranks.device)
    everyone = mine.new_empty(ranks.world, len(numbers))
    all_gather(everyone, mine, ranks)
    found: list[list[int]] = everyone.tolist()
    return found


@contextmanager
def _unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, buffers and generators may change; afterwards they are as they were."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    for buffer, values in before:
        buffer.data.copy_(values)
