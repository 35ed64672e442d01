"""Replica checks (`monitor.replica_check_every`): in some steps ranks compare what must be equal or must add up.
Each rank also repeats some work of its neighbour: it reads the same rows and computes the loss of the first
micro-batch, all ranks at the same time, so that it works at every stage. Training continues unchanged."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from motet.cluster.local_device import device_name
from motet.collectives.execute.api import all_gather
from motet.core.batch import Batch
from motet.core.seeds import derive_seed
from motet.core.trace import span
from motet.data.samples.loader import BatchLoader
from motet.models.build import TrainableModel
from motet.monitor.events import ReplicaCheckDone
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    resolve_communication_groups,
)
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.layout import Layout, contributing_rows_of_rank
from motet.parallel.process.process_group import RankGroup
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

    loss_sums: list[float]  # Sums over its targets: one, or one for each row of the global batch
    targets: float
    tokens: int
    batches: list[Batch]  # Micro-batches as they were read; empty without a replica check
    first_loss: float  # Sum over the targets of the first micro-batch; 0 without a replica check


@dataclass(frozen=True)
class ReplicaChecker:
    """Checks one rank against the others."""

    model: TrainableModel
    batch_source: BatchLoader
    engine: TrainingEngine
    layout: Layout
    batch_sequences: int
    communication: CommunicationSettings
    every_steps: int

    def is_due(self, step: int) -> bool:
        return (step + 1) % self.every_steps == 0

    def digest_before_update(self, step: int, local: LocalStepResult) -> Callable[[StepStats], ReplicaCheckDone]:
        """Digest the state after backward, when nothing is updated yet. Returns the comparison after the update."""
        start_s = time.perf_counter()
        with span("watch"):
            group, optimizer = self.engine.step_group, self.engine.optimizer
            neighbour_rank = self.engine.group.rank - group.rank + (group.rank - 1) % group.world
            neighbour_rows = contributing_rows_of_rank(self.layout, neighbour_rank, self.batch_sequences)
            neighbour_batches = [self.batch_source.batch(step, rows) for rows in neighbour_rows]
            named = self.engine.module.named_parameters()
            replicated = {n: p.detach() for n, p in named if not isinstance(p, DTensor)}  # on every rank in full
            parameter_digests = digest_tensors(replicated | self.engine.buffers_at_step_start)
            rows = torch.cat([batch.rows for batch in local.batches]).tolist()
            loss, neighbour_loss = self._first_microbatch_losses(step, local, neighbour_batches[0])
            neighbour_targets = sum(batch.weights.sum(dtype=torch.float64).item() for batch in neighbour_batches)
            gradients = {str(i): g for i, g in enumerate(optimizer.sharded_parameters.reduced_gradients())}
            device, kernels = device_name(self.engine.group.device), torch.backends.cpu.get_cpu_capability()
            report = RankDigestReport(
                machine_digest=derive_seed(device, kernels, str(torch.get_num_threads()), torch.__version__),
                parameters=derive_seed(*parameter_digests.values()),
                states=0,
                rows=rows_digest(rows),
                row_count=len(rows),
                batches=_digest_batches(local.batches),
                neighbour_batches=_digest_batches(neighbour_batches),
                targets=float_to_bits(local.targets),
                neighbour_targets=float_to_bits(neighbour_targets),
                gradients=derive_seed(*digest_tensors(gradients).values()),
                norm=0,
                squared_norm=float_to_bits(optimizer.local_squared_norm()),
                loss=loss,
                neighbour_loss=neighbour_loss,
            )
        seconds = time.perf_counter() - start_s
        return partial(self._compare_ranks, step=step, report=report, parameters=parameter_digests, seconds=seconds)

    def _compare_ranks(
        self, stats: StepStats, *, step: int, report: RankDigestReport, parameters: dict[str, int], seconds: float
    ) -> ReplicaCheckDone:
        start_s = time.perf_counter()
        with span("watch"):
            group = self.engine.step_group
            state_digests = digest_tensors(self._optimizer_tensors())
            states, norm = derive_seed(*state_digests.values()), float_to_bits(stats.grad_norm)
            numbers = list(report._replace(states=states, norm=norm))
            reports = [RankDigestReport(*row) for row in all_gather_integers(numbers, group)]
            digests = {"parameters": parameters, "states": state_digests}
            violations = [
                f"{found.description}{self._first_differing_tensor(found, digests.get(found.invariant))}: "
                f"{VIOLATION_CAUSES[found.invariant]}"
                for found in find_violations(reports, self._expected_invariants(stats.count))
            ]
        return ReplicaCheckDone(
            step=step + 1,
            ranks=group.world,
            same_machines=len({report.machine_digest for report in reports}) == 1,
            violations=tuple(violations),
            duration_s=seconds + time.perf_counter() - start_s,
        )

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            name: tensor.values if isinstance(tensor, LocalShard) else tensor
            for name, tensor in self.engine.optimizer.state().items()
        }

    def _expected_invariants(self, targets: float) -> ExpectedInvariants:
        sharding = (self.layout.of_replica() if self.engine.outer_optimizer else self.layout).sharding
        groups = resolve_communication_groups(self.communication, sharding)
        first = self.engine.group.rank - self.engine.step_group.rank
        ranks = range(first, first + sharding.ranks)
        parts = [p for rank in ranks for p in contributing_rows_of_rank(self.layout, rank, self.batch_sequences)]
        rows = range(min(part.start for part in parts), max(part.stop for part in parts))
        state_groups = (tuple(range(sharding.ranks)),) if groups.gathers_gradients else groups.replica_groups
        return ExpectedInvariants(groups.replica_groups, state_groups, rows, targets, not self.engine.reproducible)

    def _first_microbatch_losses(self, step: int, local: LocalStepResult, neighbour_batch: Batch) -> tuple[int, int]:
        """The losses of the first micro-batches of this rank and of its neighbour, the latter computed here.
        The forward of a module may have other bits without gradients. It then has them on most ranks, and this rank's
        loss is computed without gradients, too."""
        group, local_loss = self.engine.step_group, float_to_bits(local.first_loss)
        neighbour_loss = float_to_bits(self._loss_without_gradients(step, neighbour_batch))
        pairs = all_gather_integers([local_loss, neighbour_loss], group)
        if all(loss == pairs[(rank + 1) % len(pairs)][1] for rank, (loss, _) in enumerate(pairs)):
            return local_loss, neighbour_loss
        recomputed_loss = float_to_bits(self._loss_without_gradients(step, local.batches[0]))
        differing_ranks = sum(flag for (flag,) in all_gather_integers([int(recomputed_loss != local_loss)], group))
        return (recomputed_loss if 2 * differing_ranks > len(pairs) else local_loss), neighbour_loss

    def _loss_without_gradients(self, step: int, batch: Batch) -> float:
        device, saved_buffers = self.engine.group.device, [(b, b.clone()) for b in self.engine.module.buffers()]
        batch, devices = batch.to(device), [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad(), self.model.randomness(step, batch.rows):
            loss = self.model.loss_sum(batch).item()
        for buffer, values in saved_buffers:
            buffer.data.copy_(values)
        return loss

    def _first_differing_tensor(self, violation: InvariantViolation, local_digests: Mapping[str, int] | None) -> str:
        """A clause about the first tensor that differs. All ranks call it, since all have found the violation."""
        if local_digests is None:
            return ""
        reports = all_gather_integers(list(local_digests.values()), self.engine.step_group)
        ranks: Iterable[int] = range(len(reports))
        if violation.invariant != "parameters":  # other ranks hold other shards, which all differ
            groups = self._expected_invariants(0.0).state_groups
            ranks = next((group for group in groups if set(violation.ranks) <= set(group)), ranks)
        for index, name in enumerate(local_digests):
            if outliers({rank: reports[rank][index] for rank in ranks}):
                return f", first in {name}"
        return ""


def digest_tensors(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digest of the bits of each tensor."""
    digests = [_digest_tensor(tensor).cpu() for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(digests).tolist() if digests else [], strict=True))


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


def _digest_batches(batches: Iterable[Batch]) -> int:
    tensors = {
        f"{index}.{field.name}": value
        for index, batch in enumerate(batches)
        for field in fields(batch)
        if field.name != "rows" and (value := getattr(batch, field.name)) is not None
    }
    return derive_seed(*(word for pair in digest_tensors(tensors).items() for word in pair))


def all_gather_integers(numbers: list[int], group: RankGroup) -> list[list[int]]:
    """The integers of each rank."""
    local = torch.tensor(numbers, dtype=torch.int64, device=group.device)
    gathered = local.new_empty(group.world, len(numbers))
    all_gather(gathered, local, group)
    return [list(map(int, row)) for row in gathered.tolist()]
