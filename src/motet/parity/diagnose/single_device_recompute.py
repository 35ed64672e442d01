"""Micro-batches of ranks, computed on one device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from motet.parallel.layout import Layout, contributing_rows_of_rank
from motet.parallel.metric_reductions import reports
from motet.parity.compare.planned_records import PlannedRecords
from motet.parity.compare.reference_runs import ReferenceRuns
from motet.parity.record import record_verification_steps as recording


class MicroBatchResult(NamedTuple):
    """Loss and gradients of one micro-batch of one rank."""

    rank: int
    microbatch: int
    loss_sum: Tensor
    target_count: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class SingleDeviceRecompute:
    """One device that computes, at one step of the reference, what the ranks of a layout should compute."""

    subject: recording.VerificationSubject
    layout: Layout
    reference_runs: ReferenceRuns
    planned: PlannedRecords | None = None  # None: the plan of parallel code of the caller is not known
    step: int = 0

    @cached_property
    def rank_subject(self) -> recording.VerificationSubjectOnRank:
        with self.subject.numerics():
            subject = self.subject.with_microbatches(1)
            return subject.build(recording.SINGLE_RANK_GROUP, self.reference_runs.folder)

    @property
    def module(self) -> nn.Module:
        return self.rank_subject.engine.module

    @cached_property
    def all_microbatches(self) -> int:
        """Micro-batches of all ranks."""
        return (
            self.layout.sharding.reproducible_batch_size
            or self.layout.sharding.ranks * self.layout.sharding.microbatches
        )

    @cached_property
    def state_before_step(self) -> dict[str, Tensor]:
        with self._restored_to(self.step):
            return {name: tensor.detach().clone() for name, tensor in self.rank_subject.state.tensors().items()}

    @cached_property
    def microbatch_results(self) -> list[MicroBatchResult]:
        with self._restored_to(self.step):
            results = [self._compute(rank, index, rows) for rank, index, rows in self._rows_by_microbatch()]
        if not self.reference_runs.has_mean_gradients:
            return results
        count = sum(r.target_count for r in results)
        return [r._replace(gradients={name: g / count for name, g in r.gradients.items()}) for r in results]

    @cached_property
    def evaluation_results(self) -> list[MicroBatchResult]:
        """Losses of the evaluation after the last step; each batch of it has as many micro-batches."""
        with self._restored_to(self.subject.steps), torch.no_grad():
            self.module.eval()
            results = [
                MicroBatchResult(rank, batch * self.layout.sharding.microbatches + index, *loss_and_count, {})
                for rank, index, rows in self._rows_by_microbatch()
                for batch, loss_and_count in enumerate(self.rank_subject.evaluation_losses(rows))
            ]
            self.module.train()
        return results

    @contextmanager
    def _restored_to(self, step: int) -> Iterator[None]:
        with self.subject.numerics():
            self.rank_subject.state.restore(recording.step_checkpoint_path(self.reference_runs.folder, step))
            yield

    def _rows_by_microbatch(self) -> Iterator[tuple[int, int, range]]:
        """Rows of the ranks that report targets; other ranks compute parts of the same."""
        dims = self.layout.dims
        for rank in (rank for rank in range(dims.ranks) if reports("targets", dims.coordinates(rank), dims)):
            for microbatch, rows in enumerate(contributing_rows_of_rank(self.layout, rank, self.subject.batch_rows)):
                yield rank, microbatch, rows

    def _compute(self, rank: int, microbatch: int, rows: range) -> MicroBatchResult:
        engine, parameters = self.rank_subject.engine, self.rank_subject.engine.optimizer.sharded_parameters
        engine.begin_step()
        with self.rank_subject.loss_of_rows(self.step, rows) as (loss, targets):
            engine.backward(loss)
        gradients = parameters.local_shards(parameters.local_gradients()).items()
        dense = {name: gradient.values.view(gradient.shape).clone() for name, gradient in gradients}
        return MicroBatchResult(rank, microbatch, loss.detach(), targets, dense)


def recompute_layout(
    subject: recording.VerificationSubject, world: int, reference_runs: ReferenceRuns
) -> SingleDeviceRecompute:
    """One device that computes what the ranks of a layout should compute by its plan."""
    planned = PlannedRecords(subject.step_plan(reference_runs.inventory, world))
    return SingleDeviceRecompute(subject, subject.layout_for(world), reference_runs, planned)
