"""A model and batches of the caller's own, as a trial: no job, no files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from motet.core.errors import InputError
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.parallel.layout import Layout, LayoutSettings, parse_layout, resolve_layout
from motet.parallel.process.process_group import RankGroup
from motet.parallel.row_assignment import contributing_rows_of_rank
from motet.precision.float64_mode import use_float64
from motet.train.engine import TrainingEngine, loss_and_count, parallelize
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.state import TrainingState
from motet.verify.record import Recorder
from motet.verify.trial import masks_told

GivenBatch = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | float]]
SEED = 0


_MADE: WeakSet[nn.Module] = WeakSet()
"""Modules that are trained already."""


@dataclass(frozen=True)
class GivenTrial:
    """What the caller gives."""

    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[[int], GivenBatch]
    """Step -> the batch of all ranks; the first dimension of each tensor is its rows."""
    loss_fn: Loss
    """Of a module and some rows of a batch: the mean of the losses of rows, or their sum and how many there are."""
    optimizer: OptimizerSettings
    steps: int
    layout: LayoutSettings = field(default_factory=LayoutSettings)

    @cached_property
    def rows(self) -> int:
        return rows_in(self.batch_fn(0))

    def batch(self, step: int) -> GivenBatch:
        batch = self.batch_fn(step)
        if (rows := rows_in(batch)) != self.rows:
            raise InputError(f"verify: batch {step} has {rows} rows, and batch 0 has {self.rows}; give all as many")
        return batch

    def numerics(self) -> AbstractContextManager[None]:
        return use_float64()

    def build(self, group: RankGroup, folder: Path) -> "GivenBuilt":
        how = self.optimizer.model_dump(exclude_unset=True)
        engine = parallelize(self.module(), self.layout, optimizer=how, precision="fp64")
        state = TrainingState(engine.module, engine.optimizer, group, folder / "checkpoints", 2**31, "")
        return GivenBuilt(self, engine, state, resolve_layout(self.layout, group.world, self.rows))

    def cut(self, parts: int) -> "GivenTrial":
        return replace(self, layout=LayoutSettings(microbatches=parts))

    def in_layout(self, text: str) -> "GivenTrial":
        return replace(self, layout=parse_layout(text))

    def module(self) -> nn.Module:
        """With the same values every time."""
        torch.manual_seed(SEED)
        module = self.model_fn()
        if not isinstance(module, nn.Module) or module in _MADE:
            what = "the same module again" if isinstance(module, nn.Module) else f"a {type(module).__name__}"
            raise InputError(f"verify: model_fn gives {what}; let it make a new module in each call")
        _MADE.add(module)
        return module.double().train()


@dataclass(frozen=True)
class GivenBuilt:
    """On one rank."""

    trial: GivenTrial
    engine: TrainingEngine
    state: TrainingState
    layout: Layout

    def rate(self, number: int) -> float:
        return self.trial.optimizer.learning_rate

    def step(self, number: int, recorder: Recorder) -> None:
        whole, engine = self.trial.batch(number), self.engine
        work = contributing_rows_of_rank(self.layout, engine.group.rank, self.trial.rows)
        total, count = 0.0, 0.0
        engine.begin_step()
        for part, rows in enumerate(work):
            places = torch.arange(rows.start, rows.stop)
            recorder.begin_part(rows)
            batch = rows_of(whole, rows)
            for name, tensor in named(batch):
                recorder.add("sample", name, tensor)
            with masks_told(self._randomness.for_rows(number, places), recorder):
                loss, targets = self._loss(batch)
            recorder.add("loss", "loss", loss)
            engine.backward(loss, part == 0, part == len(work) - 1)
            total, count = total + float(loss.detach()), count + targets
        engine.update(self.rate(number), total, count)

    def loss(self, number: int, rows: range) -> tuple[Tensor, float]:
        with self._randomness.for_rows(number, torch.arange(rows.start, rows.stop)):
            return self._loss(rows_of(self.trial.batch(number), rows))

    def evaluation(self) -> dict[str, float]:
        return {}

    def judged(self, rows: range) -> list[tuple[Tensor, float]]:
        raise AssertionError("nothing is evaluated")

    @property
    def _randomness(self) -> LayoutInvariantDropoutMode:
        return LayoutInvariantDropoutMode(SEED)

    def _loss(self, batch: GivenBatch) -> tuple[Tensor, float]:
        """Their sum, and how many."""
        found = self.trial.loss_fn(self.engine.module, batch)
        value, count = loss_and_count(found, "verify")
        return (value, count) if isinstance(found, tuple) else (value * rows_in(batch), float(rows_in(batch)))


def default_loss(module: nn.Module, batch: Any) -> Any:
    """What the module gives for the batch, or its `loss`."""
    if isinstance(batch, Mapping):
        found = module(**batch)
    else:
        found = module(batch) if isinstance(batch, Tensor) else module(*batch)
    return found["loss"] if isinstance(found, Mapping) else getattr(found, "loss", found)


def named(batch: GivenBatch) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield "batch", batch
        return
    if not isinstance(batch, Mapping | Sequence):
        raise InputError(f"verify: a batch is a {type(batch).__name__}; give a tensor, or some by name or in order")
    yield from batch.items() if isinstance(batch, Mapping) else ((str(n), each) for n, each in enumerate(batch))


def rows_in(batch: GivenBatch) -> int:
    for name, tensor in named(batch):
        if not isinstance(tensor, Tensor):
            raise InputError(f"verify: {name} of a batch is a {type(tensor).__name__}; give tensors")
    found = {name: len(tensor) if tensor.ndim else 0 for name, tensor in named(batch)}
    if len(set(found.values())) != 1 or 0 in found.values():
        raise InputError(
            f"verify: the tensors of a batch have {found} rows; give tensors with one first dimension, the rows"
        )
    return next(iter(found.values()))


def rows_of(batch: GivenBatch, rows: range) -> Any:
    """Some of its rows; what is of floating point in float64."""
    cut = {name: wide(tensor[rows.start : rows.stop]) for name, tensor in named(batch)}
    if isinstance(batch, Tensor):
        return cut["batch"]
    if isinstance(batch, Mapping):
        return cut
    return type(batch)(*cut.values()) if hasattr(batch, "_fields") else tuple(cut.values())


def wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
