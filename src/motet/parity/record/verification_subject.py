"""The interface of a subject of verification, which is built on any number of ranks and trains there."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Self

from torch import Tensor

from motet.parallel.process.process_group import RankGroup
from motet.parity.record.tensor_recorder import TensorRecorder
from motet.train.engine import TrainingEngine
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.state import TrainingState


class VerificationSubjectOnRank(Protocol):
    """A subject that was built on one rank."""

    @property
    def engine(self) -> TrainingEngine: ...

    @property
    def state(self) -> TrainingState: ...

    def learning_rate(self, step: int) -> float: ...

    def step(self, step: int, recorder: TensorRecorder) -> None:
        """Train for one step; record samples, random masks and losses."""

    def loss_of_rows(self, step: int, rows: range) -> tuple[Tensor, float]:
        """The sum of the losses of some rows, and their count; nothing is updated."""

    def evaluation_metrics(self) -> dict[str, float]: ...

    def evaluation_losses(self, rows: range) -> list[tuple[Tensor, float]]:
        """The sum of the losses and their count, for some rows of each batch of the evaluation."""


class VerificationSubject(Protocol):
    """A job or a module, with a layout."""

    @property
    def optimizer(self) -> OptimizerSettings: ...

    @property
    def batch_rows(self) -> int: ...

    @property
    def steps(self) -> int: ...

    def numerics(self) -> AbstractContextManager[None]:
        """The precision in which everything is computed inside."""

    def build(self, group: RankGroup, folder: Path) -> VerificationSubjectOnRank: ...

    def with_microbatches(self, microbatches: int) -> Self:
        """The subject on one device that splits the batch into micro-batches."""
