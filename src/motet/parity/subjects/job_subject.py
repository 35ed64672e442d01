"""What is verified: something that can be built on any number of ranks and does steps there. A job is one."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.parallel.layout import LayoutSettings
from motet.parallel.process.process_group import RankGroup
from motet.parallel.row_assignment import microbatches_of_rank
from motet.parity.record.tensor_recorder import TensorRecorder
from motet.parity.subjects.stress_data import ReorderedRowSamples, UnevenTargetSamples, with_extra_boundaries
from motet.train.build import TrainingComponents, build_components, evaluate_split, precision_context
from motet.train.engine import TrainingEngine
from motet.train.job import Job
from motet.train.optimizer.lr_schedule import learning_rate_factor
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.state import TrainingState
from motet.train.step import BatchSource, StepModel


class VerificationSubjectOnRank(Protocol):
    """A trial on one rank."""

    @property
    def engine(self) -> TrainingEngine: ...

    @property
    def state(self) -> TrainingState: ...

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step."""

    def step(self, step: int, recorder: TensorRecorder) -> None:
        """Do a step, and tell what is read and drawn and the losses."""

    def loss_of_rows(self, step: int, rows: range) -> tuple[Tensor, float]:
        """The sum of the losses of some rows, and how many there are; no step is done."""

    def evaluation_metrics(self) -> dict[str, float]:
        """What is judged after the last step, by name."""

    def evaluation_losses(self, rows: range) -> list[tuple[Tensor, float]]:
        """Of some rows of each of its batches, the sum of the losses, and how many there are."""


class VerificationSubject(Protocol):
    """What can be built."""

    @property
    def optimizer(self) -> OptimizerSettings: ...

    @property
    def batch_rows(self) -> int:
        """Of a batch."""

    @property
    def steps(self) -> int: ...

    def numerics(self) -> AbstractContextManager[None]:
        """Inside it, numbers are what the precision says."""

    def build(self, group: RankGroup, folder: Path) -> VerificationSubjectOnRank: ...

    def with_microbatches(self, microbatches: int) -> Self:
        """On one device, which cuts the batch into so many micro-batches."""


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
        assert self.job.run.steps is not None, "shrink gives it some"
        return self.job.run.steps

    def numerics(self) -> AbstractContextManager[None]:
        return precision_context(self.job)

    def build(self, group: RankGroup, folder: Path) -> "JobVerificationSubjectOnRank":
        return JobVerificationSubjectOnRank(self.job, build_components(self.job, group, folder))

    def with_microbatches(self, microbatches: int) -> "JobVerificationSubject":
        run_settings = self.job.run.model_copy(update={"reproducible": None})
        return JobVerificationSubject(
            self.job.model_copy(update={"layout": LayoutSettings(microbatches=microbatches), "run": run_settings})
        )


@dataclass(frozen=True)
class JobVerificationSubjectOnRank:
    """A job on one rank."""

    job: Job
    context: TrainingComponents
    row_order: Sequence[int] | None = None  # Of the rows of a batch

    @property
    def engine(self) -> TrainingEngine:
        return self.context.engine

    @property
    def state(self) -> TrainingState:
        return self.context.state

    def learning_rate(self, step: int) -> float:
        settings = self.job.optimizer
        return settings.learning_rate * learning_rate_factor(settings.schedule, step, self.context.total_steps)

    def step(self, step: int, recorder: TensorRecorder) -> None:
        stepper = self.context.make_train_step(self.job)
        microbatches = microbatches_of_rank(stepper.layout, self.engine.group.rank, stepper.batch_sequences)
        recording_samples = _RecordingSamples(
            self._ordered_samples, recorder, self.row_order, (share.contributes_gradients for share in microbatches)
        )
        replace(stepper, model=_RecordingModel(stepper.model, recorder), batch_source=recording_samples).step(
            step, self.learning_rate(step)
        )

    def loss_of_rows(self, step: int, rows: range) -> tuple[Tensor, float]:
        batch = self._ordered_samples.batch(step, rows)
        with self.context.model.randomness(step, batch.rows):
            return self.context.model.loss_sum(batch), float(batch.weights.sum())

    def evaluation_metrics(self) -> dict[str, float]:
        with training_mode_calls(self.context.model.module) as calls:
            evaluation = evaluate_split(self.job, self.context, "validation", self._stress_samples)
        if evaluation is None:
            return {}
        metrics = {
            TRAINING_MODE_CALLS: float(len(calls)),
            "evaluation targets": evaluation.targets,
            "evaluation loss": evaluation.loss,
        }
        return metrics if evaluation.accuracy is None else {**metrics, "evaluation accuracy": evaluation.accuracy}

    def evaluation_losses(self, rows: range) -> list[tuple[Tensor, float]]:
        batches = range(self._stress_samples.evaluation_batches("validation"))
        evaluation_batches = (self._stress_samples.evaluation_batch("validation", index, rows) for index in batches)
        return [(self.context.model.loss_sum(batch), float(batch.weights.sum())) for batch in evaluation_batches]

    def with_row_order(self, row_order: Sequence[int] | None) -> "JobVerificationSubjectOnRank":
        """Its batches have the same rows in another order."""
        return replace(self, row_order=row_order)

    @property
    def _ordered_samples(self) -> BatchSource:
        return (
            self._stress_samples
            if self.row_order is None
            else ReorderedRowSamples(self._stress_samples, self.row_order)
        )

    @property
    def _stress_samples(self) -> UnevenTargetSamples:
        return UnevenTargetSamples(with_extra_boundaries(self.context.data, self.job.data.batch_sequences))


@dataclass(frozen=True)
class _RecordingSamples:
    """Rows are told as they are read."""

    inner: BatchSource
    recorder: TensorRecorder
    row_order: Sequence[int] | None
    recording_flags: Iterator[bool]  # Whether something is to come of the next micro-batch

    def batch(self, step: int, rows: range) -> Batch:
        batch = self.inner.batch(step, rows)
        row_numbers = rows if self.row_order is None else [self.row_order[row] for row in rows]
        self.recorder.begin_microbatch(row_numbers, next(self.recording_flags, True))
        for name, value in _with_default_tensors(batch).items():
            self.recorder.add("sample", name, value)
        return batch


def _with_default_tensors(batch: Batch) -> dict[str, Tensor]:
    """Its tensors, and those that it leaves out since each row is one document: that is so in some micro-batches."""
    present = {part.name: value for part in fields(batch) if (value := getattr(batch, part.name)) is not None}
    defaults = {"documents": torch.zeros_like(batch.tokens)}
    defaults["positions"] = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    if batch.source is not None:
        defaults["source_documents"] = torch.zeros_like(batch.source)
    return present | {name: value for name, value in defaults.items() if name not in present}


@dataclass(frozen=True)
class _RecordingModel:
    """Masks and losses are told as they are computed."""

    inner: StepModel
    recorder: TensorRecorder

    def randomness(self, step: int, rows: Tensor) -> AbstractContextManager[None]:
        return recording_dropout_masks(self.inner.randomness(step, rows), self.recorder)

    def loss_sum(self, batch: Batch) -> Tensor:
        loss = self.inner.loss_sum(batch)
        self.recorder.add("loss", "loss", loss)
        return loss


TRAINING_MODE_CALLS = "modules called as in training"


@contextmanager
def training_mode_calls(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Modules that are called inside of it in the state of training."""
    calls: list[nn.Module] = []

    def hook(called: nn.Module, inputs: object) -> None:
        if called.training:
            calls.append(called)

    hooks = [inner.register_forward_pre_hook(hook) for inner in module.modules()]
    try:
        yield calls
    finally:
        for each in hooks:
            each.remove()


@contextmanager
def recording_dropout_masks(randomness: AbstractContextManager[object], recorder: TensorRecorder) -> Iterator[None]:
    """Masks that are drawn inside are recorded."""
    with randomness as mode:
        if not isinstance(mode, LayoutInvariantDropoutMode):
            yield
            return
        mode.on_mask = recorder.record_dropout_mask
        try:
            yield
        finally:
            mode.on_mask = None
