"""What the reference gives for parts of the work: micro-batches of ranks by themselves, a step from other values."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from motet.parallel.layout import Layout
from motet.parallel.row_assignment import contributing_rows_of_rank
from motet.parity.compare.align_with_reference import ReferenceTensor, TensorKey
from motet.parity.compare.reference_runs import (
    SINGLE_RANK_GROUP,
    ReferenceRuns,
    run_recorded_step,
    step_checkpoint_path,
)
from motet.parity.compare.tensor_differences import build_reference_tensors
from motet.parity.record.tensor_recorder import RecordedTensor, patched_method
from motet.parity.subjects.job_subject import VerificationSubject, VerificationSubjectOnRank


class MicroBatchResult(NamedTuple):
    """By one micro-batch of one rank, alone."""

    rank: int
    microbatch: int
    loss_sum: Tensor
    target_count: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class SingleDeviceRecompute:
    """One device, at one step of the reference."""

    subject: VerificationSubject
    layout: Layout  # Whose shares of the work are asked for
    reference_runs: ReferenceRuns
    step: int

    @cached_property
    def rank_subject(self) -> VerificationSubjectOnRank:
        with self.subject.numerics():
            return self.subject.with_microbatches(1).build(SINGLE_RANK_GROUP, self.reference_runs.folder)

    @property
    def module(self) -> nn.Module:
        return self.rank_subject.engine.module

    @cached_property
    def state_before_step(self) -> dict[str, Tensor]:
        """The state before the step, by name."""
        with self._restored_to(self.step):
            return {name: tensor.detach().clone() for name, tensor in self.rank_subject.state.tensors().items()}

    @cached_property
    def microbatch_results(self) -> list[MicroBatchResult]:
        """By each micro-batch of each rank."""
        with self._restored_to(self.step):
            return [self._compute_microbatch(rank, number, rows) for rank, number, rows in self._rows_by_microbatch()]

    @cached_property
    def evaluation_results(self) -> list[MicroBatchResult]:
        """Of the evaluation after the last step, by each rank and micro-batch, of which each batch has as many."""
        with self._restored_to(self.subject.steps), torch.no_grad():
            self.module.eval()
            results = [
                MicroBatchResult(rank, batch * self.layout.microbatches + number, *judged, {})
                for rank, number, rows in self._rows_by_microbatch()
                for batch, judged in enumerate(self.rank_subject.evaluation_losses(rows))
            ]
            self.module.train()
        return results

    def run_with_stale_parameters(
        self, older_step: int, prefix: str, fresh_slices: Mapping[str, slice], backward_only: bool = False
    ) -> dict[TensorKey, ReferenceTensor]:
        """This step, with parameters whose names begin so as they were before an older step, but for some elements.

        `backward`: there alone.
        """
        with self._restored_to(older_step):
            stale_values = {n: p.detach().clone() for n, p in self.module.named_parameters()}

        def make_stale() -> None:
            for name, parameter in self.module.named_parameters():
                if name.startswith(prefix):
                    flat, fresh_slice = parameter.data.view(-1), fresh_slices.get(name, slice(0, 0))
                    stale_values[name].view(-1)[fresh_slice] = flat[fresh_slice]
                    parameter.data.copy_(stale_values[name])

        with self._restored_to(self.step):
            if not backward_only:
                make_stale()
                return build_reference_tensors(run_recorded_step(self.rank_subject, self.step, sketches_shards=False))
            original_backward = self.rank_subject.engine.backward

            def backward_with_stale(*arguments: Any) -> None:
                make_stale()
                original_backward(*arguments)

            with patched_method(self.rank_subject.engine, "backward", backward_with_stale):
                return build_reference_tensors(run_recorded_step(self.rank_subject, self.step, sketches_shards=False))

    @cached_property
    def records_with_same_microbatches(self) -> dict[TensorKey, list[RecordedTensor]]:
        """This step, with the batch cut into as many micro-batches as the layout has over all ranks."""
        with self.subject.numerics():
            microbatches = self.layout.reproducible_batch_size or self.layout.dp * self.layout.microbatches
            rank_subject = self.subject.with_microbatches(microbatches).build(
                SINGLE_RANK_GROUP, self.reference_runs.folder
            )
            rank_subject.state.restore(step_checkpoint_path(self.reference_runs.folder, self.step))
            records = run_recorded_step(rank_subject, self.step)
        records_by_key: dict[TensorKey, list[RecordedTensor]] = {}
        for record in records:
            records_by_key.setdefault((record.kind, record.name), []).append(record)
        return records_by_key

    @contextmanager
    def _restored_to(self, step: int) -> Iterator[None]:
        with self.subject.numerics():
            self.rank_subject.state.restore(step_checkpoint_path(self.reference_runs.folder, step))
            yield

    def _rows_by_microbatch(self) -> Iterator[tuple[int, int, range]]:
        for rank in range(self.layout.dp):
            for microbatch, rows in enumerate(contributing_rows_of_rank(self.layout, rank, self.subject.batch_rows)):
                yield rank, microbatch, rows

    def _compute_microbatch(self, rank: int, microbatch: int, rows: range) -> MicroBatchResult:
        parameters_by_name = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        loss, targets = self.rank_subject.loss_of_rows(self.step, rows)
        raw_gradients = torch.autograd.grad(loss, list(parameters_by_name.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(p) if gradient is None else gradient.to_dense()
            for (name, p), gradient in zip(parameters_by_name.items(), raw_gradients, strict=True)
        }
        return MicroBatchResult(rank, microbatch, loss.detach(), targets, gradients)
