"""A job as a subject of verification.

Samples that expose mistakes: rows with fewer targets, extra document boundaries, the entries at the ends of each
rank's part of a vocabulary, and rows in another order.

With equal counts of targets, a wrong divisor would go unnoticed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from motet.core.batch import Batch, BatchSource
from motet.data.samples.dataset import MixtureDataset
from motet.data.samples.loader import BatchLoader
from motet.data.samples.packing import IntArray, TokenWindows
from motet.data.settings import DataSettings
from motet.memory.policy_choice import MemorySettings
from motet.parallel.layout import Layout, LayoutSettings, microbatches_of_rank
from motet.parallel.model_sharding import ModelInventory, ModelSharding
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.parity.record.record_verification_steps import VerificationSubjectOnRank
from motet.parity.record.tensor_recorder import TensorRecorder
from motet.train.build import TrainingComponents, build_components, precision_context
from motet.train.job import Job
from motet.train.optimizer.optimizer_settings import OptimizerSettings, learning_rate_factor
from motet.train.step import TrainableModelProtocol

MAX_VOCABULARY_RANKS = 8  # Most ranks that split a vocabulary and have samples at the ends of their parts
STRESSED_STEPS = 3  # Steps after which the ids repeat
ROWS_TO_EMPTY = 5  # One row in this many
PROMPT = (3, 1, 4, 1, 5)


@dataclass(frozen=True)
class UnevenTargetSamples:
    """Samples in which up to half of the targets at the end of a row have weight 0, or every fifth class label.

    Some tokens and targets are the first or last entry of a rank that splits the vocabulary of the model.
    """

    inner: BatchLoader
    settings: DataSettings
    entries: int | None = None  # Entries of the model's vocabulary; None: unknown
    has_empty_rows: bool = False  # Some rows have no targets, so that experts do not count them

    def batch(self, step: int, rows: range) -> Batch:
        batch = _with_optional_tensors(self.inner.batch(step, rows), self.settings)
        weights = _zero_some_weights(batch.weights, torch.tensor(rows), step)
        if self.has_empty_rows:
            weights[torch.tensor(rows) % ROWS_TO_EMPTY == 1] = 0
        batch = replace(batch, weights=weights)
        return batch if self.entries is None else _with_boundary_entries(batch, rows, step, entries=self.entries)

    def evaluation_batches(self, split: str) -> int:
        return self.inner.evaluation_batches(split)

    def evaluation_batch(self, split: str, index: int, rows: range) -> Batch:
        batch = self.inner.evaluation_batch(split, index, rows)
        return replace(batch, weights=_zero_some_weights(batch.weights, torch.tensor(rows), index))


def boundary_entries(entries: int) -> list[int]:
    """The first and the last entry of each rank, for few ranks first."""
    widths = [-(-entries // ranks) for ranks in range(1, MAX_VOCABULARY_RANKS + 1)]
    ends = [end for width in widths for start in range(0, entries, width) for end in (start, start + width - 1)]
    return list(dict.fromkeys(min(end, entries - 1) for end in ends))


def _with_boundary_entries(batch: Batch, rows: range, step: int, *, entries: int) -> Batch:
    """Replace two tokens and up to two targets of each row by ids that vary with row and step."""
    ids, tensors = boundary_entries(entries), batch.tensors()
    changed: dict[str, Any] = {n: tensors[n].clone() for n in ("tokens", "source", "targets") if n in tensors}
    for index, row in enumerate(rows):
        first = 2 * (row + len(ids) * step // STRESSED_STEPS)
        chosen = torch.tensor([ids[(first + n) % len(ids)] for n in range(2)])
        for name, tensor in changed.items():
            if tensor.ndim == 2 and tensor.shape[1] > 2:
                is_target = batch.weights[index].nonzero().flatten()[:2]
                places = is_target if name == "targets" else torch.tensor([1, 2])  # The first may be a special token
                tensor[index, places] = chosen[: len(places)]
    return replace(batch, **changed)


def with_extra_boundaries(loader: BatchLoader, rows: int) -> BatchLoader:
    """Samples with an extra document boundary in two of three rows, and two batches of evaluation, the last not full.

    Windows of a few tokens seldom have a boundary, so restarted positions and attention masks would go untested.
    """
    wrapped_loader = copy(loader)
    sample_fields = {each.name: getattr(loader.samples, each.name) for each in fields(MixtureDataset)}
    wrapped_loader.samples = _ExtraDocumentBoundarySamples(**sample_fields, max_evaluation_rows=2 * rows - 1)
    return wrapped_loader


@dataclass(frozen=True)
class _ExtraDocumentBoundarySamples(MixtureDataset):
    max_evaluation_rows: int

    def count(self, split: str) -> int:
        return super().count(split) if split == "train" else min(super().count(split), self.max_evaluation_rows)

    def training_windows(self, positions: IntArray) -> TokenWindows:
        return _add_boundaries(super().training_windows(positions), positions)

    def held_out_windows(self, split: str, positions: IntArray) -> TokenWindows:
        return _add_boundaries(super().held_out_windows(split, positions), positions)


def _add_boundaries(rows: TokenWindows, positions: IntArray) -> TokenWindows:
    width = rows.segment.shape[1]
    border = np.where(positions % 3 == 2, width, 1 + 7 * positions % width)
    return replace(rows, segment=rows.segment + (np.arange(width) >= border[:, None]))


@dataclass(frozen=True)
class ShorterSamples:
    """One batch of an evaluation, in rows of a prime number of tokens: no ranks divide it."""

    inner: UnevenTargetSamples

    def evaluation_batches(self, split: str) -> int:
        return min(1, self.inner.evaluation_batches(split))

    def evaluation_batch(self, split: str, index: int, rows: range) -> Batch:
        batch = self.inner.evaluation_batch(split, index, rows)
        lengths = [_prime_below(each.shape[1]) for each in (batch.tokens, batch.source) if each is not None]
        return batch.first_tokens(len(rows), lengths[0], lengths[-1])


def _prime_below(length: int) -> int:
    numbers = range(length - 1, 2, -1)
    return next((n for n in numbers if all(n % divisor for divisor in range(2, n))), length)


@dataclass(frozen=True)
class ReorderedRowSamples:
    """The rows of a batch in another order; each keeps its row number."""

    inner: UnevenTargetSamples
    row_order: Sequence[int]

    def batch(self, step: int, rows: range) -> Batch:
        batch = self.inner.batch(step, range(len(self.row_order)))
        row_indices = torch.tensor(self.row_order[rows.start : rows.stop])
        by_row = {name: value[row_indices] for name, value in batch_tensors(batch).items() if name != "places"}
        return replace(batch, **by_row)


def batch_tensors(batch: Batch) -> dict[str, Any]:
    """The tensors that a batch of whole rows has, or a part of each row, by name."""
    return {name: value for name, value in batch.tensors().items() if name not in ("places", "row_documents")}


def _with_optional_tensors(batch: Batch, settings: DataSettings) -> Batch:
    """A batch leaves out documents and positions if no row needs them. Here all have them, and so have equal shapes."""
    isolates, objective, tokens = settings.restart_documents, settings.objective, batch.tokens
    values = dict[str, Any]()
    if isolates or objective in ("masked", "classify"):
        values["documents"] = torch.zeros_like(tokens)
    if isolates and objective != "classify":
        values["positions"] = torch.arange(tokens.shape[1]).expand_as(tokens)
        values |= {} if batch.source is None else {"source_documents": torch.zeros_like(batch.source)}
    return replace(batch, **values | batch_tensors(batch))


def _zero_some_weights(weights: Tensor, rows: Tensor, step: int) -> Tensor:
    if weights.ndim == 1:
        return weights * ((rows + step) % 5 != 3)
    positions = torch.arange(weights.shape[1])
    zeroed_count = (5 * rows + 3 * step) % (weights.shape[1] // 2 + 1)
    return weights * (positions[None, :] < weights.shape[1] - zeroed_count[:, None])


TRAINING_MODE_CALLS = "modules called as in training"
SHORT_LOSS = "loss of a shorter forward without gradients"
GENERATED = "scores of generated tokens"


@dataclass(frozen=True)
class JobVerificationSubject:
    """A job in its layout."""

    job: Job
    model_sharding: ModelSharding | None = None

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
        components = build_components(self.job, group, folder, model_sharding=self.model_sharding)
        return JobVerificationSubjectOnRank(components.engine, components.state, self.job, components)

    def layout_for(self, world: int) -> Layout:
        return self.job.layout_for(world)

    def step_plan(self, inventory: ModelInventory, world: int) -> StepPlan:
        """The plan of a step of this many ranks."""
        return make_step_plan(
            inventory,
            self.layout_for(world),
            self.job.precision.resolved,
            settings=self.job.communication,
            batch_sequences=self.batch_rows,
            model_sharding=self.model_sharding,
            places=self.job.memory.places,
        )

    def with_model_sharding(self, model_sharding: ModelSharding) -> "JobVerificationSubject":
        return replace(self, model_sharding=model_sharding)

    def with_microbatches(self, microbatches: int) -> "JobVerificationSubject":
        run_settings = self.job.run.model_copy(update={"reproducible": None})
        update = {"layout": LayoutSettings(microbatches=microbatches), "run": run_settings}
        update["memory"] = MemorySettings()  # The reference keeps what layouts may recompute
        return replace(self, job=self.job.model_copy(update=update), model_sharding=None)


@dataclass(frozen=True)
class JobVerificationSubjectOnRank(VerificationSubjectOnRank):
    """A job on one rank."""

    job: Job
    components: TrainingComponents
    row_order: Sequence[int] | None = None  # Another order of the rows of a batch

    @property
    def steps(self) -> int:
        assert self.job.run.steps is not None, "a small job has some"
        return self.job.run.steps

    def learning_rate(self, step: int) -> float:
        last_step = self.components.total_steps - 1  # Steps that follow it have its rate
        factor = learning_rate_factor(self.job.optimizer.schedule, min(step, last_step), last_step + 1)
        return self.job.optimizer.learning_rate * factor

    def step(self, step: int, recorder: TensorRecorder) -> None:
        train_step, runner = self.components.make_train_step(self.job), self.components.make_runner(self.job)
        microbatches = microbatches_of_rank(runner.layout, self.engine.group.rank, runner.batch_sequences)
        flags = {index: microbatch.contributes_gradients for index, microbatch in enumerate(microbatches)}
        recording = _RecordingStep(self._ordered_samples, runner.model, recorder, self.row_order, flags)
        recording_runner = replace(runner, model=recording, batch_source=recording)
        replace(train_step, runner=recording_runner).step(step, self.learning_rate(step))

    @contextmanager
    def loss_of_rows(self, step: int, rows: range) -> Iterator[tuple[Tensor, float]]:
        batch, engine = self._ordered_samples.batch(step, rows), self.engine
        routed = engine.balance.rows_of(batch, engine.backward_scale) if engine.balance else None
        with self.components.model.randomness(step, batch.rows), engine.counting(routed):
            yield self.components.model.loss_sum(batch), float(batch.weights.sum())

    def logits_of_rows(self, step: int, rows: range) -> tuple[Tensor, Tensor, Tensor]:
        batch = self._ordered_samples.batch(step, rows)
        with self.components.model.randomness(step, batch.rows):
            return self.components.model.logits(batch), batch.targets, batch.weights

    def evaluation_metrics(self) -> dict[str, float]:
        with _training_mode_calls(self.components.model.module) as calls:
            evaluation = self.components.evaluate(self.job, "validation", self._stress_samples)
        if evaluation is None:
            return {}
        metrics = {
            TRAINING_MODE_CALLS: float(len(calls)),
            "evaluation targets": evaluation.targets,
            "evaluation loss": evaluation.loss,
            "evaluation accuracy": evaluation.accuracy,
        }
        return {name: value for name, value in metrics.items() if value is not None}

    def inference_metrics(self) -> dict[str, float]:
        """Metrics of forwards without gradients, of lengths that ranks do not divide."""
        samples, model, metrics = self._stress_samples, self.components.model, dict[str, float]()
        if (evaluation := self.components.evaluate(self.job, "validation", ShorterSamples(samples))) is not None:
            metrics[SHORT_LOSS] = evaluation.loss
        if model.is_autoregressive and model.vocab_size is not None:
            prompt, scores = [each % model.vocab_size for each in PROMPT], list[Tensor]()
            self.components.generate(prompt, len(PROMPT), seed=0, on_scores=scores.append)
            waves = torch.arange(1, scores[0].numel() + 1, dtype=torch.float64).sqrt().cos()  # Different for each entry
            metrics[GENERATED] = sum(float((each * waves).sum()) for each in scores)
        return metrics

    def evaluation_losses(self, rows: range) -> list[tuple[Tensor, float]]:
        samples, split = self._stress_samples, "validation"
        losses, model = [], self.components.model
        for index in range(samples.evaluation_batches(split)):
            batch = samples.evaluation_batch(split, index, rows)
            with model.randomness(index, batch.rows):
                losses.append((model.loss_sum(batch), float(batch.weights.sum())))
        return losses

    def with_row_order(self, row_order: Sequence[int]) -> "JobVerificationSubjectOnRank":
        return replace(self, row_order=row_order)

    @property
    def _ordered_samples(self) -> BatchSource:
        samples = self._stress_samples
        return samples if self.row_order is None else ReorderedRowSamples(samples, self.row_order)

    @property
    def _stress_samples(self) -> UnevenTargetSamples:
        data = self.job.data
        boundaries = with_extra_boundaries(self.components.data, data.batch_sequences)
        return UnevenTargetSamples(
            boundaries, data, self.components.model.vocab_size, has_empty_rows=self.engine.balance is not None
        )


@dataclass(frozen=True)
class _RecordingStep:
    """The samples and the model of a step; samples, random masks and losses are recorded."""

    samples: BatchSource
    model: TrainableModelProtocol
    recorder: TensorRecorder
    row_order: Sequence[int] | None
    recording_flags: Mapping[int, bool]  # False for a micro-batch whose results are discarded

    def batch(self, step: int, rows: range) -> Batch:
        batch = self.samples.batch(step, rows)
        row_numbers = rows if self.row_order is None else [self.row_order[row] for row in rows]
        is_recording = self.recording_flags.get(self.recorder.next_microbatch, True)
        self.recorder.begin_microbatch(row_numbers, is_recording)
        return batch

    def randomness(self, step: int, rows: Tensor) -> AbstractContextManager[None]:
        return self.recorder.recording_masks(self.model.randomness(step, rows))

    def loss_sum(self, batch: Batch) -> Tensor:
        if batch.row_tokens is not None:
            self.recorder.expect_rows_of(batch.row_tokens)
        self.recorder.add_samples(batch_tensors(batch))
        loss = self.model.loss_sum(batch)
        self.recorder.add("loss", "loss", loss)
        return loss


@contextmanager
def _training_mode_calls(module: nn.Module) -> Iterator[list[nn.Module]]:
    calls: list[nn.Module] = []

    def hook(called: nn.Module, inputs: object) -> None:
        if called.training:
            calls.append(called)

    with ExitStack() as hooks:
        for inner in module.modules():
            hooks.enter_context(inner.register_forward_pre_hook(hook))
        yield calls
