"""Replica checks (`monitor.replica_check_every`): in some steps ranks compare what must be equal or must add up.
Each rank also repeats some work of another, which has the same part of the model and the rows before its own: it reads
these rows and computes the loss of the first micro-batch, all ranks at the same time, so that it works in every layout.
Training continues unchanged."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from motet.cluster.local_device import device_name
from motet.collectives.execute.api import all_gather, all_reduce
from motet.core.batch import Batch
from motet.core.seeds import derive_seed
from motet.core.trace import span
from motet.data.samples.loader import BatchLoader
from motet.models.build import TrainableModel
from motet.monitor.events import ReplicaCheckDone
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.process.module_inventory import load_buffers
from motet.parallel.process.process_group import RankGroup
from motet.parallel.reproducible.tree_reduce import squared_norm, sum_on_device
from motet.parallel.step_plan.plan import IdenticalCopies, copies_in_plan
from motet.parallel.sync_groups import module_part_groups, next_data_rank, reports, same_loss_groups, same_rows_groups
from motet.train.engine import StepStats, TrainingEngine
from motet.train.replica_check.invariants import (
    VIOLATION_CAUSES,
    ExpectedInvariants,
    InvariantViolation,
    RankDigestReport,
    find_violations,
    float_to_bits,
    outliers,
    rows_digest,
    to_signed_int64,
)

DIGEST_CHUNK_WORDS = 1 << 20  # Words that are digested together


@dataclass(frozen=True)
class LocalStepResult:
    """The work of one rank in a step before the update."""

    loss_sums: Tensor  # Sums over its targets, in float64 on the device: one, or one for each row of the global batch
    targets: float
    tokens: int
    batches: list[Batch]  # Micro-batches as they were read; empty without a replica check
    first_loss: float  # Sum over the targets of the first micro-batch; 0 without a replica check


class _BufferBefore(NamedTuple):
    """A buffer before the first step."""

    buffer: Tensor
    version: int  # Autograd's count of writes
    digest: int


@dataclass(frozen=True)
class ReplicaChecker:
    """Checks one rank against the others."""

    model: TrainableModel
    batch_source: BatchLoader
    engine: TrainingEngine
    every_steps: int
    _buffers: dict[str, _BufferBefore] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        buffers = dict(self.engine.module.named_buffers())
        digests = digest_tensors(buffers)
        self._buffers.update((name, _BufferBefore(b, b._version, digests[name])) for name, b in buffers.items())

    def is_due(self, step: int) -> bool:
        return (step + 1) % self.every_steps == 0

    @cached_property
    def _expected(self) -> ExpectedInvariants:
        """The invariants of a step by its plan; the count of targets is missing."""
        dims, engine = self.engine.plan.dims, self.engine
        coordinates = [dims.coordinates(rank) for rank in range(dims.ranks)]
        reporters = {
            metric: [rank for rank, place in enumerate(coordinates) if reports(metric, place, dims)]
            for metric in ("rows", "targets", "loss")
        }
        parts = [rows for rank in range(dims.ranks) for rows in self._rows_of_rank(rank)]
        loads = tuple(load_buffers(engine.module))
        return ExpectedInvariants(
            # Counts of steps have no parameter's name.
            copies=(
                *copies_in_plan(engine.plan),
                IdenticalCopies("states", ("",), (tuple(range(dims.ranks)),)),
                IdenticalCopies("parameters", tuple(self._buffers), module_part_groups(dims)),
                *([IdenticalCopies("loads", loads, (tuple(range(dims.ranks)),))] if loads else []),
            ),
            same_rows=same_rows_groups(dims),
            same_loss=tuple(ranks for ranks in same_loss_groups(dims) if set(ranks).intersection(reporters["loss"])),
            reporters=reporters,
            next_ranks=[next_data_rank(dims, rank) for rank in range(dims.ranks)],
            rows=range(min(part.start for part in parts), max(part.stop for part in parts)),
            targets=0.0,
            rechecks_norm=not engine.reproducible,
        )

    def _rows_of_rank(self, rank: int) -> tuple[range, ...]:
        """The rows of a rank of this replica, by micro-batch."""
        return self.engine.plan.rows_by_rank[self.engine.group.rank - self.engine.step_group.rank + rank]

    def digest_before_update(self, step: int, local: LocalStepResult) -> Callable[[StepStats], ReplicaCheckDone]:
        """Digest the state after backward, when nothing is updated yet. Returns the comparison after the update."""
        start_s = time.perf_counter()
        with span("watch"):
            engine, copies = self.engine, self._expected.copies
            repeated_rows = self._rows_of_rank(self._expected.next_ranks.index(engine.step_group.rank))
            repeated_batches = [engine.part_of(self.batch_source.batch(step, rows)) for rows in repeated_rows]
            parameters = {n: local_shard(p).values for n, p in engine.module.named_parameters() if not p.is_meta}
            parameters |= self._comparable_buffers()
            sharded = engine.optimizer.sharded_parameters.engines
            engine_of = {name: each for each in sharded for name in each.plan.group.names}
            gradients = {
                each.names: engine_of[each.names[0]].reduced_gradients(each.names)
                for each in copies
                if each.kind == "gradients" and each.names[0] in engine_of
            }
            digests = [
                digest_tensors({str(i): tensor for i, tensor in enumerate(gradients.get(each.names, ()))})
                if each.kind == "gradients"
                else _digest_named(each.names, parameters)
                for each in copies
            ]
            rows = [row for batch in local.batches for row in batch.rows.tolist()]
            loss, repeated_loss = self._first_microbatch_losses(step, local, repeated_batches[0])
            repeated_targets = sum(batch.weights.sum(dtype=torch.float64).item() for batch in repeated_batches)
            device, kernels = device_name(engine.group.device), torch.backends.cpu.get_cpu_capability()
            report = RankDigestReport(
                machine_digest=derive_seed(device, kernels, str(torch.get_num_threads()), torch.__version__),
                rows=rows_digest(rows),
                row_count=len(rows),
                batches=_digest_batches(local.batches),
                repeated_batches=_digest_batches(repeated_batches),
                targets=float_to_bits(local.targets),
                repeated_targets=float_to_bits(repeated_targets),
                norm=0,
                loss=loss,
                repeated_loss=repeated_loss,
                squared_norms=tuple(
                    float_to_bits(_squared_norm(gradients.get(each.names, ()), engine.group.device))
                    for each in copies
                    if each.kind == "gradients"
                ),
            )
        seconds = time.perf_counter() - start_s
        return partial(self._compare_ranks, step=step, report=report, digests=digests, seconds=seconds)

    def _compare_ranks(
        self, stats: StepStats, *, step: int, report: RankDigestReport, digests: list[dict[str, int]], seconds: float
    ) -> ReplicaCheckDone:
        start_s = time.perf_counter()
        with span("watch"):
            group, expected = (
                self.engine.step_group,
                replace(self._expected, targets=stats.count, backward_scale=self.engine.backward_scale),
            )
            states = {
                name: tensor.values if isinstance(tensor, LocalShard) else tensor
                for name, tensor in self.engine.optimizer.state().items()
            }
            kinds = self.engine.optimizer.state_kinds()
            for index, copies in enumerate(expected.copies):
                if copies.kind == "states":
                    labels = [f"{kind}/{name}" if name else kind for name in copies.names for kind in kinds]
                    digests[index] = _digest_named(labels, states)
                elif copies.kind == "loads":
                    digests[index] = digest_tensors(load_buffers(self.engine.module))
            numbers = report._replace(
                norm=float_to_bits(stats.grad_norm), copies=tuple(derive_seed(*each.values()) for each in digests)
            ).to_integers()
            rows = all_gather_integers(numbers, group)
            rank_reports = [RankDigestReport.from_integers(row, len(digests)) for row in rows]
            violations = [
                f"{found.description}{self._first_differing_tensor(found, digests)}: "
                f"{VIOLATION_CAUSES[found.invariant]}"
                for found in find_violations(rank_reports, expected)
            ]
        return ReplicaCheckDone(
            step=step + 1,
            ranks=group.world,
            same_machines=len({report.machine_digest for report in rank_reports}) == 1,
            violations=tuple(violations),
            duration_s=seconds + time.perf_counter() - start_s,
        )

    def _comparable_buffers(self) -> dict[str, Tensor]:
        """The buffers that no forward writes to, and others as at the start of the step, if all ranks got those values.

        A write is counted, or has changed most ranks' buffers: kernels of batch norms write without being counted.
        """
        now, at_start = dict(self.engine.module.named_buffers()), self.engine.buffers_at_step_start
        digests, group = digest_tensors(now), self.engine.module_part_group
        writes = torch.tensor(
            [
                int(digests.get(name) != before.digest)
                if now.get(name) is before.buffer and before.buffer._version == before.version
                else group.world
                for name, before in self._buffers.items()
            ],
            device=self.engine.group.device,
        )
        if self._buffers:
            all_reduce(writes, group, op="sum")
        return {
            name: at_start.get(name, before.buffer.new_empty(0)) if 2 * write > group.world else before.buffer
            for (name, before), write in zip(self._buffers.items(), writes.tolist(), strict=True)
        }

    def _first_microbatch_losses(self, step: int, local: LocalStepResult, repeated_batch: Batch) -> tuple[int, int]:
        """The losses of the first micro-batches of this rank and of the one before it, the latter computed here.
        The forward of a module may have other bits without gradients. It then has them on most ranks, and this rank's
        loss is computed without gradients, too."""
        group, local_loss = self.engine.step_group, float_to_bits(local.first_loss)
        ranks = [rank for ranks in self._expected.same_loss for rank in ranks]

        def compute(batch: Batch) -> int:
            return float_to_bits(self._loss_without_gradients(step, batch)) if group.rank in ranks else local_loss

        repeated_loss = compute(repeated_batch)
        pairs = all_gather_integers([local_loss, repeated_loss], group)
        if all(pairs[rank][0] == pairs[self._expected.next_ranks[rank]][1] for rank in ranks):
            return local_loss, repeated_loss
        recomputed_loss = compute(local.batches[0])
        differing_ranks = sum(flag for (flag,) in all_gather_integers([int(recomputed_loss != local_loss)], group))
        return (recomputed_loss if 2 * differing_ranks > len(ranks) else local_loss), repeated_loss

    def _loss_without_gradients(self, step: int, batch: Batch) -> float:
        device, saved_buffers = self.engine.group.device, [(b, b.clone()) for b in self.engine.module.buffers()]
        batch, devices = batch.to(device), [device] if device.type == "cuda" else []
        randomness = self.model.randomness(step, batch.rows)
        with torch.random.fork_rng(devices), torch.no_grad(), randomness, self.engine.attention_of(batch):
            loss = self.model.loss_sum(batch).item()
        for buffer, values in saved_buffers:
            buffer.data.copy_(values)
        return loss

    def _first_differing_tensor(self, violation: InvariantViolation, digests: Sequence[Mapping[str, int]]) -> str:
        """A clause about the first tensor that differs. All ranks call it, since all have found the violation."""
        index = violation.copies_index
        if index is None or (copies := self._expected.copies[index]).kind == "gradients":
            return ""
        by_rank = all_gather_integers(list(digests[index].values()), self.engine.step_group)
        ranks = next(ranks for ranks in copies.rank_groups if set(violation.ranks) <= set(ranks))
        for position, name in enumerate(digests[index]):
            if outliers({rank: by_rank[rank][position] for rank in ranks}):
                return f", first in {name}"
        return ""


def digest_tensors(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digest of the bits of each tensor."""
    digests = [_digest_tensor(tensor).cpu() for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(digests).tolist() if digests else [], strict=True))


def _digest_named(names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digests of tensors; 0 for a tensor that this rank does not have, so that all ranks have the same names."""
    return dict.fromkeys(names, 0) | digest_tensors({name: tensors[name] for name in names if name in tensors})


def _digest_tensor(tensor: Tensor) -> Tensor:
    """A sum of 64-bit words with an odd factor for each position, modulo 2^64: exact, in any order, on any device.
    As the factors are odd, tensors that differ in one word never have the same digest."""
    data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    padding = -data.numel() % 8
    if padding or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(padding)])
    words = data.view(torch.int64)
    total, factor = torch.zeros((), dtype=torch.int64, device=tensor.device), 1
    for start in range(0, len(words), DIGEST_CHUNK_WORDS):
        chunk = words[start : start + DIGEST_CHUNK_WORDS]
        total = total + (chunk * _word_factors(tensor.device)[: len(chunk)]).sum() * factor
        factor = to_signed_int64(factor * _CHUNK_FACTOR)
    return total


_CHUNK_FACTOR = derive_seed("chunk") | 1


@cache
def _word_factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed("digest"))
    return torch.randint(-(2**62), 2**62, (DIGEST_CHUNK_WORDS,), generator=generator).mul_(2).add_(1).to(device)


def _squared_norm(tensors: Iterable[Tensor], device: torch.device) -> float:
    return float(sum_on_device([*map(squared_norm, tensors)], device))


def _digest_batches(batches: Iterable[Batch]) -> int:
    tensors = {
        f"{index}.{name}": value
        for index, batch in enumerate(batches)
        for name, value in batch.tensors().items()
        if name != "rows"
    }
    return derive_seed(*(word for pair in digest_tensors(tensors).items() for word in pair))


def all_gather_integers(numbers: list[int], group: RankGroup) -> list[list[int]]:
    """The integers of each rank."""
    local = torch.tensor(numbers, dtype=torch.int64, device=group.device)
    gathered = local.new_empty(group.world, len(numbers))
    all_gather(gathered, local, group)
    return [list(map(int, row)) for row in gathered.tolist()]
