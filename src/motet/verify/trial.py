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
from motet.train.build import TrainingComponents, build_components, evaluate_split, precision_context
from motet.train.engine import TrainingEngine
from motet.train.job import Job
from motet.train.optimizer.lr_schedule import learning_rate_factor
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.state import TrainingState
from motet.train.step import BatchSource, StepModel
from motet.verify.record import Recorder
from motet.verify.uneven import Ordered, Uneven, telling


class Built(Protocol):
    """A trial on one rank."""

    @property
    def engine(self) -> TrainingEngine: ...

    @property
    def state(self) -> TrainingState: ...

    def rate(self, number: int) -> float:
        """The learning rate of a step."""

    def step(self, number: int, recorder: Recorder) -> None:
        """Do a step, and tell what is read and drawn and the losses."""

    def loss(self, number: int, rows: range) -> tuple[Tensor, float]:
        """The sum of the losses of some rows, and how many there are; no step is done."""

    def evaluation(self) -> dict[str, float]:
        """What is judged after the last step, by name."""

    def judged(self, rows: range) -> list[tuple[Tensor, float]]:
        """Of some rows of each of its batches, the sum of the losses, and how many there are."""


class Trial(Protocol):
    """What can be built."""

    @property
    def optimizer(self) -> OptimizerSettings: ...

    @property
    def rows(self) -> int:
        """Of a batch."""

    @property
    def steps(self) -> int: ...

    def numerics(self) -> AbstractContextManager[None]:
        """Inside it, numbers are what the precision says."""

    def build(self, group: RankGroup, folder: Path) -> Built: ...

    def cut(self, parts: int) -> Self:
        """On one device, which cuts the batch into so many micro-batches."""


@dataclass(frozen=True)
class JobTrial:
    """A job in its layout."""

    job: Job

    @property
    def optimizer(self) -> OptimizerSettings:
        return self.job.optimizer

    @property
    def rows(self) -> int:
        return self.job.data.batch_sequences

    @property
    def steps(self) -> int:
        assert self.job.run.steps is not None, "shrink gives it some"
        return self.job.run.steps

    def numerics(self) -> AbstractContextManager[None]:
        return precision_context(self.job)

    def build(self, group: RankGroup, folder: Path) -> "JobBuilt":
        return JobBuilt(self.job, build_components(self.job, group, folder))

    def cut(self, parts: int) -> "JobTrial":
        usual = self.job.run.model_copy(update={"reproducible": None})
        return JobTrial(self.job.model_copy(update={"layout": LayoutSettings(microbatches=parts), "run": usual}))


@dataclass(frozen=True)
class JobBuilt:
    """A job on one rank."""

    job: Job
    parts: TrainingComponents
    order: Sequence[int] | None = None
    """Of the rows of a batch."""

    @property
    def engine(self) -> TrainingEngine:
        return self.parts.engine

    @property
    def state(self) -> TrainingState:
        return self.parts.state

    def rate(self, number: int) -> float:
        settings = self.job.optimizer
        return settings.learning_rate * learning_rate_factor(settings.schedule, number, self.parts.total_steps)

    def step(self, number: int, recorder: Recorder) -> None:
        stepper = self.parts.make_train_step(self.job)
        shares = microbatches_of_rank(stepper.layout, self.engine.group.rank, stepper.batch_sequences)
        heard = _Samples(self._samples, recorder, self.order, (share.contributes_gradients for share in shares))
        replace(stepper, model=_Model(stepper.model, recorder), samples=heard).step(number, self.rate(number))

    def loss(self, number: int, rows: range) -> tuple[Tensor, float]:
        batch = self._samples.batch(number, rows)
        with self.parts.model.randomness(number, batch.rows):
            return self.parts.model.loss_sum(batch), float(batch.weights.sum())

    def evaluation(self) -> dict[str, float]:
        with calls_in_training(self.parts.model.module) as calls:
            judged = evaluate_split(self.job, self.parts, "validation", self._read)
        if judged is None:
            return {}
        found = {IN_TRAINING: float(len(calls)), "evaluation targets": judged.targets, "evaluation loss": judged.loss}
        return found if judged.accuracy is None else {**found, "evaluation accuracy": judged.accuracy}

    def judged(self, rows: range) -> list[tuple[Tensor, float]]:
        batches = range(self._read.evaluation_batches("validation"))
        found = (self._read.evaluation_batch("validation", index, rows) for index in batches)
        return [(self.parts.model.loss_sum(batch), float(batch.weights.sum())) for batch in found]

    def in_order(self, order: Sequence[int] | None) -> "JobBuilt":
        """Its batches have the same rows in another order."""
        return replace(self, order=order)

    @property
    def _samples(self) -> BatchSource:
        return self._read if self.order is None else Ordered(self._read, self.order)

    @property
    def _read(self) -> Uneven:
        return Uneven(telling(self.parts.data, self.job.data.batch_sequences))


@dataclass(frozen=True)
class _Samples:
    """Rows are told as they are read."""

    inner: BatchSource
    recorder: Recorder
    order: Sequence[int] | None
    counts: Iterator[bool]
    """Whether something is to come of the next micro-batch."""

    def batch(self, step: int, rows: range) -> Batch:
        batch = self.inner.batch(step, rows)
        mine = rows if self.order is None else [self.order[row] for row in rows]
        self.recorder.begin_part(mine, next(self.counts, True))
        for name, value in _spelled_out(batch).items():
            self.recorder.add("sample", name, value)
        return batch


def _spelled_out(batch: Batch) -> dict[str, Tensor]:
    """Its tensors, and those that it leaves out since each row is one document: that is so in some micro-batches."""
    found = {part.name: value for part in fields(batch) if (value := getattr(batch, part.name)) is not None}
    one = {"documents": torch.zeros_like(batch.tokens)}
    one["positions"] = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    if batch.source is not None:
        one["source_documents"] = torch.zeros_like(batch.source)
    return found | {name: value for name, value in one.items() if name not in found}


@dataclass(frozen=True)
class _Model:
    """Masks and losses are told as they are computed."""

    inner: StepModel
    recorder: Recorder

    def randomness(self, step: int, rows: Tensor) -> AbstractContextManager[None]:
        return masks_told(self.inner.randomness(step, rows), self.recorder)

    def loss_sum(self, batch: Batch) -> Tensor:
        loss = self.inner.loss_sum(batch)
        self.recorder.add("loss", "loss", loss)
        return loss


IN_TRAINING = "modules called as in training"


@contextmanager
def calls_in_training(module: nn.Module) -> Iterator[list[nn.Module]]:
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
def masks_told(randomness: AbstractContextManager[object], recorder: Recorder) -> Iterator[None]:
    """Masks that are drawn inside are recorded."""
    with randomness as mode:
        if not isinstance(mode, LayoutInvariantDropoutMode):
            yield
            return
        mode.on_mask = recorder.mask
        try:
            yield
        finally:
            mode.on_mask = None
