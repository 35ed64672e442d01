"""A job as a subject of verification."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from motet.parallel.layout import LayoutSettings, microbatches_of_rank
from motet.parallel.process.process_group import RankGroup
from motet.parity.record.recording_wrappers import (
    TRAINING_MODE_CALLS,
    RecordingModel,
    RecordingSamples,
    training_mode_calls,
)
from motet.parity.record.tensor_recorder import TensorRecorder
from motet.parity.subjects.stress_data import ReorderedRowSamples, UnevenTargetSamples, with_extra_boundaries
from motet.train.build import TrainingComponents, build_components, evaluate_split, precision_context
from motet.train.engine import TrainingEngine
from motet.train.job import Job
from motet.train.optimizer.optimizer_settings import OptimizerSettings, learning_rate_factor
from motet.train.state import TrainingState
from motet.train.step import BatchSource


@dataclass(frozen=True)
class JobVerificationSubject:
    """A job in its layout."""

    job: Job

    @property
    def optimizer(self) -> OptimizerSettings:
        return self.job.optimizer

    @property
    def batch_rows(self) -> int:
        return self.job.data.batch_sequences

    @property
    def steps(self) -> int:
        assert self.job.run.steps is not None, "a small job has some"
        return self.job.run.steps

    def numerics(self) -> AbstractContextManager[None]:
        return precision_context(self.job)

    def build(self, group: RankGroup, folder: Path) -> "JobVerificationSubjectOnRank":
        return JobVerificationSubjectOnRank(self.job, build_components(self.job, group, folder))

    def with_microbatches(self, microbatches: int) -> "JobVerificationSubject":
        run_settings = self.job.run.model_copy(update={"reproducible": None})
        update = {"layout": LayoutSettings(microbatches=microbatches), "run": run_settings}
        return JobVerificationSubject(self.job.model_copy(update=update))


@dataclass(frozen=True)
class JobVerificationSubjectOnRank:
    """A job on one rank."""

    job: Job
    components: TrainingComponents
    row_order: Sequence[int] | None = None  # Another order of the rows of a batch

    @property
    def engine(self) -> TrainingEngine:
        return self.components.engine

    @property
    def state(self) -> TrainingState:
        return self.components.state

    def learning_rate(self, step: int) -> float:
        settings = self.job.optimizer
        return settings.learning_rate * learning_rate_factor(settings.schedule, step, self.components.total_steps)

    def step(self, step: int, recorder: TensorRecorder) -> None:
        train_step = self.components.make_train_step(self.job)
        microbatches = microbatches_of_rank(train_step.layout, self.engine.group.rank, train_step.batch_sequences)
        flags = (microbatch.contributes_gradients for microbatch in microbatches)
        samples = RecordingSamples(self._ordered_samples, recorder, self.row_order, flags)
        model = RecordingModel(train_step.model, recorder)
        replace(train_step, model=model, batch_source=samples).step(step, self.learning_rate(step))

    def loss_of_rows(self, step: int, rows: range) -> tuple[Tensor, float]:
        batch = self._ordered_samples.batch(step, rows)
        with self.components.model.randomness(step, batch.rows):
            return self.components.model.loss_sum(batch), float(batch.weights.sum())

    def evaluation_metrics(self) -> dict[str, float]:
        with training_mode_calls(self.components.model.module) as calls:
            evaluation = evaluate_split(self.job, self.components, "validation", self._stress_samples)
        if evaluation is None:
            return {}
        metrics = {TRAINING_MODE_CALLS: float(len(calls)), "evaluation targets": evaluation.targets}
        metrics["evaluation loss"] = evaluation.loss
        return metrics if evaluation.accuracy is None else {**metrics, "evaluation accuracy": evaluation.accuracy}

    def evaluation_losses(self, rows: range) -> list[tuple[Tensor, float]]:
        samples = self._stress_samples
        indices = range(samples.evaluation_batches("validation"))
        batches = (samples.evaluation_batch("validation", index, rows) for index in indices)
        return [(self.components.model.loss_sum(batch), float(batch.weights.sum())) for batch in batches]

    def with_row_order(self, row_order: Sequence[int]) -> "JobVerificationSubjectOnRank":
        return replace(self, row_order=row_order)

    @property
    def _ordered_samples(self) -> BatchSource:
        samples = self._stress_samples
        return samples if self.row_order is None else ReorderedRowSamples(samples, self.row_order)

    @property
    def _stress_samples(self) -> UnevenTargetSamples:
        return UnevenTargetSamples(with_extra_boundaries(self.components.data, self.job.data.batch_sequences))
