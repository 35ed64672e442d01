"""Watching a run (`monitor.replica_check_every`): now and then ranks compare what must be the same on them, or must add up.

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
from motet.train.step import BatchSource, LocalStepResult, StepModel

DIGEST_CHUNK_WORDS = 1 << 20  # Words that are looked at together


@dataclass(frozen=True)
class PreUpdateDigests:
    """What a rank reports, as far as it is known before the update."""

    report: RankDigestReport
    parameter_digests: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class ReplicaChecker:
    """One rank's part in watching."""

    model: StepModel
    batch_source: BatchSource
    engine: TrainingEngine
    layout: Layout
    batch_sequences: int
    communication: CommunicationSettings
    every_steps: int  # Steps

    def is_due(self, step: int) -> bool:
        return (step + 1) % self.every_steps == 0

    def digest_before_update(self, step: int, local_step: LocalStepResult) -> PreUpdateDigests:
        """After backward, when gradients are summed and nothing is updated yet."""
        start_s = time.perf_counter()
        with span("watch"):
            step_group = self.engine.step_group
            neighbour_rank = self.engine.group.rank - step_group.rank + (step_group.rank - 1) % step_group.world
            neighbour_batches = [self.batch_source.batch(step, rows) for rows in self._rows_of_rank(neighbour_rank)]
            parameter_digests = digest_tensors(self._replicated_tensors())
            rows = torch.cat([batch.rows for batch in local_step.batches]).tolist()
            loss, neighbour_loss = self._first_microbatch_losses(step, local_step, neighbour_batches[0])
            report = RankDigestReport(
                machine_digest=derive_seed(*self._machine_identity()),
                parameters=derive_seed(*parameter_digests.values()),
                states=0,
                rows=rows_digest(rows),
                row_count=len(rows),
                batches=_digest_batches(local_step.batches),
                neighbour_batches=_digest_batches(neighbour_batches),
                targets=float_to_bits(local_step.targets),
                neighbour_targets=float_to_bits(
                    sum(b.weights.sum(dtype=torch.float64).item() for b in neighbour_batches)
                ),
                gradients=derive_seed(
                    *digest_tensors(
                        dict(enumerate(self.engine.optimizer.sharded_parameters.reduced_gradients()))
                    ).values()
                ),
                norm=0,
                squared_norm=float_to_bits(self.engine.optimizer.local_squared_norm()),
                loss=loss,
                neighbour_loss=neighbour_loss,
            )
        return PreUpdateDigests(report, parameter_digests, time.perf_counter() - start_s)

    def compare_ranks(self, step: int, pre_update: PreUpdateDigests, stats: StepStats) -> ReplicaCheckDone:
        """After the update."""
        start_s = time.perf_counter()
        with span("watch"):
            step_group = self.engine.step_group
            state_digests = digest_tensors(self._optimizer_tensors())
            report = pre_update.report._replace(
                states=derive_seed(*state_digests.values()), norm=float_to_bits(stats.grad_norm)
            )
            reports = [RankDigestReport(*numbers) for numbers in all_gather_integers(list(report), step_group)]
            violations = find_violations(reports, self._expected_invariants(stats.count))
            tensor_digests = {"parameters": pre_update.parameter_digests, "states": state_digests}
            located_violations = [
                (
                    one,
                    self._first_differing_tensor(one, tensor_digests[one.invariant])
                    if one.invariant in tensor_digests
                    else "",
                )
                for one in violations
            ]
        return ReplicaCheckDone(
            step=step + 1,
            ranks=step_group.world,
            same_machines=len({report.machine_digest for report in reports}) == 1,
            violations=tuple(_format_violation(one, tensor) for one, tensor in located_violations),
            duration_s=pre_update.seconds + time.perf_counter() - start_s,
        )

    def _rows_of_rank(self, rank: int) -> list[range]:
        return contributing_rows_of_rank(self.layout, rank, self.batch_sequences)

    def _machine_identity(self) -> tuple[str, ...]:
        kernels = torch.backends.cpu.get_cpu_capability()
        return device_name(self.engine.group.device), kernels, str(torch.get_num_threads()), torch.__version__

    def _replicated_tensors(self) -> dict[str, Tensor]:
        """What every rank has all of: parameters that are not cut into rows, and buffers as the step began."""
        named_parameters = self.engine.module.named_parameters()
        return {
            n: p.detach() for n, p in named_parameters if not isinstance(p, DTensor)
        } | self.engine.buffers_at_step_start

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """What this rank keeps of masters and moments."""
        state = self.engine.optimizer.state()
        tensors = {name: part for name, part in state.items() if not name.startswith(COMPRESSION_STATE_PREFIX)}
        return {name: part.values if isinstance(part, LocalShard) else part for name, part in tensors.items()}

    def _expected_invariants(self, targets: float) -> ExpectedInvariants:
        has_independent_replicas = self.engine.outer_optimizer is not None
        layout = replace(self.layout, dp=self.layout.shards) if has_independent_replicas else self.layout
        groups = resolve_communication_groups(self.communication, layout)
        first = self.engine.group.rank - self.engine.step_group.rank
        rows = [part for rank in range(first, first + layout.dp) for part in self._rows_of_rank(rank)]
        state_groups = (tuple(range(layout.dp)),) if groups.gathers_gradients else groups.replica_groups
        step_rows = range(min(part.start for part in rows), max(part.stop for part in rows))
        return ExpectedInvariants(
            groups.replica_groups, state_groups, step_rows, targets, rechecks_norm=not self.engine.reproducible
        )

    def _first_microbatch_losses(
        self, step: int, local_step: LocalStepResult, neighbour_batch: Batch
    ) -> tuple[int, int]:
        """Of this rank's first micro-batch, and of its neighbour's, computed here without gradients.

        The forward of a module may have other bits without gradients. If so, it has on most ranks, and then this rank's
        own is computed without them, too.
        """
        local_loss, neighbour_loss = (
            float_to_bits(local_step.first_loss),
            float_to_bits(self._loss_without_gradients(step, neighbour_batch)),
        )
        pairs = all_gather_integers([local_loss, neighbour_loss], self.engine.step_group)
        if all(own == pairs[(rank + 1) % len(pairs)][1] for rank, (own, _) in enumerate(pairs)):
            return local_loss, neighbour_loss
        recomputed_loss = float_to_bits(self._loss_without_gradients(step, local_step.batches[0]))
        differing_ranks = sum(
            other for (other,) in all_gather_integers([int(recomputed_loss != local_loss)], self.engine.step_group)
        )
        return (recomputed_loss if 2 * differing_ranks > len(pairs) else local_loss), neighbour_loss

    def _loss_without_gradients(self, step: int, batch: Batch) -> float:
        """By this rank's model, in no step; what a forward changes is put back."""
        batch = batch.to(self.engine.group.device)
        state_preserved = _preserve_buffers_and_rng(self.engine.module, batch.tokens.device)
        with state_preserved, torch.no_grad(), self.model.randomness(step, batch.rows):
            return self.model.loss_sum(batch).item()

    def _first_differing_tensor(self, violation: InvariantViolation, local_digests: Mapping[str, int]) -> str:
        """The first tensor that differs. Every rank asks, since every rank has seen that some does."""
        reports = all_gather_integers(list(local_digests.values()), self.engine.step_group)
        if len({len(numbers) for numbers in reports}) > 1:
            return ""
        # Ranks that keep different shards differ in everything: only those that are compared count.
        ranks = next(
            (r for r in self._expected_invariants(0.0).state_groups if set(violation.ranks) <= set(r)),
            range(len(reports)),
        )
        ranks = range(len(reports)) if violation.invariant == "parameters" else ranks
        for index, name in enumerate(local_digests):
            if outliers({rank: reports[rank][index] for rank in ranks}):
                return name
        return ""


def _format_violation(violation: InvariantViolation, tensor: str) -> str:
    tensor_text = f", first in {tensor}" if tensor else ""
    return f"{violation.description}{tensor_text}: {VIOLATION_CAUSES[violation.invariant]}"


# --- digests ---------------------------------------------------------------------------------------

Key = TypeVar("Key")


def digest_tensors(tensors: Mapping[Key, Tensor]) -> dict[Key, int]:
    """Of each tensor, from its bits."""
    digest_list = [_digest_tensor(tensor) for tensor in tensors.values()]
    numbers = torch.stack([d.cpu() for d in digest_list]).tolist() if digest_list else []
    return dict(zip(tensors, numbers, strict=True))


def _digest_tensor(tensor: Tensor) -> Tensor:
    """A sum of 64-bit words with an odd factor for each place, modulo 2^64: exact, in any order, on any device.

    As the factors are odd, tensors that differ in one word never have the same digest.
    """
    data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    padding = -data.numel() % 8
    if padding or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(padding)])
    words = data.view(torch.int64)
    total, factor = torch.zeros((), dtype=torch.int64, device=tensor.device), 1
    for start in range(0, len(words), DIGEST_CHUNK_WORDS):
        part = words[start : start + DIGEST_CHUNK_WORDS]
        total = total + (part * _word_factors(tensor.device)[: len(part)]).sum() * factor
        factor = to_signed_int64(factor * _CHUNK_FACTOR)
    return total


_CHUNK_FACTOR = derive_seed("chunk") | 1


@cache
def _word_factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed("digest"))
    return torch.randint(-(2**62), 2**62, (DIGEST_CHUNK_WORDS,), generator=generator).mul_(2).add_(1).to(device)


def _digest_batches(batches: Iterable[Batch]) -> int:
    """Digest of what is read; not of the numbers of rows."""
    tensors = {
        f"{place}.{field.name}": value
        for place, batch in enumerate(batches)
        for field in fields(batch)
        if field.name != "rows" and (value := getattr(batch, field.name)) is not None
    }
    return derive_seed(*(word for pair in digest_tensors(tensors).items() for word in pair))


def all_gather_integers(numbers: list[int], group: RankGroup) -> list[list[int]]:
    """The numbers of all ranks."""
    local_values = torch.tensor(numbers, dtype=torch.int64, device=group.device)
    gathered_values = local_values.new_empty(group.world, len(numbers))
    all_gather(gathered_values, local_values, group)
    values_by_rank: list[list[int]] = gathered_values.tolist()
    return values_by_rank


@contextmanager
def _preserve_buffers_and_rng(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, buffers and generators may change; afterwards they are as they were."""
    saved_buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    for buffer, values in saved_buffers:
        buffer.data.copy_(values)
