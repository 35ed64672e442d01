"""Parts of a step, computed on one device: single micro-batches of ranks, or the step with stale parameters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from motet.parallel.layout import Layout, contributing_rows_of_rank
from motet.parallel.metric_reductions import reports
from motet.parity.compare.align_with_reference import ReferenceTensor
from motet.parity.compare.planned_records import PlannedRecords
from motet.parity.compare.reference_runs import ReferenceRuns
from motet.parity.compare.tensor_differences import build_reference_tensors
from motet.parity.record import record_verification_steps as recording
from motet.parity.record.engine_hooks import patched_method
from motet.parity.record.tensor_recorder import RecordedShard, RecordedTensor, TensorKey, group_by_key


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
        return self._build(1)

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

    def run_with_stale_parameters(
        self, prefix: str, fresh_shards: Mapping[str, RecordedShard], backward_only: bool
    ) -> dict[TensorKey, ReferenceTensor]:
        """Do the step with parameters whose names begin with the prefix as they were before the previous step.

        The elements in `fresh_shards` keep their values. With `backward_only`, forward uses the fresh parameters.
        """
        with self._restored_to(self.step - 1):
            stale_values = {name: p.detach().clone() for name, p in self.module.named_parameters()}

        def make_stale() -> None:
            for name, parameter in self.module.named_parameters():
                if name.startswith(prefix):
                    kept = parameter.data.clone()
                    parameter.data.copy_(stale_values[name])
                    for box, _ in fresh_shards[name].boxes() if name in fresh_shards else ():
                        parameter.data[box] = kept[box]

        with self._restored_to(self.step):
            engine, original_backward = self.rank_subject.engine, self.rank_subject.engine.backward

            def backward(*args: Any, **kwargs: Any) -> None:
                make_stale()
                original_backward(*args, **kwargs)

            if not backward_only:
                make_stale()
            with patched_method(engine, "backward", backward if backward_only else original_backward):
                records = recording.run_recorded_step(self.rank_subject, self.step, sketches_shards=False)
                return build_reference_tensors(records)

    @cached_property
    def records_with_same_microbatches(self) -> dict[TensorKey, list[tuple[int, RecordedTensor]]]:
        """The step of one device that splits the batch into as many micro-batches as all ranks together."""
        with self.subject.numerics():
            rank_subject = self._build(self.all_microbatches)
            rank_subject.state.restore(recording.step_checkpoint_path(self.reference_runs.folder, self.step))
            return group_by_key([recording.run_recorded_step(rank_subject, self.step)])

    def _build(self, microbatches: int) -> recording.VerificationSubjectOnRank:
        with self.subject.numerics():
            subject = self.subject.with_microbatches(microbatches)
            return subject.build(recording.SINGLE_RANK_GROUP, self.reference_runs.folder)

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
        parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        loss, targets = self.rank_subject.loss_of_rows(self.step, rows)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        dense = {name: gradient.to_dense() for name, gradient in zip(parameters, gradients, strict=True)}
        return MicroBatchResult(rank, microbatch, loss.detach(), targets, dense)


def recompute_layout(
    subject: recording.VerificationSubject, world: int, reference_runs: ReferenceRuns
) -> SingleDeviceRecompute:
    """One device that computes what the ranks of a layout should compute by its plan."""
    planned = PlannedRecords(subject.step_plan(reference_runs.inventory, world))
    return SingleDeviceRecompute(subject, subject.layout_for(world), reference_runs, planned)
