"""Wrappers of samples, models and dropout that record what passes through them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.parity.record.tensor_recorder import TensorRecorder
from motet.train.step import BatchSource, StepModel

TRAINING_MODE_CALLS = "modules called as in training"


@dataclass(frozen=True)
class RecordingSamples:
    """Samples that are recorded when they are read."""

    inner: BatchSource
    recorder: TensorRecorder
    row_order: Sequence[int] | None
    recording_flags: Iterator[bool]  # False for a micro-batch whose results are discarded

    def batch(self, step: int, rows: range) -> Batch:
        batch = self.inner.batch(step, rows)
        row_numbers = rows if self.row_order is None else [self.row_order[row] for row in rows]
        self.recorder.begin_microbatch(row_numbers, next(self.recording_flags, True))
        for name, value in _with_default_tensors(batch).items():
            self.recorder.add("sample", name, value)
        return batch


def _with_default_tensors(batch: Batch) -> dict[str, Tensor]:
    """A batch leaves out documents and positions where each of its rows is one document."""
    present = {part.name: value for part in fields(batch) if (value := getattr(batch, part.name)) is not None}
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    defaults = {"documents": torch.zeros_like(batch.tokens), "positions": positions}
    if batch.source is not None:
        defaults["source_documents"] = torch.zeros_like(batch.source)
    return present | {name: value for name, value in defaults.items() if name not in present}


@dataclass(frozen=True)
class RecordingModel:
    """A model whose random masks and losses are recorded."""

    inner: StepModel
    recorder: TensorRecorder

    def randomness(self, step: int, rows: Tensor) -> AbstractContextManager[None]:
        return recording_dropout_masks(self.inner.randomness(step, rows), self.recorder)

    def loss_sum(self, batch: Batch) -> Tensor:
        loss = self.inner.loss_sum(batch)
        self.recorder.add("loss", "loss", loss)
        return loss


@contextmanager
def recording_dropout_masks(randomness: AbstractContextManager[object], recorder: TensorRecorder) -> Iterator[None]:
    """Record the masks that are drawn inside."""
    with randomness as mode:
        if not isinstance(mode, LayoutInvariantDropoutMode):
            yield
            return
        mode.on_mask = recorder.record_dropout_mask
        try:
            yield
        finally:
            mode.on_mask = None


@contextmanager
def training_mode_calls(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Inner modules that are called inside while they are in training mode."""
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
